"""Faults from the MPS server's log: it is back in ACTIVE before a poll of its state sees them (FACTS 4)."""

import re
from pathlib import Path
from typing import Final

_FATAL: Final = re.compile(rb"fatal|\bfault\b", re.IGNORECASE)
_CLIENT: Final = re.compile(rb"Client \{PID: (\d+)")
_MAX_READ: Final = 2**20


def culprit_of(line: str) -> int | None:
    """Pid of the client that a fault line names; None when it names none."""
    match = _CLIENT.search(line.encode())
    return int(match[1]) if match else None


class FaultLog:
    """Follows server.log; `read` answers the first fault line since the last call."""

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

    def read(self) -> str | None:
        """The new line that tells whose fault it was, None without one; a rotated log is read from its start."""
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
        lines = [line for line in text.splitlines() if _FATAL.search(line)]
        # The server first names the client whose error it was, then says that it handles it.
        named = [line for line in lines if _CLIENT.search(line)]
        return (named or lines)[0].decode(errors="replace").strip()[:300] if lines else None
