"""Figures of bench/sharing from records that are written by hand."""

from pathlib import Path
from typing import Any

import pytest
from bench.sharing.analysis import Outcomes, makespans, mean_of, outcomes, ratio_of, runs, windows
from bench.sharing.records import Records
from bench.sharing.report import table, write_report

RATE = 10.0  # iterations per second alone


def add_alone(records: Records, session: int = 0, rate: float = RATE) -> None:
    records.add("alone", session=session, program="train", rate=rate, ms=[], work_ms=[], start_seconds=1.0)
    records.add("alone", session=session, program="serve", rate=100.0, ms=[10.0] * 99 + [20.0], work_ms=[])


def add_run(records: Records, policy: str, jobs: list[dict[str, Any]], repetition: int = 0, **values: Any) -> None:
    name = f"{policy}-{repetition}"
    for number, job in enumerate(jobs):
        records.add(
            "job", **{"run": name, "number": number, "status": 0, "cap": None, "tail": "", "ms": [], **job}
        )
    records.add(
        "run",
        **{
            "name": name,
            "session": 0,
            "policy": policy,
            "repetition": repetition,
            "state": "complete",
            "failed": 0,
            "seconds": 10.0,
            "joules": 5000.0,
            **values,
        },
    )


def training(
    arrives: float, ready: float, rates: list[tuple[float, float]], *, promise: float = 0.6, share: int = 50
) -> dict[str, Any]:
    """A job that went at each rate for so many seconds, one log line a second."""
    progress, count, at = [[ready, 0.0, 0.0]], 0.0, ready
    for rate, seconds in rates:
        for _ in range(round(seconds)):
            at, count = at + 1.0, count + rate
            progress.append([at, count, at - ready])
    return {
        "program": "train",
        "class": "throughput",
        "share": share,
        "promise": promise,
        "arrives": arrives,
        "started": ready - 0.5,
        "ready": ready,
        "ended": at,
        "count": count,
        "rate": 0.0,
        "progress": progress,
    }


def serving(arrives: float, ready: float, ended: float, ms: list[float], *, work: float) -> dict[str, Any]:
    return {
        "program": "serve",
        "class": "latency",
        "share": 20,
        "promise": 0.9,
        "arrives": arrives,
        "started": ready,
        "ready": ready,
        "ended": ended,
        "count": len(ms),
        "rate": 50.0,
        "progress": [[ready, 0, 0.0], [ended, len(ms), work]],
        "ms": ms,
    }


def test_one_job_alone_is_as_alone(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records)
    add_run(records, "fifo", [training(0.0, 1.0, [(10.0, 8)])])
    (run,) = runs(records)
    assert run.makespan == pytest.approx(9.0)
    assert run.summed_progress == pytest.approx(8.0 / 9.0)
    assert run.jobs[0].slowdown == pytest.approx(1.0)
    assert run.jobs[0].completion == pytest.approx(9.0)
    assert run.below_ratio == 0.0
    assert run.joules == 5000.0


def test_seconds_below_the_promise_are_those_of_the_slow_windows(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records)
    add_run(records, "mps-pairs", [training(0.0, 0.0, [(10.0, 4), (5.0, 4), (5.9, 2)], promise=0.6)])
    (run,) = runs(records)
    assert [window.progress for window in run.jobs[0].windows] == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.59])
    assert run.jobs[0].below_seconds == pytest.approx(4.0)  # 0.59 is within the tolerance of 0.6
    assert run.below_ratio == pytest.approx(0.4)
    assert run.jobs[0].slowdown == pytest.approx(10.0 / 7.18)


def test_work_is_by_the_rate_alone_of_the_same_session(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records, 0, rate=10.0)
    add_alone(records, 1, rate=20.0)
    add_run(records, "fifo", [training(0.0, 0.0, [(10.0, 4)])], 0, session=0)
    add_run(records, "fifo", [training(0.0, 0.0, [(10.0, 4)])], 1, session=1)
    add_run(records, "fifo", [training(0.0, 0.0, [(10.0, 4)])], 2, session=2)
    assert [run.jobs[0].slowdown for run in runs(records)] == pytest.approx([1.0, 2.0, 1.5])


def test_a_serving_job_is_slow_where_its_answers_are_and_not_where_it_waits(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records)
    add_run(
        records,
        "gpushare",
        [
            serving(0.0, 0.0, 8.0, [10.0] * 400, work=4.0),
            serving(0.0, 0.0, 8.0, [15.0] * 396 + [30.0] * 4, work=8.0),
        ],
    )
    (run,) = runs(records)
    assert [job.slowdown for job in run.jobs] == pytest.approx([1.0, 2.0])
    assert [job.below_seconds for job in run.jobs] == pytest.approx([0.0, 8.0])
    assert run.summed_progress == pytest.approx(2.0)  # each was offered eight seconds of requests


def test_latency_is_over_alone_and_alone_counts_the_exclusive_runs_requests(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records)
    add_run(records, "fifo", [serving(0.0, 0.0, 2.0, [10.0] * 100, work=1.0)])
    add_run(records, "gpushare", [serving(0.0, 0.0, 2.0, [10.0] * 50 + [40.0] * 50, work=1.0)])
    fifo, ours = runs(records)
    # alone: 199 requests of 10 ms and one of 20, so p99 is 10
    assert fifo.p99 == pytest.approx({"serve": 1.0})
    assert ours.p50 == pytest.approx({"serve": 1.0})
    assert ours.p99 == pytest.approx({"serve": 4.0})


def test_best_effort_is_counted_while_a_latency_job_runs(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records)
    add_run(
        records,
        "gpushare",
        [training(0.0, 0.0, [(10.0, 4), (4.0, 4)]), serving(0.0, 4.0, 8.0, [10.0] * 200, work=2.0)],
    )
    (run,) = runs(records)
    assert run.beside_latency == pytest.approx(0.4)


def add_session(records: Records) -> None:
    jobs = [{"program": name, "seconds": 4.0, "arrives": 1.0} for name in ("train", "serve")]
    records.add("settings", jobs=2, seed=1, list=jobs)
    records.add(
        "session",
        number=0,
        began="2026-11-22T22:00:00+00:00",
        gpu="NVIDIA H200",
        simulated=True,
        launcher="processes",
        driver="580",
        commit="abc",
    )


def rows(text: str) -> dict[str, dict[str, str]]:
    """The first table's cells by policy and column."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in lines[0]]
    return {
        line[0].strip(): dict(zip(heads, map(str.strip, line), strict=True))
        for line in lines[2:]
        if len(line) == len(heads)
    }


def test_a_run_with_a_failed_job_is_in_no_mean_and_the_report_counts_it(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_session(records)
    add_alone(records)
    well = training(0.0, 0.0, [(10.0, 4)])
    soon_dead = training(0.0, 0.0, [(10.0, 1)]) | {"status": 1}
    add_run(records, "gpushare", [well, well], 0)
    add_run(records, "mps-equal", [well, soon_dead], 0, failed=1)
    add_run(records, "mps-equal", [training(0.0, 0.0, [(10.0, 8)])], 1)
    add_run(records, "mps-pairs", [soon_dead, well | {"ended": None}], failed=2)
    records.add("run", name="x", policy="hard-caps", repetition=0, state="failed", failed=2, error="no daemon")
    assert [(run.policy, run.repetition) for run in runs(records)] == [("gpushare", 0), ("mps-equal", 1)]
    assert outcomes(records) == {
        "gpushare": Outcomes(1, 0, 0, 0),
        "mps-equal": Outcomes(1, 1, 0, 1),
        "mps-pairs": Outcomes(0, 1, 0, 2),
        "hard-caps": Outcomes(0, 1, 0, 2),
    }
    equal = rows(table(records))["MPS, 4 equal parts"]
    assert (equal["runs"], equal["failed runs"], equal["failed jobs"]) == ("1", "1", "1")
    assert equal["makespan, s"] == "8.0"  # and not the mean with that of a run whose job died
    assert equal["makespan of ours over its"] == ""
    assert rows(table(records))["MPS, uncapped pairs"]["makespan, s"] == ""


def test_a_run_that_its_patience_cut_is_a_makespan_of_at_least_so_long(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_session(records)
    add_alone(records)
    well = [training(0.0, 0.0, [(10.0, 8)])]
    cut = {"state": "cut", "cut_by": "patience", "makespan_over": 40.0}
    for repetition in range(2):
        add_run(records, "gpushare", well, repetition)
    add_run(records, "mps-equal", well, 0)
    add_run(records, "mps-equal", [], 1, **cut)
    add_run(records, "fifo", [], 0, state="cut", cut_by="budget")
    add_run(records, "fifo", well, 0)
    add_run(records, "mps-pairs", [], 0, **cut)
    found = runs(records)
    assert [run.policy for run in found] == ["gpushare", "gpushare", "mps-equal", "fifo"]
    cells = rows(table(records))
    assert cells["MPS, 4 equal parts"]["makespan, s"] == "≥ 24.0"
    assert cells["MPS, 4 equal parts"]["makespan of ours over its"] == "≤ 0.60"
    assert cells["MPS, uncapped pairs"]["makespan, s"] == "≥ 40.0"
    assert cells["exclusive, first come first served"]["makespan, s"] == "8.0"
    assert [cells[name]["cut runs"] for name in ("MPS, 4 equal parts", "gpushare")] == ["1", "0"]
    ours, equal = (makespans(records, found, name) for name in ("gpushare", "mps-equal"))
    assert ratio_of(equal, ours).sign == mean_of(equal).sign == "≥ "
    assert ratio_of(equal, equal).interval is None  # of two cut runs nobody knows which is longer
    assert cells["exclusive, first come first served"]["cut runs"] == "0"  # it was made again
    again = "made again and in no figure of this table: exclusive, first come first served 1."
    assert again in table(records)


def test_a_run_that_its_session_cut_counts_as_cut_until_it_is_made_again(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_session(records)
    add_alone(records)
    well = [training(0.0, 0.0, [(10.0, 8)])]
    add_run(records, "gpushare", well, 0)
    add_run(records, "gpushare", [], 1, state="cut", cut_by="budget")
    assert outcomes(records)["gpushare"] == Outcomes(1, 0, 1, 0)
    assert "made again" not in table(records)
    add_run(records, "gpushare", well, 1)
    assert outcomes(records)["gpushare"] == Outcomes(2, 0, 0, 0, again=1)
    mean = mean_of(makespans(records, runs(records), "gpushare")).interval
    assert mean is not None
    assert (mean.mean, mean.number) == (8.0, 2)


def test_a_job_that_was_taken_away_worked_in_vain_from_its_first_start_on(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_session(records)
    add_alone(records)
    again = training(0.0, 10.0, [(10.0, 10)]) | {"restarts": 2, "first_started": 4.0}
    add_run(records, "gpushare", [again])
    add_run(records, "fifo", [again | {"restarts": 0, "first_started": None}])
    anew, smooth = (run for run in runs(records))
    assert (smooth.below_ratio, smooth.jobs[0].slowdown) == (0.0, pytest.approx(1.0))
    assert anew.jobs[0].below_seconds == pytest.approx(6.0)
    assert anew.below_ratio == pytest.approx(6.0 / 16.0)
    assert anew.jobs[0].slowdown == pytest.approx(1.6)
    assert anew.makespan == smooth.makespan
    assert rows(table(records))["gpushare"]["restarts"] == "2.0"


def test_makespans_are_compared_within_a_repetition(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records)
    for repetition, (ours, theirs) in enumerate([(4, 8), (6, 8)]):
        add_run(records, "gpushare", [training(0.0, 0.0, [(10.0, ours)])], repetition)
        add_run(records, "fifo", [training(0.0, 0.0, [(10.0, theirs)])], repetition)
    add_run(records, "gpushare", [training(0.0, 0.0, [(10.0, 100)])], 2)  # the other one is missing
    found = runs(records)
    ratio = ratio_of(makespans(records, found, "gpushare"), makespans(records, found, "fifo")).interval
    assert ratio is not None
    assert (ratio.mean, ratio.number) == (pytest.approx(0.625), 2)


def test_windows_of_a_log_with_gaps_are_straight_between_its_lines() -> None:
    found = windows([[0.0, 0, 0.0], [5.0, 50, 5.0]], RATE)
    assert [(w.begin, w.end) for w in found] == [(0.0, 2.0), (2.0, 5.0)]
    assert [w.progress for w in found] == pytest.approx([1.0, 1.0])
    assert windows([[1.0, 0, 0.0]], RATE) == ()
    assert [w.progress for w in windows([[0.0, 0, 0.0], [3.0, 0, 0.0]], RATE)] == [None]


def test_a_line_that_was_cut_off_is_dropped_and_the_file_goes_on(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_alone(records)
    with records.path.open("a") as file:
        file.write('{"record":"run","pol')
    again = Records.open(tmp_path)
    assert again.lines == records.lines
    add_run(again, "fifo", [training(0.0, 0.0, [(10.0, 4)])])
    assert Records.open(tmp_path).is_settled("fifo", 0)
    assert not Records.open(tmp_path).is_settled("fifo", 1)


def test_the_report_has_a_row_for_each_policy_and_a_figure(tmp_path: Path) -> None:
    records = Records.open(tmp_path)
    add_session(records)
    assert "No run is complete" in table(records)
    add_alone(records)
    records.add("signatures", known=["train"], source="table")
    for repetition in range(2):
        for policy, seconds in (("fifo", 8), ("gpushare", 6)):
            serve = serving(0.0, 1.0, 5.0, [10.0] * 200, work=2.0)
            add_run(records, policy, [training(0.0, 0.0, [(10.0, seconds)]), serve], repetition)
    text = write_report(tmp_path)
    exclusive = rows(text)["exclusive, first come first served"]
    assert (exclusive["runs"], exclusive["makespan of ours over its"]) == ("2", "0.75 ± 0.00")
    assert rows(text)["gpushare"]["makespan, s"] == "6.0 ± 0.0"
    assert "without Kubernetes" in text
    assert "Signatures: the H200 table's, cap curves too (1 programs)." in text
    assert (tmp_path / "sharing.png").stat().st_size > 10_000
