"""A policy that avoids GPUs which are kept for pods that have waited longer (keeping.py)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from gpushare.core.api import Reason, Rejection
from gpushare.core.placement.fitting import fitting_gpus
from gpushare.core.placement.keeping import KeptGpus
from gpushare.core.placement.search import NarrowedPolicy, PlacementPolicy
from gpushare.core.placement.shapes import PlacementRequest, Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray
from gpushare.core.placement.whatif import WhatIf

Barred = Mapping[tuple[int, int], KeptGpus]
"""By (slot, row), the GPUs that a pod may not take and the pod that each is kept for."""
_MINUTES_FROM: Final = 120.0
_HOURS_FROM: Final = 7200.0


class StandingBack(NarrowedPolicy):
    """A policy for one request that avoids GPUs where the request would set back a pod that has waited longer."""

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
    """Return the GPUs that a request may not take, because it would set back a pod that has waited longer.

    The request may take a GPU if that pod would still fit beside it after the same tenants have left.

    Args:
        closes: returns whether the request would have a GPU (row, slot) to itself for a while.
    """
    found: dict[tuple[int, int], KeptGpus] = {}
    state = what_if.state
    if not request.gpu_count:
        return found
    for each in kept:
        row = state.row(each.node)
        if row is None or not each.before(request) or state.reservation(each.pod.request.pod_uid) is not None:
            continue
        uuids = state.uuids(row)
        slots = [uuids.index(uuid) for uuid in each.gpu_uuids if uuid in uuids]
        tenants = {slot: state.tenants(uuids[slot]) for slot in slots}
        gone = [tenant for on_gpu in tenants.values() for tenant in on_gpu if tenant.pod_uid in each.leaving]
        if not what_if.node_fits(each.pod, row, gone, request):
            found.update(((slot, row), each) for slot in range(len(uuids)))
            continue
        for slot in slots:
            if state.share_free_milli[slot, row] < request.share_milli:
                continue  # it does not fit there anyway, which is the reason to report
            is_one = each.pod.request.gpu_count == 1
            fits_beside = is_one and not closes(row, slot)
            if not (fits_beside and what_if.fits(each.pod, (slot, row), tenants[slot], each.leaving, request)):
                found[slot, row] = each
    return found


def _rejection_of(kept: KeptGpus) -> Rejection:
    gpus = f"GPU {kept.gpu_uuids[0]} is" if len(kept.gpu_uuids) == 1 else f"{len(kept.gpu_uuids)} GPUs are"
    return Rejection(
        Reason.KEPT, f"{gpus} kept for {kept.pod.name}, which has waited {_long(kept.waited_seconds)}"
    )


def _long(seconds: float) -> str:
    """Return a duration as text, coarse enough that it does not change every second."""
    if seconds < _MINUTES_FROM:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < _HOURS_FROM else f"{seconds / 3600:.0f} h"
