"""A simulation's history holds what the simulation did: GPUs in use, progress, losses and broken promises."""

import numpy as np
import pytest

from gpushare.cli.errors import UsageError
from gpushare.cli.report.simulated import JobRecorder
from gpushare.cli.report.usage import course, kept_ratio, neighbours, showback
from gpushare.sim.jobs import Job, JobCluster, JobResult, JobTenant, Outcome

JOBS = [Job("a", "train", 0.0, 3600.0, 1.5), Job("b", "serve", 0.0, 1800.0, 1.5)]


def told(recorder: JobRecorder) -> Outcome:
    """Half an hour a alone, then half an hour a and b on one GPU of two, a at 0.5 and b at 0.9."""
    cluster = JobCluster(JOBS, None, None, [[JobTenant(0, 100, 0.0, 0.0)], []])  # type: ignore[arg-type]
    recorder.on_span(cluster, {0: 1.0}, 1800.0)
    cluster.now_seconds = 1800.0
    cluster.gpus[0].append(JobTenant(1, 100, 1800.0, 1800.0, duty_ratio=0.8))
    recorder.on_span(cluster, {0: 0.5, 1: 0.9}, 3600.0)
    results = tuple(JobResult(job.name, job.workload, 0.0, 3600.0, 3600.0, 3600.0, 0.0, 1) for job in JOBS)
    return Outcome("magic", 2, results, ())


def test_a_simulations_figures_are_those_of_its_spans() -> None:
    recorder = JobRecorder(JOBS)
    history = recorder.history(told(recorder), "a test")
    run = course(history)
    assert run.in_use.sum() * history.hours == pytest.approx(1.0)
    assert run.progress.sum() * history.hours == pytest.approx(0.5 * 1.0 + 0.5 * 1.4)
    assert np.unique(run.given) == pytest.approx([1.0])  # two jobs with 100% each hold half of the GPU each
    assert run.throttled.sum() * history.hours == pytest.approx(0.5)
    assert kept_ratio(history) == pytest.approx(2 / 3)  # a is below 1 / 1.5 in its second half
    rows = {row.workload: row for row in showback(history, by_workload=True)}
    assert (rows["train"].progressed, rows["serve"].progressed) == pytest.approx((0.75, 0.45))
    loss = neighbours(history)[0]
    assert (loss.slowed[1], loss.by[1], loss.lost) == ("train", "serve", pytest.approx(0.25))
    assert history.retractions == 2


def test_nothing_placed_is_a_sentence() -> None:
    recorder = JobRecorder(JOBS)
    recorder.on_span(JobCluster(JOBS, None, None, [[], []]), {0: 0.5, 1: 0.5}, 3600.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="places nothing"):
        recorder.history(Outcome("fluid", 2, (), ()), "a test")
