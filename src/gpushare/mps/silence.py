"""What the MPS host does about a throttle that does not report; pure, time is an argument.

A process that gets no CPU is as silent as one that hangs. So the pods that it froze are thawed soon, and again and
again while it is silent; it is killed only much later, and on a busy node it goes on as if nothing had happened
(docs/adr/0168). Times are seconds of CLOCK_BOOTTIME.
"""

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SILENT_SECONDS: Final = 1.4  # with the longest freeze below the promised 2 s; longer than any reading
KILL_SECONDS: Final = 10.0
START_SECONDS: Final = 60.0  # while it starts no pod is frozen; 0.2 s of CPU time, which may be long in coming
LOOK_SECONDS: Final = 0.1
_ATTENDED_SECONDS: Final = 2 * LOOK_SECONDS  # what one look counts for at most
_WORD: Final = struct.Struct("d")  # a whole number of them fills the pipe


def word(now: float) -> bytes:
    """Return the heartbeat that the throttle's process writes after each look: when the look began."""
    return _WORD.pack(now)


class Remedy(StrEnum):
    """What to do now about a process that says nothing."""

    WAIT = "Wait"
    THAW = "Thaw"
    KILL = "Kill"


@dataclass(slots=True)
class Silence:
    """How long the throttle's process has said nothing.

    The kill counts only time in which we looked: where we get no CPU either, its silence means nothing.

    Attributes:
        heard_at: the look of its last word, or its start.
        looked_at: our last look.
        attended_seconds: of its silence, how long we have been looking.
        is_long: whether we began to thaw its pods.
    """

    heard_at: float
    looked_at: float
    kill_seconds: float = KILL_SECONDS
    has_spoken: bool = False
    attended_seconds: float = 0.0
    is_long: bool = False

    def hear(self, words: bytes, now: float) -> None:
        """Record its heartbeats: the time in the last one counts, not the time at which it was read."""
        (said_at,) = _WORD.unpack(words[-_WORD.size :]) if len(words) % _WORD.size == 0 else (now,)
        self.heard_at = min(said_at, now) if math.isfinite(said_at) else now
        self.looked_at, self.attended_seconds = now, 0.0
        self.has_spoken, self.is_long = True, False

    def look(self, now: float, *, is_ending: bool = False) -> Remedy:
        """Return what to do, as there was no word until now.

        Args:
            is_ending: it was told to end, so nobody waits for it for long.
        """
        self.attended_seconds += min(now - self.looked_at, _ATTENDED_SECONDS)
        self.looked_at = now
        self.is_long = self.has_spoken and now - self.heard_at >= SILENT_SECONDS
        patience = self.kill_seconds if self.has_spoken else START_SECONDS
        if self.attended_seconds >= (SILENT_SECONDS if is_ending else patience):
            return Remedy.KILL
        return Remedy.THAW if self.is_long else Remedy.WAIT

    def wait_seconds(self, now: float) -> float:
        """Return how long to wait for a word before the next look."""
        if self.is_long or not self.has_spoken:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(0.0, self.heard_at + SILENT_SECONDS - now))
