"""Waits double up to a limit, less their jitter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.backoff import Backoff


def test_waits_double_up_to_the_longest():
    backoff = Backoff(0.5, 30.0)
    waits = [backoff.seconds(failures) for failures in (0, 1, 2, 3, 6, 7, 8)]
    assert waits == [
        0.5,
        0.5,
        1.0,
        2.0,
        16.0,
        30.0,
        30.0,
    ]


def test_jitter_takes_away_at_most_its_part():
    backoff = Backoff(1.0, 8.0, jitter_ratio=0.5)
    assert [backoff.seconds(2, chance) for chance in (0.0, 0.5, 1.0)] == [1.0, 1.5, 2.0]


@given(st.integers(0, 10**9), st.floats(0, 1), st.floats(0, 1))
def test_no_wait_is_out_of_bounds_however_often_it_failed(failures, jitter_ratio, chance):
    seconds = Backoff(0.1, 10.0, jitter_ratio).seconds(failures, chance)
    assert 0.1 * (1 - jitter_ratio) <= seconds + 1e-9
    assert seconds <= 10.0
    assert (
        seconds
        <= Backoff(0.1, 10.0).seconds(failures + 1)
        == pytest.approx(Backoff(0.1, 10.0).seconds(failures + 1, chance))
    )
