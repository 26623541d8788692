"""From records to figures: nothing here reads a file or a clock.

- *Makespan*: from the first job's arrival to the last one's end. *Completion*: from a job's arrival to its end.
- *Alone* is the program's rate alone on the GPU in the same session, or the mean over all where that lacks it.
- *Work* of a job: its iterations over that rate; of a serving job, its requests over the rate at which they came.
  *Summed progress*: the work of all jobs over the makespan.
- *Progress* over a window: iterations over seconds of work, relative to alone. A serving job works while it
  answers: one that waits for requests is not slow, and one whose answers take twice as long has a progress of 0.5.
- *Slowdown* of a job: its seconds of work over what they would have been alone.
- *Below the promise*: windows of two seconds (two periods of the throttle) in which a job's progress is below its
  promise by more than 0.02, in job-seconds from `ready` to `end`.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.sharing.policies import FIFO
from bench.sharing.records import COMPLETE, Record, Records

WINDOW_SECONDS: Final = 2.0
TOLERANCE: Final = 0.02
LATENCY: Final = "latency"
# Student's t, two sides, 95%, by degrees of freedom; beyond the table the normal's.
_T95: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_NORMAL95: Final = 1.96


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over repetitions, and how far off it may be (95%); None of one repetition."""

    mean: float
    half_width: float | None
    number: int


@dataclass(frozen=True, slots=True)
class Window:
    """A job's progress over a stretch of its run."""

    begin: float
    end: float
    progress: float | None


@dataclass(frozen=True)
class JobFigures:
    """One job of one run; seconds, and ratios to alone."""

    number: int
    program: str
    job_class: str
    promise: float
    arrives: float
    ready: float
    ended: float
    work_seconds: float
    slowdown: float
    windows: tuple[Window, ...]
    ms: tuple[float, ...]

    @property
    def completion(self) -> float:
        """Seconds from its arrival to its end."""
        return self.ended - self.arrives

    @property
    def below_seconds(self) -> float:
        """Seconds below its promise."""
        return sum(
            each.end - each.begin
            for each in self.windows
            if each.progress is not None and each.progress < self.promise - TOLERANCE
        )


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
    failed: int
    jobs: tuple[JobFigures, ...]
    p50: Mapping[str, float] = field(default_factory=dict)
    p99: Mapping[str, float] = field(default_factory=dict)
    all_p50: Mapping[str, float] = field(default_factory=dict)
    all_p99: Mapping[str, float] = field(default_factory=dict)
    beside_latency: float | None = None

    @property
    def completions(self) -> list[float]:
        """Completion times, by number."""
        return [job.completion for job in self.jobs]


def runs(records: Records) -> list[RunFigures]:
    """Return the figures of every complete run in which a job ended well; the others do not count."""
    rates = _rates(records)
    complete = list(records.of("run", state=COMPLETE))
    alone_ms: dict[str, list[float]] = {}
    for line in records.of("alone"):
        alone_ms.setdefault(line["program"], []).extend(line["ms"])
    for run in complete:
        if run["policy"] == FIFO.name:  # one job at a time: its requests are answered by a GPU of their own too
            for job in records.of("job", run=run["name"], status=0):
                alone_ms.setdefault(job["program"], []).extend(job["ms"])
    figures = []
    for run in complete:
        well = [job for job in records.of("job", run=run["name"], status=0) if job["ended"] is not None]
        if well:
            figures.append(_run(run, well, rates, alone_ms))
    return figures


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of some repetitions with its interval; None of nothing."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, None, 1)
    t = _T95.get(len(values) - 1, _NORMAL95)
    return Interval(mean, t * statistics.stdev(values) / math.sqrt(len(values)), len(values))


def ratio_of(one: Iterable[RunFigures], other: Iterable[RunFigures]) -> Interval | None:
    """Return one policy's makespan over another's, repetition by repetition."""
    makespans = {run.repetition: run.makespan for run in other}
    return interval([run.makespan / makespans[run.repetition] for run in one if run.repetition in makespans])


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
    points = [_at(progress, edge) for edge in edges]
    found = []
    for index, ((count, busy), (later, over)) in enumerate(itertools.pairwise(points)):
        worked = over - busy
        value = (later - count) / worked / rate if worked > 1e-6 else None
        found.append(Window(edges[index], edges[index + 1], value))
    return tuple(found)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _at(progress: Sequence[Sequence[float]], moment: float) -> tuple[float, float]:
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
    seconds = sum(job.ended - job.ready for job in figures)
    latency = [job for job in figures if job.job_class == LATENCY]
    serving = [job for job in figures if job.ms]
    return RunFigures(
        run["policy"],
        run["repetition"],
        makespan,
        sum(job.work_seconds for job in figures) / makespan,
        sum(job.below_seconds for job in figures) / seconds,
        run["joules"],
        run["failed"],
        tuple(figures),
        p50=_latency(latency, alone_ms, 0.5),
        p99=_latency(latency, alone_ms, 0.99),
        all_p50=_latency(serving, alone_ms, 0.5),
        all_p99=_latency(serving, alone_ms, 0.99),
        beside_latency=_beside(figures, latency),
    )


def _job(job: Mapping[str, Any], rate: float) -> JobFigures:
    progress = job["progress"]
    busy = progress[-1][2]
    return JobFigures(
        job["number"],
        job["program"],
        job["class"],
        job["promise"],
        job["arrives"],
        job["ready"],
        job["ended"],
        job["count"] / (job["rate"] or rate),
        busy * rate / job["count"],
        windows(progress, rate),
        tuple(job["ms"]),
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
