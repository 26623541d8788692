"""The rows of a cluster's state that changed lately: what is computed by row is updated only there."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

CHANGES_PER_ROW: Final = 16
LEAST_CHANGES: Final = 256
"""At most `LEAST_CHANGES`, and `CHANGES_PER_ROW` for each row, of the latest changes are listed. After more, most
rows have changed, and updating only those costs as much as computing everything anew."""


@dataclass(slots=True)
class RowTable:
    """One value per node, cached between decisions; stale if token or epoch differ, or rows changed since."""

    values: NDArray[np.float64] | NDArray[np.int64]
    token: object
    epoch: int
    seen: int


class RowChanges:
    """The latest changes in order, of which the older half is dropped where there are too many."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._dropped = 0

    @property
    def count(self) -> int:
        """Return the number of changes so far."""
        return self._dropped + len(self._rows)

    def add(self, row: int, of_rows: int) -> None:
        """Record that a row has changed, of `of_rows` in all."""
        self._rows.append(row)
        if len(self._rows) > CHANGES_PER_ROW * of_rows + LEAST_CHANGES:
            older = len(self._rows) // 2
            del self._rows[:older]
            self._dropped += older

    def is_forgotten(self, count: int) -> bool:
        """Return whether it is unknown which rows have changed since `count` was the number of changes."""
        return count < self._dropped

    def since(self, count: int) -> NDArray[np.int64] | None:
        """Return the rows changed since `count` was the number of changes, each once; None if it is forgotten."""
        if self.is_forgotten(count):
            return None
        recent = self._rows[count - self._dropped :]
        return np.array(sorted(set(recent)), np.int64) if len(recent) > 1 else np.array(recent, np.int64)
