"""Faults from the MPS server's log; a poll misses them, as the server is soon ACTIVE again (docs/facts.md 4)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from gpushare.mps.tail import Tail

_FATAL: Final = re.compile(rb"fatal|\bfault\b", re.IGNORECASE)
_CLIENT: Final = re.compile(rb"Client \{PID: (\d+)")
_REACHED: Final = b"sticky error set:"
_ONE_PID: Final = re.compile(rb"\] (\d+)\s*$")
_TIME: Final = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) ")
_STAMP_SECONDS: Final = 0.01  # stamps are truncated to milliseconds; a process takes longer to become a client
_CLOCK_ERROR_SECONDS: Final = 0.5  # the wall clock may be slewed between two reads


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as the server logged it.

    Attributes:
        line: the server's own line.
        pids: the affected processes; empty if the log does not list them. The server lists them in no particular
            order and without a killed process, so the list does not show which process caused the fault.
        began_at: Unix time of its first line; None if the line has none.
    """

    line: str
    pids: tuple[int, ...] = ()
    began_at: float | None = None

    def span(self, *, now: float, unix_now: float, read_before: float) -> tuple[float, float]:
        """Return the earliest and latest time, on the clock of `now`, at which the fault may have begun.

        If the line's time lies between the previous read of the log and now, it is that time. A stamp outside
        (another time zone, a wall clock that was set) is ignored, and the fault began at any time between the two.
        """
        if self.began_at is not None:
            began = now - (unix_now - self.began_at)
            if read_before - _CLOCK_ERROR_SECONDS <= began <= now + _CLOCK_ERROR_SECONDS:
                return began - _STAMP_SECONDS, began + _STAMP_SECONDS
        return read_before, now


class FaultLog:
    """Reader of server.log: `read` returns the first fault since the last call, `complete` its whole report."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._report: list[bytes] = []
        self._ahead: list[bytes] = []
        self._settled_bytes = 0
        self.skip()

    @property
    def settled_bytes(self) -> int:
        """Return how far the log needs no further look: its faults until there were skipped, or there are none."""
        return self._settled_bytes

    def resume(self, settled_bytes: int) -> None:
        """Continue where another reader of this log ended."""
        self._report, self._ahead = [], []
        self._tail.seek(settled_bytes)
        self._settled_bytes = settled_bytes

    def skip(self) -> None:
        """Skip what is written so far."""
        self._report, self._ahead = [], []
        self._tail.skip()
        self._settled_bytes = self._tail.position

    def read(self) -> Fault | None:
        """Return the first fault in the new lines, or None; a rotated log is read from its start."""
        self._report = self._taken()
        if (fault := _fault_in(self._report)) is None:
            self._settled_bytes = self._tail.position
        return fault

    def complete(self) -> Fault | None:
        """Return the fault of the last `read`, with the lines that the server has added since."""
        self._report += self._taken()
        return _fault_in(self._report)

    def has_fault(self) -> bool:
        """Return whether the lines since the last call of `read` have a fault; they stay for its next call."""
        self._ahead += self._tail.lines()
        return _fault_in(self._ahead) is not None

    def _taken(self) -> list[bytes]:
        lines, self._ahead = [*self._ahead, *self._tail.lines()], []
        return lines


def _fault_in(lines: Sequence[bytes]) -> Fault | None:
    fatal = [line for line in lines if _FATAL.search(line)]
    if not fatal:
        return None
    # A line that names one client is misleading: in each experiment it named an uninvolved one.
    shown = next((line for line in fatal if not _CLIENT.search(line)), fatal[0])
    return Fault(shown.decode(errors="replace").strip()[:300], _reached(lines), _time_of(fatal[0]))


def _time_of(line: bytes) -> float | None:
    """Return the Unix time of a line; server and reader share a container and thus the local time."""
    found = _TIME.match(line)
    if found is None:
        return None
    try:
        return datetime.fromisoformat(found[1].decode()).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _reached(lines: Sequence[bytes]) -> tuple[int, ...]:
    """Return the pids that follow the first announcement of a list of affected clients."""
    start = next((number for number, line in enumerate(lines) if _REACHED in line), len(lines))
    pids: list[int] = []
    for line in lines[start + 1 :]:
        found = _ONE_PID.search(line)
        if found is None:
            break
        pids.append(int(found[1]))
    return tuple(pids)
