import numpy as np
import pytest
from deciding import candidates, choose, context_of, place

from gpushare.core.api.rejection import Reason, Rejection
from gpushare.core.api.request import FaultDomain
from gpushare.core.interference import Profile
from gpushare.core.placement.decide import decide, survey
from gpushare.core.placement.explanation import elsewhere_of
from gpushare.core.placement.known import KnownWorkload
from gpushare.core.placement.policies import BestFit, GpuShareFit, RandomFit
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.twin.contention import WORKLOADS


def node(name: str, gpus: int = 2, memory_mib: int = 80_000, model: str = "H100", **more: int) -> NodeSpec:
    return NodeSpec(name, tuple(GpuSpec(f"GPU-{name}-{i}", model, memory_mib) for i in range(gpus)), **more)


def ask(uid: str, percent: int = 40, **more: object) -> PlacementRequest:
    return PlacementRequest(uid, percent * 10, **more)  # type: ignore[arg-type]


def put(state: ClusterState, request: PlacementRequest) -> Placement:
    placed = place(request, state, BestFit())
    assert isinstance(placed, Placement), placed
    state.reserve(request.pod_uid, placed, request)
    return placed


def test_three_pods_of_40_percent_never_share_one_gpu() -> None:
    state = ClusterState([node("a")])
    gpus = [put(state, ask(str(i))).gpu_uuids[0] for i in range(3)]
    assert gpus == ["GPU-a-0", "GPU-a-0", "GPU-a-1"]
    put(state, ask("3"))
    refused = place(ask("4"), state, BestFit())
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.SHARE
    assert "needs 40% of one GPU, the freest has 20% free" in refused.detail


def test_default_memory_is_the_share_of_what_the_gpu_has_for_tenants() -> None:
    state = ClusterState([node("a", memory_mib=80_512)], gpu_memory_reserve_mib=512)
    assert put(state, ask("x", 25)).memory_mib == 20_000
    refused = place(ask("y", 10, memory_mib=80_001), state, BestFit())
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.GPU_MEMORY
    assert "needs 80001 MiB on 1 GPU, the freest with enough share has 80000 MiB free" in refused.detail


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask("x", 100, gpu_count=3), Reason.NO_GPUS),
        (ask("x", models=frozenset({"A100"})), Reason.GPU_MODEL),
        (ask("x", 100, gpu_count=2), Reason.SHARE),
        (ask("x", clients=49), Reason.CLIENTS),
        (ask("x", cpu_milli=9_000), Reason.CPU),
        (ask("x", node_memory_mib=5_000), Reason.NODE_MEMORY),
        (ask("x", memory_mib=90_000), Reason.GPU_MEMORY),
    ],
)
def test_every_node_says_why(request_: PlacementRequest, reason: Reason) -> None:
    state = ClusterState([node("a", cpu_milli=8_000, memory_mib=80_000)])
    state.update_node(NodeSpec("a", node("a").gpus, cpu_milli=8_000, memory_mib=4_000))
    put(state, ask("tenant", 10))
    found = candidates(request_, state, BestFit(), ["a", "elsewhere"])
    assert found.nodes == []
    assert found.rejections()["a"].reason is reason
    assert found.rejections()["elsewhere"].reason is Reason.NO_GPUS
    refused = choose(request_, state, BestFit(), "a")
    assert isinstance(refused, Rejection)
    assert refused.reason is reason


CORDONED = Rejection(Reason.NODE_CORDONED, "it is cordoned")
TAINTED = Rejection(Reason.NODE_TAINT, "it has the taint a:NoSchedule, which the pod does not tolerate")


@pytest.mark.parametrize("policy", [BestFit(), GpuShareFit(), RandomFit(np.random.default_rng(3))])
def test_a_node_that_kube_scheduler_refuses_is_never_chosen_and_says_why(policy: PlacementPolicy) -> None:
    state = ClusterState([node("a"), node("b"), node("c")])
    put(state, ask("tenant", 50))  # so that node a is the best but for chance
    context = context_of(state, policy)
    for _ in range(5):
        placed = decide(ask("x", 20), context, excluded={"a": CORDONED, "b": TAINTED})
        assert isinstance(placed, Placement)
        assert placed.node == "c"
    found = survey(ask("x", 20), context, excluded={"a": CORDONED, "b": TAINTED, "unknown": TAINTED})
    assert found.nodes == ["c"]
    assert found.rejections() == {"a": CORDONED, "b": TAINTED, "unknown": TAINTED}
    assert [(each.rejection, each.nodes) for each in elsewhere_of(found)] == [(TAINTED, 2), (CORDONED, 1)]
    assert survey(ask("x", 20), context).nodes == ["a", "b", "c"], "nothing of it is remembered"
    assert isinstance(decide(ask("x", 20), context), Placement)


def test_where_only_refused_nodes_have_room_the_summary_is_about_the_others() -> None:
    state = ClusterState([node("a"), node("b")])
    full = [put(state, ask(name, 100)) for name in ("one", "two")]
    assert {each.node for each in full} == {"a"}
    context = context_of(state, BestFit())
    assert decide(ask("x", 20), context, excluded={"b": CORDONED}) == Rejection(
        Reason.SHARE, "fits on none of 2 nodes; on the 1 closest: needs 20% of one GPU, the freest has 0% free"
    )
    assert decide(ask("x", 20), context, excluded={"b": TAINTED, "a": CORDONED, "c": CORDONED}) == Rejection(
        Reason.NODE_CORDONED, "fits on none of 3 nodes; on 2 of them: it is cordoned"
    )


def test_who_asks_for_no_cpu_is_not_refused_for_the_cpu_that_others_request_too_much_of() -> None:
    state = ClusterState([NodeSpec("a", node("a").gpus, 8_000, 64_000)])
    state.set_other_use("a", 9_000, 0)
    assert put(state, ask("x", 100, cpu_milli=0)).node == "a"
    refused = place(ask("y", cpu_milli=0, node_memory_mib=90_000), state, BestFit())
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.NODE_MEMORY
    refused = place(ask("z", cpu_milli=1), state, BestFit())
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.CPU


def test_an_isolated_tenant_is_alone() -> None:
    state = ClusterState([node("a")])
    first = put(state, ask("alone", 10, fault_domain=FaultDomain.ISOLATED))
    second = put(state, ask("other", 10))
    assert first.gpu_uuids != second.gpu_uuids
    refused = place(ask("third", 10, fault_domain=FaultDomain.ISOLATED), state, BestFit())
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.FAULT_DOMAIN
    state.release("other")
    assert isinstance(place(ask("third", 10, fault_domain=FaultDomain.ISOLATED), state, BestFit()), Placement)


def test_an_unhealthy_gpu_takes_nobody_and_comes_back() -> None:
    state = ClusterState([node("a", 1)])
    state.set_health("GPU-a-0", healthy=False)
    refused = place(ask("x"), state, BestFit())
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.GPU_UNHEALTHY
    state.set_health("GPU-a-0", healthy=True)
    put(state, ask("x"))


def test_preferred_gpus_are_taken_while_they_have_room() -> None:
    state = ClusterState([node("a", 2)])
    put(state, ask("x", 10))
    context = context_of(state, BestFit())
    free = decide(ask("y", 60), context, node="a", preferred_gpus=("GPU-a-1",))
    assert free == Placement("a", ("GPU-a-1",), 48_000)
    state.reserve("z", free, ask("z", 60))
    full = decide(ask("y", 60), context, node="a", preferred_gpus=("GPU-a-1",))
    assert full == Placement("a", ("GPU-a-0",), 48_000)
    elsewhere = decide(ask("y", 60), context, node="a", preferred_gpus=("GPU-b-0",))
    assert elsewhere == full, "a GPU of another node is no choice here"


def test_a_refusal_by_caution_names_what_tenants_tolerate() -> None:
    state = ClusterState([node("a", 1, model="NVIDIA H200")])
    stream = KnownWorkload("stream", "NVIDIA H200", 1.01, Profile(WORKLOADS["stream"].solo))
    first = PlacementRequest("there", 500, known=stream)
    placed = decide(first, context_of(state, BestFit()))
    assert isinstance(placed, Placement)
    assert placed.thread_percentage == 100, "nobody like it could come, whatever its cap"
    state.reserve("there", placed, first)
    refused = decide(PlacementRequest("new", 500, known=stream), context_of(state, BestFit()))
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.SLOWDOWN
    assert "fits on none of 1 nodes; on 1 of the 1 with room: has room on 1 GPU, but" in refused.detail


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("avoid", [(), (1,), (1, 5), (0, 1, 2, 3, 5)])
def test_the_best_rows_are_those_that_a_sort_finds(count: int, avoid: tuple[int, ...]) -> None:
    state = ClusterState([node(name) for name in "abcdef"])
    for uid, percent, name in (("x", 70, "b"), ("y", 20, "d"), ("z", 20, "f"), ("u", 100, "e"), ("v", 100, "e")):
        placed = choose(ask(uid, percent), state, BestFit(), name)
        assert isinstance(placed, Placement)
        state.reserve(uid, placed, ask(uid, percent))
    names = list("fedcba")
    found = candidates(ask("new"), state, BestFit(), names)
    score = dict(zip(found.rows.tolist(), found.scores.tolist(), strict=True))
    assert state.row("e") not in score
    welcome = [row for row in score if row not in avoid] or list(score)
    expected = sorted(welcome, key=lambda row: -score[row])[:count]
    assert sorted(found.best(count, np.array(avoid, np.int64)).tolist()) == sorted(expected)
    equal = [row for row in expected if score[row] == score[expected[0]]]
    assert sorted(found.best(count, np.array(avoid, np.int64), equal_only=True).tolist()) == sorted(equal)
