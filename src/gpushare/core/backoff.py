"""Waiting times before retries."""

from dataclasses import dataclass
from typing import Final

__all__ = ["Backoff"]

_MOST_DOUBLINGS: Final = 30  # beyond any limit in use, and far below a float's range


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double with each failure in a row. This is a value; the caller counts the failures.

    Attributes:
        first_seconds: wait after the first failure.
        longest_seconds: longest wait.
        jitter_ratio: random part of a wait, so that processes that failed at the same time retry at different
            times.
    """

    first_seconds: float
    longest_seconds: float
    jitter_ratio: float = 0.0

    def seconds(self, failures: int, chance: float = 1.0) -> float:
        """Return the wait after this many failures in a row; 0 failures give the same wait as 1.

        Args:
            chance: from 0 to 1, drawn by the caller; no effect without jitter.
        """
        doublings = min(max(failures, 1) - 1, _MOST_DOUBLINGS)
        whole = min(self.longest_seconds, self.first_seconds * 2.0**doublings)
        return whole * (1.0 - self.jitter_ratio * (1.0 - chance))
