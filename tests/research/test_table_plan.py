"""The plan of the complete table, and the table that was measured by it."""

import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.research.calibration import worker
from gpushare.research.calibration.collector import Pool, Timing
from gpushare.research.calibration.counters import NoCounters
from gpushare.research.calibration.plan import CLIENTS, Cell
from gpushare.research.calibration.table import main
from gpushare.research.calibration.table_plan import alone_phase, table_phases, trial_phase, twice_phases
from gpushare.research.calibration.workload import Stage, Workload
from gpushare.research.dataset import parse
from gpushare.research.shipped_table import different_programs, joined
from gpushare.sim.table_truth import TableTruth

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"program-{place}" for place in range(10)]


def test_every_set_is_planned_once_under_every_choice_of_caps() -> None:
    runs = Counter(tuple(sorted(run)) for phase in table_phases(NAMES) for run in phase.runs if len(run) > 1)
    assert set(runs.values()) == {1}
    choices = Counter((len(run), tuple(sorted(cap for _, cap in run))) for run in runs)
    assert choices == {
        (2, (100, 100)): 45,
        (2, (50, 50)): 45,
        (2, (25, 75)): 90,
        (2, (50, 100)): 90,
        (3, (33, 33, 33)): 120,
        (3, (50, 50, 50)): 120,
        (3, (100, 100, 100)): 120,
        (4, (25,) * 4): 210,
        (4, (50,) * 4): 210,
    }


def test_every_program_is_measured_alone_at_least_twice_under_every_cap() -> None:
    alone = Counter(run[0] for phase in table_phases(NAMES) for run in phase.runs if len(run) == 1)
    assert set(alone) == set(itertools.product(NAMES, (100, 75, 50, 33, 25)))
    assert min(alone.values()) >= 2


def test_a_phase_keeps_ready_what_its_runs_need_and_no_more_than_the_clients_of_a_server() -> None:
    for phase in (*table_phases(NAMES), trial_phase(NAMES), alone_phase(NAMES, 6), *twice_phases(NAMES)):
        needed: Counter[Cell] = Counter()
        for run in phase.runs:
            needed |= Counter(run)
        assert needed == Counter(phase.cells)
        assert len(phase.cells) <= CLIENTS


def test_every_set_with_a_program_twice_is_planned_once_under_every_choice_of_caps() -> None:
    runs = Counter(tuple(sorted(run)) for phase in twice_phases(NAMES) for run in phase.runs if len(run) > 1)
    assert set(runs.values()) == {1}
    assert all(len({name for name, _ in run}) < len(run) for run in runs)
    choices = Counter((len(run), tuple(sorted(cap for _, cap in run))) for run in runs)
    assert choices == {
        (2, (100, 100)): 10,
        (2, (50, 50)): 10,
        (2, (25, 75)): 10,  # exchangeable: (75, 25) is the same
        (2, (50, 100)): 10,
        (3, (33, 33, 33)): 100,  # a, a, b: 90; a, a, a: 10
        (3, (50, 50, 50)): 100,
        (3, (100, 100, 100)): 100,
        (4, (25,) * 4): 505,  # a, a, b, c: 360; a, a, b, b: 45; a, a, a, b: 90; a, a, a, a: 10
        (4, (50,) * 4): 505,
    }


def test_sets_with_a_program_twice_come_in_the_order_in_which_jobs_form_them_and_with_windows_alone() -> None:
    phases = twice_phases(NAMES)
    first = phases[:4]
    early = {tuple(sorted(run)) for phase in first for run in phase.runs}
    shapes = Counter(tuple(sorted(Counter(name for name, _ in run).values())) for run in early if len(run) > 1)
    assert shapes == {(2,): 40, (1, 2): 270, (3,): 20, (1, 1, 2): 720}
    fours = [run for run in first[3].runs if len(run) == 4]
    for one, other in zip(fours[::2], fours[1::2], strict=True):
        assert [name for name, _ in one] == [name for name, _ in other], "a set that is begun has both caps"
    for phase in phases:
        assert {cell for run in phase.runs if len(run) == 1 for cell in run} == set(phase.cells)


def test_a_simulated_collection_of_sets_with_a_program_twice_is_resumed_and_is_a_truth(tmp_path: Path) -> None:
    output = tmp_path / "h200-table-twice.jsonl"
    options = ("--part", "twice", "--programs", "3", "--simulated", "NVIDIA H200")
    main([str(output), *options, "--budget", "0"])
    main([str(output), *options])
    first = output.read_bytes()
    main([str(output), *options])
    assert output.read_bytes() == first, "nothing was left to measure"
    table = joined({"": different_programs(), "twice": parse(first.splitlines())})
    truth = TableTruth(table, gpu_memory_mib=143_771)
    a, b, c = truth.workloads[:3]
    for names in itertools.chain.from_iterable(
        itertools.combinations_with_replacement((a, b, c), size) for size in (1, 2, 3, 4)
    ):
        assert truth.offers(names)
    assert not truth.offers([truth.workloads[3]] * 2)
    assert not truth.offers([a] * 5)


def test_workers_of_one_cell_run_side_by_side_and_one_that_fails_leaves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=lambda _: None))
    where = multiprocessing.get_context("fork").Value("i", 0)

    def build(_stage: Stage) -> Callable[[], None]:
        with where.get_lock():
            where.value += 1
            is_second = where.value == 2
        steps = itertools.count()

        def step() -> None:
            time.sleep(0.001)
            if is_second and next(steps) > 200:
                raise RuntimeError("no more")

        return step

    told: list[str] = []
    suite = {"a": Workload("a", build)}
    pool = Pool(suite, [("a", 100), ("a", 100), ("a", 50)], Stage("cpu", tiny=True), None, told.append)
    try:
        assert pool.alive() == {("a", 100): 2, ("a", 50): 1}
        timing = Timing(0.005, 0.02, 0.02)
        found = pool.fire([("a", 100), ("a", 100)], timing, NoCounters(), told.append)
        assert found is not None
        assert [each["thread_percentage"] for each in found["tenants"]] == [100, 100]
        assert all(rate > 0 for rate in found["iterations_per_s"])
        assert (
            pool.fire([("a", 100), ("a", 50), ("a", 100)], Timing(0.1, 0.3, 0.3), NoCounters(), told.append)
            is None
        )
        assert told
        assert pool.alive().total() == 2
        assert pool.fire([("a", 50)], timing, NoCounters(), told.append)
    finally:
        pool.close()


def test_only_a_worker_without_a_cap_tells_how_many_sms_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=lambda _: None))
    seen = {100: 132, 50: 66, 25: 33}

    def facts(_torch: object, _stage: Stage) -> dict[str, int]:
        return {"sm_count": seen[int(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])], "memory_mib": 1}

    monkeypatch.setattr(worker, "_facts", facts)
    suite = {"a": Workload("a", lambda _: lambda: None)}

    def alive(*percentages: int) -> dict[Cell, int]:
        pool = Pool(suite, [("a", each) for each in percentages], Stage("cpu", tiny=True), {}, lambda _: None)
        try:
            return {cell: number for cell, number in pool.alive().items() if number}
        finally:
            pool.close()

    assert alive(50, 25) == {("a", 50): 1, ("a", 25): 1}  # a phase without a whole GPU
    assert alive(100, 50) == {("a", 100): 1, ("a", 50): 1}
    seen[50] = 132
    assert alive(100, 50) == {("a", 100): 1}, "who sees the whole GPU under a cap runs outside MPS"


def test_fours_come_after_all_pairs_and_triples() -> None:
    sizes = [len(run) for phase in table_phases(NAMES) for run in phase.runs if len(run) > 1]
    assert sizes.index(4) > max(place for place, size in enumerate(sizes) if size < 4)


def test_the_measured_table_lacks_no_planned_set_and_shares_no_program_with_what_was_fitted() -> None:
    table = parse((ROOT / "src/gpushare/data/h200-table.jsonl").read_bytes().splitlines())
    fitted = parse((ROOT / "src/gpushare/data/h200-colocation.jsonl").read_bytes().splitlines())
    assert not table.skipped
    assert len(table.solo) == 10
    assert not set(table.solo) & set(fitted.solo)
    measured = {
        tuple(sorted((tenant.workload, tenant.thread_percentage) for tenant in run.tenants)) for run in table.runs
    }
    planned = {tuple(sorted(run)) for phase in table_phases(sorted(table.solo)) for run in phase.runs}
    assert measured >= planned
    assert min(run.window_seconds for run in table.runs) >= 0.35
