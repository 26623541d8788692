"""The promise: bounded by the share without a profile, by what a cap of the share costs with one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import JobClass
from gpushare.core.gpu import Counters
from gpushare.core.interference import Profile, auto_share, cap_progress, promised_progress
from gpushare.core.progress import NO_LOSS


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


# -- `auto`: the tolerated slowdown is meant against a whole GPU, share and neighbours together (docs/adr/0154)

CURVES = st.builds(
    # Rising, and above the share: a program that loses more than the part of the SMs that is taken is noise.
    lambda least, steps: profile(
        **{
            f"c{cap}": min(1.0, max(cap / 100, least + sum(steps[:at])))
            for at, cap in enumerate((10, 25, 33, 50, 75), start=1)
        }
    ),
    st.floats(0.05, 0.9),
    st.lists(st.floats(0.0, 0.4), min_size=5, max_size=5),
)
SLOWDOWNS = st.floats(1.0, 10.0)


@given(known=CURVES, slowdown=SLOWDOWNS, job_class=st.sampled_from(JobClass))
def test_auto_is_promised_its_slowdown_against_a_whole_gpu(
    known: Profile, slowdown: float, job_class: JobClass
) -> None:
    share = auto_share(known, max_slowdown=slowdown, job_class=job_class)
    promise = promised_progress(known, share, slowdown, is_auto=True)
    assert 10 <= share <= 100
    assert NO_LOSS / slowdown - 1e-9 <= promise <= 1 / slowdown + 1e-9


@given(known=CURVES, slowdown=SLOWDOWNS, more=st.floats(0.0, 5.0))
def test_who_tolerates_more_gets_no_larger_share_and_no_higher_promise(
    known: Profile, slowdown: float, more: float
) -> None:
    def share_and_promise(tolerated: float) -> tuple[int, float]:
        share = auto_share(known, max_slowdown=tolerated, job_class=JobClass.THROUGHPUT)
        return share, promised_progress(known, share, tolerated, is_auto=True)

    (share, promise), (looser, lower) = share_and_promise(slowdown), share_and_promise(slowdown + more)
    assert looser <= share
    assert lower <= promise * (1 / NO_LOSS) + 1e-9, (
        "within the noise of a curve where hardly anything is tolerated"
    )


@given(known=CURVES, slowdown=SLOWDOWNS)
def test_the_share_of_auto_leaves_neighbours_as_much_as_it_takes(known: Profile, slowdown: float) -> None:
    share = auto_share(known, max_slowdown=slowdown, job_class=JobClass.THROUGHPUT)
    left = cap_progress(known, share / 100) / promised_progress(known, share, slowdown, is_auto=True)
    assert left >= math.sqrt(slowdown) * (1 - 1e-9)


@given(alone=st.floats(0.05, 1.0), error=st.floats(-0.03, 0.03), slowdown=SLOWDOWNS)
def test_an_error_of_the_curve_moves_the_promise_of_auto_by_no_more_than_itself(
    alone: float, error: float, slowdown: float
) -> None:
    seen = min(1.0, max(0.01, alone + error))
    promises = [promised_progress(profile(c25=each), 25, slowdown, is_auto=True) for each in (seen, alone)]
    assert abs(promises[0] - promises[1]) <= abs(seen - alone) + 1e-9


@given(share=st.integers(1, 100), slowdown=SLOWDOWNS, half=st.floats(0.05, 1.0))
def test_auto_is_promised_no_less_than_the_same_share_by_number(share: int, slowdown: float, half: float) -> None:
    known = profile(c50=half)
    promise = promised_progress(known, share, slowdown, is_auto=True)
    assert promised_progress(known, share, slowdown) - 1e-9 <= promise <= 1 / slowdown + 1e-9


def test_auto_without_a_profile_is_a_fraction_like_any_other() -> None:
    assert promised_progress(None, 50, 1.5, is_auto=True) == promised_progress(None, 50, 1.5)
