"""Remedies for a throttle process that does not report; pure, time is an argument.

A process that gets no CPU is as silent as one that hangs. So the pods that it froze are thawed soon, and
repeatedly while it is silent; it is killed only much later, and on a busy node it continues as if nothing had
happened (docs/adr/0168). Times are seconds of CLOCK_BOOTTIME.
"""

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SILENT_SECONDS: Final = 1.4  # plus the longest freeze of a throttle, 0.5 s, it is below the promised 2 s
FROZEN_SECONDS: Final = 1.7  # no pod stays frozen for as long: half a second more than the longest reading
KILL_SECONDS: Final = 10.0
START_SECONDS: Final = 60.0  # while it starts no pod is frozen; takes 0.2 s of CPU time, which may come late
LOOK_SECONDS: Final = 0.1
_ATTENDED_SECONDS: Final = 2 * LOOK_SECONDS  # most time that one look counts for
_HEARTBEAT: Final = struct.Struct("dd")  # a whole number of these fills the pipe


def heartbeat(now: float, frozen_since: float = math.inf) -> bytes:
    """Return the heartbeat that the throttle's process writes after each look.

    Args:
        now: when the look began.
        frozen_since: since when a pod has been frozen, of several the first; infinite if none is.
    """
    return _HEARTBEAT.pack(now, frozen_since)


class Remedy(StrEnum):
    """Remedy for a silent process."""

    WAIT = "Wait"
    THAW = "Thaw"
    KILL = "Kill"


@dataclass(slots=True)
class Silence:
    """Duration of the throttle process's silence.

    For a kill only time counts in which we looked; if we get no CPU either, its silence means nothing.

    Attributes:
        heard_at: time in its last heartbeat, or its start.
        frozen_since: since when a pod has been frozen, by its last heartbeat; infinite if none was.
        looked_at: time of our last look.
        attended_seconds: part of its silence during which we have been looking.
        is_long: whether we have begun to thaw its pods.
    """

    heard_at: float
    looked_at: float
    kill_seconds: float = KILL_SECONDS
    frozen_since: float = math.inf
    has_spoken: bool = False
    attended_seconds: float = 0.0
    is_long: bool = False

    def hear(self, heartbeats: bytes, now: float) -> None:
        """Record its heartbeats; the time in the last one counts, not the time at which it was read."""
        is_whole = len(heartbeats) % _HEARTBEAT.size == 0
        said_at, since = _HEARTBEAT.unpack(heartbeats[-_HEARTBEAT.size :]) if is_whole else (now, math.inf)
        self.heard_at = min(said_at, now) if math.isfinite(said_at) else now
        self.frozen_since = math.inf if math.isnan(since) else since
        self.looked_at, self.attended_seconds = now, 0.0
        self.has_spoken, self.is_long = True, False

    def look(self, now: float, *, is_ending: bool = False) -> Remedy:
        """Return what to do, as no heartbeat came until now.

        Args:
            is_ending: whether it was told to end; then it is killed sooner.
        """
        self.attended_seconds += min(now - self.looked_at, _ATTENDED_SECONDS)
        self.looked_at = now
        self.is_long = self.has_spoken and now >= self._due_at()
        patience = self.kill_seconds if self.has_spoken else START_SECONDS
        if self.attended_seconds >= (SILENT_SECONDS if is_ending else patience):
            return Remedy.KILL
        return Remedy.THAW if self.is_long else Remedy.WAIT

    def wait_seconds(self, now: float) -> float:
        """Return how long to wait for a heartbeat before the next look."""
        if self.is_long or not self.has_spoken:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(0.0, self._due_at() - now))

    def _due_at(self) -> float:
        """Return from when on its pods are thawed."""
        return min(self.heard_at + SILENT_SECONDS, self.frozen_since + FROZEN_SECONDS)
