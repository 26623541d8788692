"""Waiting pods for which a GPU is due to be kept, updated when a pod or the time has changed something."""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

from gpushare.core.placement import due_changes_at, is_due

_EARLY_SECONDS: Final = 1.0
"""This long before its window begins or ends a pod is checked at every call, because sums of times are rounded."""
_AT_ONCE: Final = -math.inf
_FEW: Final = 100
"""Up to this many newcomers are inserted into the sorted list one by one; with more, the whole list is sorted."""


class Waiter(NamedTuple):
    """A waiting pod; the smallest comes first: highest priority, then longest wait.

    Attributes:
        since: Unix time.
    """

    minus_priority: int
    since: float
    uid: str


class DuePods:
    """The waiting pods for which `is_due` holds, in order, without checking all of them each time."""

    def __init__(self, after_seconds: float) -> None:
        self._after_seconds = after_seconds
        self._waiters: dict[str, Waiter] = {}
        self._due: list[Waiter] = []  # sorted
        self._changes: list[tuple[float, Waiter]] = []  # a heap of times to check a pod; some are outdated
        self._now = -math.inf

    def put(self, waiter: Waiter) -> None:
        """Record a waiting pod, or its new priority or start of waiting."""
        if self._after_seconds <= 0 or self._waiters.get(waiter.uid) == waiter:
            return
        self.drop(waiter.uid)
        self._waiters[waiter.uid] = waiter
        heapq.heappush(self._changes, (_AT_ONCE, waiter))

    def drop(self, uid: str) -> None:
        """Forget a pod if it is known."""
        waiter = self._waiters.pop(uid, None)
        if waiter is not None:
            self._set_due(waiter, is_now=False)

    def at(self, now: float) -> Iterator[str]:
        """Yield the uids of the pods that are due, in order.

        Args:
            now: Unix time; a time before the last call's is slow.
        """
        if now < self._now or len(self._changes) > 2 * len(self._waiters) + _FEW:
            self._due = []
            self._changes = [(_AT_ONCE, each) for each in self._waiters.values()]
            heapq.heapify(self._changes)
        self._now = now
        self._catch_up(now)
        return (each.uid for each in self._due)

    def _catch_up(self, now: float) -> None:
        """Check the pods for which the time has changed something since the last call."""
        looked_at, newly_due = [], []
        while self._changes and self._changes[0][0] <= now:
            _, waiter = heapq.heappop(self._changes)
            if self._waiters.get(waiter.uid) is not waiter:
                continue
            waited = now - waiter.since
            if is_due(waited, self._after_seconds):
                newly_due.append(waiter)
            else:
                self._set_due(waiter, is_now=False)
            looked_at.append((waiter.since + due_changes_at(waited, self._after_seconds) - _EARLY_SECONDS, waiter))
        for each in looked_at:
            heapq.heappush(self._changes, each)
        if len(newly_due) > _FEW:
            self._due = sorted({*self._due, *newly_due})
            return
        for waiter in newly_due:
            self._set_due(waiter, is_now=True)

    def _set_due(self, waiter: Waiter, *, is_now: bool) -> None:
        place = bisect_left(self._due, waiter)
        if (self._due[place : place + 1] == [waiter]) == is_now:
            return
        if is_now:
            self._due.insert(place, waiter)
        else:
            del self._due[place]
