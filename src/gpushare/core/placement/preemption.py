"""Choose the pods that must leave a node so that another fits on one GPU; tried on the state and undone."""

from collections.abc import Iterable, Mapping, Sequence

from gpushare.core.api import Rejection
from gpushare.core.placement.decide import DecisionContext, decide
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest
from gpushare.core.placement.state import ClusterState


def choose_victims(
    request: PlacementRequest,
    context: DecisionContext,
    node: str,
    *,
    priority: int,
    priorities: Mapping[str, int],
    proposed: Sequence[str],
) -> tuple[str, ...]:
    """Return uids of pods to evict so that the request fits on a node; none if that cannot help.

    kube-scheduler's proposal frees enough on the node in sum, which may be spread over several GPUs. If its
    victims free enough on one GPU, they are returned unchanged. Otherwise each GPU is tried without its own
    tenants and without the proposed pods, whose CPU, memory or shares may be needed too, and every pod that the
    request fits beside is spared. Of the GPUs the one with the fewest and lowest victims is taken.

    Args:
        priority: of the pod to place; only pods of lower priority are evicted.
        priorities: those of our pods by uid.
        proposed: uids that kube-scheduler proposes. Others' pods among them leave in any case; the state counts
            their CPU and memory as free already.
    """
    if proposed and _fits_without(request, context, node, proposed):
        return tuple(proposed)
    row = context.state.row(node)
    if row is None:
        return ()
    others = [uid for uid in proposed if uid not in priorities]
    uuids = context.state.uuids(row)
    best: list[str] | None = None
    for group in [[uuid] for uuid in uuids] if request.gpu_count == 1 else [list(uuids)]:
        leaving = _lower(context, group, proposed, priority, priorities)
        if not _fits_without(request, context, node, [*others, *leaving]):
            continue
        for uid in reversed(leaving.copy()):  # spare the highest and oldest first
            spared = [other for other in leaving if other != uid]
            if _fits_without(request, context, node, [*others, *spared]):
                leaving = spared
        if best is None or _cost(leaving, priorities) < _cost(best, priorities):
            best = leaving
    return () if best is None else (*others, *best)


def _fits_without(request: PlacementRequest, context: DecisionContext, node: str, leaving: Iterable[str]) -> bool:
    snapshot = context.state.snapshot()
    try:
        for uid in leaving:
            context.state.release(uid)
        return _suffices_for_kubelet(request, context.state, node) and not isinstance(
            decide(request, context, node=node), Rejection
        )
    finally:
        context.state.undo(snapshot)


def _suffices_for_kubelet(request: PlacementRequest, state: ClusterState, node: str) -> bool:
    """Return whether kubelet offers enough shares on a node; else kube-scheduler would not ask about it again.

    It offers those of the healthy GPUs, of which the tenants of all count, also of those that have failed.
    """
    row = state.row(node)
    if row is None:
        return False
    present, healthy = state.present[:, row], state.healthy[:, row]
    taken_milli = (GPU_MILLI - state.share_free_milli[present, row]).sum()
    return bool(GPU_MILLI * (present & healthy).sum() - taken_milli >= request.gpu_count * request.share_milli)


def _lower(
    context: DecisionContext,
    gpu_uuids: Iterable[str],
    proposed: Iterable[str],
    priority: int,
    priorities: Mapping[str, int],
) -> list[str]:
    """Return our pods of lower priority on these GPUs or proposed: lowest first, newest first among equals."""
    state = context.state
    order = {tenant.pod_uid: tenant.order for uuid in gpu_uuids for tenant in state.tenants(uuid)}
    for uid in proposed:
        if (reservation := state.reservation(uid)) is not None:
            order[uid] = reservation.order
    lower = [uid for uid in order if priorities.get(uid, priority) < priority]
    return sorted(lower, key=lambda uid: (priorities[uid], -order[uid], uid))


def _cost(uids: Iterable[str], priorities: Mapping[str, int]) -> tuple[bool, int, int]:
    leaving = [priorities[uid] for uid in uids]
    return bool(leaving), max(leaving, default=0), len(leaving)
