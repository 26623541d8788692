"""Pods that ended their neighbours: killed within a kernel, they took down the MPS server (docs/adr/0185)."""

from collections.abc import Callable, Iterable
from typing import Final

from gpushare.core.api import MOST_NEIGHBOURS_ENDED, NeighboursEnded

HISTORY_SECONDS: Final = 86_400.0
AHEAD_SECONDS: Final = 300.0


def ended_lately(
    records: Iterable[NeighboursEnded], now: float, seconds: Callable[[str | None], float]
) -> tuple[NeighboursEnded, ...]:
    """Return the records of the last day, up to `AHEAD_SECONDS` in the future, as node clocks may be ahead.

    Args:
        now: Unix time.
        seconds: parses a time of the API into Unix time; returns a time long ago if it is invalid.
    """
    since, until = now - HISTORY_SECONDS, now + AHEAD_SECONDS
    return tuple(one for one in records if since < seconds(one.at) <= until)


def with_ended(records: Iterable[NeighboursEnded], new: NeighboursEnded) -> tuple[NeighboursEnded, ...]:
    """Return the records with a new one, oldest first; a fault that is reported several times counts once."""
    kept = tuple(records)
    return kept if new in kept else tuple(sorted((*kept, new), key=lambda one: one.at)[-MOST_NEIGHBOURS_ENDED:])
