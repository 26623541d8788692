"""Drift: who is read anew, when, and how often."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.control import DriftWatch
from gpushare.core.control.drift import DRIFT_SECONDS, QUIET_SECONDS
from gpushare.core.progress import BAD_FIT

FITS, MISSES = 0.5 * BAD_FIT, 1.5 * BAD_FIT


def suspicions(misfits: list[float | None], seconds: float = 5.0, watch: DriftWatch | None = None) -> list[int]:
    """The windows, by number, after which somebody was suspected."""
    watch, found = watch or DriftWatch().after("ab", None, 1.0), []
    for number, misfit in enumerate(misfits, 1):
        watch = watch.after("ab", misfit, seconds)
        found += [number] * watch.is_suspected
    return found


def test_windows_that_do_not_fit_for_long_lead_to_one_suspicion_in_ten_minutes() -> None:
    first = int(DRIFT_SECONDS / 5)
    assert suspicions([MISSES] * 100) == [first]
    again = first + int(QUIET_SECONDS / 5)
    assert suspicions([MISSES] * 300) == [first, again, again + int(QUIET_SECONDS / 5)]


def test_windows_that_fit_make_up_for_others_and_none_says_nothing() -> None:
    assert suspicions([FITS] * 500) == []
    assert suspicions([MISSES, FITS] * 200) == [], "a phase that comes and goes is no drift of half of the time"
    assert suspicions([MISSES, None] * 8) == [2 * int(DRIFT_SECONDS / 5) - 1]
    assert suspicions([MISSES] * 5 + [None] * 1000) == []


def test_who_comes_or_goes_begins_it_anew() -> None:
    watch = DriftWatch()
    for number in range(40):
        watch = watch.after("ab" if number % 4 else "abc", MISSES, 5.0)
        assert not watch.is_suspected


@given(st.lists(st.floats(0, 10) | st.none(), max_size=400), st.floats(0.5, 10))
def test_suspicions_are_never_nearer_than_the_quiet_time(misfits: list[float | None], seconds: float) -> None:
    found = suspicions(misfits, seconds)
    assert all((two - one) * seconds >= QUIET_SECONDS for one, two in itertools.pairwise(found))
