"""Pods that fitted nowhere, and when to make kube-scheduler retry them.

kube-scheduler itself retries a pod that an extender refused on any cluster event (a pod leaves, a node's
allocatable changes). It misses two cases. Its event may arrive before our watch reports the same change, so that
we refuse again. And it does not watch some changes (a GpuNode's memory, a GpuShare). In both cases, writing the
pod's annotation `gpushare.io/room-since` causes an event for it.

In the same cases the reason in a pod's status may be out of date where the room does not suffice for it. Such pods
are touched too, one in a round, so that kube-scheduler writes the present one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import PodView
from gpushare.core.backoff import Backoff

# Kube-scheduler's own retry after a change: podInitialBackoffSeconds 1, plus its request.
GRACE_SECONDS: Final = 1.5
AGAIN_SECONDS: Final = 5.0  # least time between two touches of one pod; above kube-scheduler's usual back-off
MOST_AGAIN_SECONDS: Final = 300.0  # as often as kube-scheduler retries every pod anyway
PATIENCE_SECONDS: Final = 10.0  # longest wait if room appears repeatedly, which restarts the grace each time
_PAUSES: Final = Backoff(AGAIN_SECONDS, MOST_AGAIN_SECONDS)
STALE_SECONDS: Final = 10.0  # chosen far beyond any lag of a healthy watch
MAX_EXAMINED: Final = 200  # per round, about 20 ms
EXAMINING_SECONDS: Final = 0.05
"""After this long a round ends: each GPU that is kept where there is room adds up to 0.1 ms to each check."""
MAX_TOUCHES: Final = 50  # per round, so that a large queue does not cause a storm of writes
STALE_REASON_SECONDS: Final = 60.0
"""A reason in a pod's status may be out of date if it is older and room has appeared since; kube-scheduler itself
writes it anew after five minutes at the latest."""


@dataclass(slots=True)
class _Waiting:
    pod: PodView
    refused_at: float
    touched_at: float = -math.inf
    touches: int = 0
    before: tuple[float, int] = (-math.inf, 0)
    """Time and number of touches before the last one."""
    not_before: float = -math.inf
    seen_in: int = 0
    fitted: bool = False
    may_be_stale: bool = False
    """Whether the reason in its status may be out of date: room has appeared since, and did not suffice."""


class WaitingPods:
    """Refused pods by uid, with the time of their last refusal; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._room_at: float | None = None
        self._put_off_since = 0.0
        self._heard_at = -math.inf  # when the pods' watch brought something last
        self._resumed_at = -math.inf  # when it last did so after a silence, of which it may still have to catch up
        self._pass = 0
        """Number of the present pass over all waiting pods, which may take several rounds."""
        self._has_more_room = False
        """Whether room has appeared since the present pass began."""

    def __len__(self) -> int:
        return len(self._waiting)

    def refused(self, pod: PodView, now: float) -> None:
        """Record that kube-scheduler asked about the pod, or had before we started, and that it fitted nowhere."""
        known = self._waiting.get(pod.uid)
        if known is None:
            self._waiting[pod.uid] = _Waiting(pod, now)
            return
        if known.pod != pod:
            known.touches = 0
        known.pod, known.refused_at, known.may_be_stale = pod, now, False

    def served(self, pod_uid: str) -> None:
        """Forget a pod that fits, is bound, or is gone."""
        self._waiting.pop(pod_uid, None)

    def room(self, now: float) -> None:
        """Record that something became free."""
        if self._room_at is None:
            self._put_off_since = now
            self._pass += 1
        else:
            self._has_more_room = True
        self._room_at = now

    def heard(self, now: float) -> None:
        """Record that a list of pods or anything of their watch has come, a bookmark at the least."""
        if now - self._heard_at > STALE_SECONDS:
            self._resumed_at = now
        self._heard_at = now

    def prune(self, is_waiting: Callable[[str], bool], now: float) -> None:
        """Forget pods that are bound or gone; keep those that our watch may not have shown yet.

        It has shown what was there at a refusal if it has brought something long enough after it, and is not
        catching up with a silence. A pod that is forgotten too soon is woken by nobody here: kube-scheduler itself
        tries it again after five minutes.
        """
        if now - self._resumed_at < STALE_SECONDS:
            return
        over = [
            uid
            for uid, one in self._waiting.items()
            if self._heard_at - one.refused_at >= STALE_SECONDS and not is_waiting(uid)
        ]
        for uid in over:
            del self._waiting[uid]

    def due(
        self, now: float, fits: Callable[[PodView], bool], has_time: Callable[[], bool] = lambda: True
    ) -> list[PodView]:
        """Return the pods to touch now: they fit, and kube-scheduler had time to ask again since room appeared.

        Pods are checked by priority, then by waiting time. Each round continues after the pods that the last one
        checked, until all have been checked; then come those that were touched in vain. Rules that are unknown
        here may keep those out, so a pod's pause doubles with each touch until new room appears or the pod
        changes.

        Args:
            has_time: returns whether another pod may be checked in this round; one always is.
        """
        if self._room_at is None:
            return []
        if now - self._room_at < GRACE_SECONDS and now - self._put_off_since < PATIENCE_SECONDS:
            return []
        self._put_off_since = now
        ripe = self._ripe(now, self._room_at)
        if self._has_more_room and all(entry.seen_in == self._pass for entry in ripe):
            self._pass += 1
            self._has_more_room = False
            ripe = self._ripe(now, self._room_at)
        ripe.sort(key=lambda one: (one.seen_in == self._pass, -one.pod.priority, one.refused_at))
        found: list[_Waiting] = []
        for number, entry in enumerate(ripe[:MAX_EXAMINED]):
            if number and not has_time():
                self._put_off_since = -math.inf  # the next round goes on at once
                break
            fitted = fits(entry.pod)
            if fitted and len(found) == MAX_TOUCHES:
                break
            entry.seen_in, entry.fitted = self._pass, fitted
            entry.may_be_stale = not fitted and entry.refused_at < self._room_at
            if fitted:
                self._touch(entry, now, self._room_at)
                found.append(entry)
        if not self._has_more_room and not any(map(self._may_fit, self._waiting.values())):
            self._room_at = None
        return [entry.pod for entry in found]

    def with_stale_reason(self, now: float) -> PodView | None:
        """Return a pod to touch so that kube-scheduler writes anew why it waits; None if no reason may be stale.

        Call this once a round, after `due`. Pods that were not touched for longest come first.
        """
        stale = (
            entry
            for entry in self._waiting.values()
            if entry.may_be_stale
            and now - max(entry.refused_at, entry.touched_at) >= STALE_REASON_SECONDS
            and now >= entry.not_before
        )
        entry = min(stale, key=lambda one: (one.touched_at, one.refused_at), default=None)
        if entry is None:
            return None
        entry.may_be_stale = False
        self._touch(entry, now, -math.inf)
        return entry.pod

    def failed(self, pod_uid: str, now: float) -> None:
        """Record that the last touch of a pod could not be written, so that it is tried again soon."""
        if (entry := self._waiting.get(pod_uid)) is not None:
            entry.touched_at, entry.touches = entry.before
            entry.not_before = now + AGAIN_SECONDS

    @staticmethod
    def _touch(entry: _Waiting, now: float, room_at: float) -> None:
        entry.before = entry.touched_at, entry.touches
        entry.touches = 1 if entry.touched_at < room_at else entry.touches + 1
        entry.touched_at = now

    def _ripe(self, now: float, room_at: float) -> list[_Waiting]:
        """Return the pods that may be checked now."""
        return [
            entry
            for entry in self._waiting.values()
            if self._may_fit(entry)
            and now - entry.refused_at >= GRACE_SECONDS
            and now >= entry.not_before
            and now - entry.touched_at >= _PAUSES.seconds(0 if entry.touched_at < room_at else entry.touches)
        ]

    def _may_fit(self, entry: _Waiting) -> bool:
        """Return whether a pod fitted or has not been checked in this pass."""
        return entry.fitted or entry.seen_in != self._pass
