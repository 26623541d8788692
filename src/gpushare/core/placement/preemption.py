"""Choose the pods that must leave a node so that another fits there; tried on the state and undone."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from gpushare.core.api import Rejection
from gpushare.core.placement.decide import DecisionContext, decide
from gpushare.core.placement.fitting import memory_matters, memory_need_mib
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest
from gpushare.core.placement.state import ClusterState

_LOWEST: Final = -(2**31)  # priorities are int32


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
    request fits beside is spared. Of the GPUs the one with the fewest and lowest victims is taken. A request for
    several GPUs is tried on those with the fewest and lowest tenants, and on all of the node.

    A whole decision takes milliseconds, so pods are first spared by the sums of shares, memory and CPU alone. Most
    often one decision then confirms that the rest suffices.

    Args:
        priority: of the pod to place; only pods of lower priority are evicted.
        priorities: by uid, those of our pods.
        proposed: uids that kube-scheduler proposes. Others' pods among them leave in any case; the state counts
            their CPU and memory as free already.
    """
    if proposed and _fits_without(request, context, node, proposed):
        return tuple(proposed)
    row = context.state.row(node)
    if row is None:
        return ()
    others = [uid for uid in proposed if uid not in priorities]
    best: list[str] | None = None
    for group in _groups(request, context.state, row, priority, priorities):
        leaving = _lower(context, group, proposed, priority, priorities)
        by_sums = _spared(leaving, lambda uids: _sums_suffice(request, context.state, row, [*others, *uids]))
        if by_sums is None or (best is not None and _cost(by_sums, priorities) >= _cost(best, priorities)):
            continue
        found: list[str] | None = by_sums
        if not _fits_without(request, context, node, [*others, *by_sums]):  # a promise or a closed GPU
            found = _spared(leaving, lambda uids: _fits_without(request, context, node, [*others, *uids]))
        if found is not None and (best is None or _cost(found, priorities) < _cost(best, priorities)):
            best = found
    return () if best is None else (*others, *best)


def _groups(
    request: PlacementRequest, state: ClusterState, row: int, priority: int, priorities: Mapping[str, int]
) -> list[list[str]]:
    """Return the sets of GPUs whose tenants may have to leave."""
    uuids = list(state.uuids(row))
    if request.gpu_count == 1:
        return [[uuid] for uuid in uuids]
    emptied: list[tuple[int, float, str]] = []  # highest priority and number of tenants, a part of one on each GPU
    for slot, uuid in enumerate(uuids):
        tenants = {each.pod_uid: priorities.get(each.pod_uid, priority) for each in state.tenants(uuid)}
        if state.healthy[slot, row] and all(each < priority for each in tenants.values()):
            count = sum(1 / _gpu_count(state, uid) for uid in tenants)
            emptied.append((max(tenants.values(), default=_LOWEST), count, uuid))
    if not 0 < request.gpu_count < len(emptied):
        return [uuids]
    highest = sorted(emptied)[request.gpu_count - 1][0]
    fewest = sorted((each for each in emptied if each[0] <= highest), key=lambda each: each[1])
    return [[uuid for _, _, uuid in fewest[: request.gpu_count]], uuids]


def _gpu_count(state: ClusterState, uid: str) -> int:
    reservation = state.reservation(uid)
    return max(len(reservation.slots or ()), 1) if reservation is not None else 1


def _spared(leaving: Sequence[str], suffice: Callable[[Sequence[str]], bool]) -> list[str] | None:
    """Return these pods without those that can be spared, tried from the last on; None if all do not suffice."""
    if not suffice(leaving):
        return None
    needed = list(leaving)
    for uid in reversed(leaving):
        spared = [other for other in needed if other != uid]
        if suffice(spared):
            needed = spared
    return needed


def _fits_without(request: PlacementRequest, context: DecisionContext, node: str, leaving: Sequence[str]) -> bool:
    row = context.state.row(node)
    if row is None or not _sums_suffice(request, context.state, row, leaving):
        return False
    snapshot = context.state.snapshot()
    try:
        for uid in leaving:
            context.state.release(uid)
        return not isinstance(decide(request, context, node=node), Rejection)
    finally:
        context.state.undo(snapshot)


def _sums_suffice(request: PlacementRequest, state: ClusterState, row: int, leaving: Iterable[str]) -> bool:
    """Return whether shares, memory and CPU suffice without these pods; if not, no decision places the request.

    So must the node's allocatable shares, as kube-scheduler counts them; otherwise it would not ask about the node
    again. They are those of the healthy GPUs, but the tenants of failed GPUs are subtracted too.
    """
    share, memory = state.share_free_milli[:, row].copy(), state.memory_free_mib[:, row].copy()
    cpu_milli, node_memory_mib = int(state.cpu_free_milli[row]), int(state.node_memory_free_mib[row])
    for uid in set(leaving):
        reservation = state.reservation(uid)
        if reservation is not None and reservation.slots is not None and reservation.row == row:
            cpu_milli += reservation.request.cpu_milli
            node_memory_mib += reservation.request.node_memory_mib
            for slot in reservation.slots:
                share[slot] += reservation.request.share_milli
                memory[slot] += reservation.placement.memory_mib
    if cpu_milli < request.cpu_milli or node_memory_mib < request.node_memory_mib:
        return False
    shape, present, healthy = request.shape, state.present[:, row], state.healthy[:, row]
    fits = healthy & (share >= shape.share_milli)
    if memory_matters(state, shape):
        fits &= memory >= np.ravel(memory_need_mib(state, shape, np.array([row])))
    offered_milli = GPU_MILLI * (present & healthy).sum() - (GPU_MILLI - share[present]).sum()
    return bool(fits.sum() >= shape.gpu_count and offered_milli >= request.gpu_count * request.share_milli)


def _lower(
    context: DecisionContext,
    gpu_uuids: Collection[str],
    proposed: Iterable[str],
    priority: int,
    priorities: Mapping[str, int],
) -> list[str]:
    """Return our pods of lower priority on these GPUs or proposed: lowest first, newest first among equals.

    For several GPUs, those that are only proposed come last: sparing the GPUs' own tenants would empty others.
    """
    state = context.state
    order = {tenant.pod_uid: tenant.order for uuid in gpu_uuids for tenant in state.tenants(uuid)}
    tenants = set(order)
    for uid in proposed:
        if (reservation := state.reservation(uid)) is not None:
            order[uid] = reservation.order
    lower = [uid for uid in order if priorities.get(uid, priority) < priority]
    first = set(lower) if len(gpu_uuids) == 1 else tenants
    return sorted(lower, key=lambda uid: (uid not in first, priorities[uid], -order[uid], uid))


def _cost(uids: Iterable[str], priorities: Mapping[str, int]) -> tuple[bool, int, int]:
    leaving = [priorities[uid] for uid in uids]
    return bool(leaving), max(leaving, default=0), len(leaving)
