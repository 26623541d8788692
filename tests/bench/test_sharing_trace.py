"""The jobs of bench/sharing, who starts when, and what a job writes of itself."""

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from bench.sharing.command import main
from bench.sharing.deciding import Decider
from bench.sharing.joblog import story
from bench.sharing.launching import Order
from bench.sharing.policies import EQUAL, FIFO, HARD, OURS, POLICIES, may_start, order
from bench.sharing.trace import (
    LEAST_SHARE,
    TraceJob,
    TraceSettings,
    draw,
    known_truth,
    profile,
    programs,
    table_signatures,
)
from bench.sharing.work import JobLog, serve

from gpushare.core.api import JobClass, WorkloadSignature, from_json, to_json
from gpushare.core.gpu import GpuInfo
from gpushare.core.placement import Settings
from gpushare.data import default_model

GPU = GpuInfo("GPU-1", 0, "NVIDIA H200", 143_771, 132)


def job(number: int, share: int, program: str = "lu-refine-fp32-4096", **values: object) -> TraceJob:
    return replace(TraceJob(number, program, float(number), 5.0, share, JobClass.THROUGHPUT, 0.5), **values)


def test_jobs_are_the_same_each_time_and_of_every_program_equally_often() -> None:
    jobs = draw(TraceSettings())
    assert jobs == draw(TraceSettings())
    assert jobs != draw(TraceSettings(seed=2))
    assert set(Counter(each.program for each in jobs).values()) == {4}
    assert len(programs()) >= 10
    assert [each.arrives for each in jobs] == sorted(each.arrives for each in jobs)
    assert jobs[0].arrives == 0.0


def test_jobs_ask_for_what_their_memory_costs_at_least_and_are_promised_something() -> None:
    settings = TraceSettings(jobs=200)
    jobs = draw(settings)
    assert all(LEAST_SHARE <= each.share_percent <= 100 for each in jobs)
    assert all(settings.least_seconds <= each.seconds <= settings.most_seconds for each in jobs)
    assert all(0.0 < each.promise <= 1 / 1.1 + 1e-9 for each in jobs)
    latency = [each for each in jobs if each.job_class is JobClass.LATENCY]
    assert 0.1 < len(latency) / len(jobs) < 0.3
    assert all(each.is_serving for each in latency)
    work, last = sum(each.seconds for each in jobs), jobs[-1].arrives
    assert work / last == pytest.approx(settings.load, rel=1e-3)


def test_the_same_jobs_may_ask_for_less_and_are_promised_less() -> None:
    usual, half = draw(TraceSettings()), draw(TraceSettings(share_ratio=0.5))
    assert [(each.program, each.arrives, each.seconds) for each in half] == [
        (each.program, each.arrives, each.seconds) for each in usual
    ]
    assert [each.share_percent for each in half] == [
        max(LEAST_SHARE, round(0.5 * each.share_percent)) for each in usual
    ]
    assert all(less.promise <= more.promise for less, more in zip(half, usual, strict=True))
    assert sum(each.promise for each in half) < 0.9 * sum(each.promise for each in usual)
    assert max(each.share_percent for each in draw(TraceSettings(share_ratio=9.0))) == 100


@pytest.mark.parametrize("ratio", ["0", "-1", "nan", "inf"])
def test_a_share_ratio_that_is_none_is_refused_in_a_sentence(tmp_path: Path, ratio: str) -> None:
    with pytest.raises(SystemExit, match="factor above 0"):
        main(["plan", str(tmp_path), "--share-ratio", ratio])


def test_one_at_a_time_and_nobody_overtakes() -> None:
    jobs = [job(0, 50), job(1, 50), job(2, 50)]
    assert may_start(FIFO, jobs[::-1], []) == jobs[:1]
    assert may_start(FIFO, jobs[1:], jobs[:1]) == []


def test_replicas_are_so_many_whatever_the_jobs_ask_for() -> None:
    jobs = [job(number, 100) for number in range(6)]
    assert may_start(EQUAL, jobs, []) == jobs[:4]
    assert may_start(EQUAL, jobs[4:], jobs[:3]) == [jobs[4]]


def test_shares_sum_to_the_whole_and_a_small_one_overtakes() -> None:
    jobs = [job(0, 60), job(1, 60), job(2, 40), job(3, 10)]
    assert may_start(HARD, jobs, []) == [jobs[0], jobs[2]]
    assert HARD.cap(jobs[0]) == 60
    assert HARD.cap(job(4, 30, job_class=JobClass.LATENCY)) is None
    assert EQUAL.cap(jobs[0]) is None


def test_every_repetition_has_every_policy_and_begins_with_another() -> None:
    orders = [[policy.name for policy in order(repetition)] for repetition in range(3)]
    assert all(sorted(each) == sorted(POLICIES) for each in orders)
    assert len({each[0] for each in orders}) == 3


def signature(program: str) -> object:
    known = profile(program)
    return to_json(WorkloadSignature(GPU.model, known.counters.as_dict(), window_seconds=10.0))


def test_ours_is_the_extenders_decision_with_what_is_known_of_a_program() -> None:
    names = list(programs())
    jobs = [job(number, 30, names[number]) for number in range(4)]
    blind = Decider(GPU, {}, default_model()).start(jobs, 0.0)
    assert [(each.number, cap) for each, cap in blind] == [(0, 30), (1, 30), (2, 30)]
    knowing = Decider(GPU, {name: signature(name) for name in names}, default_model())
    started = knowing.start(jobs, 0.0)
    assert started
    assert any(cap > 30 for _, cap in started)
    left = [each for each in jobs if each not in [one for one, _ in started]]
    assert knowing.start(left, 1.0) == []
    for each, _ in started:
        knowing.release(each)
    assert knowing.start(left, 2.0)


def test_ours_keeps_the_gpu_for_who_waits_longer_than_the_setting() -> None:
    names = list(programs())
    runs, small, large = job(0, 60, names[0]), job(2, 20, names[2]), job(1, 80, names[1])

    def started(now: float) -> list[int]:
        decider = Decider(GPU, {}, default_model(), Settings(reserve_after_seconds=30.0))
        assert decider.start([runs], 0.0)
        return [each.number for each, _ in decider.start([large, small], now)]

    assert started(10.0) == [2]
    assert started(40.0) == [2]  # with the large one once the first is gone
    small = job(2, 30, names[2])
    assert started(10.0) == [2]
    assert started(40.0) == []


def test_requests_are_answered_one_after_the_other_from_their_arrival_on() -> None:
    now = [100.0]
    out = io.StringIO()
    log = JobLog(out, monotonic=lambda: now[0])

    def work() -> None:
        now[0] += 0.1

    def sleep(seconds: float) -> None:
        now[0] += seconds

    log.say("start", wall=1000.0)
    log.say("ready")
    # 20 requests a second where ten can be answered: each waits longer than the one before
    assert serve(work, 50, 20.0, log, seed=1, sleep=sleep) == 50
    log.say("end", count=50)
    found = story([*out.getvalue().splitlines(), "noise", "{broken"], began_wall=990.0)
    assert (found.started, found.ready, found.count) == (10.0, 10.0, 50)
    assert len(found.ms) == 50
    assert found.work_ms == pytest.approx([100.0] * 50)
    assert found.ms[0] == pytest.approx(100.0)
    assert found.ms[-1] > 1500.0
    assert found.progress[-1][1:] == (50, pytest.approx(5.0))
    assert found.ended == pytest.approx(found.progress[-1][0])
    assert json.loads(out.getvalue().splitlines()[0])["event"] == "start"


def test_a_job_that_is_told_to_stop_begins_no_more_requests() -> None:
    now = [0.0]
    log = JobLog(io.StringIO(), monotonic=lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    done = serve(lambda: None, 10**9, 10.0, log, seed=1, sleep=sleep, until=20.0)
    assert 150 < done < 250


def test_an_order_is_the_jobs_command_line() -> None:
    serving = job(3, 20, "chat-app-bf16-b8")
    assert Order(serving, 70, 20.0).arguments() == ["chat-app-bf16-b8", "70", "--rate", "20.0000", "--seed", "3"]
    assert Order(job(3, 20), 70, seconds=4).arguments() == ["lu-refine-fp32-4096", "70", "--seconds", "4"]
    assert OURS.places is None
    assert known_truth().rate_alone("chat-app-bf16-b8") > 0


def test_a_job_stops_once_a_file_is_there_and_looks_for_it_now_and_then(tmp_path: Path) -> None:
    now = [0.0]
    log = JobLog(io.StringIO(), monotonic=lambda: now[0], stop=tmp_path / "stop")
    now[0] = 1.0
    assert not log.is_over(10.0)
    (tmp_path / "stop").touch()
    assert not log.is_over(10.0)  # it has just looked
    now[0] = 1.3
    assert log.is_over(10.0)
    assert JobLog(io.StringIO(), monotonic=lambda: 11.0).is_over(10.0)


def test_the_tables_signatures_are_what_gpushares_hold() -> None:
    found = table_signatures("NVIDIA H100")
    assert set(found) == set(programs())
    kept = from_json(WorkloadSignature, found["cg-fp64-poisson-224"])
    assert kept.is_usable()
    assert kept.gpu_model == "NVIDIA H100"
    assert [point.thread_percentage for point in kept.cap_curve] == [25, 33, 50, 75]
    rates = [point.progress_ratio for point in kept.cap_curve]
    assert rates == sorted(rates)
    assert 0.6 < rates[0] < 0.75  # 114 of 169 iterations per second
