"""The collection's pure parts; the rest runs on a GPU (tests/gpu) or as a dry run."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from gpushare.research.calibration.plan import CLIENTS, phases
from gpushare.research.calibration.resume import EarlierRuns, ResumeError, cut_to_whole, earlier_runs
from gpushare.research.calibration.run import CalibrationOrder, calibrate, plan_of
from gpushare.research.calibration.worker import completed
from gpushare.research.dataset import parse

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


HEADER = {"schema": "gpushare.io/colocation/v1", "gpu_model": "NVIDIA H200", "driver": "1", "mechanism": "mps"}
RUN = {
    "tenants": [{"workload": "b", "thread_percentage": 50}, {"workload": "a", "thread_percentage": 25}],
    "iterations_per_s": [1.0, 2.0],
    "device": {"sm_util": 0.5},
}
WHOLE = "".join(json.dumps(line) + "\n" for line in (HEADER, RUN))


def test_a_dataset_cut_off_in_a_line_is_gone_on_with_behind_its_last_whole_line(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert not earlier_runs(path).runs
    path.write_text(WHOLE + json.dumps(RUN)[:20])
    found = earlier_runs(path)
    assert found.runs == {(("a", 25), ("b", 50)): 1}
    cut_to_whole(path, found)
    assert path.read_text() == WHOLE
    cut_to_whole(path, earlier_runs(path))
    assert path.read_text() == WHOLE


@pytest.mark.parametrize(
    "content",
    [b"job,workload\na,b\n", b"\xff\xfe\n", WHOLE.encode() + b"junk\n" + WHOLE.encode(), b"no line end"],
)
def test_a_file_that_is_no_dataset_is_never_written_to(content, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(ResumeError, match=r"mine\.csv is no dataset .* give another --output"):
        earlier_runs(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("gpu_model", "driver", "mechanism", "is_like"),
    [
        ("NVIDIA H200", "2", "mps", True),
        ("NVIDIA L4", "1", "mps", False),
        ("NVIDIA H200", "simulated", "mps", False),
        ("NVIDIA H200", "1", "time-slicing", False),
    ],
)
def test_runs_of_another_gpu_are_not_mixed_in(gpu_model, driver, mechanism, is_like, tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(WHOLE)
    about = {"gpu_model": gpu_model, "driver": driver}
    EarlierRuns().check(about, mechanism)
    if is_like:
        earlier_runs(path).check(about, mechanism)
        return
    with pytest.raises(ResumeError, match="the output holds runs of NVIDIA H200 under mps, these would be of"):
        earlier_runs(path).check(about, mechanism)


def test_a_collection_that_was_killed_in_a_line_ends_as_a_dataset(tmp_path):
    """The next run was written behind the piece of a line, and the file could not be read from then on."""
    order = CalibrationOrder(1, 40, workloads=("gemm-fp32-4096", "bert-infer-fp16-b1"), simulated="NVIDIA L4")
    path = tmp_path / "l4.jsonl"

    def go_on() -> int:
        return calibrate(path, order, budget_seconds=60.0, progress=lambda *_: None, log=lambda _: None)

    total = go_on()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10]) + lines[10][:30])
    assert go_on() == total - 9
    assert len(parse(path.read_bytes().splitlines()).runs) == total
    with pytest.raises(
        ResumeError, match="a simulated NVIDIA L4 under mps, these would be of a simulated NVIDIA T4"
    ):
        plan_of(replace(order, simulated="NVIDIA T4"), path)
