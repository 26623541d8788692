"""The page of what sharing an H200 is worth says what the records say."""

import re
import shutil
from pathlib import Path

import pytest
from bench.figures import percentile
from bench.sharing import accuracy
from bench.sharing.analysis import RunFigures, runs
from bench.sharing.policies import POLICIES
from bench.sharing.records import Records
from bench.sharing.report import table

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data/sharing"
PAGE = (ROOT / "docs/measurements/sharing-h200.md").read_text().replace("**", "")
TITLES = {
    "fifo": "exclusive",
    "time-slicing": "time slicing, 4 replicas",
    "mps-equal": "MPS, 4 equal parts",
    "mps-pairs": "MPS, uncapped pairs",
    "hard-caps": "shares as hard caps",
    "gpushare": "gpushare",
}


@pytest.fixture
def twelve(tmp_path: Path) -> Records:
    """A copy: what reads the records cuts off a last line that is not whole."""
    return opened("h200-12-jobs", tmp_path)


def opened(name: str, where: Path) -> Records:
    shutil.copytree(DATA / name, where / name)
    return Records.open(where / name)


def row(run: RunFigures) -> str:
    assert run.joules is not None
    slow = [job.slowdown for job in run.jobs]
    p99 = sum(run.p99.values()) / len(run.p99)
    cells = (
        f"{run.makespan:.0f}",
        f"{run.summed_progress:.2f}",
        f"{sum(run.completions) / len(run.completions):.0f}, {percentile(run.completions, 0.9):.0f}",
        f"{sum(slow) / len(slow):.2f}, {max(slow):.2f}",
        f"{100 * run.below_ratio:.1f}",
        f"{p99:.0f}" if p99 > 100 else f"{p99:.2f}",
        "none" if run.beside_latency is None else f"{run.beside_latency:.2f}",
        f"{run.joules / 1000:.1f}",
    )
    return f"| {TITLES[run.policy]} | {' | '.join(cells)} |"


def test_each_policys_row_of_the_twelve_jobs_is_what_the_records_say(twelve: Records) -> None:
    found = runs(twelve)
    assert {run.policy for run in found} == set(TITLES) - {"fifo"}
    for run in found:
        assert row(run) in PAGE, row(run)
        assert all(job.slowdown > 0 for job in run.jobs)
        assert len(run.jobs) == 12


def test_what_is_said_of_the_same_jobs_as_pods_is_what_the_records_say(tmp_path: Path) -> None:
    records = opened("h200-12-pods", tmp_path)
    section = PAGE.split("## The same twelve jobs as pods")[1].split("\n## ")[0]
    found = runs(records)
    assert {run.policy for run in found} == set(TITLES)
    for run in found:
        assert row(run) in section, row(run)
    (ours,) = [run for run in found if run.policy == "gpushare"]
    for run in found:
        if run is not ours:
            assert re.search(rf"\b{ours.makespan / run.makespan:.2f}( and [0-9.]+)?\s+times", section), run.policy
    report = "\n".join(accuracy.report(accuracy.accuracy(records)))
    for line in section.split("\n### ")[0].splitlines():
        if line.startswith(("| predicted", "| inferred", "| expected")):
            _, _, count, mean, _, bias, high, _ = (cell.strip() for cell in line.split("|"))
            assert re.search(rf"\| {count} \| {mean} \| [^|]*\| {re.escape(bias)} \| {high} \|", report), line


def test_what_is_said_of_a_new_cluster_is_what_the_records_say(tmp_path: Path) -> None:
    section = PAGE.split("### On a new cluster")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in section.splitlines() if line[:2] == "| "]
    for column, name in ((1, "h200-12-cold-before"), (2, "h200-12-cold")):
        records = opened(name, tmp_path)
        (run,) = runs(records)
        found = accuracy.accuracy(records)
        slow = [job.slowdown for job in run.jobs]
        told = {words[0].split(":")[0]: words[column] for words in cells}
        assert told["makespan, s; summed progress"] == f"{run.makespan:.0f}; {run.summed_progress:.2f}"
        assert told["slowdown, mean and largest"] == f"{sum(slow) / len(slow):.2f}, {max(slow):.2f}"
        assert "gpushare began without a signature" in table(records)
        assert told["below the promise"] == f"{100 * run.below_ratio:.1f}%"
        for what, values in (("predicted", found.predicted), ("inferred", found.inferred)):
            errors = [abs(each.error) for each in values if each.beside]
            figure = f"{len(errors)}, {sum(errors) / len(errors):.3f}"
            assert told[f"{what}, beside others"].startswith(figure), figure


def test_errors_of_prediction_and_inference_are_what_the_records_say(twelve: Records) -> None:
    report = "\n".join(accuracy.report(accuracy.accuracy(twelve)))
    told = re.findall(
        r"^\| ((?:predicted|inferred|expected)[^|]*) \| (\d+) \| (\S+) \| [^|]*\| (\S+) \| (\S+) \|$",
        report,
        re.MULTILINE,
    )
    assert len(told) == 4
    for _, *figures in told:
        count, mean, bias, high = figures
        assert re.search(rf"\| {count} \| {mean} \| [0-9.]* ?\| {re.escape(bias)} \| {high} \|", PAGE), figures


@pytest.mark.parametrize("day", ["1123", "1124"])
def test_what_is_said_of_the_forty_jobs_is_what_the_records_say(day: str, tmp_path: Path) -> None:
    records = opened(f"h200-40-jobs-{day}", tmp_path)
    (run,) = runs(records)
    found = accuracy.accuracy(records)
    predicted = [abs(each.error) for each in found.predicted if each.beside]
    inferred = [abs(each.error) for each in found.inferred if each.beside]
    section = PAGE.split("## Longer jobs" if day == "1124" else "## Predicted and inferred")[1].split("\n## ")[0]
    for figure in (
        f"{run.makespan:.0f} s",
        f"{run.summed_progress:.2f}",
        f"{sum(job.slowdown for job in run.jobs) / len(run.jobs):.2f}",
        f"{100 * run.below_ratio:.1f}%",
        f"{sum(predicted) / len(predicted):.3f}",
        f"{sum(inferred) / len(inferred):.3f}",
        f"{found.sets} sets",
    ):
        assert figure in section, figure


def test_the_report_of_the_records_names_their_machine_and_each_policy(twelve: Records) -> None:
    text = table(twelve)
    assert "12 jobs of 10 programs on NVIDIA H200" in text
    assert all(POLICIES[name].title in text for name in TITLES if name != "fifo")
