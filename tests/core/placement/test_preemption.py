"""Preemption: only lower pods leave, none in vain, and where some could make room, some are found."""

from collections.abc import Iterable
from itertools import chain, combinations

from deciding import context_of
from hypothesis import example, given
from hypothesis import strategies as st
from tests.core.placement.test_properties import frozen

from gpushare.core.api import Rejection
from gpushare.core.placement import Evictable, PlacementRequest, choose_victims
from gpushare.core.placement.decide import DecisionContext, decide
from gpushare.core.placement.policies import BestFit
from gpushare.core.placement.state import ClusterState, GpuSpec, NodeSpec, Placement

NODE, GPUS, OWN = "n", ("n/0", "n/1"), 50
tenants = st.lists(
    st.tuples(st.sampled_from(GPUS), st.integers(1, 6), st.sampled_from([0, 10, OWN, 90]), st.integers(0, 3)),
    max_size=6,
)
asked = st.builds(
    PlacementRequest,
    st.just("new"),
    st.integers(1, 10).map(lambda tenths: tenths * 100),
    cpu_milli=st.integers(0, 8),
)


def cluster(running: list[tuple[str, int, int, int]]) -> tuple[DecisionContext, dict[str, Evictable]]:
    """A node of two GPUs with these tenants, as many as fit: GPU, tenths of it, priority, CPU."""
    gpus = tuple(GpuSpec(uuid, "H200", 80_000) for uuid in GPUS)
    state, pods = ClusterState([NodeSpec(NODE, gpus, cpu_milli=8, memory_mib=100)]), {}
    for number, (gpu, tenths, priority, cpu) in enumerate(running):
        request = PlacementRequest(f"pod-{number}", tenths * 100, cpu_milli=cpu, memory_mib=1)
        placed = decide(request, context_of(state, BestFit()), node=NODE, preferred_gpus=(gpu,))
        if isinstance(placed, Placement):
            state.reserve(request.pod_uid, placed, request)
            pods[request.pod_uid] = Evictable(priority, cpu, 0)
    return context_of(state, BestFit()), pods


def fits_without(request: PlacementRequest, context: DecisionContext, leaving: Iterable[str]) -> bool:
    snapshot = context.state.snapshot()
    for uid in leaving:
        context.state.release(uid)
    found = decide(request, context, node=NODE)
    context.state.undo(snapshot)
    return not isinstance(found, Rejection)


@given(tenants, asked, st.sets(st.integers(0, 5)))
def test_who_leaves_is_lower_makes_room_and_is_needed(
    running: list[tuple[str, int, int, int]], request: PlacementRequest, proposed: set[int]
) -> None:
    context, pods = cluster(running)
    before = frozen(context.state)
    # kube-scheduler proposes lower pods alone
    offered = [uid for number in sorted(proposed) if (uid := f"pod-{number}") in pods and pods[uid].priority < OWN]
    victims = choose_victims(request, context, NODE, priority=OWN, pods=pods, proposed=offered)
    assert frozen(context.state) == before
    assert all(pods[uid].priority < OWN for uid in victims)
    assert not victims or fits_without(request, context, victims)
    if victims and victims != tuple(offered):
        for uid in set(victims) - set(offered):
            assert not fits_without(request, context, set(victims) - {uid}), f"{uid} leaves in vain"


@given(tenants, asked)
@example([("n/0", 6, 10, 0), ("n/1", 6, 0, 0)], PlacementRequest("new", 600))
@example([("n/0", 6, 0, 0), ("n/1", 6, 10, 0)], PlacementRequest("new", 600))
def test_where_lower_pods_of_one_gpu_could_make_room_the_fewest_of_the_lowest_are_found(
    running: list[tuple[str, int, int, int]], request: PlacementRequest
) -> None:
    context, pods = cluster(running)
    victims = choose_victims(request, context, NODE, priority=OWN, pods=pods, proposed=[])
    tenants_of = {gpu: [each.pod_uid for each in context.state.tenants(gpu)] for gpu in GPUS}
    lower = [[uid for uid in uids if pods[uid].priority < OWN] for uids in tenants_of.values()]
    sets = chain.from_iterable(combinations(uids, count) for uids in lower for count in range(1, len(uids) + 1))
    enough = [each for each in sets if fits_without(request, context, each)]
    if fits_without(request, context, ()):
        assert victims == ()
    else:
        assert bool(victims) == bool(enough)
    if victims:
        highest = min(max(pods[uid].priority for uid in each) for each in enough)
        assert max(pods[uid].priority for uid in victims) == highest
