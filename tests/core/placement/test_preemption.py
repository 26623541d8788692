"""Preemption: only lower pods leave, none in vain, and where some could make room, some are found."""

from collections.abc import Iterable
from itertools import chain, combinations
from typing import Any

import pytest
from deciding import context_of
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core.placement.test_properties import frozen

from gpushare.core.api import Rejection
from gpushare.core.placement import PlacementRequest, choose_victims, preemption
from gpushare.core.placement.decide import DecisionContext, decide
from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement

NODE, GPUS, OWN, CPU = "n", ("n/0", "n/1"), 50, 8
tenants = st.lists(
    st.tuples(st.sampled_from(GPUS), st.integers(1, 6), st.sampled_from([-5, 0, 10, OWN, 90]), st.integers(0, 4)),
    max_size=6,
)
asked = st.builds(
    PlacementRequest,
    st.just("new"),
    st.integers(1, 10).map(lambda tenths: tenths * 100),
    cpu_milli=st.integers(0, 8),
)


def cluster(running: list[tuple[str, int, int, int]]) -> tuple[DecisionContext, dict[str, int]]:
    """A node of two GPUs with these tenants, as many as fit: GPU, tenths of it, priority, CPU."""
    gpus = tuple(GpuSpec(uuid, "H200", 80_000) for uuid in GPUS)
    state, priorities = ClusterState([NodeSpec(NODE, gpus, cpu_milli=CPU, memory_mib=100)]), {}
    for number, (gpu, tenths, priority, cpu) in enumerate(running):
        request = PlacementRequest(f"pod-{number}", tenths * 100, cpu_milli=cpu, memory_mib=1)
        placed = decide(request, context_of(state, BestFit()), node=NODE, preferred_gpus=(gpu,))
        if isinstance(placed, Placement):
            state.reserve(request.pod_uid, placed, request)
            priorities[request.pod_uid] = priority
    return context_of(state, BestFit()), priorities


def fits_without(request: PlacementRequest, context: DecisionContext, leaving: Iterable[str]) -> bool:
    snapshot = context.state.snapshot()
    for uid in leaving:
        context.state.release(uid)
    found = decide(request, context, node=NODE)
    context.state.undo(snapshot)
    return not isinstance(found, Rejection)


def proposal_of(request: PlacementRequest, context: DecisionContext, priorities: dict[str, int]) -> list[str]:
    """kube-scheduler's proposal: all lower pods leave, then as many as fit by its sums stay, highest first."""

    def fits(leaving: list[str]) -> bool:
        staying = [each.request for uid, each in context.state.reservations.items() if uid not in leaving]
        share = sum(each.share_milli for each in staying) + request.share_milli
        return share <= 1000 * len(GPUS) and sum(each.cpu_milli for each in staying) + request.cpu_milli <= CPU

    leaving = [uid for uid in priorities if priorities[uid] < OWN]
    if not fits(leaving):
        return []
    for uid in sorted(leaving, key=lambda uid: (-priorities[uid], uid)):
        if fits(spared := [other for other in leaving if other != uid]):
            leaving = spared
    return leaving


@given(tenants, asked, st.none() | st.sets(st.integers(0, 5)))
@example(  # a GPU without pod-1 on n/0, but CPU only without the proposed pod-3 on n/1: both have to leave
    [("n/0", 3, 90, 0), ("n/0", 4, 0, 1), ("n/1", 5, 90, 0), ("n/1", 5, 0, 7)],
    PlacementRequest("new", 650, cpu_milli=7),
    None,
)
@example(  # pod-0 alone is enough; the proposed pod-3 asks for more CPU, which nobody needs
    [("n/0", 3, 0, 0), ("n/0", 3, 10, 0), ("n/1", 4, 90, 0), ("n/1", 4, 0, 3)],
    PlacementRequest("new", 650, cpu_milli=1),
    {3},
)
def test_who_leaves_is_lower_makes_room_and_is_needed(
    running: list[tuple[str, int, int, int]], request: PlacementRequest, proposed: set[int] | None
) -> None:
    context, priorities = cluster(running)
    before = frozen(context.state)
    lower = [uid for uid, priority in priorities.items() if priority < OWN]
    if proposed is None:
        offered = proposal_of(request, context, priorities)
    else:  # kube-scheduler's view may be an older one
        offered = [uid for number in sorted(proposed) if (uid := f"pod-{number}") in lower]
    victims = choose_victims(request, context, NODE, priority=OWN, priorities=priorities, proposed=offered)
    assert frozen(context.state) == before
    assert set(victims) <= set(lower)
    assert not victims or fits_without(request, context, victims)
    if victims != tuple(offered):
        for uid in victims:
            assert not fits_without(request, context, set(victims) - {uid}), f"{uid} leaves in vain"
    if offered and proposed is None and fits_without(request, context, lower):
        assert victims or fits_without(request, context, ()), "all lower pods make room, and none was found"


def test_pods_of_others_that_leave_make_room_for_none_to_be_taken_in_vain() -> None:
    context, priorities = cluster([("n/0", 3, 0, 0), ("n/0", 4, 0, 0), ("n/0", 3, 0, 0), ("n/1", 10, 90, 0)])
    del priorities["pod-0"]  # it holds a share, but is not ours
    chosen = choose_victims(
        PlacementRequest("new", 700), context, NODE, priority=OWN, priorities=priorities, proposed=["pod-0"]
    )
    assert chosen == ("pod-0", "pod-1")


@given(tenants, asked)
@example([("n/0", 6, 10, 0), ("n/1", 6, 0, 0)], PlacementRequest("new", 600))
@example([("n/0", 6, 0, 0), ("n/1", 6, 10, 0)], PlacementRequest("new", 600))
def test_where_lower_pods_of_one_gpu_could_make_room_the_fewest_of_the_lowest_are_found(
    running: list[tuple[str, int, int, int]], request: PlacementRequest
) -> None:
    context, priorities = cluster(running)
    victims = choose_victims(request, context, NODE, priority=OWN, priorities=priorities, proposed=[])
    tenants_of = {gpu: [each.pod_uid for each in context.state.tenants(gpu)] for gpu in GPUS}
    lower = [[uid for uid in uids if priorities[uid] < OWN] for uids in tenants_of.values()]
    sets = chain.from_iterable(combinations(uids, count) for uids in lower for count in range(1, len(uids) + 1))
    enough = [each for each in sets if fits_without(request, context, each)]
    if fits_without(request, context, ()):
        assert victims == ()
    else:
        assert bool(victims) == bool(enough)
    if victims:
        highest = min(max(priorities[uid] for uid in each) for each in enough)
        assert max(priorities[uid] for uid in victims) == highest


def crowded(*tenants_of: int) -> tuple[DecisionContext, dict[str, int]]:
    """A node whose GPUs have these numbers of tenants of priority 0, the first GPU the oldest."""
    gpus = tuple(GpuSpec(f"g{number}", "H200", 80_000) for number in range(len(tenants_of)))
    state, priorities = ClusterState([NodeSpec(NODE, gpus)]), {}
    for number, count in enumerate(tenants_of):
        for each in range(count):
            uid = f"g{number}-{each}"
            state.reserve(uid, Placement(NODE, (f"g{number}",), 8000), PlacementRequest(uid, 1000 // count))
            priorities[uid] = 0
    return context_of(state, BestFit()), priorities


@pytest.mark.parametrize("gpu_count", [1, 4])
def test_victims_of_a_crowded_node_cost_few_decisions(monkeypatch: pytest.MonkeyPatch, gpu_count: int) -> None:
    """kube-scheduler's are of all GPUs; whole decisions about each GPU and tenant take a third of a second."""
    context, priorities = crowded(*[10] * 8)
    decisions = []

    def counted(*args: Any, **more: Any) -> Placement | Rejection:
        decisions.append(more)
        return decide(*args, **more)

    monkeypatch.setattr(preemption, "decide", counted)
    proposed = [f"g{gpu}-{each}" for each in range(10) for gpu in range(8)][: 10 * gpu_count]
    request = PlacementRequest("new", 1000, gpu_count)
    found = choose_victims(request, context, NODE, priority=OWN, priorities=priorities, proposed=proposed)
    assert len(found) == 10 * gpu_count
    assert fits_without(request, context, found)
    assert len(decisions) <= 2


def test_of_several_gpus_those_with_the_fewest_tenants_are_emptied() -> None:
    context, priorities = crowded(1, 1, 10, 10)
    proposed = [f"g{gpu}-{each}" for gpu in (2, 3) for each in range(10)][2:]  # 180 of 200 percent
    request = PlacementRequest("new", 1000, 2)
    found = choose_victims(request, context, NODE, priority=OWN, priorities=priorities, proposed=proposed)
    assert sorted(found) == ["g0-0", "g1-0"]


def test_of_several_gpus_those_with_the_lowest_tenants_are_emptied() -> None:
    context, priorities = crowded(1, 2, 2, 1)
    priorities |= {"g0-0": 10, "g3-0": OWN}
    request = PlacementRequest("new", 1000, 2)
    found = choose_victims(request, context, NODE, priority=OWN, priorities=priorities, proposed=["g0-0", "g1-0"])
    assert sorted(found) == ["g1-0", "g1-1", "g2-0", "g2-1"]


def test_a_pod_on_several_gpus_counts_once() -> None:
    context, priorities = crowded(1, 1, 0, 0)
    context.state.reserve("two", Placement(NODE, ("g2", "g3"), 8000), PlacementRequest("two", 1000, 2))
    priorities["two"] = 0
    request = PlacementRequest("new", 1000, 2)
    found = choose_victims(request, context, NODE, priority=OWN, priorities=priorities, proposed=["g0-0"])
    assert found == ("two",)
