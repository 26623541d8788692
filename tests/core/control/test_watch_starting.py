"""A newcomer that loads before it works: the window in which it begins says little about its progress."""

import pytest
from tests.core.control.test_watch import SETTINGS, tenant, watched

from gpushare.core.api import JobClass
from gpushare.core.control import FREE, GpuWatch, StepRule, WatchedTenant, WatchWindow, explain, watch

# What the agent read on an H200 on 2026-11-26 (docs/measurements/loop-h200.md, scene "latency"): seconds after the
# newcomer's first count, length of the window, progress of the latency job, of fft and of the newcomer. tiny's is
# unknown.
READ = (
    (-8.4, 1.0, 0.791, 0.328, None),
    (-7.4, 1.0, 0.767, 0.324, None),
    (-6.4, 1.0, 0.775, 0.328, None),
    (-4.4, 2.0, 0.772, 0.327, None),
    (-1.9, 1.0, 0.706, 0.330, 0.0),
    (-0.4, 0.5, 0.734, 0.306, 0.012),
    (0.7, 1.0, 0.673, 0.243, 0.382),
    (2.1, 1.0, 0.588, 0.294, 0.608),
    (3.2, 1.0, 0.584, 0.292, 0.608),
)


def windows(read=READ):
    for at, seconds, latency, fft, newcomer in read:
        tenants = [
            WatchedTenant("latency", JobClass.LATENCY, 0.743, latency, 0.075, 0.0),
            WatchedTenant("fft", JobClass.THROUGHPUT, 0.264, fft, 0.055, 1.0),
            WatchedTenant("tiny", JobClass.THROUGHPUT, 0.667, None, None, 2.0, is_light=True),
        ]
        if newcomer is not None:
            is_asleep = newcomer < 0.05
            tenants.append(
                WatchedTenant("new", JobClass.THROUGHPUT, 0.274, newcomer, 0.07, 3.0, active=not is_asleep)
            )
        yield WatchWindow(at, tuple(tenants), seconds=seconds)


def test_the_first_throttle_takes_what_the_newcomer_can_give():
    """The newcomer made 0.61 of its progress alone, promised 0.27; by the window it began in, it made 0.50.

    So on the H200 it was left 58% of the time first, and the job's promise was kept for good 12 s later, with 46%.
    """
    state = GpuWatch()
    for window in windows():
        before = state
        state, actions = watch(state, window, window.ends_at, SETTINGS)
    step = explain(before, state, window, window.ends_at, SETTINGS)
    assert "latency" in actions.broken
    assert ("latency", StepRule.THROTTLED) in step.rules
    assert 0.44 <= actions.duties["new"] <= 0.52
    assert 0.61 * actions.duties["new"] >= 0.274


def test_the_window_in_which_it_begins_is_not_counted_as_its_progress():
    steady = tenant("a", 0.6)
    _, seen = watched(
        *[(steady, tenant("b", 0.0))] * 3, (steady, tenant("b", 0.2)), *[(steady, tenant("b", 0.9))] * 20
    )
    assert not any(actions.broken for actions in seen)
    state, _ = watched(*[(steady, tenant("b", 0.0))] * 3, (steady, tenant("b", 0.2)))
    assert state.tenants["b"].response is None
    assert state.tenants["b"].unknown_seconds > 0
    state, _ = watched((steady, tenant("b", 0.9)), state=state, start=4.0)
    assert state.tenants["b"].response.running({"a": FREE}) == pytest.approx(0.9, abs=0.03)


def test_who_is_at_work_when_first_seen_is_judged_from_the_first_window():
    _, seen = watched((tenant("a", 0.3), tenant("b", 0.9)), (tenant("a", 0.3), tenant("b", 0.9)))
    assert seen[-1].broken == ("a",)


def test_who_sleeps_again_and_again_loses_one_window_only():
    awake, asleep = (tenant("a", 0.6), tenant("b", 0.9)), (tenant("a", 0.6), tenant("b", 0.0))
    state, _ = watched(asleep, awake, asleep, awake)
    assert state.tenants["b"].response.windows == 1


def test_the_throttle_comes_no_later_for_it():
    """The window in which it begins counts for the promise that it breaks."""
    calm, begins = (tenant("a", 0.9), tenant("c", 0.0)), (tenant("a", 0.4), tenant("c", 0.3))
    _, seen = watched(calm, calm, begins, (tenant("a", 0.3), tenant("c", 0.9)))
    assert not seen[2].broken
    assert seen[3].broken == ("a",)
    assert seen[3].duties["c"] < FREE
