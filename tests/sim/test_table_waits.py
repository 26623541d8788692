"""Jobs of a trace on the table: starts take time, waits are told by share, and long waiters get a GPU kept."""

from importlib.resources import files

import pytest

from gpushare.core.api import JobClass
from gpushare.core.placement import Settings
from gpushare.data import H200_TABLE, default_model
from gpushare.research.dataset import parse
from gpushare.sim.job_trace import format_jobs, parse_jobs
from gpushare.sim.jobs import Job, SimulationError, simulate
from gpushare.sim.table_catalog import TableWorld, run_on_table
from gpushare.sim.table_ours import LiveOnTable, known_profiles
from gpushare.sim.table_policies import exclusive, mps_pairs
from gpushare.sim.table_report import waits_by_share
from gpushare.sim.table_trace import as_table_jobs
from gpushare.sim.table_truth import TableTruth

CG, LU, PPO, CHAT = "cg-fp64-poisson-224", "lu-refine-fp32-4096", "ppo-app-fp32-e8192", "chat-app-bf16-b8"


@pytest.fixture(scope="module")
def truth() -> TableTruth:
    return TableTruth(
        parse((files("gpushare.data") / H200_TABLE).read_bytes().splitlines()), gpu_memory_mib=143771
    )


def test_a_start_takes_its_time_and_hurts_nobody(truth):
    jobs = [Job("a", CG, 0.0, 100.0, 1.5), Job("b", LU, 0.0, 100.0, 1.5, start_seconds=30.0)]
    alone = simulate(jobs[1:], 1, exclusive(), truth)
    assert alone.jobs[0].end_seconds == pytest.approx(130.0)
    outcome = simulate(jobs, 1, mps_pairs(), truth)
    spans = [span for span in outcome.spans if span.end_seconds <= 30.0 + 1e-6]
    assert [span.summed_progress for span in spans] == pytest.approx([1.0] * len(spans))


def test_waits_are_told_by_share(truth):
    jobs = [Job(f"{n}", CG, 0.0, 100.0, 1.5, fraction) for n, fraction in enumerate(("0.1", "0.5", "0.5"))]
    found = waits_by_share(simulate(jobs, 1, exclusive(), truth), jobs)
    assert set(found) == {"all", "below 25%", "45% and more"}
    assert found["below 25%"].longest == pytest.approx(0.0, abs=1e-6)
    assert found["45% and more"].mean == pytest.approx(150.0)
    assert found["all"].longest == pytest.approx(200.0)


def test_a_traces_jobs_get_their_share_and_promise_from_the_table(truth):
    lines = [
        "job,workload,submit_seconds,solo_seconds,max_slowdown,fraction,class,start_seconds",
        f"a,{CG},0,100,1.5,auto,throughput,2.5",
        f"b,{CHAT},5,100,1.1,0.2,latency,",
    ]
    jobs = parse_jobs(lines)
    assert [job.start_seconds for job in jobs] == [2.5, 0.0]
    assert parse_jobs(format_jobs(jobs).splitlines()) == jobs
    known = as_table_jobs(jobs, truth)
    assert 0 < float(known[0].fraction) <= 1
    assert [job.is_auto for job in known] == [True, False]
    assert known[0].promise == pytest.approx(1 / 1.5), "auto: against a whole GPU"
    assert all(job.promise is not None and 0 < job.promise < 1 for job in known)
    assert known[1].job_class is JobClass.LATENCY
    with pytest.raises(SimulationError, match='no program "x"'):
        as_table_jobs([Job("a", "x", 0.0, 1.0, 1.5)], truth)
    world = TableWorld(truth, default_model())
    found = run_on_table(world, ["exclusive"], jobs=jobs, gpus=1, load=1.0, seed=0)
    assert found["exclusive"].makespan_seconds == pytest.approx(202.5)


def test_ours_keeps_a_gpu_for_a_job_that_would_be_overtaken(truth):
    """Small jobs always wait, so that one leaves and another comes: 80% of the GPU are never free at once."""
    large = Job("large", LU, 10.0, 100.0, 1.5, "0.8")
    jobs = [large] + [Job(f"s{n}", (CG, PPO)[n % 2], 40.0 * n, 90.0, 1.5, "0.3", promise=0.05) for n in range(40)]

    def wait(after):
        ours = LiveOnTable(
            default_model().for_gpu(truth.gpu_model),
            truth.gpu_model,
            known_profiles(truth, 0),
            0,
            watches=False,
            release=Settings(reserve_after_seconds=after),
        )
        [result] = [each for each in simulate(jobs, 1, ours, truth).jobs if each.name == "large"]
        return result.completion_seconds - result.run_seconds

    never, soon = wait(0.0), wait(100.0)
    assert soon < 100.0 + 3 * 90.0
    assert never > 2 * soon
