"""Queue of keys, each at most once and not before its due time; without clock or I/O of its own."""

import heapq
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from gpushare.core.backoff import Backoff

K = TypeVar("K", bound=Hashable)

BACKOFF: Final = Backoff(first_seconds=0.5, longest_seconds=60.0)


class WorkQueue(Generic[K]):
    """Keys with due times; adding a key that already waits keeps the earlier time."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._failures: dict[K, int] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: K, due: float) -> None:
        """Schedule a key at `due` seconds (or earlier, if it waits for an earlier time already)."""
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._added += 1
        heapq.heappush(self._heap, (due, self._added, key))

    def take(self, now: float, most: int) -> list[K]:
        """Remove and return up to `most` keys that are due, the longest waiting first."""
        taken: list[K] = []
        while self._heap and self._heap[0][0] <= now and len(taken) < most:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                taken.append(key)
        return taken

    def next_due(self) -> float | None:
        """Return when the next key is due; None when nothing waits."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)  # replaced by an earlier time
        return self._heap[0][0] if self._heap else None

    def failed(self, key: K, now: float, at_least_seconds: float = 0.0) -> float:
        """Put a key back after a failure with a doubled wait; return the wait in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        wait = max(at_least_seconds, BACKOFF.seconds(self._failures[key]))
        self.add(key, now + wait)
        return wait

    def succeeded(self, key: K) -> None:
        """Forget a key's failures."""
        self._failures.pop(key, None)
