"""Jobs of the table's programs: their requests and promises, and how much work they offer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gpushare.core.admission import Defaults
from gpushare.core.api import AUTO, JobClass
from gpushare.core.interference import auto_share, promised_progress
from gpushare.sim.jobs import Job, SimulationError
from gpushare.sim.table_truth import TableTruth

# The programs that answer requests. A fifth of all jobs is of class latency; all of these run one of these
# programs.
SERVING: Final = ("chat-app-bf16-b8", "convnext-infer-bf16-b48", "retrieval-app-fp16-bursts")
FRACTIONS: Final = ("0.1", "0.2", "0.3", "0.4", "0.5", "auto")
LATENCY_RATIO: Final = 0.2
MEAN_SOLO_SECONDS: Final = 1800.0
_LEAST_SOLO_SECONDS: Final = 60.0


def as_table_jobs(jobs: Sequence[Job], truth: TableTruth) -> list[Job]:
    """Return jobs of a trace with the share that `auto` means and the promise, both by the table.

    Raises:
        SimulationError: a job's program is not in the table.
    """
    found = []
    for job in jobs:
        if job.workload not in truth.workloads:
            raise SimulationError(
                f'job "{job.name}": the table has no program "{job.workload}", only {", ".join(truth.workloads)}'
            )
        found.append(_promised(job, truth))
    return found


def draw_table_jobs(
    truth: TableTruth,
    count: int,
    *,
    gpus: int,
    load: float,
    seed: int,
    latency_workloads: Sequence[str] = SERVING,
    defaults: Defaults | None = None,
) -> list[Job]:
    """Draw jobs of all programs equally often, with Poisson arrivals and log-normal lengths (sigma 1).

    Their work, alone on whole GPUs, is `load` times what the GPUs could do one job at a time until the last
    arrival. `auto` is resolved by the true cap curve, so a job has the same request and promise under each policy.

    Args:
        latency_workloads: programs whose jobs may be of class latency, so that a fifth of all jobs is.
        defaults: tolerated slowdown by class.
    """
    defaults = defaults or Defaults()
    rng = np.random.default_rng([seed, count])
    workloads = truth.workloads
    serving = [name for name in workloads if name in latency_workloads]
    often = min(1.0, LATENCY_RATIO * len(workloads) / len(serving)) if serving else 0.0
    lengths = np.maximum(_LEAST_SOLO_SECONDS, rng.lognormal(np.log(MEAN_SOLO_SECONDS) - 0.5, 1.0, count)).round(3)
    gaps = rng.exponential(1.0, count)
    arrivals = (np.cumsum(gaps) / gaps.sum() * lengths.sum() / (gpus * load)).round(3)
    jobs = []
    for index in range(count):
        workload = workloads[int(rng.integers(len(workloads)))]
        is_latency = workload in serving and rng.random() < often
        fraction = FRACTIONS[int(rng.integers(len(FRACTIONS)))]
        job_class = JobClass.LATENCY if is_latency else JobClass.THROUGHPUT
        job = Job(
            f"job-{index:05d}",
            workload,
            float(arrivals[index]),
            float(lengths[index]),
            defaults.max_slowdown_of(job_class),
            fraction,
            job_class,
        )
        jobs.append(_promised(job, truth))
    return jobs


def _promised(job: Job, truth: TableTruth) -> Job:
    """Return the job with the share that `auto` means, by the true cap curve, and with its promise."""
    profile, fraction, is_auto = truth.true_profiles[job.workload], job.fraction, job.fraction == AUTO
    if is_auto:
        fraction = f"{auto_share(profile, max_slowdown=job.max_slowdown, job_class=job.job_class) / 100:g}"
    promise = promised_progress(profile, round(100 * float(fraction)), job.max_slowdown, is_auto=is_auto)
    return replace(job, fraction=fraction, promise=promise, is_auto=is_auto)
