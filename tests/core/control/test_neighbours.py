"""Who ended its neighbours, and for how long that is remembered."""

import pytest

from gpushare.core.api import MOST_NEIGHBOURS_ENDED, NeighboursEnded
from gpushare.core.control import ended_lately, with_ended
from gpushare.runtime.moments import unix_seconds

NOW = "2026-11-23T12:00:00Z"


def ended(at: str) -> NeighboursEnded:
    return NeighboursEnded(at, "u1", "GPU-1")


@pytest.mark.parametrize(
    ("at", "counts"),
    [
        ("2026-11-23T11:59:59Z", True),
        ("2026-11-22T12:00:01Z", True),
        ("2026-11-22T12:00:00Z", False),
        ("2026-11-23T12:05:00Z", True),  # a node's clock that is ahead
        ("2026-11-23T12:05:01Z", False),
        ("2999-01-01T00:00:00Z", False),  # before: isolated until then
        ("yesterday", False),
        ("", False),
    ],
)
def test_a_day_is_remembered(at: str, counts: bool) -> None:
    assert bool(ended_lately([ended(at)], unix_seconds(NOW), unix_seconds)) is counts


def test_one_fault_counts_once_and_the_newest_are_kept() -> None:
    kept: tuple[NeighboursEnded, ...] = ()
    for minute in [*range(20), 19, 19]:
        kept = with_ended(kept, ended(f"2026-11-23T11:{minute:02}:00Z"))
    assert [one.at[14:16] for one in kept] == [str(minute) for minute in range(20 - MOST_NEIGHBOURS_ENDED, 20)]
