"""How much of an error is the scatter of a table's own windows: a table without scatter has none."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gpushare.data
from gpushare.research.dataset import Dataset, parse
from gpushare.research.studies.table_noise import noises, scatter


@pytest.fixture(scope="module")
def table() -> Dataset:
    """Return the shipped table with the pairs of two programs that repeat well and two that do not."""
    data = parse((Path(gpushare.data.__file__).parent / "h200-table.jsonl").read_bytes().splitlines())
    some = {"convnext-infer-bf16-b48", "ppo-app-fp32-e8192", "chat-app-bf16-b8", "unet3d-app-fp16-b2"}
    runs = [run for run in data.runs if len(run.tenants) <= 2 and {t.workload for t in run.tenants} <= some]
    return replace(data, runs=tuple(runs))


def test_two_windows_that_differ_by_a_tenth_lie_a_fourteenth_from_their_mean_on_average() -> None:
    assert scatter([1.05, 0.95]) == pytest.approx(0.1 / 2**0.5)
    assert scatter([3.0, 3.0, 3.0]) == 0.0
    assert scatter([3.0]) == 0.0, "nothing is known of it"
    many = np.random.default_rng(1).normal(1.0, 0.02, 400)
    assert scatter(many.tolist()) == pytest.approx(0.02 * (2 / np.pi) ** 0.5, rel=0.1)


def test_programs_that_repeat_well_owe_little_to_scatter_and_others_much(table: Dataset) -> None:
    found = noises(table, 0)
    of = {program: [each for each in found if each.program == program] for program in table.solo}
    assert all(len(each) == 18 for each in of.values())
    assert np.mean([each.truth for each in of["convnext-infer-bf16-b48"]]) < 0.005
    assert np.mean([each.truth for each in of["chat-app-bf16-b8"]]) > 0.05
    assert np.nanmean([each.exact for each in found]) < np.nanmean([each.scattered for each in found])


def test_a_table_whose_windows_are_all_alike_scatters_nothing(table: Dataset) -> None:
    alike = tuple(
        table.solo[run.tenants[0].workload][run.tenants[0].thread_percentage][0] if run.is_solo else run
        for run in table.runs
    )
    for each in noises(replace(table, runs=alike), 0):
        assert each.truth == 0.0
        assert each.scattered == pytest.approx(each.exact, abs=1e-9, nan_ok=True)
