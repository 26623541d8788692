"""GPUs kept for pods that have waited long, so that smaller ones do not overtake them for ever (docs/adr/0155).

EASY backfilling with ages in place of run times, which nobody knows: the GPU is kept where the fewest tenants have
to leave, and of these the oldest are expected to leave first. Nothing is remembered between two calls: what is
kept follows from who waits since when, from who runs where, and from the time, so every replica keeps the same.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Tenant
from gpushare.core.placement.state import BoolArray, IntArray
from gpushare.core.placement.whatif import WaitingPod, WhatIf

WINDOW_RATIO: Final = 12
"""A pod's first window lasts so many times what it waits before; then nothing is kept for it for as long."""
MOST_KEPT_RATIO: Final = 0.25
"""Part of the GPUs that are kept at most, but for the pod that comes first."""
MOST_PODS: Final = 16
"""Pods for which GPUs are kept at once: some 10 ms every second for 40,000 GPUs."""
MOST_EXAMINED: Final = 64
"""Pods for which a GPU is looked for, those included for which there is none."""
MOST_SEARCHES: Final = 4
"""Pods for which a place is looked for in all GPUs in one second, where something was kept the second before."""
TURNS: Final = 8
"""Seconds until every place has been looked for anew."""
CANDIDATES: Final = 8
"""GPUs, or nodes, with the most free share of which the one is chosen that a pod will fit first."""
_FAR: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class KeptGpus:
    """GPUs of one node that are kept for a pod.

    Attributes:
        leaving: uids of the tenants after whose end it fits; none: it fits now.
        waited_seconds: how long it has waited.
    """

    pod: WaitingPod
    node: str
    gpu_uuids: tuple[str, ...]
    leaving: frozenset[str]
    waited_seconds: float

    def before(self, request: PlacementRequest) -> bool:
        """Return whether another pod has to stand back: a younger one of no higher priority."""
        return self.pod.request.rank < request.rank and self.pod.request.pod_uid != request.pod_uid


def is_due(waited_seconds: float, after_seconds: float) -> bool:
    """Return whether something is kept for a pod that has waited so long; never with `after_seconds` 0.

    Windows and pauses of equal length take turns, each pair twice as long as the one before: tenants that stay
    longer than the first window block a GPU for half of the time at most, and whoever waits gets a window in the
    end that is longer than any tenant stays.
    """
    if after_seconds <= 0 or not math.isfinite(waited_seconds):
        return False
    begin, end, _ = _window(waited_seconds, after_seconds)
    return begin <= waited_seconds < end


def due_changes_at(waited_seconds: float, after_seconds: float) -> float:
    """Return how long a pod has waited, in seconds, when `is_due` next answers otherwise than now.

    Args:
        waited_seconds: finite; after_seconds: above 0.
    """
    return next(each for each in _window(waited_seconds, after_seconds) if each > waited_seconds)


def _window(waited_seconds: float, after_seconds: float) -> tuple[float, float, float]:
    """Return begin and end of the window that a wait is before, in, or in the pause after; and the pause's end."""
    begin, length = after_seconds, WINDOW_RATIO * after_seconds
    while waited_seconds >= begin + 2 * length:
        begin, length = begin + 2 * length, 2 * length
    return begin, begin + length, begin + 2 * length


def keep(
    waiting: Iterable[WaitingPod],
    what_if: WhatIf,
    after_seconds: float,
    before: Sequence[KeptGpus] | None = None,
) -> tuple[KeptGpus, ...]:
    """Return the GPUs to keep, for the highest priority and the longest waiting first, one place for each pod.

    A pod that would fit no GPU even if its tenants had left gets none, and blocks nobody.

    Args:
        before: what was kept a second ago. Most places are then only looked at again, and a few are looked for
            anew in turn, as a search over a large cluster takes a millisecond; None: all are looked for.
    """
    if after_seconds <= 0:
        return ()
    due = [
        pod
        for pod in waiting
        if pod.request.gpu_count and is_due(what_if.now - pod.request.queued_at, after_seconds)
    ]
    search = _Search(what_if, what_if.state.present & what_if.state.healthy)
    most = MOST_KEPT_RATIO * int(search.free.sum())
    found: list[KeptGpus] = []
    count = 0
    known = {each.pod.request.pod_uid: each for each in before or ()}
    searches = MOST_SEARCHES if before is not None else MOST_EXAMINED
    for number, pod in enumerate(sorted(due, key=lambda each: each.request.rank)[:MOST_EXAMINED]):
        if found and count + pod.request.gpu_count > most:
            continue
        kept = None
        its_turn = number % TURNS == int(what_if.now) % TURNS
        if pod.request.pod_uid in known and not (its_turn and searches):
            kept = search.again(pod, known[pod.request.pod_uid])
        if kept is None and searches:
            searches -= 1
            kept = search.place(pod)
        if kept is None:
            continue
        found.append(kept)
        count += len(kept.gpu_uuids)
        if len(found) == MOST_PODS:
            break
    return tuple(found)


@dataclass(slots=True)
class _Search:
    """Looks for places; `free` marks the GPUs, (width, rows), that are healthy and not kept yet."""

    what_if: WhatIf
    free: BoolArray

    def place(self, pod: WaitingPod) -> KeptGpus | None:
        """Return where a pod will fit first, and keep that from the next."""
        possible = self._possible(pod)
        found = self._one(pod, possible) if pod.request.gpu_count == 1 else self._whole(pod, possible)
        if found is None:
            return None
        return self._kept(pod, *found)

    def _kept(self, pod: WaitingPod, row: int, slots: tuple[int, ...], leaving: Sequence[Tenant]) -> KeptGpus:
        self.free[list(slots), row] = False
        state = self.what_if.state
        return KeptGpus(
            pod,
            state.node_name(row),
            tuple(state.uuids(row)[slot] for slot in slots),
            frozenset(each.pod_uid for each in leaving),
            self.what_if.now - pod.request.queued_at,
        )

    def again(self, pod: WaitingPod, before: KeptGpus) -> KeptGpus | None:
        """Return the place that was kept for a pod, as it is now; None where it cannot be kept any more."""
        state = self.what_if.state
        places = [at for uuid in before.gpu_uuids if (at := state.gpu_at(uuid)) is not None]
        if len(places) < len(before.gpu_uuids) or not all(self.free[slot, row] for row, slot in places):
            return None
        row = places[0][0]
        if pod.nodes is not None and state.node_name(row) not in pod.nodes:
            return None
        leaving = self._leaving(pod, (places[0][1], row)) if len(places) == 1 else self._all_of(pod, places)
        return None if leaving is None else self._kept(pod, row, tuple(slot for _, slot in places), leaving)

    def _all_of(self, pod: WaitingPod, places: Sequence[tuple[int, int]]) -> list[Tenant] | None:
        """The tenants of several GPUs of one node, (row, slot); None where its CPU or memory would not do."""
        state, row = self.what_if.state, places[0][0]
        tenants = [each for _, slot in places for each in state.tenants(state.uuids(row)[slot])]
        leaving = list({each.pod_uid: each for each in tenants}.values())
        return leaving if self.what_if.node_fits(pod, row, leaving) else None

    def _possible(self, pod: WaitingPod) -> BoolArray:
        """GPUs that could take the pod if they were empty, (width, rows)."""
        state, shape = self.what_if.state, pod.request.shape
        possible = self.free.copy()
        if shape.models:
            possible &= np.isin(state.model_ids, state.accepted_model_ids(shape.models))
        if shape.memory_mib:
            possible &= state.memory_usable_mib >= shape.memory_mib
        if pod.nodes is not None:
            allowed = np.zeros(len(state.alive), bool)
            allowed[[row for row in state.rows(pod.nodes) if row is not None]] = True
            possible &= allowed
        return possible

    def _one(self, pod: WaitingPod, possible: BoolArray) -> tuple[int, tuple[int, ...], list[Tenant]] | None:
        """The GPU, of those with the most free share, from which the fewest and oldest tenants have to leave."""
        missing = np.maximum(pod.request.share_milli - self.what_if.state.share_free_milli, 0)
        best: tuple[tuple[int, int], int, int, list[Tenant]] | None = None
        looked = 0
        for at in _nearest(np.where(possible, missing, _FAR)):
            slot, row = divmod(at, possible.shape[1])
            leaving = self._leaving(pod, (slot, row))
            if leaving is None:
                continue
            rank = (len(leaving), max((each.order for each in leaving), default=0))
            if best is None or rank < best[0]:
                best = (rank, row, slot, leaving)
            looked += 1
            if looked == CANDIDATES or not leaving:
                break
        return None if best is None else (best[1], (best[2],), best[3])

    def _leaving(self, pod: WaitingPod, at: tuple[int, int]) -> list[Tenant] | None:
        """The tenants of a GPU after whose end the pod fits, oldest first; None: not even without any."""
        slot, row = at
        tenants = self.what_if.state.tenants(self.what_if.state.uuids(row)[slot])

        def fits(gone: Sequence[Tenant]) -> bool:
            return self.what_if.fits(pod, at, tenants, {each.pod_uid for each in gone})

        if not fits(tenants):
            return None
        leaving = next(list(tenants[:count]) for count in range(len(tenants) + 1) if fits(tenants[:count]))
        for each in reversed(leaving.copy()):
            fewer = [other for other in leaving if other is not each]
            if fits(fewer):
                leaving = fewer
        return leaving

    def _whole(self, pod: WaitingPod, possible: BoolArray) -> tuple[int, tuple[int, ...], list[Tenant]] | None:
        """The node whose least used GPUs have the least share in use, for a pod of several whole GPUs."""
        state, count = self.what_if.state, pod.request.gpu_count
        if possible.shape[0] < count:
            return None
        used = np.where(possible, GPU_MILLI - state.share_free_milli, _FAR)
        least = np.sort(used, axis=0)[:count]
        together = np.where(least[-1] == _FAR, _FAR, np.where(least == _FAR, 0, least).sum(axis=0))
        for row in _nearest(together):
            slots = tuple(np.argsort(used[:, row], kind="stable")[:count].tolist())
            leaving = self._all_of(pod, [(row, slot) for slot in slots])
            if leaving is not None:
                return row, slots, leaving
        return None


def _nearest(distance: IntArray) -> list[int]:
    """Indices into a flattened array of the least, some more than are chosen from; none of what is far."""
    flat = distance.ravel()
    found: list[int] = []
    reached = -1
    while len(found) < 4 * CANDIDATES:  # equal ones are many: a sort of all costs fifty times as much
        reached = int(np.where(flat > reached, flat, _FAR).min(initial=_FAR))
        if reached == _FAR:
            break
        found += np.flatnonzero(flat == reached)[: 4 * CANDIDATES - len(found)].tolist()
    return found
