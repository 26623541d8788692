"""Compute figures from records; pure, without files or clocks.

- *Makespan*: from the first job's arrival to the last one's end. *Completion*: from a job's arrival to its end.
- *Alone* is the program's rate alone on the GPU in the same session, or the mean over all where that lacks it.
- *Work* of a job: its iterations over that rate; of a serving job, its requests over the rate at which they came.
  *Summed progress*: the work of all jobs over the makespan.
- *Progress* over a window: iterations over seconds of work, relative to alone. A serving job works while it
  answers: one that waits for requests is not slow, and one whose answers take twice as long has a progress of 0.5.
- *Slowdown* of a job: its seconds of work over what they would have been alone.
- *Below the promise*: windows of two seconds (two periods of the throttle) in which a job's progress is below its
  promise by more than 0.02, in job-seconds from `ready` to `end`.
- A job that was taken away and started again worked from its first start on, with no progress until its last
  `ready`.

A run with a failed job is in no mean: its other jobs had more of the GPU. A run that its own patience cut is in
none either, but its makespan is known to be at least that long. `outcomes` counts both.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.figures import Interval, interval, percentile
from bench.sharing.policies import FIFO
from bench.sharing.records import BUDGET, COMPLETE, CUT, FAILED, PATIENCE, Record, Records

WINDOW_SECONDS: Final = 2.0
TOLERANCE: Final = 0.02
LATENCY: Final = "latency"


@dataclass(frozen=True, slots=True)
class Window:
    """A job's progress over a stretch of its run."""

    begin: float
    end: float
    progress: float | None


@dataclass(frozen=True)
class JobFigures:
    """One job of one run; seconds, and ratios to alone.

    Attributes:
        began: its `ready`; of a job that was taken away and started again, its first start.
    """

    number: int
    program: str
    job_class: str
    promise: float
    arrives: float
    began: float
    ready: float
    ended: float
    work_seconds: float
    slowdown: float
    windows: tuple[Window, ...]
    ms: tuple[float, ...]
    restarts: int

    @property
    def completion(self) -> float:
        """Return the seconds from its arrival to its end."""
        return self.ended - self.arrives

    @property
    def below_seconds(self) -> float:
        """Return the seconds below its promise."""
        return sum(self.below_spells)

    @property
    def below_spells(self) -> list[float]:
        """Return how many seconds each stretch below its promise lasted; windows without work end none."""
        spells: list[float] = []
        is_below = False
        for each in self.windows:
            if each.progress is None:
                continue
            was_below, is_below = is_below, each.progress < self.promise - TOLERANCE
            if is_below:
                seconds = each.end - each.begin
                spells = [*spells[:-1], spells[-1] + seconds] if was_below else [*spells, seconds]
        return spells


@dataclass(frozen=True)
class RunFigures:
    """One policy in one repetition.

    Attributes:
        p50, p99: by program with jobs of class latency: over the same program's alone. all_p50, all_p99: of every
            serving program, of whatever class.
        beside_latency: mean progress of throughput jobs while a latency job ran.
    """

    policy: str
    repetition: int
    makespan: float
    summed_progress: float
    below_ratio: float
    joules: float | None
    jobs: tuple[JobFigures, ...]
    p50: Mapping[str, float] = field(default_factory=dict)
    p99: Mapping[str, float] = field(default_factory=dict)
    all_p50: Mapping[str, float] = field(default_factory=dict)
    all_p99: Mapping[str, float] = field(default_factory=dict)
    beside_latency: float | None = None

    @property
    def completions(self) -> list[float]:
        """Return completion times by number."""
        return [job.completion for job in self.jobs]

    @property
    def restarts(self) -> int:
        """Return how often a job was taken away and began again."""
        return sum(job.restarts for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Number of a policy's runs by outcome.

    Attributes:
        counted: in the means.
        failed: with a failed job, or broken off by an error.
        cut: before their last job's end, by their own patience or by the session's budget, and not made again.
        failed_jobs: of all runs.
        again: cut by the session's budget, and made again as a whole by a later session.
    """

    counted: int
    failed: int
    cut: int
    failed_jobs: int
    again: int = 0


@dataclass(frozen=True, slots=True)
class Makespan:
    """Of one run; `is_least`: it was cut, and would have taken at least that long."""

    seconds: float
    is_least: bool = False


@dataclass(frozen=True, slots=True)
class Bounded:
    """Mean of values of which some are only bounded: `sign` is then ≥ or ≤, and there is no interval."""

    interval: Interval | None
    sign: str = ""


def runs(records: Records) -> list[RunFigures]:
    """Return the figures of every complete run whose jobs all ended well; the others do not count."""
    rates = _rates(records)
    complete = countable(records)
    alone_ms: dict[str, list[float]] = {}
    for line in records.of("alone"):
        alone_ms.setdefault(line["program"], []).extend(line["ms"])
    for run in complete:
        if run["policy"] == FIFO.name:  # one job at a time: its requests are answered by a GPU of their own too
            for job in records.of("job", run=run["name"], status=0):
                alone_ms.setdefault(job["program"], []).extend(job["ms"])
    return [_run(run, jobs, rates, alone_ms) for run in complete if (jobs := _jobs(records, run))]


def countable(records: Records) -> list[Record]:
    """Return the complete runs whose jobs all ended well."""
    return [run for run in records.of("run", state=COMPLETE) if not _failed_jobs(records, run)]


def rate_alone(records: Records, run: Record, program: str) -> float:
    """Return a program's iterations per second of work alone, in the run's session where it was measured there."""
    rates = _rates(records)
    return rates.get((run["session"], program), rates[None, program])


def rate_over_whole_jobs(records: Records, run: Record, program: str) -> float | None:
    """Return a program's rate over its whole jobs under exclusive use, in the run's session.

    One job at a time has the GPU there, so of a run that was cut the jobs that ended count as well.

    Returns:
        Iterations per second of work; None where no such job ended.
    """
    count = worked = 0.0
    for alone in records.of("run", session=run["session"], policy=FIFO.name):
        if alone["state"] not in (COMPLETE, CUT):
            continue
        for job in records.of("job", run=alone["name"], program=program, status=0):
            if job["ended"] is not None and job["progress"]:
                count += job["progress"][-1][1]
                worked += job["progress"][-1][2]
    return count / worked if count > 0 and worked > 0 else None


def outcomes(records: Records) -> dict[str, Outcomes]:
    """Return what became of all runs, by policy."""
    by_policy: dict[str, list[Record]] = {}
    for run in records.of("run"):
        by_policy.setdefault(run["policy"], []).append(run)
    found = {}
    for policy, of_policy in by_policy.items():
        failed_jobs = [_failed_jobs(records, run) for run in of_policy]
        complete = [run["state"] == COMPLETE for run in of_policy]
        cut = [run for run in of_policy if run["state"] == CUT]
        by_session = [run for run in cut if run.get("cut_by") == BUDGET]
        again = [run for run in by_session if records.is_settled(policy, run["repetition"])]
        failed = [run["state"] == FAILED or number > 0 for run, number in zip(of_policy, failed_jobs, strict=True)]
        found[policy] = Outcomes(
            counted=sum(well and not bad for well, bad in zip(complete, failed, strict=True)),
            failed=sum(failed),
            cut=len(cut) - len(again),
            failed_jobs=sum(failed_jobs),
            again=len(again),
        )
    return found


def makespans(records: Records, found: Iterable[RunFigures], policy: str) -> dict[int, Makespan]:
    """Return a policy's makespans by repetition, of the runs that count and of those that their patience cut."""
    cut = records.of("run", policy=policy, state=CUT, cut_by=PATIENCE)
    least = {run["repetition"]: Makespan(run["makespan_over"], is_least=True) for run in cut}
    return least | {run.repetition: Makespan(run.makespan) for run in found if run.policy == policy}


def mean_of(spans: Mapping[int, Makespan]) -> Bounded:
    """Return the mean makespan; at least so much where a run was cut."""
    return _bounded([(span.seconds, span.is_least, False) for span in spans.values()])


def ratio_of(one: Mapping[int, Makespan], other: Mapping[int, Makespan]) -> Bounded:
    """Return one policy's makespan over another's, repetition by repetition."""
    return _bounded(
        [
            (span.seconds / other[repetition].seconds, span.is_least, other[repetition].is_least)
            for repetition, span in one.items()
            if repetition in other
        ]
    )


def _bounded(values: Sequence[tuple[float, bool, bool]]) -> Bounded:
    """Return the mean of (value, whether it may be more, whether it may be less), bounded accordingly."""
    found = interval([value for value, _, _ in values])
    more, less = any(each for _, each, _ in values), any(each for _, _, each in values)
    if found is None or (more and less):
        return Bounded(None)
    if more or less:
        return Bounded(Interval(found.mean, None, found.number), "≥ " if more else "≤ ")
    return Bounded(found)


def windows(progress: Sequence[Sequence[float]], rate: float) -> tuple[Window, ...]:
    """Cut a progress log into windows of two seconds; what is left at the end joins the last one.

    Args:
        progress: (seconds, iterations, seconds of work), rising.
        rate: alone, iterations per second of work.
    """
    if len(progress) < 2 or progress[-1][0] <= progress[0][0]:
        return ()
    begin, end = progress[0][0], progress[-1][0]
    number = max(1, int((end - begin) / WINDOW_SECONDS))
    edges = [begin + WINDOW_SECONDS * index for index in range(number)] + [end]
    points = [progress_at(progress, edge) for edge in edges]
    found = []
    for index, ((count, busy), (later, over)) in enumerate(itertools.pairwise(points)):
        worked = over - busy
        value = (later - count) / worked / rate if worked > 1e-6 else None
        found.append(Window(edges[index], edges[index + 1], value))
    return tuple(found)


def progress_at(progress: Sequence[Sequence[float]], moment: float) -> tuple[float, float]:
    """Return iterations and seconds of work by a moment, straight between what was logged."""
    before = progress[0]
    for point in progress[1:]:
        if point[0] >= moment:
            part = (moment - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 1.0
            return before[1] + part * (point[1] - before[1]), before[2] + part * (point[2] - before[2])
        before = point
    return before[1], before[2]


def _rates(records: Records) -> dict[tuple[int | None, str], float]:
    """Return rates alone by session and program, and under None the mean over sessions."""
    found: dict[tuple[int | None, str], float] = {}
    by_program: dict[str, list[float]] = {}
    for line in records.of("alone"):
        found[line["session"], line["program"]] = line["rate"]
        by_program.setdefault(line["program"], []).append(line["rate"])
    return {**found, **{(None, program): statistics.fmean(values) for program, values in by_program.items()}}


def _jobs(records: Records, run: Record) -> list[Record]:
    return list(records.of("job", run=run["name"]))


def _failed_jobs(records: Records, run: Record) -> int:
    """Return how many jobs of a run failed; of one that broke off, all."""
    return max(run["failed"], sum(job["status"] != 0 or job["ended"] is None for job in _jobs(records, run)))


def _run(
    run: Record,
    jobs: Sequence[Record],
    rates: Mapping[tuple[int | None, str], float],
    alone_ms: Mapping[str, Sequence[float]],
) -> RunFigures:
    figures = []
    for job in sorted(jobs, key=lambda each: each["number"]):
        rate = rates.get((run["session"], job["program"]), rates[None, job["program"]])
        figures.append(_job(job, rate))
    makespan = max(job.ended for job in figures) - min(job.arrives for job in figures)
    seconds = sum(job.ended - job.began for job in figures)
    latency = [job for job in figures if job.job_class == LATENCY]
    serving = [job for job in figures if job.ms]
    return RunFigures(
        run["policy"],
        run["repetition"],
        makespan,
        sum(job.work_seconds for job in figures) / makespan,
        sum(job.below_seconds for job in figures) / seconds,
        run["joules"],
        tuple(figures),
        p50=_latency(latency, alone_ms, 0.5),
        p99=_latency(latency, alone_ms, 0.99),
        all_p50=_latency(serving, alone_ms, 0.5),
        all_p99=_latency(serving, alone_ms, 0.99),
        beside_latency=_beside(figures, latency),
    )


def _job(job: Mapping[str, Any], rate: float) -> JobFigures:
    progress = job["progress"]
    ready = job["ready"]
    began = job.get("first_started")  # only of a job that started again
    lost = 0.0 if began is None else max(0.0, ready - began)
    before = windows([[ready - lost, 0.0, 0.0], [ready, 0.0, lost]], rate)
    return JobFigures(
        job["number"],
        job["program"],
        job["class"],
        job["promise"],
        job["arrives"],
        ready - lost,
        ready,
        job["ended"],
        job["count"] / (job["rate"] or rate),
        (lost + progress[-1][2]) * rate / job["count"],
        (*before, *windows(progress, rate)),
        tuple(job["ms"]),
        job.get("restarts", 0),
    )


def _latency(jobs: Sequence[JobFigures], alone_ms: Mapping[str, Sequence[float]], part: float) -> dict[str, float]:
    """Return a percentile of all requests by program, over the same program's alone."""
    by_program: dict[str, list[float]] = {}
    for job in jobs:
        by_program.setdefault(job.program, []).extend(job.ms)
    return {
        program: percentile(ms, part) / percentile(alone_ms[program], part)
        for program, ms in sorted(by_program.items())
        if ms and alone_ms.get(program)
    }


def _beside(jobs: Sequence[JobFigures], latency: Sequence[JobFigures]) -> float | None:
    spans = [(job.ready, job.ended) for job in latency]
    weighed = [
        (window.progress, window.end - window.begin)
        for job in jobs
        if job.job_class != LATENCY
        for window in job.windows
        if window.progress is not None and any(begin <= window.begin and window.end <= end for begin, end in spans)
    ]
    seconds = sum(weight for _, weight in weighed)
    return sum(value * weight for value, weight in weighed) / seconds if seconds else None
