"""Figures that summarise one simulation."""

from dataclasses import dataclass

import numpy as np

from gpushare.sim.jobs import Outcome


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one policy on one trace.

    Attributes:
        makespan_seconds: from the first submission to the last end.
        mean_completion_seconds, p95_completion_seconds: submission to end.
        throughput_ratio: work done per GPU-second in use; running alone on whole GPUs is 1.
        mean_slowdown: mean over jobs of time on a GPU divided by time alone.
        worst_slowdown: the largest of them.
        late_share: part of all jobs' seconds on GPUs that were slower than tolerated.
        utilization_ratio: share of GPU-seconds until the makespan with at least one tenant.
        jain_index: fairness of the jobs' progress (Jain, Chiu, Hawe 1984); 1 if all are slowed down equally.
        retractions: number of jobs taken back.
        modelled_ratio: part of the GPU-seconds with two or more jobs whose rates came from the interference model,
            not from measurements; None if no GPU was shared.
    """

    policy: str
    jobs: int
    makespan_seconds: float
    mean_completion_seconds: float
    p95_completion_seconds: float
    throughput_ratio: float
    mean_slowdown: float
    worst_slowdown: float
    late_share: float
    utilization_ratio: float
    jain_index: float
    retractions: int
    modelled_ratio: float | None


def report(outcome: Outcome) -> Report:
    """Summarise an outcome."""
    completion = np.array([job.completion_seconds for job in outcome.jobs])
    slowdown = np.array([job.slowdown for job in outcome.jobs])
    progress = 1 / slowdown
    begin = min(job.submit_seconds for job in outcome.jobs)
    makespan = max(job.end_seconds for job in outcome.jobs) - begin
    in_use = sum((span.end_seconds - span.begin_seconds) * span.gpus_in_use for span in outcome.spans)
    shared = sum((span.end_seconds - span.begin_seconds) * span.gpus_shared for span in outcome.spans)
    modelled = sum((span.end_seconds - span.begin_seconds) * span.gpus_modelled for span in outcome.spans)
    run = sum(job.run_seconds for job in outcome.jobs)
    return Report(
        policy=outcome.policy,
        jobs=len(outcome.jobs),
        makespan_seconds=makespan,
        mean_completion_seconds=float(completion.mean()),
        p95_completion_seconds=float(np.quantile(completion, 0.95)),
        throughput_ratio=sum(job.solo_seconds for job in outcome.jobs) / in_use,
        mean_slowdown=float(slowdown.mean()),
        worst_slowdown=float(slowdown.max()),
        late_share=sum(job.late_seconds for job in outcome.jobs) / run,
        utilization_ratio=in_use / (outcome.gpus * makespan),
        jain_index=float(progress.sum() ** 2 / (len(progress) * (progress**2).sum())),
        retractions=sum(job.retractions for job in outcome.jobs),
        modelled_ratio=modelled / shared if shared else None,
    )
