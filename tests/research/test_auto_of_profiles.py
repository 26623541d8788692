"""`auto` by a live profile against the measured cap curve: on the shipped table, whose figures the page quotes."""

from pathlib import Path

import pytest

import gpushare.data
from gpushare.research.dataset import Dataset, parse
from gpushare.research.studies.auto_of_profiles import KINDS, shares_of, summary


@pytest.fixture(scope="module")
def table() -> Dataset:
    return parse((Path(gpushare.data.__file__).parent / "h200-table.jsonl").read_bytes().splitlines())


def test_the_truth_keeps_the_speed_that_auto_asks_for(table: Dataset) -> None:
    for program in table.solo:
        row = shares_of(table, program, 1.5)
        assert row is not None
        assert len(row) == 1 + len(KINDS)
        curve = table.cap_curve(program)
        above = min(cap for cap in curve if cap >= row[0])
        assert curve[above] >= 1.5**-0.5 - 1e-9, "the next measured cap keeps at least as much"
        below = [cap for cap in curve if cap < row[0] - 5]
        assert all(curve[cap] < 1.5**-0.5 for cap in below), "and no measured cap well below does"


def test_a_grown_cap_curve_comes_closer_than_one_signature(table: Dataset) -> None:
    rows = [row for program in table.solo if (row := shares_of(table, program, 1.5)) is not None]
    means = [summary(rows, kind)[1] for kind in range(len(KINDS))]
    assert means[-1] == min(means)


def test_of_rows_it_is_told_how_many_are_close_and_how_many_get_less() -> None:
    rows = [(50, 55, 0, 0, 0), (50, 45, 0, 0, 0), (50, 90, 0, 0, 0), (50, 30, 0, 0, 0)]
    assert summary(rows, 0) == (2, 17.5, 40, 2)


def test_a_program_without_runs_under_caps_is_left_out(table: Dataset) -> None:
    assert shares_of(table, "nobody", 1.5) is None
