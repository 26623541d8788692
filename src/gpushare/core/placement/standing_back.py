"""A policy that avoids GPUs which are kept for pods that have waited longer (keeping.py) or are nominated."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from gpushare.core.api import Reason, Rejection
from gpushare.core.placement.fitting import fitting_gpus
from gpushare.core.placement.judge import Newcomer
from gpushare.core.placement.keeping import KeptGpus
from gpushare.core.placement.outlook import best_cap
from gpushare.core.placement.search import NarrowedPolicy, PlacementPolicy
from gpushare.core.placement.shapes import PlacementRequest, Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray
from gpushare.core.placement.whatif import WhatIf

Barred = Mapping[tuple[int, int], KeptGpus]
"""By (slot, row), the GPUs that a pod may not take and the pod that each is kept for."""
_MINUTES_FROM: Final = 120.0
_HOURS_FROM: Final = 7200.0


class StandingBack(NarrowedPolicy):
    """A policy for one request that avoids GPUs where the request would set back a pod that they are kept for."""

    is_choosy = True

    def __init__(self, wider: PlacementPolicy, barred: Barred) -> None:
        self.wider = wider
        self.name = f"{wider.name}, standing back"
        self.rows = np.array(sorted({row for _, row in barred}), np.int64)
        self._barred = barred

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Rank as the wrapped policy does, treating barred GPUs as full."""
        left = gpu_fits & ~self._bars(rows, gpu_fits.shape[0])
        some = left.sum(axis=0) >= max(1, shape.gpu_count)
        scores = np.full(len(rows), -np.inf)
        if some.any():
            scores[some] = self.wider.rank(state, shape, rows[some], left[:, some])
        return scores

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Pick as the wrapped policy does, among the GPUs that are not barred."""
        return self.wider.pick(state, shape, row, [slot for slot in slots if (slot, row) not in self._barred])

    def select(self, scores: FloatArray) -> int:
        """Select as the wrapped policy does."""
        return self.wider.select(scores)

    def token(self, state: ClusterState) -> object:
        """Return None: this policy ranks only a few rows, so nothing is cached."""
        del state
        return None

    def takes(self, state: ClusterState, row: int, slot: int) -> bool:
        """Return whether a GPU is not barred."""
        del state
        return (slot, row) not in self._barred

    def refusals(self, state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
        """Return one rejection for each node: the pod that a GPU is kept for, else the wrapped policy's reason."""
        found: list[Rejection] = []
        groups = np.full(len(rows), -1, np.int64)
        for at in np.flatnonzero(np.isin(rows, self.rows)).tolist():
            fits = np.flatnonzero(fitting_gpus(state, shape, rows[[at]])[:, 0]).tolist()
            kept = [self._barred[slot, int(rows[at])] for slot in fits if (slot, int(rows[at])) in self._barred]
            if kept:
                groups[at] = len(found)
                found.append(_rejection_of(kept[0]))
        others = groups < 0
        if others.any():
            more, of_those = self.wider.refusals(state, shape, rows[others])
            groups[others] = len(found) + of_those
            found += more
        return found, groups

    def _bars(self, rows: IntArray, width: int) -> BoolArray:
        bars = np.zeros((width, len(rows)), bool)
        place = {row: at for at, row in enumerate(rows.tolist())}
        for slot, row in self._barred:
            if row in place:
                bars[slot, place[row]] = True
        return bars


def barred_for(
    request: PlacementRequest,
    kept: Iterable[KeptGpus],
    what_if: WhatIf,
    closes: Callable[[int, int], bool] = lambda _row, _slot: False,
) -> Barred:
    """Return the GPUs that a request may not take, because it would set back a pod that they are kept for.

    The request may take a GPU if that pod would still fit beside it after the same tenants have left. Several
    nominated pods may share a GPU, so each must fit beside those before it too.

    Args:
        kept: those for nominated pods in the order of `DecisionContext.nominated`.
        closes: returns whether the request would have a GPU (row, slot) to itself for a while.
    """
    state = what_if.state
    if not request.gpu_count:
        return {}
    stands_back = [
        (row, each)
        for each in kept
        if each.before(request)
        and (row := state.row(each.node)) is not None
        and state.reservation(each.pod.request.pod_uid) is None
    ]
    rows = np.array([row for row, _ in stands_back], np.int64)
    has_room = np.logical_or.reduce(state.share_free_milli.take(rows, 1) >= request.share_milli, axis=0)
    found: dict[tuple[int, int], KeptGpus] = {}
    nominated: dict[int, list[KeptGpus]] = {}
    for (row, each), may_fit in zip(stands_back, has_room.tolist(), strict=True):
        earlier = nominated.setdefault(row, []) if each.is_nominated else []
        if may_fit:  # else it does not fit there anyway, which is the reason to report
            bars = _barred_by(each, row, request, what_if, earlier=earlier, closes=closes)
            found.update((at, each) for at in bars)
        if each.is_nominated:
            earlier.append(each)
    return found


def _barred_by(
    each: KeptGpus,
    row: int,
    request: PlacementRequest,
    what_if: WhatIf,
    *,
    earlier: Sequence[KeptGpus],
    closes: Callable[[int, int], bool],
) -> Iterator[tuple[int, int]]:
    """Yield the GPUs (slot, row) of a node that a request may not take because of one pod that they are kept for.

    Args:
        earlier: what is kept on the node for nominated pods before this one.
    """
    state, pod = what_if.state, each.pod
    uuids = state.uuids(row)
    if each.is_nominated:
        node_fits = _has_counted(state, row, request, [pod.request, *(other.pod.request for other in earlier)])
    else:
        node_fits = what_if.node_fits(pod, row, each.leaving, (request,))
    if not node_fits:
        yield from ((slot, row) for slot in range(len(uuids)))
        return
    leaving = each.leaving.union(*(other.leaving for other in earlier)) if earlier else each.leaving
    for slot in (uuids.index(uuid) for uuid in each.gpu_uuids if uuid in uuids):
        if state.share_free_milli[slot, row] < request.share_milli:
            continue
        arriving = [request, *(other.pod.request for other in earlier if uuids[slot] in other.gpu_uuids)]
        fits = partial(
            what_if.fits,
            pod,
            (slot, row),
            state.tenants(uuids[slot]),
            leaving,
            arriving,
            counts_node=not each.is_nominated,
        )
        if pod.request.gpu_count > 1 or closes(row, slot) or not fits():
            yield slot, row
            continue
        # The request gets the cap that is best for those who are there now, which may be too high for that pod.
        newcomer = Newcomer.of(request)
        highest = newcomer.caps(state.model_names[int(state.model_ids[slot, row])])[-1]
        if not fits(caps={request.pod_uid: highest}):
            cap = best_cap(what_if.judge, state, newcomer, slot, row)
            if not fits(caps={request.pod_uid: cap}):
                yield slot, row


def _has_counted(
    state: ClusterState, row: int, request: PlacementRequest, nominated: Iterable[PlacementRequest]
) -> bool:
    """Return whether a node has the CPU and memory for a request and nominated pods, as kube-scheduler counts.

    Pods that are being deleted count until they are gone. What the request does not ask for is not looked at.
    """
    cpu_milli, memory_mib = request.cpu_milli, request.node_memory_mib
    for each in nominated:
        cpu_milli += each.cpu_milli
        memory_mib += each.node_memory_mib
    has_cpu = not request.cpu_milli or cpu_milli <= int(state.cpu_free_milli[row])
    return has_cpu and (not request.node_memory_mib or memory_mib <= int(state.node_memory_free_mib[row]))


def _rejection_of(kept: KeptGpus) -> Rejection:
    gpus = f"GPU {kept.gpu_uuids[0]} is" if len(kept.gpu_uuids) == 1 else f"{len(kept.gpu_uuids)} GPUs are"
    why = "is nominated to this node" if kept.is_nominated else f"has waited {_long(kept.waited_seconds)}"
    return Rejection(Reason.KEPT, f"{gpus} kept for {kept.pod.name}, which {why}")


def _long(seconds: float) -> str:
    """Return a duration as text, coarse enough that it does not change every second."""
    if seconds < _MINUTES_FROM:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < _HOURS_FROM else f"{seconds / 3600:.0f} h"
