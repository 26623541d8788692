"""The job-level simulator: exact between events, conserves work, and every policy keeps its own promises."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.admission import Defaults
from gpushare.core.api import JobClass
from gpushare.core.interference import Forecast
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    GpuSpec,
    Judge,
    NodeSpec,
    Placement,
    Settings,
    decide,
)
from gpushare.data import default_model
from gpushare.research.dataset import Mechanism, parse
from gpushare.sim.job_catalog import POLICIES
from gpushare.sim.job_policies import Fifo, MpsUncapped, TimeSlicing
from gpushare.sim.job_report import report
from gpushare.sim.job_trace import JobTraceError, draw_jobs, format_jobs, parse_jobs
from gpushare.sim.jobs import RESTART_SECONDS, Job, JobCluster, SimulationError, simulate
from gpushare.sim.truth import DatasetTruth, TenantKind
from gpushare.twin.contention import TwinLoad, contended_progress

HEADER = '{"schema": "gpushare.io/colocation/v1", "gpu_model": "X", "driver": "1", "mechanism": "mps"}'


def run_line(tenants, rates, memory, **device):
    return json.dumps(
        {
            "tenants": [{"workload": w, "thread_percentage": p} for w, p in tenants],
            "iterations_per_s": rates,
            "device": device,
            "window_s": 1.5,
            "memory_mib": memory,
        }
    )


LINES = [
    HEADER,
    run_line([("heavy", 100)], [10.0], [6000], sm_util=0.9, fp32_util=0.8, dram_bw_util=0.5),
    run_line([("heavy", 50)], [6.0], [6000], sm_util=0.5),
    run_line([("light", 100)], [100.0], [1000], sm_util=0.2, fp32_util=0.1, dram_bw_util=0.1),
    run_line([("light", 50)], [95.0], [1000], sm_util=0.2),
    run_line([("heavy", 100), ("light", 100)], [9.0, 50.0], [6000, 1000], sm_util=0.95),
    run_line([("heavy", 100), ("heavy", 100)], [4.0, 4.0], [6000, 6000], sm_util=0.95),
    run_line([("light", 100), ("light", 100)], [90.0, 90.0], [1000, 1000], sm_util=0.4),
]


def forecaster(tenants):
    rates = contended_progress([TwinLoad(profile.counters, cap) for profile, cap in tenants])
    return tuple(Forecast(rate, rate - 0.1, rate) for rate in rates)


def truth(memory_mib: int = 13000) -> DatasetTruth:
    return DatasetTruth(parse(LINES), forecaster, gpu_memory_mib=memory_mib)


def job(name: str, workload: str, submit: float = 0.0, length: float = 100.0, slowdown: float = 2.0) -> Job:
    return Job(name, workload, submit, length, slowdown)


def test_alone_a_job_takes_its_solo_time_and_the_queue_waits_in_order():
    outcome = simulate([job("a", "heavy"), job("b", "heavy", 10.0)], 1, Fifo(), truth())
    assert [result.end_seconds for result in outcome.jobs] == pytest.approx([100.0, 200.0])
    assert report(outcome).throughput_ratio == pytest.approx(1.0)


class Counted(Fifo):
    """Fails at more calls than any test's trace needs, so that a simulation without end ends.

    Attributes:
        wakes: ask each time to be called again at once, the first few times.
    """

    wakes = 0

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def schedule(self, cluster: JobCluster) -> None:
        super().schedule(cluster)
        self.times.append(cluster.now_seconds)
        assert len(self.times) < 1000, f"time stands still at {cluster.now_seconds}"
        if len(self.times) <= self.wakes:
            cluster.wake_at(cluster.now_seconds)


@pytest.mark.parametrize("days", [60, 194, 365, 4000])
def test_short_jobs_end_however_late_they_come(days):
    """What rounding of a late time leaves of a job's work takes less time than that time can tell."""
    rng = np.random.default_rng(1)
    lengths = rng.uniform(0.2, 1.0, 100).round(3)
    trace = [
        job(f"j{number}", "light", days * 86400 + 7.001 * number, float(length))
        for number, length in enumerate(lengths)
    ]
    outcome = simulate(trace, 1, Counted(), truth())
    assert [each.slowdown for each in outcome.jobs] == pytest.approx([1.0] * len(trace), abs=1e-4)


def test_a_policy_is_called_at_a_later_time_however_late_it_is():
    policy = Counted()
    policy.wakes = 5
    simulate([job("a", "light", 4000 * 86400, 1.0)], 1, policy, truth())
    assert len(set(policy.times)) == len(policy.times) > policy.wakes


def test_rates_change_at_the_very_moment_a_neighbour_comes_and_goes():
    # heavy alone 50 s (50 done), beside light at 0.9; light runs at 0.5: 100 work takes 200 s, heavy ends first:
    # 50 left at 0.9 = 55.56 s, by then light has done 27.78, the rest alone: 72.22 s.
    outcome = simulate([job("a", "heavy"), job("b", "light", 50.0)], 1, MpsUncapped(2), truth())
    assert outcome.jobs[0].end_seconds == pytest.approx(50 + 50 / 0.9)
    assert outcome.jobs[1].end_seconds == pytest.approx(50 + 50 / 0.9 + 100 - 0.5 * 50 / 0.9)
    assert outcome.jobs[1].late_seconds == pytest.approx(0.0)


def test_how_much_of_the_shared_time_rests_on_the_model_is_told():
    assert report(simulate([job("a", "heavy")], 1, Fifo(), truth())).modelled_ratio is None
    pair = simulate([job("a", "heavy"), job("b", "light")], 1, MpsUncapped(2), truth())
    assert report(pair).modelled_ratio == 0.0
    jobs = [job("a", "light"), job("b", "light", length=200), job("c", "light", length=900)]
    outcome = simulate(jobs, 1, MpsUncapped(3), truth())
    first, second = sorted(result.end_seconds for result in outcome.jobs)[:2]
    assert report(outcome).modelled_ratio == pytest.approx(first / second)


def test_being_slower_than_tolerated_is_counted_while_it_lasts():
    jobs = [job("a", "heavy", slowdown=1.5), job("b", "heavy", slowdown=3.0)]
    outcome = simulate(jobs, 1, MpsUncapped(2), truth())
    assert outcome.jobs[0].late_seconds == pytest.approx(250.0)
    assert outcome.jobs[1].late_seconds == 0.0
    assert report(outcome).late_share == pytest.approx(0.5)


def test_measured_sets_win_over_the_model_and_caps_follow_the_curve():
    world = truth()
    pair = (TenantKind("light"), TenantKind("heavy"))
    assert world.progress(pair, Mechanism.MPS) == pytest.approx((0.5, 0.9))
    assert world.alone("heavy", 50) == pytest.approx(0.6)
    assert world.alone("heavy", 75) == pytest.approx(0.8)
    triple = (TenantKind("light", 50), TenantKind("heavy", 50), TenantKind("heavy", 50))
    rates = world.progress(triple, Mechanism.MPS)
    assert max(rates[1:]) <= 0.6
    assert rates == truth().progress(triple, Mechanism.MPS), "what was drawn once stays"


def test_taking_turns_fills_idle_gaps_first():
    rates = truth().progress((TenantKind("heavy"), TenantKind("light")), Mechanism.TIME_SLICING)
    assert rates[1] == pytest.approx(1.0)
    assert rates[0] == pytest.approx(0.8 / 0.9)


def test_gandiva_takes_back_a_pair_that_is_worse_than_taking_turns_and_remembers():
    world = truth()
    policy = POLICIES["gandiva"](world, default_model(), 0)
    outcome = simulate([job("a", "heavy", 0, 300), job("b", "heavy", 1, 300)], 1, policy, world)
    assert outcome.jobs[1].retractions == 1
    # watched 60 s at 0.4 each from second 1, then a finishes alone, then b restarts and finishes alone
    first_end = 61 + (300 - 1 - 0.4 * 60)
    assert outcome.jobs[0].end_seconds == pytest.approx(first_end)
    assert outcome.jobs[1].end_seconds == pytest.approx(first_end + RESTART_SECONDS + 300 - 0.4 * 60)


def test_ours_is_the_live_decision():
    """Each start is what `decide` says of the same requests on the same GPUs, cap included."""
    world = truth()
    policy = POLICIES["gpushare"](world, default_model(), 0)
    state = ClusterState(
        NodeSpec(f"node-{gpu}", (GpuSpec(str(gpu), world.gpu_model, world.gpu_memory_mib),)) for gpu in range(2)
    )
    context = DecisionContext.of(state, Settings(), Judge(default_model))
    cluster = JobCluster(
        [job("a", "heavy", slowdown=1.1), job("b", "heavy", slowdown=1.1), job("c", "light")],
        world,
        policy.mechanism,
        [[], []],
        queue=[0, 1, 2],
    )
    expected: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for number, one in enumerate(cluster.jobs):
        request = policy.request_of(one, world)
        decided = decide(request, context)
        if isinstance(decided, Placement):
            state.reserve(request.pod_uid, decided, request)
            expected[int(decided.gpu_uuids[0])].append((number, decided.thread_percentage))
    policy.schedule(cluster)
    started = {gpu: [(t.job, t.thread_percentage) for t in tenants] for gpu, tenants in enumerate(cluster.gpus)}
    assert started == expected
    assert sum(map(len, started.values())) >= 2


def test_ours_reads_fraction_and_class():
    world = truth()
    policy = POLICIES["gpushare"](world, default_model(), 0)
    asked = policy.request_of(replace(job("a", "light"), fraction="0.3", job_class=JobClass.LATENCY), world)
    assert (asked.share_milli, asked.job_class, asked.memory_mib) == (300, JobClass.LATENCY, 1000)
    with pytest.raises(JobTraceError, match="line 2, column fraction"):
        parse_jobs(["job,workload,submit_seconds,solo_seconds,fraction", "a,x,0,5,lots"])
    with pytest.raises(JobTraceError, match="line 2, column class"):
        parse_jobs(["job,workload,submit_seconds,solo_seconds,class", "a,x,0,5,fast"])


def test_ours_charges_a_job_for_its_memory_as_admission_does():
    """6,000 MiB are 49% of the GPU's 12,488 MiB for tenants, whatever smaller fraction the job asks for."""
    world = truth()

    def share_milli(fraction: str, *, charge_memory: bool) -> int:
        policy = POLICIES["gpushare"](world, default_model(), 0)
        policy.settings = Settings(defaults=Defaults(charge_memory=charge_memory))
        return policy.request_of(replace(job("a", "heavy"), fraction=fraction), world).share_milli

    assert share_milli("0.1", charge_memory=True) == 490
    assert share_milli("0.1", charge_memory=False) == 100
    assert share_milli("0.5", charge_memory=True) == 500


def test_memory_is_never_over_committed():
    world = truth(memory_mib=7000)
    outcome = simulate([job("a", "heavy"), job("b", "heavy")], 1, MpsUncapped(4), world)
    assert outcome.jobs[1].end_seconds == pytest.approx(200.0)
    with pytest.raises(SimulationError, match='job "a": workload "heavy" needs 6000 MiB, a GPU has 5000 MiB'):
        simulate([job("a", "heavy")], 1, Fifo(), truth(memory_mib=5000))


def test_an_unknown_workload_is_named():
    with pytest.raises(SimulationError, match='job "a": workload "missing" is absent from the colocation data'):
        simulate([job("a", "missing")], 1, Fifo(), truth())


WORKLOADS = st.sampled_from(["heavy", "light"])
TRACES = st.lists(
    st.tuples(WORKLOADS, st.floats(0, 500), st.floats(1, 500), st.floats(1, 4)), min_size=1, max_size=12
)


@settings(max_examples=25, deadline=None)
@given(TRACES, st.integers(1, 3), st.sampled_from(sorted(set(POLICIES) - {"xu"})), st.integers(0, 3))
def test_every_policy_does_all_the_work_and_no_faster_than_alone(trace, gpus, name, seed):
    world = truth()
    jobs = [
        Job(f"j{index}", workload, submit, length, slowdown)
        for index, (workload, submit, length, slowdown) in enumerate(sorted(trace, key=lambda t: t[1]))
    ]
    outcomes = [simulate(jobs, gpus, POLICIES[name](world, default_model(), seed), world) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    for result in outcomes[0].jobs:
        assert result.end_seconds >= result.submit_seconds + result.solo_seconds * (1 - 1e-6)
        assert result.run_seconds <= result.completion_seconds + 1e-6
    done = sum((span.end_seconds - span.begin_seconds) * span.summed_progress for span in outcomes[0].spans)
    assert done == pytest.approx(sum(each.solo_seconds for each in jobs), rel=1e-6)
    assert all(0 <= span.gpus_in_use <= gpus for span in outcomes[0].spans)


def test_gavel_reaches_the_optimum_of_a_world_solved_by_hand():
    # Two lights on one GPU: the pair (0.9 each) all the time beats taking turns, and is fair: rate 0.9 each.
    world = truth()
    policy = POLICIES["gavel"](world, default_model(), 0)
    outcome = simulate([job("a", "light"), job("b", "light")], 1, policy, world)
    assert [r.end_seconds for r in outcome.jobs] == pytest.approx([100 / 0.9] * 2, rel=2e-3)


def test_gavel_waits_through_a_time_without_jobs():
    world = truth()
    policy = POLICIES["gavel"](world, default_model(), 0)
    outcome = simulate([job("a", "light", 0, 10), job("b", "light", 100, 10)], 1, policy, world)
    assert [r.end_seconds for r in outcome.jobs] == pytest.approx([10.0, 110.0])


def test_time_slicing_runs_no_more_tenants_than_replicas():
    outcome = simulate([job(str(i), "heavy") for i in range(5)], 1, TimeSlicing(2), truth())
    assert max(span.waiting for span in outcome.spans) == 3


def test_a_trace_survives_being_written_and_read():
    drawn = draw_jobs(["a", "b (batch size 2)"], 20, mean_interarrival_seconds=5, mean_solo_seconds=60, seed=4)
    assert parse_jobs(format_jobs(drawn).splitlines()) == drawn
    assert drawn == draw_jobs(
        ["a", "b (batch size 2)"], 20, mean_interarrival_seconds=5, mean_solo_seconds=60, seed=4
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], 'line 1: column "job" is missing'),
        (["job,workload,submit_seconds,solo_seconds"], "line 1: the trace has no jobs"),
        (["job,workload,submit_seconds,solo_seconds", "a,x,0"], "line 2: 3 cells where 4 belong"),
        (["job,workload,submit_seconds,solo_seconds", "a,x,0,nan"], 'line 2, column solo_seconds: "nan" is not'),
        (["job,workload,submit_seconds,solo_seconds", "a,x,-1,5"], 'line 2, column submit_seconds: "-1" is not'),
        (
            ["job,workload,submit_seconds,solo_seconds", "a,x,0,5", "a,x,0,5"],
            'line 3, column job: "a" is there twice',
        ),
        (["job,workload,submit_seconds,solo_seconds,mood", "a,x,0,5,ok"], 'line 1: unknown column "mood"'),
    ],
)
def test_a_bad_trace_is_refused_with_where_and_what(lines, message):
    with pytest.raises(JobTraceError) as refused:
        parse_jobs(lines)
    assert message in str(refused.value)


def test_jain_is_one_when_all_are_slowed_alike():
    outcome = simulate([job("a", "heavy"), job("b", "heavy")], 1, MpsUncapped(2), truth())
    figures = report(outcome)
    assert figures.jain_index == pytest.approx(1.0)
    assert figures.worst_slowdown == pytest.approx(2.5)
    assert np.isfinite([figures.mean_completion_seconds, figures.p95_completion_seconds]).all()
