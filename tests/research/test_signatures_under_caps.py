"""A signature under a cap is worth what one with all threads is: on ten programs that nothing was fitted to."""

from pathlib import Path

import pytest

import gpushare.data
from gpushare.research.attribution_score import read_in_place, with_all_threads
from gpushare.research.dataset import Dataset, parse
from gpushare.research.studies.signatures_under_caps import (
    capped_runs,
    fitted,
    law_error,
    set_errors,
    taken_as_whole,
)

DATA = Path(gpushare.data.__file__).parent


def read(name: str) -> Dataset:
    return parse((DATA / name).read_bytes().splitlines())


@pytest.fixture(scope="module")
def table() -> Dataset:
    return read("h200-table.jsonl")


def test_the_constants_are_those_of_the_fit_and_err_little_on_the_programs_of_the_table(table: Dataset) -> None:
    runs = capped_runs(read("h200-colocation.jsonl"))
    assert len(runs) == 138
    assert fitted(runs) == pytest.approx([1.13, -0.25, -0.78], abs=0.02)
    assert law_error(runs) <= 0.085
    assert law_error(capped_runs(table)) <= 0.11


@pytest.mark.slow
@pytest.mark.compute
def test_profiles_read_in_place_predict_as_well_as_those_with_all_threads(table: Dataset) -> None:
    whole, read_there, naive = (
        set_errors(table, load_of) for load_of in (with_all_threads, read_in_place, taken_as_whole)
    )
    for size in whole:
        assert read_there[size].predicted <= whole[size].predicted, "they know what the cap in force costs"
        # 0.020 worse for two tenants: the error of what the cap costs scales the whole progress (signatures.md).
        assert read_there[size].inferred <= whole[size].inferred + 0.025
        assert naive[size].predicted > 1.3 * read_there[size].predicted, "else nothing would be gained by the law"
