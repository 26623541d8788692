"""Counters that stand still: readings that are impossible on a working GPU."""

from dataclasses import dataclass
from typing import Final

from gpushare.core.gpu.pipes import Counters

# Twelve measured ratios never repeat to the last digit; after three windows NVML's utilisation is no longer late.
STILL_WINDOWS: Final = 3
BUSY_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True)
class Standstill:
    """State of the watch over one GPU's counters: the last reading, and how many impossible ones came in a row."""

    last: Counters | None = None
    windows: int = 0

    def after(self, counters: Counters, utilization_ratio: float | None) -> "Standstill":
        """Return the state after one more window.

        Args:
            counters: the window's counters.
            utilization_ratio: NVML's utilisation; None if unknown.
        """
        values = counters.as_dict()
        is_zero = bool(values) and not any(values.values())
        is_busy = utilization_ratio is not None and utilization_ratio >= BUSY_RATIO
        repeats = any(values.values()) and counters == self.last
        return Standstill(counters, self.windows + 1 if repeats or (is_zero and is_busy) else 0)

    @property
    def problem(self) -> str:
        """Return a sentence on what is wrong; empty while the counters move."""
        if self.windows < STILL_WINDOWS or self.last is None:
            return ""
        if any(self.last.as_dict().values()):
            return f"its counters have read the same to the last digit for {self.windows} windows"
        return f"its counters have read zero for {self.windows} windows while NVML says that it is busy"
