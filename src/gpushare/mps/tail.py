"""Reader of the lines that are added to a log."""

from pathlib import Path
from typing import Final

_MAX_READ: Final = 2**20  # most bytes read in one call; earlier ones are skipped


class Tail:
    """One log: `lines` returns what was added since the last call; a rotated one is read from its start."""

    def __init__(self, path: Path, most: int = _MAX_READ) -> None:
        self._path, self._most = path, most
        self._offset = 0

    @property
    def position(self) -> int:
        """Return how far it has been read, in bytes."""
        return self._offset

    def seek(self, position: int) -> None:
        """Read from this position on, in bytes."""
        self._offset = position

    def skip(self) -> None:
        """Skip what is written so far."""
        try:
            self._offset = self._path.stat().st_size
        except OSError:
            self._offset = 0

    def lines(self) -> list[bytes]:
        """Return the new complete lines; the server may be writing the last one."""
        try:
            size = self._path.stat().st_size
            if size < self._offset:
                self._offset = 0
            if size == self._offset:
                return []
            with self._path.open("rb") as file:
                start = max(self._offset, size - self._most)
                file.seek(start)
                text = file.read(self._most)
        except OSError:
            return []
        whole = text.rfind(b"\n") + 1
        self._offset = start + whole
        return text[:whole].splitlines()
