"""Invariants that hold for every policy (docs/design.md 6): nothing over-committed, undo exact, repeatable."""

from collections import Counter
from dataclasses import replace

import numpy as np
from deciding import candidates, choose, context_of, place
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import names
from gpushare.core.api.request import FaultDomain
from gpushare.core.placement.decide import decide
from gpushare.core.placement.policies import NAMES, make
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.state import GPU_MILLI, ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest

nodes = st.lists(
    st.tuples(
        st.integers(0, 32_000),
        st.integers(0, 64_000),
        st.integers(0, 8),
        st.sampled_from(["A", "B"]),
        st.sampled_from([None, 16_000, 80_000]),
    ),
    min_size=1,
    max_size=5,
)
parts = st.builds(
    PlacementRequest,
    st.just("x"),
    st.integers(1, GPU_MILLI),
    st.just(1),
    st.sampled_from([None, 0, 2_000, 40_000]),
    st.integers(0, 8_000),
    st.integers(0, 16_000),
    st.sampled_from([frozenset(), frozenset({"A"}), frozenset({"B", "C"})]),
    fault_domain=st.sampled_from([*[FaultDomain.SHARED] * 5, FaultDomain.ISOLATED]),
    clients=st.sampled_from([1, 1, 20]),
)
whole = st.builds(PlacementRequest, st.just("x"), st.just(GPU_MILLI), st.sampled_from([0, 1, 2, 4]))
# A pod to place, or the number of an earlier one to release.
steps = st.lists(st.one_of(parts, parts, whole, st.integers(0, 30)), max_size=30)


def build(described: list[tuple[int, int, int, str, int | None]]) -> ClusterState:
    return ClusterState(
        [
            NodeSpec(f"n{i}", tuple(GpuSpec(f"n{i}/{g}", model, mib) for g in range(gpus)), cpu, memory)
            for i, (cpu, memory, gpus, model, mib) in enumerate(described)
        ],
        gpu_memory_reserve_mib=512,
    )


def run(state: ClusterState, policy: PlacementPolicy, work: list[PlacementRequest | int]) -> list[object]:
    """Place and release; what was decided."""
    done: list[object] = []
    for index, step in enumerate(work):
        if isinstance(step, int):
            done.append(state.release(f"pod-{step}"))
            continue
        request = replace(step, pod_uid=f"pod-{index}")
        placed = place(request, state, policy)
        if isinstance(placed, Placement) and state.reservation(request.pod_uid) is None:
            here = decide(request, context_of(state, policy), node=placed.node, preferred_gpus=placed.gpu_uuids)
            assert here == placed, "on its node, the preferred GPUs are the ones decided"
            state.reserve(request.pod_uid, placed, request)
        done.append(placed)
    return done


def frozen(state: ClusterState) -> tuple[object, ...]:
    arrays = {key: value.copy() for key, value in vars(state).items() if isinstance(value, np.ndarray)}
    gpus = [gpu for node in state.node_names for gpu in (state.spec(node) or NodeSpec("", ())).gpus]
    return (
        {key: (value.dtype, value.shape, value.tobytes()) for key, value in arrays.items()},
        dict(state.reservations),
        {gpu.uuid: state.tenants(gpu.uuid) for gpu in gpus},
        dict(state.reserved_shapes),
        state.isolated_count,
    )


@settings(max_examples=40, deadline=None)
@given(nodes, steps, st.sampled_from(NAMES))
def test_no_policy_over_commits(
    described: list[tuple[int, int, int, str, int | None]], work: list[PlacementRequest | int], name: str
) -> None:
    state = build(described)
    run(
        state,
        make(name, {step.shape: 1.0 for step in work if not isinstance(step, int)}, np.random.default_rng(1)),
        work,
    )
    share, memory, clients, alone = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    cpu, node_memory, tenants = Counter[str](), Counter[str](), Counter[str]()
    for reservation in state.reservations.values():
        request = reservation.request
        cpu[reservation.placement.node] += request.cpu_milli
        node_memory[reservation.placement.node] += request.node_memory_mib
        assert len(set(reservation.placement.gpu_uuids)) == request.gpu_count
        for uuid in reservation.placement.gpu_uuids:
            assert uuid.startswith(reservation.placement.node + "/")
            share[uuid] += request.share_milli
            memory[uuid] += reservation.placement.memory_mib
            clients[uuid] += request.clients
            tenants[uuid] += 1
            alone[uuid] += request.fault_domain is FaultDomain.ISOLATED
    for index, (cpu_milli, memory_mib, gpus, model, mib) in enumerate(described):
        node = f"n{index}"
        assert cpu[node] <= cpu_milli
        assert node_memory[node] <= memory_mib
        for slot in range(gpus):
            uuid = f"{node}/{slot}"
            assert share[uuid] <= GPU_MILLI
            assert memory[uuid] <= max((mib or 0) - 512, 0)
            assert clients[uuid] <= names.MAX_CLIENTS_PER_GPU
            assert not alone[uuid] or tenants[uuid] == 1
            for tenant in state.tenants(uuid):
                reservation = state.reservations[tenant.pod_uid]
                assert not reservation.request.models or model in reservation.request.models


@settings(max_examples=40, deadline=None)
@given(nodes, steps, steps, steps)
def test_undo_restores_the_state_bit_for_bit(
    described: list[tuple[int, int, int, str, int | None]],
    before: list[PlacementRequest | int],
    tried: list[PlacementRequest | int],
    nested: list[PlacementRequest | int],
) -> None:
    state = build(described)
    policy = make("bestfit", {}, np.random.default_rng(0))
    run(state, policy, before)
    start = frozen(state)
    outer = state.snapshot()
    for index, step in enumerate([*tried, *nested]):
        if isinstance(step, int):
            state.release(f"pod-{step}")
        else:
            request = replace(step, pod_uid=f"try-{index}")
            placed = place(request, state, policy)
            if isinstance(placed, Placement):
                state.reserve(request.pod_uid, placed, request)
        if index == len(tried):
            middle, inner = frozen(state), state.snapshot()
            run(state, policy, before)
            state.undo(inner)
            assert frozen(state) == middle
    state.undo(outer)
    assert frozen(state) == start
    assert state.reserve("later", Placement("n0", ()), PlacementRequest("later", 1, 0)) is None


@settings(max_examples=25, deadline=None)
@given(nodes, steps, st.sampled_from(NAMES))
def test_the_same_seed_decides_the_same(
    described: list[tuple[int, int, int, str, int | None]], work: list[PlacementRequest | int], name: str
) -> None:
    history = {step.shape: 1.0 for step in work if not isinstance(step, int)}
    first = run(build(described), make(name, history, np.random.default_rng(3)), work)
    assert first == run(build(described), make(name, history, np.random.default_rng(3)), work)


@settings(max_examples=40, deadline=None)
@given(nodes, steps, steps, parts)
def test_kept_scores_and_refusals_are_those_of_a_fresh_look(
    described: list[tuple[int, int, int, str, int | None]],
    work: list[PlacementRequest | int],
    more: list[PlacementRequest | int],
    request: PlacementRequest,
) -> None:
    state = build(described)
    policy = make("fgd", {step.shape: 1.0 for step in work if not isinstance(step, int)}, np.random.default_rng(0))
    for part in (work, more):
        run(state, policy, part)
        known = candidates(request, state, policy)
        known_refusals = known.rejections()
        state.row_tables.clear()
        fresh = candidates(request, state, policy)
        assert known.nodes == fresh.nodes
        assert known.scores.tolist() == fresh.scores.tolist()
        assert known_refusals == fresh.rejections()
        for node in fresh.nodes:
            assert isinstance(choose(request, state, policy, node), Placement)
        for node, refused in fresh.rejections().items():
            assert choose(request, state, policy, node) == refused
