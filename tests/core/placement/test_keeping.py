"""GPUs kept for pods that have waited long: who stands back, where, for how long, and that nobody starves."""

import heapq
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import FaultDomain, JobClass, Reason, Rejection
from gpushare.core.interference import Profile
from gpushare.core.placement import (
    DecisionContext,
    Judge,
    KnownWorkload,
    ProbationSettings,
    Unprofiled,
    WaitingPod,
    decide,
    is_due,
    survey,
)
from gpushare.core.placement.keeping import MOST_KEPT_RATIO, WINDOW_RATIO
from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"
AFTER = 100.0
NOW = 1000.0


def cluster(nodes=1, gpus=2, memory_mib=80_000, cpu_milli=None):
    return ClusterState(
        NodeSpec(f"n{n}", tuple(GpuSpec(f"g{n}.{g}", H200, memory_mib) for g in range(gpus)), cpu_milli)
        for n in range(nodes)
    )


def put(state, uid, percent, gpu, **more):
    request = PlacementRequest(uid, percent * 10, **more)
    state.reserve(uid, Placement(state.gpu_node(gpu), (gpu,), 800 * percent), request)


def waits(uid, percent, since=NOW - 500, **more):
    nodes = more.pop("nodes", None)
    gpus = more.pop("gpu_count", 1)
    return WaitingPod(PlacementRequest(uid, percent * 10, gpus, queued_at=since, **more), f"default/{uid}", nodes)


def context(state, *waiting, policy=None, judge=None, after=AFTER):
    made = DecisionContext(
        state, policy or BestFit(), judge or Judge(default_model), NOW, reserve_after_seconds=after
    )
    return made.keeping(waiting)


def young(percent, **more):
    return PlacementRequest("young", percent * 10, **{"queued_at": NOW - 5} | more)


def test_the_gpu_that_the_fewest_have_to_leave_is_kept_and_younger_pods_are_told_so():
    state = cluster()
    for uid, percent, gpu in (("a", 40, "g0.0"), ("b", 40, "g0.0"), ("c", 70, "g0.1"), ("d", 10, "g0.1")):
        put(state, uid, percent, gpu)
    found = context(state, waits("large", 80))
    [kept] = found.kept
    assert kept.gpu_uuids == ("g0.1",)  # c has to leave; of the other GPU both
    assert kept.leaving == {"c"}
    decided = decide(young(20), found)
    assert isinstance(decided, Placement)
    assert decided.gpu_uuids == ("g0.0",)
    put(state, "e", 20, "g0.0")
    refused = decide(young(20), found)
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.KEPT
    assert "GPU g0.1 is kept for default/large, which has waited 8 min" in refused.detail
    [(node, rejection)] = survey(young(20), found).rejections().items()
    assert (node, rejection.reason) == ("n0", Reason.KEPT)
    assert decide(young(20), found, node="n0") == rejection


def test_who_does_not_set_it_back_goes_there():
    state = cluster(gpus=1)
    put(state, "a", 70, "g0.0")
    found = context(state, waits("large", 80))
    assert isinstance(decide(young(20), found), Placement)  # 20 + 80 once a has left
    assert isinstance(decide(young(30), found), Rejection)


def test_who_would_have_the_gpu_to_itself_on_probation_stands_back():
    state = cluster(gpus=2)
    put(state, "service", 60, "g0.0", job_class=JobClass.LATENCY)  # beside it nobody can be read
    found = replace(context(state, waits("large", 50)), probation=ProbationSettings())
    unknown = young(30, unprofiled=Unprofiled(frozenset({"new"})))
    [kept] = found.kept
    assert kept.gpu_uuids == ("g0.1",)
    decided = decide(unknown, found)
    assert isinstance(decided, Placement)
    assert (decided.gpu_uuids, decided.probation) == (("g0.0",), None)
    alone = decide(unknown, replace(found, kept=()))
    assert isinstance(alone, Placement)
    assert alone.gpu_uuids == ("g0.1",)
    assert alone.probation is not None


def test_only_younger_pods_of_no_higher_priority_stand_back():
    state = cluster(gpus=1)
    put(state, "a", 60, "g0.0")
    found = context(state, waits("large", 80))
    assert isinstance(decide(young(40), found), Rejection)
    assert isinstance(decide(young(40, priority=-1), found), Rejection)
    assert isinstance(decide(young(40, priority=1), found), Placement)
    assert isinstance(decide(young(40, queued_at=NOW - 600), found), Placement)
    # For an important pod that has waited long the others stand back, whenever they came.
    found = context(state, waits("large", 80, priority=5))
    assert isinstance(decide(young(40, priority=1, queued_at=NOW - 600), found), Rejection)


def test_it_goes_itself_where_it_fits_and_then_nothing_is_kept():
    state = cluster(gpus=2)
    put(state, "a", 60, "g0.0")
    put(state, "b", 50, "g0.1")
    found = context(state, waits("large", 60))
    state.release("b")  # elsewhere than where it was expected
    decided = decide(waits("large", 60).request, found)
    assert isinstance(decided, Placement)
    state.reserve("large", decided, waits("large", 60).request)
    assert not found.barred(young(40))


def test_a_place_is_kept_from_second_to_second_until_it_is_lost_or_another_is_better():
    state = cluster(nodes=3, gpus=1)
    for gpu in ("g0.0", "g1.0", "g2.0"):
        put(state, f"on-{gpu}", 60, gpu)
    pods = [waits(f"w{number}", 80, since=NOW - 500 + number) for number in range(2)]
    found = context(state, pods[0])
    place = found.kept[0].gpu_uuids
    for second in range(8):
        found = found.at(NOW + second).keeping(pods[:1], goes_on=True)
        assert found.kept[0].gpu_uuids == place
        assert found.kept[0].leaving == {f"on-{place[0]}"}
    state.set_health(place[0], healthy=False)
    found = found.keeping(pods[:1], goes_on=True)
    assert found.kept[0].gpu_uuids != place
    state.set_health(place[0], healthy=True)
    better = next(gpu for gpu in ("g0.0", "g1.0", "g2.0") if gpu not in (*place, *found.kept[0].gpu_uuids))
    state.release(f"on-{better}")
    for second in range(8):
        found = found.at(NOW + second).keeping(pods[:1], goes_on=True)
    assert found.kept[0].gpu_uuids == (better,)
    assert not found.kept[0].leaving
    assert not found.keeping([], goes_on=True).kept


def test_what_fits_now_is_kept_until_its_next_try():
    state = cluster(gpus=1)
    [kept] = context(state, waits("large", 80)).kept
    assert not kept.leaving
    refused = decide(young(30), context(state, waits("large", 80)))
    assert isinstance(refused, Rejection)


@pytest.mark.parametrize(
    "never",
    [
        waits("large", 50, memory_mib=90_000),
        waits("large", 50, models=frozenset({"NVIDIA A100"})),
        waits("large", 50, nodes=frozenset({"elsewhere"})),
        waits("large", 50, nodes=frozenset()),
        waits("large", 50, cpu_milli=9_000),
        waits("large", 100, gpu_count=3),
    ],
    ids=["memory", "model", "no such node", "no node", "CPU", "GPUs"],
)
def test_nothing_is_kept_for_a_pod_that_never_fits(never):
    state = cluster(cpu_milli=8_000)
    put(state, "a", 60, "g0.0")
    found = context(state, never, waits("other", 90, since=NOW - 200))
    assert [each.pod.name for each in found.kept] == ["default/other"]
    assert not context(state, never).kept
    assert isinstance(decide(young(40), context(state, never)), Placement)


@pytest.mark.parametrize("never", [4, 100])
def test_pods_that_never_fit_are_not_among_those_that_are_examined(never):
    state = cluster(gpus=8)
    pods = [waits(f"never{number}", 50, since=NOW - 900, memory_mib=90_000) for number in range(never)]
    found = context(state, *pods, waits("other", 90))
    assert [each.pod.name for each in found.kept] == ["default/other"]
    assert found.in_vain == {each.request.pod_uid for each in pods}
    # From then on there are a few searches a second, and the caller leaves out those that were in vain.
    late = waits("late", 90, since=NOW - 200)
    found = found.at(NOW + 1).keeping([pods[0], waits("other", 90), late], goes_on=True)
    assert [each.pod.name for each in found.kept] == ["default/other", "default/late"]
    assert found.in_vain == {"never0"}


def test_nothing_is_kept_before_its_time_or_when_it_is_switched_off():
    state = cluster(gpus=1)
    put(state, "a", 60, "g0.0")
    assert not context(state, waits("large", 80, since=NOW - AFTER + 1)).kept
    assert not context(state, waits("large", 80), after=0.0).kept
    assert context(state, waits("large", 80, since=NOW - AFTER)).kept


def test_whole_gpus_are_kept_on_the_node_where_least_is_in_use():
    state = cluster(nodes=2, gpus=2)
    put(state, "a", 50, "g0.0")
    put(state, "b", 20, "g1.0")
    put(state, "c", 20, "g1.1")
    found = context(state, waits("large", 100, gpu_count=2))
    [kept] = found.kept
    assert (kept.node, kept.leaving) == ("n1", {"b", "c"})
    assert set(kept.gpu_uuids) == {"g1.0", "g1.1"}
    decided = decide(young(10), found)
    assert isinstance(decided, Placement)
    assert decided.node == "n0"
    assert "2 GPUs are kept for default/large" in survey(young(10), found).rejections()["n1"].detail


def test_its_cpu_is_kept_on_the_whole_node():
    state = cluster(gpus=2, cpu_milli=8_000)
    put(state, "a", 60, "g0.0", cpu_milli=4_000)
    put(state, "b", 90, "g0.1")
    found = context(state, waits("large", 60, cpu_milli=6_000))
    assert found.kept[0].gpu_uuids == ("g0.0",)
    assert isinstance(decide(young(10, cpu_milli=2_000), found), Placement)
    assert isinstance(decide(young(10, cpu_milli=3_000), found), Rejection)


def test_a_pod_that_only_neighbours_keep_out_gets_a_gpu_too():
    """Its share is free all the while; what is promised to it is not, and every newcomer takes some of it."""

    def known(max_slowdown):
        solo = WORKLOADS["stream"]
        return KnownWorkload("stream", H200, max_slowdown, Profile(solo.solo, solo.iterations_per_s), "stream")

    state = cluster(gpus=1)
    put(state, "a", 20, "g0.0", known=known(4.0))
    service = waits("service", 50, job_class=JobClass.LATENCY, known=known(1.1))
    judge = Judge(default_model)
    found = context(state, service, judge=judge)
    assert isinstance(decide(service.request, found), Rejection)
    [kept] = found.kept
    assert kept.leaving
    newcomer = young(20, known=known(4.0))
    assert isinstance(decide(newcomer, replace(found, kept=())), Placement)
    refused = decide(newcomer, found)
    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.KEPT


@given(
    after=st.floats(1, 1e5),
    tenant_seconds=st.floats(1, 1e7),
)
def test_windows_and_pauses_take_turns_until_one_outlasts_every_tenant(after, tenant_seconds):
    assert not is_due(after * 0.999, after)
    assert is_due(after, after)
    begin, length, windows = after, WINDOW_RATIO * after, 0
    while length <= tenant_seconds:
        assert is_due(begin + 0.5 * length, after)
        assert not is_due(begin + 1.5 * length, after)
        begin, length, windows = begin + 2 * length, 2 * length, windows + 1
    assert is_due(begin + 0.99 * length, after)
    # It is the last one, and it began no later than some four times as late as the longest tenant stays.
    assert begin <= max(after, 4 * tenant_seconds + after)


@pytest.mark.parametrize("waited", [math.inf, -math.inf, math.nan])
def test_nothing_is_due_for_who_has_waited_nobody_knows_how_long(waited):
    assert not is_due(waited, AFTER)


GPU_NODES = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([16_000, 80_000]), st.sampled_from([None, 4_000])),
    min_size=1,
    max_size=4,
)
REQUESTS = st.builds(
    lambda percent, memory, cpu, domain, gpus: PlacementRequest(
        "x", 1000 if gpus > 1 else percent * 10, gpus, memory, cpu, fault_domain=domain
    ),
    st.integers(1, 100),
    st.sampled_from([None, 1_000, 40_000]),
    st.sampled_from([0, 1_000, 5_000]),
    st.sampled_from([*[FaultDomain.SHARED] * 4, FaultDomain.ISOLATED]),
    st.sampled_from([1, 1, 1, 2, 4]),
)


@settings(max_examples=60, deadline=None)
@given(described=GPU_NODES, running=st.lists(REQUESTS, max_size=8), queued=st.lists(REQUESTS, max_size=6))
def test_what_is_kept_can_be_used_and_the_decision_says_the_same_everywhere(described, running, queued):
    def empty():
        return ClusterState(
            NodeSpec(f"n{n}", tuple(GpuSpec(f"g{n}.{g}", H200, memory) for g in range(gpus)), cpu)
            for n, (gpus, memory, cpu) in enumerate(described)
        )

    state = empty()
    plain = DecisionContext(state, BestFit(), Judge(default_model), NOW, reserve_after_seconds=AFTER)
    for number, request in enumerate(running):
        decided = decide(request, plain)
        if isinstance(decided, Placement):
            state.reserve(f"r{number}", decided, replace(request, pod_uid=f"r{number}"))
    pods = [
        WaitingPod(replace(each, pod_uid=f"q{number}", queued_at=NOW - 500 + number), f"default/q{number}")
        for number, each in enumerate(queued)
    ]
    found = plain.keeping(pods)
    uuids = [uuid for each in found.kept for uuid in each.gpu_uuids]
    assert len(uuids) == len(set(uuids))
    gpus = sum(gpus for gpus, *_ in described)
    assert len(uuids) - len(found.kept[0].gpu_uuids if found.kept else ()) <= MOST_KEPT_RATIO * gpus
    for each in found.kept:
        # It fits there at the latest when the tenants that are named have left.
        snapshot = state.snapshot()
        for uid in each.leaving:
            state.release(uid)
        decided = decide(each.pod.request, plain, node=each.node)
        assert isinstance(decided, Placement)
        state.undo(snapshot)
        assert isinstance(decide(each.pod.request, replace(plain, state=empty()), node=each.node), Placement)
    for request in (young(10), young(60), young(100), young(20, cpu_milli=1_000)):
        surveyed, refused = survey(request, found), survey(request, found).rejections()
        for node in state.node_names:
            one = decide(request, found, node=node)
            assert (node in surveyed.nodes) == isinstance(one, Placement)
            if isinstance(one, Rejection):
                assert refused[node] == one
            else:
                assert not {(node, uuid) for uuid in one.gpu_uuids} & {
                    (state.node_name(row), state.uuids(row)[slot]) for slot, row in found.barred(request)
                }


class Stream:
    """One GPU, small pods that come for ever and stay `stay` seconds each, and a large one that came once."""

    def __init__(self, rng, *, gpus, small, large, stay):
        self.state = cluster(nodes=gpus, gpus=1)
        self.rng, self.small, self.stay = rng, small, stay
        self.large = PlacementRequest("large", large * 10, queued_at=0.0)

    def placed_at(self, after, until):
        """When the large pod is placed by the rules of a queue that may be overtaken; None: not until then."""
        plain = DecisionContext(self.state, BestFit(), Judge(default_model), reserve_after_seconds=after)
        ends: list[tuple[float, str]] = []
        queue: list[PlacementRequest] = []
        numbers = itertools.count()
        now = 0.0
        while now < until:
            while ends and ends[0][0] <= now:
                self.state.release(heapq.heappop(ends)[1])
            while len(queue) < 4:  # somebody always waits
                uid = f"s{next(numbers)}"
                queue.append(PlacementRequest(uid, 10 * self.small, queued_at=now))
            waiting = [WaitingPod(each, each.pod_uid) for each in (self.large, *queue)] if now else []
            found = plain.at(now).keeping(waiting)
            for each in (*queue, self.large) if not now else (self.large, *queue):
                decided = decide(each, found)
                if isinstance(decided, Rejection):
                    continue
                if each is self.large:
                    return now
                self.state.reserve(each.pod_uid, decided, each)
                heapq.heappush(ends, (now + self.rng.uniform(0.5, 1.0) * self.stay, each.pod_uid))
                queue.remove(each)
            now += 1.0
        return None


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    gpus=st.integers(1, 3),
    small=st.sampled_from([10, 20, 30]),
    large=st.sampled_from([80, 100]),
    stay=st.sampled_from([20.0, 60.0]),
)
def test_a_large_pod_is_placed_in_bounded_time_whatever_small_ones_come(seed, gpus, small, large, stay):
    def stream():
        return Stream(np.random.default_rng(seed), gpus=gpus, small=small, large=large, stay=stay)

    # No tenant stays longer than `stay`, and from `after` on no other comes to its GPU: then it is placed.
    after = 30.0
    assert stay < WINDOW_RATIO * after
    placed = stream().placed_at(after, 1000.0)
    assert placed is not None
    assert placed <= after + 2 * stay + 2


def test_without_it_the_same_pod_waits_for_ever():
    stream = Stream(np.random.default_rng(0), gpus=1, small=20, large=100, stay=60.0)
    assert stream.placed_at(0.0, 1000.0) is None


def without_cpu(nodes, gpus):
    """Nodes with hardly any CPU and nothing on their GPUs, except one tenant that has not enough of it."""
    state = cluster(nodes, gpus, cpu_milli=1_500)
    put(state, "small", 10, "g0.0", cpu_milli=500)
    return state


def test_nodes_without_cpu_do_not_hide_the_gpu_that_can_be_kept():
    """Their GPUs have the most free share just because nobody finds CPU there; before, nothing was kept then."""
    state = without_cpu(nodes=5, gpus=8)
    state.add_node(NodeSpec("n", (GpuSpec("g", H200, 80_000),), 64_000))
    put(state, "a", 80, "g", cpu_milli=60_000)
    [kept] = context(state, waits("large", 50, cpu_milli=8_000)).kept
    assert (kept.gpu_uuids, kept.leaving) == (("g",), {"a"})


def test_nodes_without_cpu_do_not_hide_the_whole_gpus_that_can_be_kept():
    state = without_cpu(nodes=40, gpus=2)
    state.add_node(NodeSpec("n", tuple(GpuSpec(f"g{g}", H200, 80_000) for g in range(2)), 64_000))
    put(state, "a", 80, "g0", cpu_milli=60_000)
    [kept] = context(state, waits("large", 100, gpu_count=2, cpu_milli=8_000)).kept
    assert (kept.node, kept.leaving) == ("n", {"a"})
