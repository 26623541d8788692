"""Policies against slow, literal readings of their sources."""

import math

import numpy as np
import pytest
from deciding import candidates, place
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.placement.fragmentation import FragmentTables, Kind, Mix, fragmented_milli, kind_of, open_share
from gpushare.core.placement.policies import (
    NAMES,
    BestFit,
    Clustering,
    DotProduct,
    Fgd,
    GpuShareFit,
    Packing,
    RandomFit,
    make,
)
from gpushare.core.placement.policies.gpushare import RELEARN_SECONDS, LookaheadTables
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest

MODELS = ("G2", "T4")


def cluster(*nodes: tuple[int, int, str]) -> ClusterState:
    """Nodes of (CPU milli, GPUs, model)."""
    return ClusterState(
        NodeSpec(f"n{i}", tuple(GpuSpec(f"n{i}/{g}", model) for g in range(gpus)), cpu, 10**6)
        for i, (cpu, gpus, model) in enumerate(nodes)
    )


def ask(
    uid: str, milli: int, count: int = 1, cpu: int = 0, models: frozenset[str] = frozenset()
) -> PlacementRequest:
    return PlacementRequest(uid, milli, count, cpu_milli=cpu, models=models)


def put(state: ClusterState, request: PlacementRequest, node: str, *gpus: int) -> None:
    state.reserve(request.pod_uid, Placement(node, tuple(f"{node}/{g}" for g in gpus)), request)


def scores(state: ClusterState, request: PlacementRequest, policy: object) -> dict[str, float]:
    found = candidates(request, state, policy)  # type: ignore[arg-type]
    return dict(zip(found.nodes, found.scores.tolist(), strict=True))


def fragment_by_definition(cpu: int, free: list[int], model: str, mix: Mix) -> float:
    """frag.go, word for word: NodeGpuShareFragAmountScore."""
    total = 0.0
    for kind, weight in zip(mix.kinds, mix.weights, strict=True):
        fits = (
            kind.gpu_count > 0
            and (not kind.models or model in kind.models)
            and sum(part >= kind.share_milli for part in free) >= kind.gpu_count
            and cpu >= kind.cpu_milli
        )
        total += weight * (sum(part for part in free if part < kind.share_milli) if fits else sum(free))
    return total


kinds = st.one_of(
    st.builds(
        Kind, st.sampled_from([0, 2000, 8000]), st.integers(1, 1000), st.just(1), st.sampled_from([(), ("T4",)])
    ),
    st.builds(Kind, st.sampled_from([0, 4000]), st.just(1000), st.sampled_from([2, 4]), st.just(())),
    st.builds(Kind, st.sampled_from([1000, 9000]), st.just(0), st.just(0), st.just(())),
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(kinds, st.integers(1, 20), min_size=1, max_size=6),
    st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    st.integers(0, 12_000),
    st.sampled_from(MODELS),
)
def test_fragments_by_table_are_fragments_by_definition(
    counts: dict[Kind, float], free: list[int], cpu: int, model: str
) -> None:
    mix = Mix.from_counts(counts, 1.0)
    tables = FragmentTables(mix, list(MODELS))
    column = np.array(free)[:, None]
    usable = tables.usable(np.array([cpu]), column, np.full_like(column, MODELS.index(model)))
    assert math.isclose(sum(free) - usable[0], fragment_by_definition(cpu, free, model, mix), abs_tol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(kinds, st.integers(1, 20), min_size=1, max_size=6),
    st.lists(st.integers(0, 1000), min_size=2, max_size=8),
    st.sampled_from([(300, 1), (1000, 1), (1000, 2), (1, 0)]),
)
def test_the_fragment_after_a_placement_is_that_of_the_state_after_it(
    counts: dict[Kind, float], free: list[int], asked: tuple[int, int]
) -> None:
    mix = Mix.from_counts(counts, 1.0)
    tables = FragmentTables(mix, list(MODELS))
    column, models = np.array(free)[:, None], np.zeros((len(free), 1), np.int64)
    shape = ask("x", *asked, cpu=1500).shape
    after = tables.usable_after(np.array([9000]), column, models, shape)
    if asked == (300, 1):
        for slot, part in enumerate(free):
            if part >= 300:
                left = [*free[:slot], part - 300, *free[slot + 1 :]]
                want = sum(left) - fragment_by_definition(7500, left, "G2", mix)
                assert math.isclose(after[slot, 0], want, abs_tol=1e-6)
    elif sum(part == 1000 for part in free) >= asked[1]:
        left, taken = [], asked[1]
        for part in free:
            take = part == 1000 and taken > 0
            taken -= take
            left.append(0 if take else part)
        want = sum(left) - fragment_by_definition(7500, left, "G2", mix)
        assert math.isclose(after[0], want, abs_tol=1e-6)


def test_typical_kinds_are_the_most_frequent_up_to_the_popularity() -> None:
    a, b, c = Kind(1, 500, 1, ()), Kind(2, 500, 1, ()), Kind(3, 500, 1, ())
    mix = Mix.from_counts({a: 1, b: 90, c: 9})
    assert mix.kinds == (b, c)
    assert mix.weights == pytest.approx((90 / 99, 9 / 99))


def test_fgd_puts_a_small_pod_where_the_typical_pod_cannot_go_anyway() -> None:
    state = cluster((64_000, 1, "G2"), (64_000, 1, "G2"))
    put(state, ask("a", 400), "n1", 0)
    mix = Mix.of({ask("t", 1000).shape: 1.0})
    # n0: a fragment of 700 comes about, 100 / (1 + e^0.7); n1: one of 600 shrinks to 300, 100 / (1 + e^-0.3)
    assert scores(state, ask("x", 300), Fgd(mix)) == {"n0": 33.0, "n1": 57.0}


def test_best_fit_leaves_the_least_cpu_and_gpu() -> None:
    state = cluster((128_000, 8, "G2"), (64_000, 2, "G2"))
    # 1 - (0.5 * 128/128 + 0.5 * 7.5/8) = 0.03; 1 - (0.5 * 64/128 + 0.5 * 1.5/8) = 0.656
    assert scores(state, ask("x", 500), BestFit()) == {"n0": 3.0, "n1": 65.0}


def test_dot_product_goes_where_the_demand_points_least() -> None:
    state = cluster((128_000, 8, "G2"), (64_000, 8, "G2"))
    # 1 - (1 * 0.5 + 1 * 1/8) / 2 and 1 - (0.5 * 0.5 + 1 * 1/8) / 2
    assert scores(state, ask("x", 1000, cpu=64_000), DotProduct()) == {"n0": 68.0, "n1": 81.0}


def test_clustering_keeps_alike_together() -> None:
    state = cluster(*[(64_000, 4, "G2")] * 4)
    put(state, ask("a", 400), "n0", 0)
    put(state, ask("b", 300), "n1", 0)
    put(state, ask("c", 1000), "n1", 1)
    put(state, ask("d", 1000), "n2", 1)
    found = scores(state, ask("x", 200), Clustering())
    assert found == {"n0": 75 + 13, "n1": 50 + 16, "n2": 0 + 15, "n3": 25 + 12}


def test_packing_prefers_shared_gpus_then_used_nodes_then_free_ones() -> None:
    state = cluster(*[(64_000, 4, "G2")] * 3)
    put(state, ask("a", 400), "n0", 0)
    put(state, ask("b", 900), "n1", 0)
    assert scores(state, ask("x", 300), Packing()) == {"n0": 94.0, "n1": 49.0, "n2": 29.0}


def test_random_is_by_lot_and_repeats_with_its_seed() -> None:
    state = cluster(*[(64_000, 4, "G2")] * 5)

    def draw(seed: int) -> list[object]:
        policy = RandomFit(np.random.default_rng(seed))
        return [place(ask("x", 300), state, policy) for _ in range(12)]

    assert draw(1) == draw(1)
    assert len({str(placed) for placed in draw(1)}) > 3


def test_a_gap_is_worth_what_will_come_to_fill_it() -> None:
    mix = Mix.of({ask("a", 700).shape: 0.5, ask("b", 300).shape: 0.5})
    (worth,) = {tuple(row.tolist()) for row in LookaheadTables(mix, ["G2"]).single[0, 1:]}
    assert worth[299] == 0
    assert worth[300] == pytest.approx(300)
    assert worth[1000] == pytest.approx(1000)
    assert worth[800] == pytest.approx(700, abs=60)  # 300 + 300 or 700, nothing fills it


def test_ours_spares_the_cpu_of_nodes_with_free_gpus() -> None:
    state = cluster((32_000, 8, "G2"), (32_000, 1, "G2"))
    policy = GpuShareFit({ask("t", 1000, cpu=4_000).shape: 1.0})
    found = scores(state, ask("x", 1, 0, cpu=16_000), policy)
    assert found["n1"] > found["n0"]


def test_ours_learns_the_mix_from_the_pods_in_place() -> None:
    state = cluster(*[(640_000, 8, "G2")] * 20)
    policy = GpuShareFit()
    before = policy.token(state)
    for index in range(40):
        placed = place(ask(str(index), 700), state, policy)
        assert isinstance(placed, Placement)
        state.reserve(str(index), placed, ask(str(index), 700))
    assert policy.token(state) != before
    learnt = policy.token(state)
    state.release("0")
    assert policy.token(state) == learnt, "one pod more or less teaches nothing"


def test_ours_learns_aside_where_somebody_asks_for_lessons() -> None:
    state, usual = cluster(*[(640_000, 8, "G2")] * 20), GpuShareFit()
    aside = GpuShareFit(learns_aside=True)
    before = aside.token(state)
    for index in range(40):
        put(state, ask(str(index), 700), f"n{index // 8}", index % 8)
    assert aside.token(state) == before, "no decision waits for learning"
    lesson = aside.lesson(state, 0.0)
    assert lesson is not None
    aside.adopt(state, lesson, lesson.learn())
    assert aside.token(state) != before
    assert aside.lesson(state, 1.0) is None
    asked = ask("x", 300)
    assert scores(state, asked, aside) == scores(state, asked, usual)


def test_a_mix_that_has_changed_at_all_is_learnt_after_a_while() -> None:
    """So that a plan, which learns the mix of its own moment, ranks as the extender does soon after a change."""
    state = cluster(*[(640_000, 8, "G2")] * 20)
    for index in range(40):
        put(state, ask(str(index), 700), f"n{index // 8}", index % 8)
    policy = GpuShareFit(learns_aside=True)

    def learns(now: float) -> bool:
        lesson = policy.lesson(state, now)
        if lesson is not None:
            policy.adopt(state, lesson, lesson.learn())
        return lesson is not None

    assert learns(1000.0)
    state.release("0")
    put(state, ask("other", 300), "n0", 0)
    assert not learns(1000.0 + RELEARN_SECONDS - 1), "their number is the same"
    assert learns(1000.0 + RELEARN_SECONDS)
    assert not learns(1000.0 + 3 * RELEARN_SECONDS), "nothing has changed since"
    asked = ask("x", 300)
    assert scores(state, asked, policy) == scores(state, asked, GpuShareFit())
    for index in range(10, 30):
        state.release(str(index))
    assert learns(1000.0 + 3 * RELEARN_SECONDS)
    for index in range(10, 30):
        put(state, ask(str(index), 700), f"n{index // 8}", index % 8)
    assert learns(1000.0 + 3 * RELEARN_SECONDS), "half as many again are learnt at once"


def test_what_cannot_take_tenants_is_not_open() -> None:
    state = cluster((64_000, 2, "G2"))
    state.set_health("n0/1", healthy=False)
    put(state, ask("a", 200), "n0", 0)
    assert open_share(state, np.array([0]))[:, 0].tolist() == [800, 0]
    assert fragmented_milli(state, Mix.of({ask("t", 1000).shape: 1.0})) == 800
    assert kind_of(ask("c", 500, 0, cpu=3).shape) == Kind(3, 0, 0, ())


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_without_gpus_takes_pods_without_gpus(name: str) -> None:
    state = cluster((64_000, 0, "none"))
    policy = make(name, {ask("t", 1000, 8).shape: 1.0}, np.random.default_rng(0))
    assert place(ask("c", 1, 0), state, policy) == Placement("n0", ())
    assert not isinstance(place(ask("g", 500), state, policy), Placement)
    state.add_node(NodeSpec("g", tuple(GpuSpec(f"g/{i}", "G2") for i in range(8))))
    assert isinstance(place(ask("g", 1000, 8), state, policy), Placement)


def test_every_policy_has_a_name() -> None:
    history = {ask("t", 500).shape: 1.0}
    assert [make(name, history, np.random.default_rng(0)).name for name in NAMES] == list(NAMES)
