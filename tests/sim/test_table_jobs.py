"""Jobs on the table: what they are promised, how their accounts are kept, and what hindsight finds."""

import itertools
from dataclasses import replace
from importlib.resources import files

import pytest

from gpushare.core.api import JobClass
from gpushare.core.interference import auto_share, promised_progress
from gpushare.data import H200_TABLE, default_model
from gpushare.research.dataset import Mechanism, parse
from gpushare.sim.jobs import Job, JobResult, JobRetraction, Outcome, Span, simulate
from gpushare.sim.table_catalog import TABLE_POLICIES, TableWorld, run_on_table
from gpushare.sim.table_hindsight import Asker, Hindsight, TableSearch
from gpushare.sim.table_policies import HardCaps, exclusive, mps_equal, mps_pairs, share_percent
from gpushare.sim.table_report import (
    is_needless,
    mean_with_interval,
    pooled_throughput,
    table_figures,
    throughput_ratio,
)
from gpushare.sim.table_trace import SERVING, draw_table_jobs
from gpushare.sim.table_truth import TableTruth
from gpushare.sim.truth import TenantKind

MPS = Mechanism.MPS
CG, LU, PPO, CHAT = "cg-fp64-poisson-224", "lu-refine-fp32-4096", "ppo-app-fp32-e8192", "chat-app-bf16-b8"


@pytest.fixture(scope="module")
def truth() -> TableTruth:
    dataset = parse((files("gpushare.data") / H200_TABLE).read_bytes().splitlines())
    return TableTruth(dataset, gpu_memory_mib=143771)


def job(name, workload, submit=0.0, length=100.0, fraction="0.5", promise=0.3, job_class=JobClass.THROUGHPUT):
    return Job(name, workload, submit, length, 1.5, fraction, job_class, promise)


def never(_tenants):
    return False


def test_drawn_jobs_offer_the_load_ask_what_they_may_and_are_promised_what_the_table_says(truth):
    jobs = draw_table_jobs(truth, 500, gpus=16, load=1.2, seed=3)
    assert sum(each.solo_seconds for each in jobs) / (16 * jobs[-1].submit_seconds) == pytest.approx(1.2, rel=1e-3)
    assert {each.workload for each in jobs} == set(truth.workloads)
    latency = [each for each in jobs if each.job_class is JobClass.LATENCY]
    assert {each.workload for each in latency} == set(SERVING)
    assert 0.15 < len(latency) / len(jobs) < 0.25
    for each in jobs:
        most = 1.1 if each.job_class is JobClass.LATENCY else 1.5
        alone = truth.alone(each.workload, share_percent(each))
        known = truth.true_profiles[each.workload]
        if each.is_auto:
            assert 0.98 / most <= each.promise <= 1 / most + 1e-9, "against a whole GPU"
            assert share_percent(each) == auto_share(known, max_slowdown=most, job_class=each.job_class)
        else:
            assert each.promise == pytest.approx(min(alone, 1.0) / most)
        assert each.promise == promised_progress(known, share_percent(each), most, is_auto=each.is_auto)
    assert 50 < sum(each.is_auto for each in jobs) < 120
    assert jobs == draw_table_jobs(truth, 500, gpus=16, load=1.2, seed=3)
    assert jobs != draw_table_jobs(truth, 500, gpus=16, load=1.2, seed=4)


def test_throughput_counts_only_while_a_job_waits(truth):
    # Two jobs alone one after the other: 100 s with one waiting, then 100 s in which nobody waits.
    jobs = [job("a", CG), job("b", CG), job("c", LU, submit=150.0, length=10.0)]
    found = table_figures(simulate(jobs, 1, exclusive(), truth), jobs, never)
    assert found.waited_gpu_seconds == pytest.approx(150.0)  # b until 100, c from 150 until 200
    assert found.throughput == pytest.approx(1.0)
    assert found.mean_completion_seconds == pytest.approx((100 + 200 + 60) / 3)
    assert found.late_ratio == 0.0
    assert found.interpolated_ratio is None


def test_seconds_below_the_promise_are_counted_for_each_job(truth):
    cg, lu = truth.progress((TenantKind(CG), TenantKind(LU)), MPS)
    jobs = [job("a", CG, length=1000 * cg, promise=cg + 0.01), job("b", LU, length=1000 * lu, promise=lu - 0.01)]
    found = table_figures(simulate(jobs, 1, mps_pairs(), truth), jobs, never)
    assert found.late_ratio == pytest.approx(0.5)
    assert found.interpolated_ratio == 0.0


def test_a_latency_jobs_slowdown_is_told_beyond_its_share_and_against_alone(truth):
    rates = truth.progress((TenantKind(CHAT), TenantKind(LU)), MPS)
    asked = [
        replace(job("a", CHAT, length=1000 * rates[0], promise=0.5, job_class=JobClass.LATENCY), max_slowdown=1.1),
        job("b", LU, length=1000 * rates[1]),
    ]
    found = table_figures(simulate(asked, 1, mps_pairs(), truth), asked, never)
    assert found.latency_p99 == pytest.approx(0.55 / rates[0])
    assert found.latency_p99_whole == pytest.approx(1 / rates[0])


def test_a_retraction_is_needless_where_throttling_or_the_next_ten_minutes_would_have_done():
    retraction = JobRetraction(1000.0, 1, ((0, 50), (1, 50), (2, 50)))
    late, soon = {0: 9000.0, 1: 9000.0, 2: 9000.0}, {0: 1500.0, 1: 9000.0, 2: 9000.0}
    assert is_needless(retraction, late, lambda _: True)
    assert not is_needless(retraction, late, never)
    assert is_needless(retraction, soon, lambda tenants: len(tenants) == 2)
    assert not is_needless(retraction, late, lambda tenants: len(tenants) == 2)
    ended_itself = {0: 9000.0, 1: 1100.0, 2: 9000.0}
    assert not is_needless(retraction, ended_itself, lambda tenants: len(tenants) == 2)


@pytest.mark.slow
@pytest.mark.compute
def test_no_policy_runs_a_set_that_was_not_measured(truth):
    class Checked(TableTruth):
        def progress(self, kinds, mechanism):
            assert len({kind.workload for kind in kinds}) == len(kinds) <= 4
            return super().progress(kinds, mechanism)

    dataset = parse((files("gpushare.data") / H200_TABLE).read_bytes().splitlines())
    world = TableWorld(Checked(dataset, gpu_memory_mib=143771), default_model())
    found = run_on_table(world, list(TABLE_POLICIES), jobs=25, gpus=2, load=2.0, seed=1)
    assert set(found) == set(TABLE_POLICIES)
    for name, figures in found.items():
        assert 0.0 <= figures.late_ratio <= 1.0, name
        assert figures.waited_work > 0.0, name
    assert found["exclusive"].throughput == pytest.approx(1.0)
    assert found["exclusive"].late_ratio == 0.0
    assert found["hindsight"].mean_completion_seconds < found["exclusive"].mean_completion_seconds
    assert found["hindsight"].late_ratio < found["hard-caps"].late_ratio


def test_shares_as_caps_never_sum_above_the_gpu(truth):
    jobs = [job("a", CG, fraction="0.5"), job("b", LU, fraction="0.4"), job("c", PPO, fraction="0.3")]
    outcome = simulate(jobs, 1, HardCaps(), truth)
    pair = truth.progress((TenantKind(CG, 50), TenantKind(LU, 40)), MPS)
    first = min(100 / pair[0], 100 / pair[1])
    assert outcome.spans[0].summed_progress == pytest.approx(sum(pair))
    assert outcome.spans[0].end_seconds == pytest.approx(first)
    assert outcome.spans[0].waiting == 1


def test_replicas_take_no_more_than_their_places(truth):
    jobs = [job(str(index), name) for index, name in enumerate(truth.workloads[:6])]
    outcome = simulate(jobs, 1, mps_equal(), truth)
    assert outcome.spans[0].waiting == 2


def test_the_search_finds_the_best_caps_and_duties_by_brute_force(truth):
    search = TableSearch(truth)
    askers = [Asker(CG, 0.62, True), Asker(PPO, 0.5, True)]
    found = search.best(askers, [None, None])
    best = 0.0
    for caps in itertools.product((25, 33, 50, 75, 100), repeat=2):
        free = truth.progress((TenantKind(CG, caps[0]), TenantKind(PPO, caps[1])), MPS)
        alone = [truth.alone(CG, caps[0]), truth.alone(PPO, caps[1])]
        for at, duty in [(0, 1.0), *itertools.product((0, 1), [step / 10 for step in range(1, 10)])]:
            progress = [duty * free[0], duty * free[1]]
            progress[1 - at] += (1 - duty) * alone[1 - at]
            if duty == 1.0:
                progress = list(free)
            if progress[0] >= 0.62 and progress[1] >= 0.5:
                best = max(best, sum(progress))
    assert found is not None
    assert found.summed_progress == pytest.approx(best)
    assert search.best(list(reversed(askers)), [None, None]).caps == tuple(reversed(found.caps))
    assert search.best([Asker(CG, 1.0, True), Asker(PPO, 1.0, True)], [None, None]) is None
    assert search.keeps(askers, found.caps)
    assert not search.keeps([Asker(CG, 1.0, True), Asker(PPO, 1.0, True)], (100, 100))


def test_hindsight_leaves_a_latency_tenant_uncapped_and_free(truth):
    search = TableSearch(truth)
    for other in truth.workloads:
        if other != CHAT:
            found = search.best([Asker(CHAT, 0.3, False), Asker(other, 0.2, True)], [None, None])
            assert found is not None
            assert (found.caps[0], found.duties[0]) == (100, 1.0)


def test_hindsight_keeps_the_caps_of_running_jobs_unless_it_may_change_them(truth):
    jobs = [job("a", PPO, length=500, promise=0.2), job("b", CG, submit=50.0, length=500, promise=0.6)]
    kept = simulate(jobs, 1, Hindsight(TableSearch(truth)), truth)
    free = simulate(jobs, 1, Hindsight(TableSearch(truth), changes_caps=True), truth)
    assert kept.spans[0].summed_progress == free.spans[0].summed_progress == pytest.approx(1.0)
    assert sum(each.late_seconds for each in (*kept.jobs, *free.jobs)) == 0.0
    shared = [span for span in free.spans if span.gpus_shared]
    assert shared
    assert max(span.summed_progress for span in shared) >= max(
        (span.summed_progress for span in kept.spans if span.gpus_shared), default=0.0
    )


def test_means_over_seeds_weigh_throughput_by_the_time_in_which_jobs_waited():
    def seed(seconds, work):
        spans = (Span(0.0, seconds, 1, work / seconds, 1), Span(seconds, 1000.0, 1, 0.1, 0))
        result = JobResult("a", CG, 0.0, 1000.0, 1.0, 1.0, 0.0, 0)
        return table_figures(Outcome("x", 1, (result,), spans), [job("a", CG)], never)

    one, other = seed(100.0, 100.0), seed(300.0, 600.0)
    assert pooled_throughput([one, other])[0] == pytest.approx(700 / 400)
    assert throughput_ratio([one, other], [one, one])[0] == pytest.approx(1.75)
    mean, half = mean_with_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.30 / 3**0.5)
