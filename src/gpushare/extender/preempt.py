"""preempt: which pods must leave a node so that a GPU has room; tried on the state itself and undone."""

from collections.abc import Iterable, Mapping

from gpushare.core.api.rejection import Rejection
from gpushare.core.placement.state import PlacementRequest
from gpushare.extender.ledger import Ledger
from gpushare.extender.reduce import PodView
from gpushare.extender.wire import Victims


def choose_victims(
    ledger: Ledger, pod: PodView, request: PlacementRequest, proposed: Mapping[str, Victims]
) -> dict[str, Victims]:
    """For each node that kube-scheduler proposes, victims whose leaving frees a GPU for the pod.

    kube-scheduler's own choice frees the node's sum, which may lie on several GPUs. Where its victims free a GPU
    they stand as they are. Otherwise the fewest, lowest and newest tenants of one GPU are taken; those proposed
    that are then not needed for the node's CPU and memory stay. A node where no lower pods' leaving helps is left
    out.
    """
    chosen: dict[str, Victims] = {}
    for node, victims in proposed.items():
        with ledger.others.leaving(node, victims.pod_uids):
            uids = _victims_on(ledger, pod, request, node, victims.pod_uids)
        if uids:
            chosen[node] = Victims(uids, victims.pdb_violations)
    return chosen


def _victims_on(
    ledger: Ledger, pod: PodView, request: PlacementRequest, node: str, proposed: tuple[str, ...]
) -> tuple[str, ...]:
    if proposed and _fits_without(ledger, request, node, proposed):
        return proposed
    extra = _cheapest(ledger, pod, request, node)
    if extra is None:
        return ()
    kept = _still_needed(ledger, extra, proposed)
    uids = tuple(dict.fromkeys([*kept, *extra]))
    return uids if uids and _fits_without(ledger, request, node, uids) else ()


def _fits_without(ledger: Ledger, request: PlacementRequest, node: str, leaving: Iterable[str]) -> bool:
    snapshot = ledger.state.snapshot()
    try:
        for uid in leaving:
            ledger.state.release(uid)
        return not isinstance(ledger.choose(request, node), Rejection)
    finally:
        ledger.state.undo(snapshot)


def _cheapest(ledger: Ledger, pod: PodView, request: PlacementRequest, node: str) -> list[str] | None:
    """The smallest set of lower tenants, GPU by GPU, without which the request fits; None when there is none."""
    state = ledger.state
    row = state.row(node)
    if row is None:
        return None

    def lower(uuids: Iterable[str]) -> list[str]:
        """Uids of lower tenants: lowest priority first, the newest first among equals."""
        tenants = {tenant.pod_uid: tenant.order for uuid in uuids for tenant in state.tenants(uuid)}
        views = [(ledger.pods[uid].priority, -order, uid) for uid, order in tenants.items() if uid in ledger.pods]
        return [uid for priority, _, uid in sorted(views) if priority < pod.priority]

    uuids = state.uuids(row)
    groups = [[uuid] for uuid in uuids] if request.gpu_count == 1 else [list(uuids)]
    best: list[str] | None = None
    for group in groups:
        leaving = lower(group)
        if not _fits_without(ledger, request, node, leaving):
            continue
        for uid in reversed(leaving.copy()):  # the highest and oldest may stay first
            spared = [other for other in leaving if other != uid]
            if _fits_without(ledger, request, node, spared):
                leaving = spared
        if best is None or _cost(ledger, leaving) < _cost(ledger, best):
            best = leaving
    return best


def _cost(ledger: Ledger, uids: list[str]) -> tuple[int, int]:
    return max((ledger.pods[uid].priority for uid in uids), default=0), len(uids)


def _still_needed(ledger: Ledger, extra: list[str], proposed: Iterable[str]) -> list[str]:
    """Those proposed that must leave too: pods not ours, and ours while the node's CPU or memory needs it."""
    ours = [uid for uid in proposed if uid in ledger.pods and uid not in extra]
    others = [uid for uid in proposed if uid not in ledger.pods]
    cpu = sum(ledger.pods[uid].cpu_milli for uid in extra) - sum(ledger.pods[uid].cpu_milli for uid in ours)
    memory = sum(ledger.pods[uid].memory_mib for uid in extra) - sum(ledger.pods[uid].memory_mib for uid in ours)
    return others if cpu >= 0 and memory >= 0 else [*others, *ours]
