"""Times of the API, and steps of the wall clock."""

import pytest

from gpushare.runtime.moments import STEP_SECONDS, ClockSteps


def test_a_wall_clock_that_is_set_is_seen_beside_one_that_is_not() -> None:
    steps = ClockSteps()
    assert steps.seconds(1_795_000_000.0, 50.0) == 0.0
    assert steps.seconds(1_795_000_900.0, 950.0) == 0.0, "time that passes is no step"
    assert steps.seconds(1_794_996_400.0, 1050.0) == -4600.0
    assert steps.seconds(1_795_001_001.0, 1051.0) == 0.0, "and back"


def test_small_steps_add_up_and_what_two_readings_differ_by_is_none() -> None:
    steps = ClockSteps()
    ahead = 0.4 * STEP_SECONDS
    found = [steps.seconds(1000.0 + number * ahead, 0.0) for number in range(6)]
    assert found == pytest.approx([0.0, 0.0, 0.0, 3 * ahead, 3 * ahead, 3 * ahead])
