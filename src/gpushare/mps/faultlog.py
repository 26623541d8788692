"""Faults from the MPS server's log: it is back in ACTIVE before a poll of its state sees them (FACTS 4)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FATAL: Final = re.compile(rb"fatal|\bfault\b", re.IGNORECASE)
_CLIENT: Final = re.compile(rb"Client \{PID: (\d+)")
_REACHED: Final = b"sticky error set:"
_ONE_PID: Final = re.compile(rb"\] (\d+)\s*$")
_MAX_READ: Final = 2**20


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as the server logged it.

    Attributes:
        line: the server's words.
        pids: the processes that it reached, empty where the log does not say. Whose fault it was is not known: the
            server lists who has the error in an order of its own, and a process that was killed is not among them.
    """

    line: str
    pids: tuple[int, ...] = ()


class FaultLog:
    """Follows server.log; `read` answers the first fault since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.skip()

    def skip(self) -> None:
        """Leave what is written so far behind."""
        try:
            self._offset = self._path.stat().st_size
        except OSError:
            self._offset = 0

    def read(self) -> Fault | None:
        """The fault in the new lines, None without one; a rotated log is read from its start."""
        try:
            size = self._path.stat().st_size
            if size < self._offset:
                self._offset = 0
            if size == self._offset:
                return None
            with self._path.open("rb") as file:
                file.seek(max(self._offset, size - _MAX_READ))
                text = file.read(_MAX_READ)
                self._offset = file.tell()
        except OSError:
            return None
        lines = text.splitlines()
        fatal = [line for line in lines if _FATAL.search(line)]
        if not fatal:
            return None
        # A line that names one client says less than it seems to: it was a bystander each time this was tried.
        said = next((line for line in fatal if not _CLIENT.search(line)), fatal[0])
        return Fault(said.decode(errors="replace").strip()[:300], _reached(lines))


def _reached(lines: Sequence[bytes]) -> tuple[int, ...]:
    """The pids that follow the first announcement of such a list."""
    start = next((number for number, line in enumerate(lines) if _REACHED in line), len(lines))
    pids: list[int] = []
    for line in lines[start + 1 :]:
        found = _ONE_PID.search(line)
        if found is None:
            break
        pids.append(int(found[1]))
    return tuple(pids)
