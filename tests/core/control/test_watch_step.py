"""What is told of a step of the loop: the estimates that it acted by, and the rule that decided."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from tests.core.control.test_watch import LOW, SETTINGS, any_story, tenant

from gpushare.core.api import JobClass
from gpushare.core.control import FREE, GpuWatch, LooseningRule, StepRule, WatchWindow, explain, watch
from gpushare.core.control.relief import KnownTenants


def steps(*windows, state=None, start=0.0, settings=SETTINGS):
    """Watch tuples of tenants, or windows, one a second; return the last state and what is told of each step."""
    state, told = state or GpuWatch(), []
    for number, each in enumerate(windows, start=1):
        window, now = WatchWindow(start + number, each) if isinstance(each, tuple) else each, start + number
        after, _ = watch(state, window, now, settings)
        told.append(explain(state, after, window, now, settings))
        state = after
    return state, told


def rules(step):
    return {each.uid: each.rule for each in step.tenants}


def test_nothing_is_told_while_every_promise_is_kept_and_nobody_is_throttled():
    _, told = steps(*[(tenant("a", 0.6), tenant("b", 0.9))] * 3)
    assert told == [None] * 3


def test_a_breach_its_throttle_and_the_window_after_it():
    _, (first, second, third) = steps(LOW, LOW, LOW)
    assert rules(first) == {"a": StepRule.FEW_WINDOWS}
    assert first.loosening is None
    assert rules(second)["a"] is StepRule.THROTTLED
    assert second.rules == (("a", StepRule.THROTTLED),)
    assert second.duties["c"] < FREE
    assert {each.duty for each in second.tenants} == {FREE}, "the window's duties, not the later ones"
    assert rules(third)["a"] is StepRule.CHANGE_NOT_SHOWN
    assert third.loosening is LooseningRule.WINDOW_UNUSED
    [a] = [each for each in second.tenants if each.uid == "a"]
    assert (a.progress, a.error, a.promise, a.below, a.is_broken) == (0.3, 0.03, 0.5, 2, True)
    assert a.room == pytest.approx(a.estimate - 0.5)
    assert a.room < 0


def test_the_line_has_every_figure():
    _, (told,) = steps(LOW)
    [a] = told.tenants
    assert str(told) == (
        "at=1.00 seconds=1.00 duties=- loosening=-; pod=a duty=1.000 progress=0.300 error=0.030 promise=0.500 "
        f"estimate={a.estimate:.3f} room={a.room:.3f} doubt={a.doubt:.3f} below=1 kept=0 broken=no "
        "rule=too-few-windows"
    )
    useless = WatchWindow(1.0, (replace(LOW[0], error=None),), usable=False)
    assert str(steps(useless)[1][0]).endswith(
        "error=- promise=0.500 estimate=- room=- doubt=- below=0 kept=0 broken=no rule=window-unused"
    )


def test_why_nothing_is_done_for_a_promise_that_is_short():
    within = (tenant("a", 0.48), tenant("b", 0.9))
    assert rules(steps(within)[1][0]) == {"a": StepRule.WITHIN_ERROR}
    assert rules(steps((tenant("a", 0.3),))[1][0]) == {"a": StepRule.ALONE}
    useless = WatchWindow(1.0, LOW, usable=False)
    assert rules(steps(useless)[1][0]) == {"a": StepRule.WINDOW_UNUSED}
    never = (tenant("a", 0.3), tenant("b", 0.9, job_class=JobClass.LATENCY))
    assert rules(steps(*[never] * 3)[1][-1]) == {"a": StepRule.NO_STEP}
    unknown = (replace(LOW[0], error=None), *LOW[1:])
    assert rules(steps(unknown)[1][0]) == {"a": StepRule.UNKNOWN}


def test_a_broken_promise_that_is_expected_to_be_kept_needs_no_further_step():
    """It counts as broken until two windows in a row show it kept."""
    state, _ = steps(LOW, LOW)
    well = tuple(
        tenant(uid, rate * state.duties.get(uid, FREE)) for uid, rate in zip("abc", (0.65, 0.9, 0.9), strict=True)
    )
    _, told = steps(well, well, state=state, start=2.0)
    assert told[-1].rules == (("a", StepRule.ENOUGH_ROOM),)
    assert told[-1].loosening is LooseningRule.BROKEN


def test_a_promise_that_no_neighbour_breaks_is_told_as_that():
    """Whatever b does, a makes 0.3 of the promised 0.5."""
    state, duty, told = GpuWatch(), FREE, []
    for number in range(1, 40):
        now, pair = float(number), (tenant("a", 0.3), tenant("b", 0.9 * duty, 0.3))
        after, actions = watch(state, WatchWindow(now, pair), now, SETTINGS)
        told.append(explain(state, after, WatchWindow(now, pair), now, SETTINGS))
        state, duty = after, actions.duties.get("b", FREE)
    assert StepRule.NOT_BY_NEIGHBOURS in {rules(step)["a"] for step in told}


def followed(state, rates, seconds):
    """What is told while tenants make these rates as long as they run."""
    told = []
    for number in range(3, seconds):
        now, duties = float(number), state.duties
        tenants = tuple(tenant(uid, rate and rate * duties.get(uid, FREE)) for uid, rate in rates.items())
        after, _ = watch(state, WatchWindow(now, tenants), now, SETTINGS)
        step = explain(state, after, WatchWindow(now, tenants), now, SETTINGS)
        told += [step.loosening] if step is not None else []
        state = after
    return told


def test_why_a_throttle_stays():
    state, _ = steps(LOW, LOW)
    told = followed(state, {"a": 0.9, "b": 0.7, "c": 0.9}, 40)
    assert told[0] is LooseningRule.WINDOW_UNUSED
    assert {LooseningRule.BROKEN, LooseningRule.SETTLING, LooseningRule.LET_GO} <= {*told}
    assert LooseningRule.UNKNOWN in followed(state, {"a": None, "b": 0.9, "c": 0.9}, 12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_story())
def test_every_step_can_be_told_and_agrees_with_what_was_done(story):
    state = GpuWatch()
    for window, now in story:
        after, actions = watch(state, window, now, SETTINGS)
        step = explain(state, after, window, now, SETTINGS) if window is not None else None
        if step is not None:
            assert str(step)
            assert dict(step.duties) == actions.duties
            fell = {uid for uid, duty in after.duties.items() if duty < state.duties.get(uid, FREE)}
            is_told = StepRule.THROTTLED in rules(step).values()
            assert is_told == bool(fell)
            rose = {uid for uid, duty in state.duties.items() if after.duties.get(uid, FREE) > duty}
            assert (step.loosening is LooseningRule.LET_GO) == bool(rose & after.tenants.keys())
        state = after


def test_only_what_is_short_costs_time(monkeypatch):
    """The estimates are computed for a promise that is short or a throttle, not in calm."""
    monkeypatch.setattr(KnownTenants, "progress", lambda *_: pytest.fail("computed"))
    window = WatchWindow(1.0, (tenant("a", 0.6), tenant("b", 0.9)))
    after = replace(GpuWatch(), last_ends_at=1.0)
    assert explain(GpuWatch(), after, window, 1.0, SETTINGS) is None
