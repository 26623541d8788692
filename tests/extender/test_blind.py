"""A kube-scheduler that sleeps is told from one that is at work; the test turns the clock."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import PodView, names
from gpushare.extender import blind
from gpushare.extender.blind import (
    CONFIG,
    MOST_RESTARTS,
    PAUSE_SECONDS,
    WINDOW_SECONDS,
    BlindScheduler,
    UntriedPods,
    processes_of_scheduler,
)
from gpushare.kube import LEASES, PODS, Retryable
from gpushare.kube.fake import FakeApi

AFTER = 25.0
Json = dict[str, Any]


def body(name: str, **change: Any) -> Json:
    spec: Json = {"schedulerName": names.SCHEDULER_NAME}
    metadata = {"namespace": "shop", "name": name, "uid": f"uid-{name}", "annotations": {names.FRACTION: "0.2"}}
    return {"metadata": metadata, "spec": {**spec, **change.pop("spec", {})}, "status": change.pop("status", {})}


class Bench:
    """The watch over a kube-scheduler whose pods and questions the test has in hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.api = FakeApi()
        self.pods: dict[str, PodView] = {}
        self.asked_at = -1.0
        self.restarts = 0
        self.ends: list[float] = []
        self.is_leader = True
        self.watch = BlindScheduler(
            self.api,
            untried=lambda: list(self.pods.values()),
            asked_at=lambda: self.asked_at,
            restarts=lambda: self.restarts,
            leads=self.leads,
            after_seconds=AFTER,
            clock=lambda: self.now,
            end=self.end,
        )
        self.now += AFTER  # its own start

    async def leads(self) -> bool:
        return self.is_leader

    def end(self) -> int:
        self.ends.append(self.now)
        return 1

    def put(self, name: str, **change: Any) -> None:
        pod = body(name, **change)
        self.pods[name] = PodView.from_object(pod)
        self.api.store.put(PODS, pod)

    async def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            await self.watch.round()


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_one_that_does_not_see_a_pod_is_ended_once(bench: Bench) -> None:
    bench.put("late")
    began = bench.now
    await bench.run(AFTER + 2)
    assert bench.ends == [pytest.approx(began + AFTER, abs=1.1)]
    await bench.run(10 * PAUSE_SECONDS)
    assert len(bench.ends) == 1, "it waits for something else"
    bench.put("next")
    await bench.run(AFTER + 2)
    assert len(bench.ends) == 2


async def test_a_pod_that_comes_after_a_restart_waits_for_its_pause_alone(bench: Bench) -> None:
    bench.put("first")
    await bench.run(AFTER + 2)
    del bench.pods["first"]
    bench.put("second")
    began = bench.now
    await bench.run(PAUSE_SECONDS + 2)
    assert len(bench.ends) == 2
    assert bench.ends[1] - began <= PAUSE_SECONDS


async def test_two_restarts_are_some_time_apart(bench: Bench) -> None:
    for number in range(800):
        bench.put(f"p{number}")
        await bench.run(3)
    gaps = [after - before for before, after in pairwise(bench.ends)]
    assert min(gaps) >= PAUSE_SECONDS
    in_a_window = [sum(at <= each < at + WINDOW_SECONDS for each in bench.ends) for at in bench.ends]
    assert max(in_a_window) == MOST_RESTARTS
    assert len(bench.ends) > 2 * MOST_RESTARTS


async def test_one_that_asks_about_somebody_is_at_work(bench: Bench) -> None:
    bench.put("last-of-many")
    for _ in range(20):
        await bench.run(AFTER - 5)
        bench.asked_at = bench.now
    assert bench.ends == []


async def test_one_that_refuses_or_serves_pods_by_itself_is_at_work(bench: Bench) -> None:
    for number in range(12):
        bench.put(f"p{number}")
    for number in range(10):
        await bench.run(AFTER - 5)
        del bench.pods[f"p{number}"]  # bound, refused, or gone
    assert bench.ends == []
    await bench.run(AFTER + 2)
    assert len(bench.ends) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}]}},
        {"spec": {"schedulerName": "default-scheduler"}},
        {"spec": {"schedulingGates": [{"name": "wait"}]}},
        {"spec": {"nodeName": "n1"}},
        {"status": {"nominatedNodeName": "n1"}},
        {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": "not-made-yet"}]}},
        {"spec": {"workloadRef": {"name": "gang", "podGroup": "workers"}}},
    ],
)
async def test_a_pod_that_waits_for_something_else_is_asked_about_once(bench: Bench, change: Json) -> None:
    bench.put("other", **change)
    bench.pods["other"] = PodView.from_object(body("other"))  # as a watch that lags has it
    await bench.run(10 * AFTER)
    assert bench.ends == []


@pytest.mark.parametrize("volume", [{"persistentVolumeClaim": {"claimName": "data"}}, {"ephemeral": {"x": 1}}])
async def test_a_standby_does_not_know_whose_volumes_the_leader_prepares(bench: Bench, volume: Json) -> None:
    bench.is_leader = False
    bench.put("train", spec={"volumes": [volume]})
    await bench.run(10 * AFTER)
    assert bench.ends == []
    bench.put("plain", spec={"volumes": [{"emptyDir": {}}]})
    await bench.run(AFTER + 2)
    assert len(bench.ends) == 1


async def test_a_leader_is_asked_about_a_pod_before_its_volumes_are_prepared(bench: Bench) -> None:
    bench.put("train", spec={"volumes": [{"persistentVolumeClaim": {"claimName": "data"}}]})
    await bench.run(AFTER + 2)
    assert len(bench.ends) == 1


@pytest.mark.parametrize("version", ["1.34", "1.35"])
@pytest.mark.parametrize("leads", [True, False])
async def test_no_kube_scheduler_ends_while_it_prepares_a_pods_volumes(
    cluster: Any, serve_cluster: Any, *, leads: bool, version: str
) -> None:
    cluster.add_node("n1")
    now, ends = [1000.0], []
    async with serve_cluster(cluster, clock=lambda: now[0], unseen_seconds=AFTER, lease="lease") as running:
        running.extender.blind._end = lambda: len(ends.append(now[0]) or ends)
        pod = cluster.make_pod("train", "0.5")
        pod["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
        cluster.put(PODS, pod)
        holder = f"{socket.gethostname() if leads else 'other'}_uid"
        cluster.put(
            LEASES, {"metadata": {"name": "lease", "namespace": "default"}, "spec": {"holderIdentity": holder}}
        )
        await cluster.settle()
        if leads:
            assert (await running.filter("train"))["NodeNames"] == ["n1"]
        if version == "1.35":  # NominatedNodeNameForExpectation tells so before PreBind
            cluster.put(PODS, {**pod, "status": {**pod["status"], "nominatedNodeName": "n1"}})
            await cluster.settle()
        for _ in range(40):
            now[0] += 1
            running.extender._look_back()
            await running.extender.blind.round()
    assert ends == []


async def test_a_pod_that_is_gone_ends_nothing(bench: Bench) -> None:
    bench.pods["gone"] = PodView.from_object(body("gone"))
    await bench.run(10 * AFTER)
    assert bench.ends == []


async def test_nothing_is_ended_while_the_api_server_is_away_or_just_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> Json:
        raise Retryable("nobody answers", retry_after_seconds=0.0)

    bench.put("early")
    with monkeypatch.context() as patched:
        patched.setattr(bench.api, "get", away)
        await bench.run(3 * AFTER)
    assert bench.ends == []
    bench.restarts += 1  # our own watch is back
    await bench.run(AFTER - 1)
    assert bench.ends == []
    await bench.run(3)
    assert len(bench.ends) == 1


async def test_it_can_be_switched_off() -> None:
    bench = Bench()
    bench.watch = BlindScheduler(
        bench.api,
        untried=lambda: [PodView.from_object(body("p"))],
        asked_at=lambda: -1.0,
        restarts=lambda: 0,
        leads=bench.leads,
        after_seconds=0.0,
        clock=lambda: bench.now,
        end=bench.end,
    )
    bench.put("p")
    await bench.run(10 * AFTER)
    assert bench.ends == []


@given(st.lists(st.tuples(st.floats(0.1, AFTER - 1), st.sampled_from(["ask", "serve", "arrive"])), max_size=60))
def test_no_pod_counts_as_unseen_while_scheduling_goes_on(events: list[tuple[float, str]]) -> None:
    pods, now, asked = UntriedPods(AFTER), 0.0, 0.0
    waiting = {"first": PodView.from_object(body("first")), "second": PodView.from_object(body("second"))}
    last = now  # when something came of it
    for number, (seconds, kind) in enumerate(events):
        now += seconds
        if kind == "ask":
            asked = last = now
        elif kind == "arrive" or len(waiting) < 2:
            waiting[f"p{number}"] = PodView.from_object(body(f"p{number}"))
        else:
            waiting.pop(next(iter(waiting)))
            last = now
        unseen = pods.look(waiting.values(), asked, now)
        assert not unseen or now - last >= AFTER
    assert pods.look(waiting.values(), asked, now + 10 * AFTER) or not events


@pytest.fixture
def scheduler() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", CONFIG, "--v=2"]) as process:
        deadline = time.monotonic() + 60.0
        while CONFIG.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
        process.kill()


def test_its_process_is_found_by_its_configuration_and_ended(
    scheduler: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert scheduler.pid in processes_of_scheduler()
    for name, cmdline in (("7", CONFIG), ("8", f"kube-scheduler\0{CONFIG}\0--v=2"), ("x", f"a\0{CONFIG}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmdline").write_text(cmdline)
    (tmp_path / "9").mkdir()  # ended meanwhile
    assert list(processes_of_scheduler(tmp_path)) == [8]


def test_who_may_not_end_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not ours")

    monkeypatch.setattr(blind, "processes_of_scheduler", lambda: iter([4242]))
    monkeypatch.setattr("os.kill", refuse)
    assert blind._terminate() == 0
    assert "kube-scheduler's process 4242: not ours" in caplog.text
