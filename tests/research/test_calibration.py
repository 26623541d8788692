"""The collection's pure parts; the rest runs on a GPU (tests/gpu) or as a dry run."""

import json
from collections import Counter

import pytest

from gpushare.research.calibration.collector import measured_before
from gpushare.research.calibration.plan import CLIENTS, phases
from gpushare.research.calibration.worker import completed

NAMES = [f"w{n}" for n in range(44)]


def test_the_same_seed_gives_the_same_plan():
    arguments = {"count": 3, "runs_per_phase": 80}
    assert phases(NAMES, seed=1, **arguments) == phases(NAMES, seed=1, **arguments)
    assert phases(NAMES, seed=1, **arguments) != phases(NAMES, seed=2, **arguments)


def test_a_phase_never_needs_more_clients_than_one_server_takes_and_fires_only_its_own():
    planned = phases(NAMES, count=5, runs_per_phase=140, seed=1)
    for phase in planned:
        assert len(phase.cells) == len(set(phase.cells)) <= CLIENTS
        assert all(set(run) <= set(phase.cells) for run in phase.runs)
        shared = [tuple(sorted(run)) for run in phase.runs if len(run) > 1]
        assert len(shared) == len(set(shared)) or phase is planned[0]
        assert all(len({name for name, _ in run}) == len(run) for run in phase.runs)


def test_every_workload_is_measured_alone_at_three_caps():
    solos = {
        run[0]
        for phase in phases(NAMES, count=5, runs_per_phase=140, seed=1)
        for run in phase.runs
        if len(run) == 1
    }
    for name in NAMES:
        assert {(name, 100), (name, 50), (name, 25)} <= solos


def test_every_workload_meets_every_probe_once_where_it_is_measured_alone():
    names, probes = [f"w{n}" for n in range(60)], ["p", "q", "r"]
    planned = phases(names, count=4, runs_per_phase=260, seed=3, probes=probes)
    beside = Counter(run for phase in planned for run in phase.runs if any(name in probes for name, _ in run))
    assert beside == Counter(
        {((name, 100), (probe, 100)): 1 for name in names for probe in probes}
        | {((probe, 100),): 2 * len(planned) for probe in probes}
    )
    for phase in planned:
        assert len(phase.cells) == len(set(phase.cells)) <= CLIENTS
        assert all(set(run) <= set(phase.cells) for run in phase.runs)


def test_a_small_group_ends_by_itself():
    planned = phases(NAMES[:3], count=1, runs_per_phase=100, seed=1, capped=False)
    assert {len(run) for run in planned[0].runs} == {1, 2, 3}


@pytest.mark.parametrize(("moment", "expected"), [(0.5, 0.5), (1.0, 1.0), (2.0, 1.5), (3.0, 2.0), (9.0, 2.0)])
def test_iterations_are_counted_with_their_fractions(moment, expected):
    assert completed([1.0, 3.0], 0.0, moment) == pytest.approx(expected)


def test_a_dataset_cut_off_in_a_line_is_resumed(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert not measured_before(path)
    run = {"tenants": [{"workload": "b", "thread_percentage": 50}, {"workload": "a", "thread_percentage": 25}]}
    path.write_text('{"schema": "x"}\n' + json.dumps(run) + "\n" + json.dumps(run)[:20])
    assert measured_before(path) == {(("a", 25), ("b", 50)): 1}
