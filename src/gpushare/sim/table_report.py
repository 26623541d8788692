"""Figures of one simulation on the table, and their means over seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from gpushare.core.api import JobClass
from gpushare.sim.jobs import Job, JobRetraction, Outcome

NEEDLESS_SECONDS: Final = 600.0
# Student's t at 97.5% by degrees of freedom, 1 to 30; 1.96 beyond.
_STUDENT: Final = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)

Keeps = Callable[[Sequence[tuple[int, int]]], bool]
"""Returns whether the promises of tenants, (job, thread percentage) each, could all be kept by throttling."""


SHARES: Final = {"all": (0, 101), "below 25%": (0, 25), "25 to 44%": (25, 45), "45% and more": (45, 101)}
"""Groups of jobs by requested share in percent: (from, below)."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Waiting times of jobs: total seconds in which they were submitted and on no GPU."""

    mean: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Waits":
        """Summarise waiting times."""
        p90, p99 = np.percentile(seconds, [90, 99]).tolist()
        return cls(float(np.mean(seconds)), p90, p99, max(seconds))


@dataclass(frozen=True, slots=True)
class TableFigures:
    """Figures of one policy on one trace.

    Attributes:
        waited_gpu_seconds: GPU-seconds while at least one job waits.
        waited_work: summed progress over these.
        waiting_ratio: part of the time until the last arrival in which a job waits.
        mean_completion_seconds: submission to end.
        late_ratio: part of all jobs' seconds on GPUs below their promise.
        latency_p99: slowdown of latency jobs relative to their share alone (1.1 is promised), 99th percentile over
            time; None without such jobs.
        latency_p99_whole: likewise, relative to alone on the whole GPU.
        retractions: number of jobs taken back.
        needless: number of retractions that the next ten minutes proved needless.
        interpolated_ratio: part of the shared time whose exact caps were not measured; None without shared time.
        makespan_seconds: from the first submission to the last end.
        waits: by group of share (SHARES), for groups that have jobs.
    """

    waited_gpu_seconds: float
    waited_work: float
    waiting_ratio: float
    mean_completion_seconds: float
    late_ratio: float
    latency_p99: float | None
    latency_p99_whole: float | None
    retractions: int
    needless: int
    interpolated_ratio: float | None
    makespan_seconds: float = math.nan
    waits: Mapping[str, Waits] = field(default_factory=dict)

    @property
    def throughput(self) -> float:
        """Return the summed progress per GPU while a job waits; nan if none ever waits."""
        return self.waited_work / self.waited_gpu_seconds if self.waited_gpu_seconds else math.nan


def table_figures(outcome: Outcome, jobs: Sequence[Job], keeps: Keeps) -> TableFigures:
    """Summarise an outcome.

    Args:
        keeps: returns whether a set could have kept every promise, by throttling if needed.
    """
    waited = [span for span in outcome.spans if span.waiting]
    seconds = sum(span.end_seconds - span.begin_seconds for span in waited)
    work = sum((span.end_seconds - span.begin_seconds) * span.summed_progress for span in waited)
    shared = sum((span.end_seconds - span.begin_seconds) * span.gpus_shared for span in outcome.spans)
    between = sum((span.end_seconds - span.begin_seconds) * span.gpus_modelled for span in outcome.spans)
    run = sum(job.run_seconds for job in outcome.jobs)
    ends = {index: job.end_seconds for index, job in enumerate(outcome.jobs)}
    # A promise is the share's progress alone divided by the tolerated slowdown; their product is that progress.
    latency = [job for job in jobs if job.job_class is JobClass.LATENCY]
    tolerated = {job.least_progress: job.max_slowdown for job in latency}
    beyond = [
        (least * tolerated[least] / max(progress, 1e-3), spent)
        for (progress, least), spent in outcome.latency_seconds.items()
    ]
    whole = [(1.0 / max(progress, 1e-3), spent) for (progress, _), spent in outcome.latency_seconds.items()]
    last_arrival = max(job.submit_seconds for job in jobs)
    until_last = sum(
        min(span.end_seconds, last_arrival) - span.begin_seconds
        for span in waited
        if span.begin_seconds < last_arrival
    )
    return TableFigures(
        waited_gpu_seconds=seconds * outcome.gpus,
        waited_work=work,
        waiting_ratio=until_last / (last_arrival - min(job.submit_seconds for job in jobs) or math.inf),
        mean_completion_seconds=float(np.mean([job.completion_seconds for job in outcome.jobs])),
        late_ratio=sum(job.late_seconds for job in outcome.jobs) / run,
        latency_p99=_percentile(beyond, 0.99),
        latency_p99_whole=_percentile(whole, 0.99),
        retractions=len(outcome.retractions),
        needless=sum(is_needless(each, ends, keeps) for each in outcome.retractions),
        interpolated_ratio=between / shared if shared else None,
        makespan_seconds=max(job.end_seconds for job in outcome.jobs) - min(job.submit_seconds for job in jobs),
        waits=waits_by_share(outcome, jobs),
    )


def waits_by_share(outcome: Outcome, jobs: Sequence[Job]) -> dict[str, Waits]:
    """Return the waiting times of each group of share; an unresolved `auto` counts as a whole GPU."""
    found: dict[str, list[float]] = {}
    for job, result in zip(jobs, outcome.jobs, strict=True):
        share = 100 if job.fraction == "auto" else round(100 * float(job.fraction))
        for group, (least, below) in SHARES.items():
            if least <= share < below:
                found.setdefault(group, []).append(max(0.0, result.completion_seconds - result.run_seconds))
    return {group: Waits.of(found[group]) for group in SHARES if group in found}


def is_needless(retraction: JobRetraction, ends: Mapping[int, float], keeps: Keeps) -> bool:
    """Return whether the promises could have been kept with the retracted job still there.

    Either by throttling at once, or after tenants left whose jobs ended within the next ten minutes anyway.
    """
    soon = retraction.seconds + NEEDLESS_SECONDS
    left = [(job, cap) for job, cap in retraction.tenants if ends[job] > soon or job == retraction.job]
    return keeps(retraction.tenants) or keeps(left)


def mean_with_interval(values: Sequence[float], t: float | None = None) -> tuple[float, float]:
    """Return the mean over seeds and its 95% half-width; nan for what cannot be computed.

    Args:
        t: Student's t, if the caller has a better value than the table.
    """
    count = len(values)
    if count < 2:
        return (values[0] if values else math.nan), math.nan
    times = student(count) if t is None else t
    return float(np.mean(values)), times * float(np.std(values, ddof=1)) / math.sqrt(count)


def pooled_throughput(seeds: Sequence[TableFigures]) -> tuple[float, float]:
    """Return the throughput while a job waits over all seeds, and its 95% half-width (jackknife)."""
    return _jackknife([(each,) for each in seeds], lambda rows: _throughput([each for (each,) in rows]))


def throughput_ratio(ours: Sequence[TableFigures], others: Sequence[TableFigures]) -> tuple[float, float]:
    """Return one policy's pooled throughput over another's on the same seeds, and its 95% half-width."""
    return _jackknife(
        list(zip(ours, others, strict=True)),
        lambda rows: (
            _throughput([one for one, _ in rows]) / (_throughput([other for _, other in rows]) or math.nan)
        ),
    )


def _throughput(seeds: Sequence[TableFigures]) -> float:
    seconds = sum(each.waited_gpu_seconds for each in seeds)
    return sum(each.waited_work for each in seeds) / seconds if seconds else math.nan


_Row = TypeVar("_Row")


def _jackknife(rows: Sequence[_Row], figure: Callable[[Sequence[_Row]], float]) -> tuple[float, float]:
    """Return the figure and its 95% jackknife half-width."""
    count = len(rows)
    whole = figure(rows)
    if count < 2:
        return whole, math.nan
    without = [figure([*rows[:at], *rows[at + 1 :]]) for at in range(count)]
    spread = math.sqrt((count - 1) / count * sum((each - sum(without) / count) ** 2 for each in without))
    return whole, student(count) * spread


def student(count: int) -> float:
    """Return Student's t for the 95% interval of a mean of this many values."""
    return _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 1.96


def _percentile(weighted: Sequence[tuple[float, float]], at: float) -> float | None:
    """Return the smallest value at or below which a part of the weight lies."""
    if not weighted:
        return None
    rising = sorted(weighted)
    total = np.cumsum([weight for _, weight in rising])
    return rising[min(len(rising) - 1, int(np.searchsorted(total, at * total[-1])))][0]
