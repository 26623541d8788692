"""What a counter may miss by: in proportion to the work of those who use it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.gpu.pipes import COUNTERS, Counters
from gpushare.core.progress.counter_errors import COUNTER_ERRORS, CounterRow, counters_of

HEAVY = Counters(fp32_util=0.8, sm_util=0.9)
LIGHT = Counters(fp32_util=0.0, sm_util=0.1)


def row(name: str, *works: Counters, guessed: bool = False) -> CounterRow:
    return CounterRow.of(name, Counters(fp32_util=0.5, sm_util=0.5), works, [guessed] * len(works))


@given(st.sampled_from(sorted(COUNTER_ERRORS)), st.lists(st.floats(0.0, 1.2), min_size=1, max_size=8))
def test_nobodys_work_has_the_counters_own_error_alone(name: str, drawn: list[float]) -> None:
    works = [Counters(**{name: value}) for value in drawn]
    found = CounterRow.of(name, Counters(**{name: 0.0}), works, [False] * len(works))
    assert found.variance([0.0] * len(works)) == pytest.approx(COUNTER_ERRORS[name].floor ** 2)


def test_one_who_does_not_use_a_pipe_brings_no_error_to_it() -> None:
    pair = row("fp32_util", HEAVY, LIGHT)
    assert pair.variance([0.5, 0.0]) == pytest.approx(pair.variance([0.5, 1.0]))
    assert pair.variance([1.0, 0.0]) > 3 * pair.variance([0.5, 0.0]), "twice the work, twice the error"


def test_work_under_an_unseen_cap_is_less_sure() -> None:
    assert row("sm_util", HEAVY, LIGHT, guessed=True).variance([0.5, 0.5]) > 4 * row(
        "sm_util", HEAVY, LIGHT
    ).variance([0.5, 0.5])


def test_neighbours_add_to_what_the_device_reads_but_not_without_end() -> None:
    alone, crowd = row("sm_util", HEAVY), row("sm_util", HEAVY, *[LIGHT] * 40)
    assert alone.design == (0.9,)
    assert 0.9 < crowd.design[0] <= 0.9 * 1.2


def test_only_counters_that_everyone_has_are_read() -> None:
    assert counters_of(Counters(fp32_util=0.1, sm_util=0.2, dram_bw_util=0.3), [HEAVY]) == ("fp32_util", "sm_util")
    assert counters_of(HEAVY, [HEAVY, Counters()]) == ()
    assert set(COUNTER_ERRORS) <= set(COUNTERS)
