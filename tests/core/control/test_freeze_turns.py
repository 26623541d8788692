"""Who runs beside whom while several are throttled, and what the agent's estimate takes them for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.control.freeze_turns import presence, turns_of

DUTIES = st.lists(st.floats(0.1, 1.0), min_size=1, max_size=6)


def test_two_are_frozen_one_after_the_other() -> None:
    assert turns_of([0.7, 0.6]) == [
        (pytest.approx(0.3), (1,)),
        (pytest.approx(0.4), (0,)),
        (pytest.approx(0.3), (0, 1)),
    ]


@given(DUTIES)
def test_the_parts_are_a_whole_period_and_each_runs_for_its_duty(duties: list[float]) -> None:
    found = turns_of(duties)
    assert sum(share for share, _ in found) == pytest.approx(1.0)
    for position, duty in enumerate(duties):
        assert sum(share for share, running in found if position in running) == pytest.approx(duty)


@given(DUTIES)
def test_nobody_is_frozen_beside_another_while_the_freezes_fit_into_a_period(duties: list[float]) -> None:
    fitting = [1.0 - (1.0 - duty) / len(duties) for duty in duties]
    assert all(len(running) >= len(duties) - 1 for share, running in turns_of(fitting) if share > 1e-9)


@given(st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_two_are_beside_each_other_as_long_as_their_turns_say(one: float, other: float) -> None:
    assert presence({"a": one, "b": other}, "a")["b"] * one == pytest.approx(
        sum(share for share, running in turns_of([one, other]) if running == (0, 1)), abs=1e-9
    )


@given(st.lists(st.floats(0.5, 1.0), min_size=3, max_size=4))
def test_several_are_beside_each_other_in_the_mean_nearly_as_long_as_their_turns_say(duties: list[float]) -> None:
    """Exact while their freezes fit one by one; beyond, whose freezes meet depends on the order."""
    named = {str(position): duty for position, duty in enumerate(duties)}
    estimated = sum(duty * sum(presence(named, uid).values()) for uid, duty in named.items())
    true = sum(share * len(running) * (len(running) - 1) for share, running in turns_of(duties))
    fit = sum(1.0 - duty for duty in duties) <= 1.0
    assert estimated == pytest.approx(true, abs=1e-9 if fit else 0.1 * len(duties))


def test_beside_who_never_runs_nobody_is_present_and_who_is_gone_takes_no_turn() -> None:
    assert presence({"a": 0.0, "b": 1.0}, "a") == {}
    assert presence({"a": 0.5, "b": 0.0, "c": 0.6}, "a") == {"b": 0.0, "c": pytest.approx(0.2)}
