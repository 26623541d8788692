"""A job's own count of iterations between the moments at which it told it."""

import itertools
from collections.abc import Sequence

Counts = Sequence[tuple[float, float]]  # seconds, iterations so far


def counted(counts: Counts, at: float) -> float | None:
    """Return the count at a time, between two of the job's own; None outside them."""
    for (before, low), (after, high) in itertools.pairwise(counts):
        if before <= at <= after:
            return low + (high - low) * (at - before) / (after - before)
    return None


def rate_of(counts: Counts, begin: float, end: float) -> float | None:
    """Return iterations per second between two times; None where it was not counting for most of that.

    A job that is stopped tells nothing meanwhile: from the first to the last count inside alone it would look
    faster than it is.
    """
    if len(counts) < 2:
        return None
    first, last = max(begin, counts[0][0]), min(end, counts[-1][0])
    if last - first < 0.45 * (end - begin):
        return None
    low, high = counted(counts, first), counted(counts, last)
    return None if low is None or high is None else (high - low) / (last - first)
