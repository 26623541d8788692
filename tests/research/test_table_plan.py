"""The plan of the complete table, and the table that was measured by it."""

import itertools
from collections import Counter
from pathlib import Path

from gpushare.research.calibration.plan import CLIENTS
from gpushare.research.calibration.table_plan import alone_phase, table_phases, trial_phase
from gpushare.research.dataset import parse

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
    for phase in (*table_phases(NAMES), trial_phase(NAMES), alone_phase(NAMES, 6)):
        assert {cell for run in phase.runs for cell in run} == set(phase.cells)
        assert len(phase.cells) == len(set(phase.cells)) <= CLIENTS


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
