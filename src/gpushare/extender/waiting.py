"""Pods that fitted nowhere, and when to make kube-scheduler retry them.

kube-scheduler itself retries a pod that an extender refused on any cluster event (a pod leaves, a node's
allocatable changes). It misses two cases. Its event may arrive before our watch reports the same change, so that
we refuse again. And it does not watch some changes (a GpuNode's memory, a GpuShare). In both cases, writing the
pod's annotation `gpushare.io/room-since` causes an event for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import PodView

# Kube-scheduler's own retry after a change: podInitialBackoffSeconds 1, plus its request.
GRACE_SECONDS: Final = 1.5
AGAIN_SECONDS: Final = 5.0  # least time between two touches of one pod; above kube-scheduler's usual back-off
PATIENCE_SECONDS: Final = 10.0  # longest wait if room appears repeatedly, which restarts the grace each time
STALE_SECONDS: Final = 10.0  # far beyond any lag of a healthy watch
MAX_EXAMINED: Final = 200  # per round, about 20 ms
MAX_TOUCHES: Final = 50  # per round, so that a large queue does not cause a storm of writes


@dataclass(slots=True)
class _Waiting:
    pod: PodView
    refused_at: float
    touched_at: float


class WaitingPods:
    """Refused pods by uid, with the time of their last refusal; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._room_at: float | None = None
        self._room_since = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def refused(self, pod: PodView, now: float) -> None:
        """Record that kube-scheduler asked about the pod and that it fitted nowhere."""
        known = self._waiting.get(pod.uid)
        self._waiting[pod.uid] = _Waiting(pod, now, known.touched_at if known else float("-inf"))

    def served(self, pod_uid: str) -> None:
        """Forget a pod that fits, is bound, or is gone."""
        self._waiting.pop(pod_uid, None)

    def room(self, now: float) -> None:
        """Record that something became free."""
        if self._room_at is None:
            self._room_since = now
        self._room_at = now

    def prune(self, is_waiting: Callable[[str], bool], now: float) -> None:
        """Forget pods that are bound or gone; keep recent refusals a while, as they may be ahead of our watch."""
        over = [
            uid
            for uid, one in self._waiting.items()
            if now - one.refused_at >= STALE_SECONDS and not is_waiting(uid)
        ]
        for uid in over:
            del self._waiting[uid]

    def due(self, now: float, fits: Callable[[PodView], bool]) -> list[PodView]:
        """Return the pods to touch now: they fit, and kube-scheduler had time to ask again since room appeared.

        Pods are checked by priority, then by waiting time.
        """
        if self._room_at is None:
            return []
        impatient = now - self._room_since >= PATIENCE_SECONDS
        if impatient:
            self._room_since = now
        graced = impatient or now - self._room_at >= GRACE_SECONDS
        ripe: list[_Waiting] = []
        later = False
        for entry in self._waiting.values():
            if graced and now - entry.refused_at >= GRACE_SECONDS:
                ripe.append(entry)
                later = later or now - entry.touched_at < AGAIN_SECONDS
            else:
                later = True
        ripe = [entry for entry in ripe if now - entry.touched_at >= AGAIN_SECONDS]
        ripe.sort(key=lambda one: (-one.pod.priority, one.refused_at))
        found = [entry for entry in ripe[:MAX_EXAMINED] if fits(entry.pod)][:MAX_TOUCHES]
        for entry in found:
            entry.touched_at = now
        if not found and not later:
            self._room_at = None
        return [entry.pod for entry in found]
