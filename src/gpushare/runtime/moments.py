"""Times as the Kubernetes API writes them, and by how much the wall clock was set meanwhile."""

from datetime import UTC, datetime
from typing import Final

STEP_SECONDS: Final = 1.0  # as of NTP steps; reading two clocks one after the other takes far less


def unix_seconds(moment: str | None) -> float:
    """Return a time of the API (RFC 3339) as Unix time; a time long ago if it is missing or invalid."""
    try:
        found = datetime.fromisoformat(moment or "")
    except ValueError:
        return float("-inf")
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


class ClockSteps:
    """Sum of the steps by which a wall clock was set, seen beside a monotonic one.

    A clock that runs too fast or too slow is no step: the kernel corrects both clocks' rates alike.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def seconds(self, wall: float, monotonic: float) -> float:
        """Return by how much the wall clock was set ahead since the first call; negative: back.

        Args:
            wall: Unix time now; monotonic: seconds of a clock that is never set, at the same moment.
        """
        ahead = wall - monotonic
        if self._first is None:
            self._first = self._last = ahead
        if abs(ahead - self._last) >= STEP_SECONDS:
            self._last = ahead
        return self._last - self._first
