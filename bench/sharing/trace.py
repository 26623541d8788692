"""Draw the jobs with a seed: program, work, its pod's request and promise, and arrival."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np

from gpushare.core.admission import Defaults
from gpushare.core.api import CapPoint, JobClass, WorkloadSignature, to_json
from gpushare.core.interference import Profile, auto_share, promised_progress
from gpushare.data import H200_TABLE
from gpushare.research.dataset import parse
from gpushare.sim.table_trace import FRACTIONS, LATENCY_RATIO, SERVING
from gpushare.sim.table_truth import TableTruth

MEMORY_MIB: Final = 6144
"""Limit of every job: the table's programs took at most 3,028 MiB."""
LEAST_SHARE: Final = 8
"""Percent: what that memory is of an H100's, rounded up. Memory is paid for (chart value policy.chargeMemory)."""
SERVING_LOAD: Final = 0.5
"""Requests of a serving job come at this part of what the program answers alone, one after the other."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Parameters by which the jobs are drawn.

    Attributes:
        least_seconds, most_seconds: of a job alone on the GPU; log-uniform between them.
        load: work offered until the last arrival, alone on the GPU one after the other, over that time.
        share_ratio: factor on the drawn shares, and so on what is promised.
    """

    jobs: int = 40
    least_seconds: float = 4.0
    most_seconds: float = 12.0
    load: float = 2.5
    seed: int = 1
    share_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job.

    Attributes:
        seconds: of work, alone on the GPU.
        promise: progress that its pod may count on; the same under every policy.
    """

    number: int
    program: str
    arrives: float
    seconds: float
    share_percent: int
    job_class: JobClass
    promise: float

    @property
    def is_serving(self) -> bool:
        """Return whether it answers requests as they arrive, instead of working as fast as it can."""
        return self.program in SERVING

    @property
    def name(self) -> str:
        """Return its pod's name."""
        return f"job-{self.number:03d}"


@cache
def known_truth() -> TableTruth:
    """Return what the programs make alone under caps on the H200: promises follow from it, on any GPU."""
    lines = (files("gpushare.data") / H200_TABLE).read_bytes().splitlines()
    return TableTruth(parse(lines), gpu_memory_mib=143_771)


def programs() -> Sequence[str]:
    """Return the names of the ten programs."""
    return known_truth().workloads


def profile(program: str) -> Profile:
    """Return a program's measured profile."""
    return known_truth().profiles[program]


def table_signatures(gpu_model: str) -> dict[str, Any]:
    """Return the programs' signatures by the H200's table, as GpuShares hold them: counters, rate, cap curve."""
    found = {}
    for program in programs():
        known = profile(program)
        curve = tuple(CapPoint(cap, round(min(1.0, known.cap_curve[cap]), 4)) for cap in sorted(known.cap_curve))
        found[program] = to_json(
            WorkloadSignature(
                gpu_model,
                {name: round(min(1.0, value), 5) for name, value in known.counters.as_dict().items()},
                known.iterations_per_s,
                known.memory_mib,
                tuple(point for point in curve if point.thread_percentage < 100),
                window_seconds=60.0,
            )
        )
    return found


def draw(settings: TraceSettings) -> list[TraceJob]:
    """Draw the jobs in the order in which they come: every program equally often, a fifth of class latency."""
    rng = np.random.default_rng([settings.seed, settings.jobs])
    names, defaults = list(programs()), Defaults()
    chosen = [names[index % len(names)] for index in range(settings.jobs)]
    rng.shuffle(chosen)
    low, high = np.log(settings.least_seconds), np.log(settings.most_seconds)
    seconds = np.exp(rng.uniform(low, high, settings.jobs)).round(2)
    gaps = rng.exponential(1.0, settings.jobs)
    gaps[0] = 0.0
    arrivals = (np.cumsum(gaps) / gaps.sum() * seconds.sum() / settings.load).round(3)
    often = LATENCY_RATIO * len(names) / len(SERVING)
    jobs = []
    for number, program in enumerate(chosen):
        is_latency = program in SERVING and rng.random() < often
        job_class = JobClass.LATENCY if is_latency else JobClass.THROUGHPUT
        fraction, most = FRACTIONS[int(rng.integers(len(FRACTIONS)))], defaults.max_slowdown_of(job_class)
        known = known_truth().true_profiles[program]
        share = (
            auto_share(known, max_slowdown=most, job_class=job_class)
            if fraction == "auto"
            else round(100 * float(fraction))
        )
        share = min(100, max(LEAST_SHARE, round(share * settings.share_ratio)))
        jobs.append(
            TraceJob(
                number,
                program,
                float(arrivals[number]),
                float(seconds[number]),
                share,
                job_class,
                promised_progress(known, share, most),
            )
        )
    return jobs


def as_record(job: TraceJob) -> dict[str, Any]:
    """Return what of a job goes into its record."""
    return {
        "number": job.number,
        "program": job.program,
        "arrives": job.arrives,
        "seconds": job.seconds,
        "share": job.share_percent,
        "class": job.job_class.value,
        "promise": round(job.promise, 4),
    }
