"""Choose the pods that must leave a node so that another fits on one GPU; tried on the state and undone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpushare.core.api import Rejection
from gpushare.core.placement.decide import DecisionContext, decide
from gpushare.core.placement.shapes import PlacementRequest


@dataclass(frozen=True, slots=True)
class Evictable:
    """One of our pods, as preemption sees it; `cpu_milli` and `memory_mib` are its requests on its node."""

    priority: int
    cpu_milli: int
    memory_mib: int


def choose_victims(
    request: PlacementRequest,
    context: DecisionContext,
    node: str,
    *,
    priority: int,
    pods: Mapping[str, Evictable],
    proposed: Sequence[str],
) -> tuple[str, ...]:
    """Return uids of pods to evict so that the request fits on a node; none if that cannot help.

    kube-scheduler's proposal frees enough on the node in sum, which may be spread over several GPUs. If its
    victims free enough on one GPU, they are returned unchanged. Otherwise the fewest, lowest and newest tenants of
    one GPU are chosen; proposed victims that are then not needed for the node's CPU and memory are spared.

    Args:
        priority: of the pod to place; only pods of lower priority are evicted.
        pods: our pods by uid.
        proposed: uids that kube-scheduler proposes.
    """
    if proposed and _fits_without(request, context, node, proposed):
        return tuple(proposed)
    extra = _cheapest(request, context, node, priority, pods)
    if extra is None:
        return ()
    victims = tuple(dict.fromkeys([*_still_needed(pods, extra, proposed), *extra]))
    return victims if victims and _fits_without(request, context, node, victims) else ()


def _fits_without(request: PlacementRequest, context: DecisionContext, node: str, leaving: Iterable[str]) -> bool:
    snapshot = context.state.snapshot()
    try:
        for uid in leaving:
            context.state.release(uid)
        return not isinstance(decide(request, context, node=node), Rejection)
    finally:
        context.state.undo(snapshot)


def _cheapest(
    request: PlacementRequest, context: DecisionContext, node: str, priority: int, pods: Mapping[str, Evictable]
) -> list[str] | None:
    """Return the smallest set of lower-priority tenants without which the request fits on one GPU, or None."""
    state = context.state
    row = state.row(node)
    if row is None:
        return None

    def lower(uuids: Iterable[str]) -> list[str]:
        """Return uids of lower-priority tenants: lowest priority first, newest first among equals."""
        tenants = {tenant.pod_uid: tenant.order for uuid in uuids for tenant in state.tenants(uuid)}
        ordered = sorted((pods[uid].priority, -order, uid) for uid, order in tenants.items() if uid in pods)
        return [uid for own, _, uid in ordered if own < priority]

    def cost(uids: list[str]) -> tuple[int, int]:
        return max((pods[uid].priority for uid in uids), default=0), len(uids)

    uuids = state.uuids(row)
    groups = [[uuid] for uuid in uuids] if request.gpu_count == 1 else [list(uuids)]
    best: list[str] | None = None
    for group in groups:
        leaving = lower(group)
        if not _fits_without(request, context, node, leaving):
            continue
        for uid in reversed(leaving.copy()):  # spare the highest and oldest first
            spared = [other for other in leaving if other != uid]
            if _fits_without(request, context, node, spared):
                leaving = spared
        if best is None or cost(leaving) < cost(best):
            best = leaving
    return best


def _still_needed(pods: Mapping[str, Evictable], extra: list[str], proposed: Iterable[str]) -> list[str]:
    """Return the proposed victims that must leave too: others' pods, and ours if CPU or memory needs it."""
    ours = [uid for uid in proposed if uid in pods and uid not in extra]
    others = [uid for uid in proposed if uid not in pods]
    cpu = sum(pods[uid].cpu_milli for uid in extra) - sum(pods[uid].cpu_milli for uid in ours)
    memory = sum(pods[uid].memory_mib for uid in extra) - sum(pods[uid].memory_mib for uid in ours)
    return others if cpu >= 0 and memory >= 0 else [*others, *ours]
