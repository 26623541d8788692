"""What a variant of `python -m bench knowledge` changes."""

from types import SimpleNamespace

import pytest
from bench.knowledge import VARIANTS, figures_of
from bench.retractions import GPU_MEMORY_MIB

from gpushare.core.api import JobClass
from gpushare.data import default_model
from gpushare.research.shipped_table import complete_table
from gpushare.sim.table_catalog import TableWorld
from gpushare.sim.table_trace import draw_table_jobs
from gpushare.sim.table_truth import TableTruth

pytestmark = pytest.mark.compute


def test_a_tenth_more_is_promised_to_class_throughput_alone() -> None:
    truth = TableTruth(complete_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    world = TableWorld(truth, default_model().for_gpu(truth.gpu_model))
    jobs = draw_table_jobs(truth, 30, gpus=4, load=1.2, seed=3)
    highest = []
    for name in ("ours", "a tenth more promised"):
        policy = VARIANTS[name](world, 3)
        figures_of(world, policy, jobs, 4)
        told = [
            policy._last[number][1]
            for number, job in enumerate(jobs)
            if number in policy._last and job.job_class is JobClass.THROUGHPUT
        ]
        highest.append(max(told))
    usual, more = highest
    assert more == pytest.approx(1.1 * usual, abs=0.02)
    for number, job in enumerate(jobs):
        admitted = policy._admitted(SimpleNamespace(jobs=jobs, retractions={}), number)
        factor = 1.1 if job.job_class is JobClass.THROUGHPUT else 1.0
        assert admitted.max_slowdown == pytest.approx(job.max_slowdown / factor)


def test_jobs_of_class_throughput_report_their_rate_and_are_below_their_promise_less_often() -> None:
    truth = TableTruth(complete_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    world = TableWorld(truth, default_model().for_gpu(truth.gpu_model))
    jobs = draw_table_jobs(truth, 40, gpus=4, load=2.0, seed=3)
    late = {}
    for name in ("class latency names targets", "every job names a target"):
        policy = VARIANTS[name](world, 3)
        late[name] = figures_of(world, policy, jobs, 4).late_ratio
        reporting = {number for number, job in enumerate(jobs) if job.job_class is JobClass.THROUGHPUT}
        assert set(policy._reports.counters) == (reporting if policy.reports else set())
    for number, counter in policy._reports.counters.items():
        alone = truth.rate_alone(jobs[number].workload)
        assert counter.target.target_per_second == pytest.approx(jobs[number].least_progress * alone)
    assert late["every job names a target"] < 0.7 * late["class latency names targets"], late
