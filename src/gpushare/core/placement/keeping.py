"""GPUs kept for pods that have waited long, so that smaller pods do not overtake them for ever (docs/adr/0155).

This is EASY backfilling with ages instead of run times, which are unknown: a GPU is kept where the fewest tenants
have to leave, and among these where the tenants are oldest, which are expected to leave first. Nothing is stored
between calls: the result follows from which pods wait and since when, which pods run where, and the time, so every
replica keeps the same GPUs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Tenant
from gpushare.core.placement.state import BoolArray, IntArray
from gpushare.core.placement.whatif import WaitingPod, WhatIf

WINDOW_RATIO: Final = 12
"""A pod's first window lasts this many times the wait before it; then nothing is kept for it for as long."""
MOST_KEPT_RATIO: Final = 0.25
"""Largest part of the GPUs that is kept; the first pod is exempt."""
MOST_PODS: Final = 16
"""Most pods for which GPUs are kept at once; takes about 10 ms every second for 40,000 GPUs."""
MOST_EXAMINED: Final = 64
"""Most pods that are examined, less those for which no GPU is found."""
MOST_SEARCHES: Final = 4
"""Most searches over all GPUs in one second, if something was kept the second before."""
TURNS: Final = 8
"""Seconds until every place has been searched anew."""
CANDIDATES: Final = 8
"""Number of GPUs or nodes with the most free share, among which the place is chosen."""
_FAR: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class KeptGpus:
    """GPUs of one node that are kept for a pod.

    Attributes:
        leaving: uids of the tenants that must end before the pod fits; empty if it fits now.
        waited_seconds: how long the pod has waited.
        is_nominated: they are kept because the pod is nominated to the node (nominated.py), not for its age.
    """

    pod: WaitingPod
    node: str
    gpu_uuids: tuple[str, ...]
    leaving: frozenset[str]
    waited_seconds: float
    is_nominated: bool = False

    def before(self, request: PlacementRequest) -> bool:
        """Return whether another pod must stand back: one of no higher priority, and a younger one for age."""
        own = self.pod.request
        if own.pod_uid == request.pod_uid:
            return False
        return own.priority >= request.priority if self.is_nominated else own.rank < request.rank


def is_due(waited_seconds: float, after_seconds: float) -> bool:
    """Return whether a GPU is kept for a pod that has waited this long; never with `after_seconds` 0.

    Windows and pauses of equal length alternate, each pair twice as long as the one before. So long-running
    tenants keep a GPU blocked for at most half of the time, and a waiting pod finally gets a window longer than
    any tenant stays.
    """
    if after_seconds <= 0 or not math.isfinite(waited_seconds):
        return False
    begin, end, _ = _window(waited_seconds, after_seconds)
    return begin <= waited_seconds < end


def due_changes_at(waited_seconds: float, after_seconds: float) -> float:
    """Return the waiting time, in seconds, at which the answer of `is_due` next changes.

    Args:
        waited_seconds: present waiting time, finite.
        after_seconds: above 0.
    """
    return next(each for each in _window(waited_seconds, after_seconds) if each > waited_seconds)


def _window(waited_seconds: float, after_seconds: float) -> tuple[float, float, float]:
    """Return the window, with its pause, that a waiting time belongs to: (begin, end, end of the pause)."""
    begin, length = after_seconds, WINDOW_RATIO * after_seconds
    while waited_seconds >= begin + 2 * length:
        begin, length = begin + 2 * length, 2 * length
    return begin, begin + length, begin + 2 * length


def keep(
    waiting: Iterable[WaitingPod],
    what_if: WhatIf,
    after_seconds: float,
    before: Sequence[KeptGpus] | None = None,
    nominated: Sequence[KeptGpus] = (),
) -> tuple[tuple[KeptGpus, ...], frozenset[str]]:
    """Return the GPUs to keep, one place for each pod: highest priority first, then longest waiting.

    A pod that would not even fit an empty GPU gets none, and blocks nobody. With `before`, each such pod uses up
    one of the few searches of this second, so the caller should examine it again only after the others.

    Args:
        before: the GPUs kept a second ago. Most places are then only checked again, and a few are searched anew in
            turn, as a search over a large cluster takes a millisecond. None: search all.
        nominated: the GPUs that are kept for nominated pods: these have a place, and others are given none there.

    Returns:
        what is kept, and the uids of the pods for which a GPU was searched in vain.
    """
    if after_seconds <= 0:
        return (), frozenset()
    placed = {each.pod.request.pod_uid for each in nominated}
    due = [
        pod
        for pod in waiting
        if pod.request.gpu_count
        and pod.request.pod_uid not in placed
        and is_due(what_if.now - pod.request.queued_at, after_seconds)
    ]
    taken = [at for each in nominated for uuid in each.gpu_uuids if (at := what_if.state.gpu_at(uuid)) is not None]
    search = _Search(what_if, what_if.state.present & what_if.state.healthy, taken)
    most = MOST_KEPT_RATIO * int(search.free.sum())
    found: list[KeptGpus] = []
    in_vain: set[str] = set()
    count = examined = number = 0
    known = {each.pod.request.pod_uid: each for each in before or ()}
    searches = MOST_SEARCHES if before is not None else len(due)
    for pod in sorted(due, key=lambda each: each.request.rank):
        if len(found) == MOST_PODS or examined == MOST_EXAMINED:
            break
        examined += 1
        if found and count + pod.request.gpu_count > most:
            continue
        kept = None
        if pod.request.pod_uid in known:
            its_turn = number % TURNS == int(what_if.now) % TURNS
            number += 1
            if not (its_turn and searches):
                kept = search.again(pod, known[pod.request.pod_uid])
        if kept is None and searches:
            searches -= 1
            kept = search.place(pod)
            if kept is None:
                in_vain.add(pod.request.pod_uid)
                examined -= 1
        if kept is not None:
            found.append(kept)
            count += len(kept.gpu_uuids)
    return tuple(found), frozenset(in_vain)


@dataclass(slots=True)
class _Search:
    """Search for places.

    Attributes:
        free: the GPUs that are healthy and not kept yet, (width, rows).
        taken: row and slot of GPUs where no new place is searched.
    """

    what_if: WhatIf
    free: BoolArray
    taken: Sequence[tuple[int, int]]

    def place(self, pod: WaitingPod) -> KeptGpus | None:
        """Return the place where a pod will fit first, and mark it as taken."""
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
        """Return the place that was kept for a pod, brought up to date; None if it cannot be kept any more."""
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
        """Return the tenants of several GPUs (row, slot) of a node; None if its CPU or memory would not do."""
        state, row = self.what_if.state, places[0][0]
        tenants = [each for _, slot in places for each in state.tenants(state.uuids(row)[slot])]
        leaving = list({each.pod_uid: each for each in tenants}.values())
        return leaving if self.what_if.node_fits(pod, row, [each.pod_uid for each in leaving]) else None

    def _possible(self, pod: WaitingPod) -> BoolArray:
        """Return the GPUs that could take the pod if they were empty, (width, rows)."""
        state, shape = self.what_if.state, pod.request.shape
        possible = self.free.copy()
        for row, slot in self.taken:
            possible[slot, row] = False
        if shape.models:
            possible &= np.isin(state.model_ids, state.accepted_model_ids(shape.models))
        if shape.memory_mib:
            possible &= state.memory_usable_mib >= shape.memory_mib
        if pod.nodes is not None:
            allowed = np.zeros(len(state.alive), bool)
            allowed[[row for row in state.rows(pod.nodes) if row is not None]] = True
            possible &= allowed
        return possible

    def _parts(self, pod: WaitingPod, possible: BoolArray) -> Iterator[BoolArray]:
        """Yield the possible GPUs of nodes with enough CPU and memory, then those whose tenants may leave enough.

        Only the `CANDIDATES` with the most free share are examined. Often these are on nodes whose CPU is used up,
        where nobody takes the share, so the nodes with enough CPU come first, on their own.
        """
        state = self.what_if.state
        suffices = state.cpu_free_milli >= pod.request.cpu_milli
        suffices &= state.node_memory_free_mib >= pod.request.node_memory_mib
        yield possible & suffices
        has_tenants = state.clients > 0
        if pod.request.gpu_count > 1:
            has_tenants = np.asarray(has_tenants.any(axis=0))
        rest = possible & ~suffices & has_tenants
        if rest.any():
            yield rest

    def _one(self, pod: WaitingPod, possible: BoolArray) -> tuple[int, tuple[int, ...], list[Tenant]] | None:
        """Return the GPU, of those with the most free share, that the fewest and oldest tenants must leave."""
        missing = np.maximum(pod.request.share_milli - self.what_if.state.share_free_milli, 0)
        best: tuple[tuple[int, float], int, int, list[Tenant]] | None = None
        for part in self._parts(pod, possible):
            looked = 0
            for at in _nearest(np.where(part, missing, _FAR)):
                slot, row = divmod(at, possible.shape[1])
                leaving = self._leaving(pod, (slot, row))
                if leaving is None:
                    continue
                rank = (len(leaving), max((each.order for each in leaving), default=0.0))
                if best is None or rank < best[0]:
                    best = (rank, row, slot, leaving)
                looked += 1
                if not leaving:
                    return row, (slot,), leaving
                if looked == CANDIDATES:
                    break
        return None if best is None else (best[1], (best[2],), best[3])

    def _leaving(self, pod: WaitingPod, at: tuple[int, int]) -> list[Tenant] | None:
        """Return the tenants of a GPU that must end before the pod fits, oldest first; None if it never fits."""
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
        """Return the node whose least used GPUs have the least share in use, for a pod on several whole GPUs."""
        state, count = self.what_if.state, pod.request.gpu_count
        if possible.shape[0] < count:
            return None
        for part in self._parts(pod, possible):
            used = np.where(part, GPU_MILLI - state.share_free_milli, _FAR)
            least = np.sort(used, axis=0)[:count]
            joint_share = np.where(least[-1] == _FAR, _FAR, np.where(least == _FAR, 0, least).sum(axis=0))
            for row in _nearest(joint_share):
                slots = tuple(np.argsort(used[:, row], kind="stable")[:count].tolist())
                leaving = self._all_of(pod, [(row, slot) for slot in slots])
                if leaving is not None:
                    return row, slots, leaving
        return None


def _nearest(distance: IntArray) -> list[int]:
    """Return up to 4 x `CANDIDATES` indices of the smallest values of a flattened array; `_FAR` is left out."""
    flat = distance.ravel()
    found: list[int] = []
    reached = -1
    while len(found) < 4 * CANDIDATES:  # many are equal; sorting all costs fifty times as much
        reached = int(np.where(flat > reached, flat, _FAR).min(initial=_FAR))
        if reached == _FAR:
            break
        found += np.flatnonzero(flat == reached)[: 4 * CANDIDATES - len(found)].tolist()
    return found
