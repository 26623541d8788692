"""The page of what sharing an H200 is worth says what the records say."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from bench.figures import percentile
from bench.sharing import accuracy, analysis
from bench.sharing.analysis import RunFigures, makespans, ratio_of, runs
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


def mean_row(policy: str, found: Sequence[RunFigures]) -> str:
    """The row of a policy's means, with each repetition's makespan."""
    slow = [[job.slowdown for job in run.jobs] for run in found]
    p99 = fmean(fmean(run.p99.values()) for run in found)
    beside = [run.beside_latency for run in found if run.beside_latency is not None]
    completion = (
        f"{fmean(fmean(run.completions) for run in found):.0f}",
        f"{fmean(percentile(run.completions, 0.9) for run in found):.0f}",
    )
    cells = (
        f"{fmean(run.makespan for run in found):.0f}: {', '.join(f'{run.makespan:.0f}' for run in found)}",
        f"{fmean(run.summed_progress for run in found):.2f}",
        ", ".join(completion),
        f"{fmean(map(fmean, slow)):.2f}, {fmean(map(max, slow)):.2f}",
        f"{100 * fmean(run.below_ratio for run in found):.1f}",
        f"{p99:.0f}" if p99 > 100 else f"{p99:.2f}",
        f"{fmean(beside):.2f}" if beside else "none",
        f"{fmean((run.joules or 0.0) / 1000 for run in found):.1f}",
    )
    return f"| {TITLES[policy]} | {' | '.join(cells)} |"


def by_policy(found: Sequence[RunFigures]) -> dict[str, list[RunFigures]]:
    return {name: [run for run in found if run.policy == name] for name in TITLES}


def test_what_is_said_of_the_same_jobs_as_pods_is_what_the_records_say(tmp_path: Path) -> None:
    records = opened("h200-12-pods", tmp_path)
    section = PAGE.split("## The same twelve jobs as pods")[1].split("\n## ")[0]
    found = runs(records)
    each = by_policy(found)
    assert {name: len(some) for name, some in each.items()} == dict.fromkeys(TITLES, 3) | {"fifo": 4}
    assert "made again and in no figure of this table: exclusive, first come first served 1, gpushare 1" in table(
        records
    )
    for policy, some in each.items():
        assert mean_row(policy, some) in section, mean_row(policy, some)
    spans = makespans(records, found, "gpushare")
    for policy, words in {
        "time-slicing": "makespan over that of time slicing",
        "mps-equal": "over that of equal parts",
        "mps-pairs": "over that of uncapped pairs",
        "hard-caps": "over that of hard caps",
        "fifo": "over that of exclusive use",
    }.items():
        ratio = ratio_of(spans, makespans(records, found, policy)).interval
        assert ratio is not None
        assert f"| {words} | {ratio.mean:.2f} |" in section, ratio
    ours = each["gpushare"]
    assert f"| job-seconds below the promise | {100 * fmean(run.below_ratio for run in ours):.1f}% |" in section
    assert f"latency over alone | {fmean(fmean(run.p99.values()) for run in ours):.2f} |" in section
    report = "\n".join(accuracy.report(accuracy.accuracy(records)))
    for line in section.split("\n### ")[0].splitlines():
        if line.startswith(("| predicted", "| inferred", "| expected")):
            _, _, count, mean, _, bias, high, _ = (cell.strip() for cell in line.split("|"))
            assert re.search(rf"\| {count} \| {mean} \| [^|]*\| {re.escape(bias)} \| {high} \|", report), line


@pytest.mark.parametrize(
    ("name", "title", "shares"),
    [
        ("h200-12-small-shares", "A third of the shares, as pods", range(10, 20)),
        ("h200-40-pods", "Forty jobs as pods", range(10, 101)),
        ("h200-40-pods-1130", "Forty jobs as pods, once more", range(10, 101)),
    ],
)
def test_what_is_said_of_one_repetition_as_pods_is_what_the_records_say(
    tmp_path: Path, name: str, title: str, shares: range
) -> None:
    records = opened(name, tmp_path)
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    found = runs(records)
    assert {run.policy for run in found} >= set(TITLES) - {"fifo"}
    bare = section.replace("**", "")
    for run in found:
        assert row(run).replace("**", "") in bare, row(run)
    (ours,) = (run for run in found if run.policy == "gpushare")
    words = {
        "time-slicing": "time slicing",
        "mps-equal": "equal parts",
        "mps-pairs": "uncapped pairs",
        "hard-caps": "hard caps",
        "fifo": "exclusive use",
    }
    for run in found:
        if run is not ours:
            policy = words[run.policy]
            assert f"over that of {policy} | {ours.makespan / run.makespan:.2f} |" in section, run.policy
    assert f"job-seconds below the promise | {100 * ours.below_ratio:.1f}% |" in section
    report = "\n".join(accuracy.report(accuracy.accuracy(records)))
    for what, error in re.findall(r"\| (predicted|inferred),[^|]*\| ([0-9.]+) \|", section):
        assert re.search(rf"\| {what}, each [^|]*beside others \| \d+ \| {error} \|", report), what
    assert {job["share"] for job in records.of("job")} <= set(shares)


def test_what_is_said_of_gaps_between_forty_jobs_is_what_the_records_say(tmp_path: Path) -> None:
    section = PAGE.split("## Forty jobs as pods\n")[1].split("\n## ")[0]
    jobs = jobs_of(opened("h200-40-pods", tmp_path))
    for began, words in (("ready", "no job was at work in "), ("started", "none on the GPU at all in ")):
        gaps = {policy: round(idle_seconds(each, began)) for policy, each in jobs.items()}
        (numbers,) = re.findall(rf"{words}([^)]*)\)", section.replace("\n", " "))
        others = [gaps[name] for name in ("hard-caps", "mps-pairs", "time-slicing", "mps-equal", "fifo")]
        whole = began == "ready"
        expected = [gaps["gpushare"], *([242] if whole else []), *others, *([429] if whole else [])]
        assert list(map(int, re.findall(r"\d+", numbers))) == expected
    starts = [job["ready"] - job["started"] for job in jobs["gpushare"]]
    assert f"a pod takes {percentile(starts, 0.5):.1f} s in the median" in section


def test_what_is_said_of_gaps_between_forty_jobs_two_days_later_is_what_the_records_say(tmp_path: Path) -> None:
    section = PAGE.split("## Forty jobs as pods, once more\n")[1].split("\n## ")[0].replace("\n", " ")
    jobs = jobs_of(opened("h200-40-pods-1130", tmp_path))
    gaps = {policy: round(idle_seconds(each, "ready")) for policy, each in jobs.items()}
    others = [gaps[name] for name in ("hard-caps", "mps-pairs", "time-slicing", "mps-equal", "fifo")]
    (numbers,) = re.findall(r"no job was at work in ([^)]*)\)", section)
    assert list(map(int, re.findall(r"\d+", numbers))) == [gaps["gpushare"], 170, *others, 370]
    starts = [job["ready"] - job["started"] for job in jobs["gpushare"]]
    assert f"starts of {percentile(starts, 0.5):.1f} s for 3.7 s" in section


def jobs_of(records: Records) -> dict[str, list[dict[str, Any]]]:
    """Return the jobs' records by policy."""
    jobs: dict[str, list[dict[str, Any]]] = {}
    for job in records.of("job"):
        jobs.setdefault(job["run"].split("-", 1)[1].rsplit("-", 1)[0], []).append(job)
    return jobs


def idle_seconds(jobs: Sequence[dict[str, Any]], began: str) -> float:
    """Seconds until the last end in which no job lies between `began` and its end."""
    idle = busy_until = 0.0
    for start, end in sorted((job[began], job["ended"]) for job in jobs):
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    return idle


def test_what_is_said_of_promises_relative_to_whole_jobs_is_what_the_records_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = opened("h200-12-pods", tmp_path)
    whole = {
        (line["session"], line["program"]): analysis.rate_over_whole_jobs(records, line, line["program"])
        for line in records.of("alone")
    }
    short = {(line["session"], line["program"]): line["rate"] for line in records.of("alone")}
    ratios = [rate / each for key, rate in short.items() if (each := whole[key]) is not None]
    assert len(ratios) == len(short) == 50
    assert f"That rate is {min(ratios):.2f} (lattice Boltzmann) to {max(ratios):.2f} times (unet3d)" in PAGE
    nowhere = dict.fromkeys(((None, program) for _, program in short), 0.0)
    monkeypatch.setattr(analysis, "_rates", lambda _: nowhere | whole)
    below = {
        name: f"{100 * fmean(run.below_ratio for run in found):.1f}"
        for name, found in by_policy(runs(records)).items()
    }
    order = ("fifo", "mps-pairs", "gpushare", "hard-caps", "mps-equal", "time-slicing")
    (sentence,) = re.findall(r"Relative to whole jobs it\s+has\s[^:]*", PAGE)
    assert re.findall(r"[0-9]+\.[0-9]", sentence) == [below[name] for name in order]


def test_what_is_said_of_the_faults_is_what_the_records_say(tmp_path: Path) -> None:
    sessions = [opened("h200-12-pods", tmp_path / "pods"), opened("h200-12-faults", tmp_path / "faults")]
    section = PAGE.split("### Faults during the trace")[1].split("\n### ")[0]
    told = [[cell.strip() for cell in line.split("|")[2:-1]] for line in section.splitlines() if "fault-" in line]
    rows = [row for row in told if len(row) == 7]
    reported = [line for each in sessions for line in table(each).splitlines() if "| fault-" in line]
    found = [fault for each in sessions for fault in each.of("fault")]
    assert len(rows) == len(reported) == len(found) == 10
    for row, line, fault in zip(rows, reported, found, strict=True):
        _, name, at, present, fell, unseen, beside, _, back, _ = (cell.strip() for cell in line.split("|")[1:-1])
        assert row[:2] == [name, at]
        assert [len(re.findall("job-", row[2])), len(re.findall("job-", row[3]))] == [
            int(present),
            int(fell) + int(unseen),
        ]
        assert set(re.findall(r"job-\d+", row[3])) == {*fault["fell"], *fault["fell_unseen"]}
        assert row[4:6] == [beside, f"{back}: met"]
        known = [seconds for seconds in fault["told_after"].values() if seconds is not None]
        assert row[6].startswith(f"{max(known):.1f}")
        assert ("told nothing" in row[6]) == bool(fault["fell_unseen"])
    faulted = [run for each in sessions for run in runs(each) if run.policy == "gpushare-faults"]
    assert [(len(run.jobs), run.restarts, f"{run.makespan:.0f}") for run in faulted] == [
        (12, 1, "232"),
        (12, 6, "276"),
        (12, 6, "270"),
    ]
    assert all(f"within {run.makespan:.0f} s" in re.sub(r"\s+", " ", section) for run in faulted)


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


def test_how_long_promises_stay_broken_is_what_the_records_say(tmp_path: Path) -> None:
    section = PAGE.split("How long a promise stays broken")[1].split("\n## ")[0]
    for policy, some in by_policy(runs(opened("h200-12-pods", tmp_path))).items():
        spells = [spell for run in some for job in run.jobs for spell in job.below_spells]
        p50 = fmean(fmean(run.p50.values()) for run in some)
        programs = [
            ", ".join(f"{run.p50[name]:.0f}" if run.p50[name] > 100 else f"{run.p50[name]:.2f}" for run in some)
            for name in ("chat-app-bf16-b8", "convnext-infer-bf16-b48")
        ]
        cells = (
            str(len(spells)),
            f"{max(spells):.1f}",
            str(sum(spell > 10 for spell in spells)),
            f"{p50:.0f}" if p50 > 100 else f"{p50:.2f}",
            *programs,
        )
        assert f"| {TITLES[policy]} | {' | '.join(cells)} |" in section, cells
    for name, words in {
        "h200-12-small-shares": "four, 4.0 s at the longest",
        "h200-12-jobs": "one of eleven took 12.0 s",
        "h200-12-cold": "three of 18 took longer than 10 s, 27.9 at the longest",
    }.items():
        (ours,) = (run for run in runs(opened(name, tmp_path)) if run.policy == "gpushare")
        spells = [spell for job in ours.jobs for spell in job.below_spells]
        counted = {4: "four", 11: "eleven"}.get(len(spells), str(len(spells)))
        assert counted in words
        assert f"{max(spells):.1f}" in words
        assert words in section


def test_a_stretch_below_the_promise_ends_where_it_is_made_again_and_not_in_a_window_without_work() -> None:
    made = [0.4, None, 0.4, 0.6, 0.4, 0.6, None]
    windows = tuple(analysis.Window(2.0 * at, 2.0 * at + 2, each) for at, each in enumerate(made))
    job = analysis.JobFigures(1, "p", "throughput", 0.5, 0, 0, 0, 14, 12, 1.5, windows, (), 0)
    assert job.below_spells == [4.0, 2.0]
    assert job.below_seconds == 6.0
