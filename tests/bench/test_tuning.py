"""The sweep of settings: its default is the live policy, one thing changes at a time, the pages show its runs."""

import json
from pathlib import Path

import pytest
from bench.retractions import GPU_MEMORY_MIB
from bench.table_plant import read_table
from bench.tuning import LOADS, SEEDS, SETTINGS, Release, latency, measure, slowdown, sweep, times
from bench.tuning_page import PAGES, PLOT, TABLES, digest, draw, filled, of, read

from gpushare.core.api import AUTO, JobClass
from gpushare.data import default_model
from gpushare.sim.table_catalog import TableWorld, run_on_table
from gpushare.sim.table_trace import SERVING, draw_table_jobs
from gpushare.sim.table_truth import TableTruth

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data/tuning/h200-table.jsonl"


@pytest.fixture(scope="module")
def world():
    truth = TableTruth(read_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    return TableWorld(truth, default_model().for_gpu(truth.gpu_model))


@pytest.fixture(scope="module")
def drawn(world):
    return draw_table_jobs(world.truth, 24, gpus=3, load=2.0, seed=3)


def test_the_default_is_what_sim_jobs_runs(world, drawn):
    found = measure(world, Release(), drawn, 3, 3)
    figures = run_on_table(world, ["gpushare-told-curves"], jobs=24, gpus=3, load=2.0, seed=3)[
        "gpushare-told-curves"
    ]
    assert found["throughput"] == figures.throughput
    assert found["below_promise"] == figures.late_ratio
    assert found["retracted"] == figures.retractions
    assert 1.0 < found["slowdown_median"] <= found["slowdown_p95"]


def test_without_sharing_nobody_is_slowed_and_who_waits_waits_longer(world, drawn):
    alone, shared = (measure(world, release, drawn, 3, 3) for release in (Release(shares=False), Release()))
    assert (alone["slowdown_p95"], alone["throughput"]) == pytest.approx((1.0, 1.0))
    assert (alone["throttled"], alone["stopped"]) == (0, 0.0)
    assert alone["wait_seconds"] > shared["wait_seconds"]


def test_a_setting_changes_what_it_says_and_nothing_else(world, drawn):
    usual, bold = (release.jobs(drawn, world.truth) for release in (Release(), slowdown(3.0)))
    for before, after in zip(usual, bold, strict=True):
        assert (before.name, before.workload, before.submit_seconds) == (
            after.name,
            after.workload,
            after.submit_seconds,
        )
        if before.job_class is JobClass.LATENCY:
            assert before == after
        elif not before.is_auto:
            assert after.promise == pytest.approx(before.promise / 2)
        else:
            assert after.promise == pytest.approx(1 / 3)
    strict = latency(1.05).jobs(drawn, world.truth)
    assert {job.max_slowdown for job in strict if job.job_class is JobClass.LATENCY} == {1.05}


def test_classes_and_fractions_are_what_users_would_change(world, drawn):
    serving = Release(serving_is_latency=True).jobs(drawn, world.truth)
    assert {job.job_class for job in serving if job.workload in SERVING} == {JobClass.LATENCY}
    assert all(job.is_auto for job in Release(asks=lambda _: AUTO).jobs(drawn, world.truth))
    assert [times(2.0)(each) for each in ("0.1", "0.3", "0.5", AUTO)] == ["0.2", "0.6", "1", AUTO]


def test_a_run_that_the_file_holds_is_not_made_again(tmp_path):
    found = tmp_path / "runs.jsonl"
    made = list(sweep(found, 8, 2, ["no sharing"]))
    assert len(made) == len(LOADS) * len(SEEDS)
    assert [json.loads(line) for line in made] == read(found)
    assert list(sweep(found, 8, 2, ["no sharing"])) == []


def test_every_setting_was_run_at_every_load_and_seed():
    runs = read(DATA)
    wanted = {
        (setting, value, load, seed)
        for setting, values in SETTINGS.items()
        for value in values
        for load in LOADS
        for seed in SEEDS
    }
    assert sorted(wanted) == sorted((run["setting"], run["value"], run["load"], run["seed"]) for run in runs)


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_runs(name):
    page = (ROOT / "docs" / name).read_text()
    assert page.count("<!-- tuning: end -->") == 2
    assert filled(page, read(DATA)) == page, "run python -m bench.tuning_page"


def test_a_page_that_was_changed_by_hand_is_told(tmp_path):
    page = (ROOT / "docs" / PAGES[0]).read_text()
    assert filled(page.replace("| 1.00 |", "| 1.01 |"), read(DATA)) == page != page.replace("| 1.00 |", "| 1.01 |")


def test_the_default_stands_among_the_values_of_max_slowdown():
    runs = read(DATA)
    assert of(runs, "policy.maxSlowdown", "1.5", 2.0) == of(runs, "default", "", 2.0)
    assert TABLES["maxSlowdown"](runs).count("**1.5**") == len(LOADS)


def test_the_plot_was_drawn_from_these_runs(tmp_path):
    assert digest(DATA) in (ROOT / "docs" / PLOT).read_text()
    draw(read(DATA), tmp_path / "again.svg", digest(DATA))
    assert "throughput gained over a GPU each, %" in (tmp_path / "again.svg").read_text()
