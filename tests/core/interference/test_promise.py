"""The promise: bounded by the share without a profile, by what a cap of the share costs with one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu import Counters
from gpushare.core.interference import Profile, promised_progress


def profile(**curve: float) -> Profile:
    counters = Counters(sm_util=0.9, graphics_util=1.0)
    return Profile(counters, cap_curve={int(cap[1:]): progress for cap, progress in curve.items()})


def test_an_unknown_workload_is_bounded_by_its_share() -> None:
    assert promised_progress(None, 25, 1.5) == pytest.approx(0.25 / 1.5)
    assert promised_progress(None, 100, 1.0) == 1.0


def test_a_workload_that_its_cap_costs_nothing_is_promised_the_tolerated_slowdown() -> None:
    assert promised_progress(profile(c25=1.0), 25, 1.5) == pytest.approx(1 / 1.5)
    assert promised_progress(profile(c25=0.4), 100, 1.5) == pytest.approx(1 / 1.5)


def test_one_that_its_cap_costs_something_is_promised_what_it_makes_under_it_over_the_slowdown() -> None:
    assert promised_progress(profile(c25=0.4), 25, 1.5) == pytest.approx(0.4 / 1.5)
    assert promised_progress(profile(c25=0.95), 25, 1.5) == pytest.approx(0.95 / 1.5)


@given(alone=st.floats(0.05, 1.0), error=st.floats(-0.03, 0.03), slowdown=st.floats(1, 10))
def test_an_error_of_the_cap_curve_moves_the_promise_by_no_more_than_itself(
    alone: float, error: float, slowdown: float
) -> None:
    """No step, at 1 / slowdown or elsewhere (docs/adr/0142)."""
    seen = min(1.0, max(0.01, alone + error))
    moved = promised_progress(profile(c25=seen), 25, slowdown) - promised_progress(
        profile(c25=alone), 25, slowdown
    )
    assert abs(moved) <= abs(seen - alone) / slowdown + 1e-9


@given(share=st.integers(1, 100), slowdown=st.floats(1, 100), half=st.floats(0.05, 1.0), known=st.booleans())
def test_a_promise_is_never_more_than_the_tolerated_slowdown_nor_nothing(
    share: int, slowdown: float, half: float, known: bool
) -> None:
    promise = promised_progress(profile(c50=half) if known else None, share, slowdown)
    assert 0 < promise <= 1 / slowdown + 1e-12


@pytest.mark.parametrize(("share", "slowdown"), [(0, 1.5), (101, 1.5), (50, 0.9), (50, float("nan"))])
def test_what_is_out_of_range_is_refused(share: int, slowdown: float) -> None:
    with pytest.raises(ValueError, match="no promise"):
        promised_progress(None, share, slowdown)
