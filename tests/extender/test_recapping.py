"""A pod without a process gets the cap for the tenants that are there now; nothing else changes."""

from __future__ import annotations

import asyncio
import copy
import itertools
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest

from gpushare.core.api import WorkloadSignature, to_json
from gpushare.extender.idle import FRESH_SECONDS, IdlePods
from gpushare.extender.recapping import (
    BACKOFF,
    MOST_CHANGED,
    MOST_EXAMINED,
    MOST_JUDGED,
    SETTLED_SECONDS,
    CapChanger,
    beside,
)
from gpushare.kube import EVENTS, GPUNODES, GPUSHARES, PODS, Forbidden, Retryable
from gpushare.twin.contention import WORKLOADS

H200 = "NVIDIA H200"
CAP = "gpushare.io/thread-percentage"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Caps:
    """An extender's cap changer with clocks that the test turns, and the cluster around it."""

    def __init__(self, cluster: Any, running: Any, clock: Clock) -> None:
        self.cluster, self.running, self.clock = cluster, running, clock
        self.ledger = running.extender.ledger
        self.changer = CapChanger(cluster, self.ledger, running.extender.metrics, clock)
        self.reports = 0

    def pod(
        self, name: str, fraction: str, cap: int, *, node: str = "n1", workload: str | None = None, **more: str
    ):
        """A bound pod, decided long ago."""
        pod = self.cluster.make_pod(name, fraction, **more)
        pod["metadata"]["annotations"] |= {
            "gpushare.io/gpu": f"GPU-{node}-0",
            CAP: str(cap),
            "gpushare.io/memory-limit": "0=1024M",
            "gpushare.io/decided-at": "2026-11-24T00:00:00Z",
        }
        pod["spec"]["nodeName"] = node
        if workload is not None:
            pod["metadata"]["ownerReferences"] = [
                {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": f"job-{name}", "controller": True}
            ]
            self.profile(name, workload)
        self.cluster.put(PODS, pod)

    def profile(self, name: str, workload: str) -> None:
        """A GpuShare with the profile of one of the twin's programs."""
        solo = WORKLOADS[workload]
        counters = {key: value for key, value in asdict(solo.solo).items() if value is not None}
        signature = WorkloadSignature(
            gpu_model=H200, taken_at="2026-11-23T00:00:00Z", window_seconds=5.0, counters=counters
        )
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": f"job-{name}"}
        self.cluster.put(
            GPUSHARES,
            {
                "metadata": {
                    "name": name,
                    "namespace": "default",
                    "uid": f"share-{name}",
                    "ownerReferences": [owner],
                },
                "spec": {},
                "status": {"profile": to_json(signature)},
            },
        )

    async def report(
        self, *, node: str = "n1", state: str = "Active", ceilings: str = "Enforced", **clients: int | None
    ) -> None:
        """The agent's report: how many processes the node's pods, all on its first GPU, have at MPS."""
        self.reports += 1
        obj = copy.deepcopy(self.cluster.objects[GPUNODES][node])
        obj["status"]["observedAt"] = f"report {self.reports}"
        gpu = obj["status"]["gpus"][0]
        gpu["mps"] = {"state": state, "ceilings": ceilings}
        gpu["tenants"] = [
            {"podUid": self.uid(name), "share": 1, "clients": count} for name, count in clients.items()
        ]
        self.cluster.put(GPUNODES, obj)
        await self.cluster.settle()

    async def round(self) -> None:
        await self.changer.round()
        await self.cluster.settle()

    def uid(self, name: str) -> str:
        return self.cluster.pod(name)["metadata"]["uid"]

    def cap(self, name: str) -> str:
        return self.cluster.pod(name)["metadata"]["annotations"][CAP]

    @property
    def changed(self) -> float:
        return self.running.extender.metrics.registry.get_sample_value("gpushare_extender_caps_changed_total")


@pytest.fixture
async def caps(cluster: Any, serve_cluster: Any) -> Any:
    """Eight nodes of one GPU, so that a pod is likely to stay alone; the extender itself changes no cap."""
    clock = Clock()
    for number in range(8):
        cluster.add_node(f"n{number + 1}", gpus=1, model=H200)
    async with serve_cluster(cluster, clock) as running:
        running.extender.caps.round = _nothing
        made = Caps(cluster, running, clock)
        for number in range(8):
            await made.report(node=f"n{number + 1}")
        yield made


async def _nothing() -> None:
    pass


async def test_it_gets_the_gpu_once_its_neighbour_has_left(caps: Caps, caplog: pytest.LogCaptureFixture) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    before = copy.deepcopy(caps.cluster.pod("a")["metadata"]["annotations"])
    await caps.report(a=0)
    with caplog.at_level("INFO", logger="gpushare.extender.recapping"):
        await caps.round()
    assert caps.cluster.pod("a")["metadata"]["annotations"] == before | {CAP: "100"}
    assert caps.ledger.state.reservations[caps.uid("a")].placement.thread_percentage == 100
    assert caps.changed == 1
    assert (
        "pod default/a runs no process, alone on its GPU: its next one gets 100% of the threads instead of 50%"
        in (caplog.messages)
    )
    (event,) = caps.cluster.store.objects(EVENTS).values()
    assert (event["reason"], event["type"], event["regarding"]["uid"]) == ("CapChanged", "Normal", caps.uid("a"))
    told = "alone on its GPU, it runs no process now: its next one gets at most 100% of the GPU's threads"
    assert event["note"] == f"{told}, instead of 50%"


@pytest.mark.parametrize(
    ("others", "words"), [(0, "alone on its GPU"), (1, "beside 1 other pod"), (2, "beside 2 other pods")]
)
def test_the_neighbours_are_named_in_words(others: int, words: str) -> None:
    """Before: "beside 1 other pods"."""
    assert beside(others) == words


async def test_a_pod_that_waits_is_asked_about_again_when_a_cap_has_changed(caps: Caps) -> None:
    """It may fit beside the new cap."""
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(a=0)
    rooms: list[str] = []
    caps.ledger.on_room = lambda: rooms.append("room")
    await caps.changer.round()
    assert rooms == ["room"]


async def test_a_cap_that_another_writes_counts_and_the_pod_stays_as_old_as_it_is(caps: Caps) -> None:
    caps.pod("a", "0.5", 50)
    caps.pod("b", "0.2", 20)
    await caps.cluster.settle()
    pod = copy.deepcopy(caps.cluster.pod("a"))
    pod["metadata"]["annotations"][CAP] = "75"
    caps.cluster.put(PODS, pod)
    await caps.cluster.settle()
    tenants = [(each.pod_uid, each.thread_percentage) for each in caps.ledger.state.tenants("GPU-n1-0")]
    assert tenants == [(caps.uid("a"), 75), (caps.uid("b"), 20)]


async def test_a_cap_that_another_replica_has_just_changed_is_left_alone_for_a_while(caps: Caps) -> None:
    """Before, two replicas took turns: a cap was 20, 33 and 25 within 12 s, and a process began under the 33."""
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.cluster.settle()
    pod = copy.deepcopy(caps.cluster.pod("a"))
    pod["metadata"]["annotations"][CAP] = "75"
    caps.cluster.put(PODS, pod)
    await caps.report(a=0)
    caps.clock.now += SETTLED_SECONDS / 2
    await caps.report(a=0)
    await caps.round()
    assert caps.cap("a") == "75"
    caps.clock.now += SETTLED_SECONDS / 2
    await caps.report(a=0)
    await caps.round()
    assert caps.cap("a") == "100"


async def test_a_second_look_writes_nothing(caps: Caps) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(a=0)
    await caps.round()
    writes = len(caps.cluster.patches)
    for _ in range(3):
        caps.clock.now += SETTLED_SECONDS
        await caps.report(a=0)
        await caps.round()
    assert len(caps.cluster.patches) == writes == 1


@pytest.mark.parametrize("clients", [1, 16, None])
async def test_a_pod_with_a_process_or_of_which_it_is_not_known_is_left_alone(
    caps: Caps, clients: int | None
) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(a=clients)
    await caps.round()
    assert caps.cap("a") == "50"


@pytest.mark.parametrize(
    "mps",
    [
        {"state": "Down"},
        {"state": "Fault"},
        {"state": "Starting"},
        {"ceilings": "NotEnforced"},
        {"ceilings": "Untested"},
    ],
    ids=str,
)
async def test_nothing_changes_where_the_daemon_is_not_up_or_caps_do_not_bind(
    caps: Caps, mps: dict[str, str]
) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(a=0, **mps)
    await caps.round()
    assert caps.cap("a") == "50"


async def test_a_report_is_used_while_it_is_fresh_and_once(caps: Caps) -> None:
    """A process may have connected since."""
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    caps.changer._pauses_until = caps.clock.now + FRESH_SECONDS
    await caps.report(a=0)
    await caps.round()
    caps.clock.now += FRESH_SECONDS + 0.1
    await caps.round()
    assert caps.cap("a") == "50"
    await caps.report(a=0)
    await caps.round()
    assert caps.cap("a") == "100"


async def test_what_an_agent_says_of_another_nodes_pod_counts_for_nothing(caps: Caps) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(node="n2", a=0)
    await caps.round()
    assert caps.cap("a") == "50"


async def test_the_first_report_that_an_extender_sees_may_be_old(caps: Caps, serve_cluster: Any) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(a=0)
    async with serve_cluster(caps.cluster) as other:
        assert other.extender.ledger.idle.take() is None


async def test_a_pod_that_is_ending_or_was_just_decided_is_left_alone(caps: Caps) -> None:
    for name, node in (("ends", "n1"), ("new", "n2"), ("probe", "n3")):
        more = {"class": "latency"} if name == "probe" else {}
        caps.pod(name, "0.5", 50, node=node, workload="montecarlo-fp32", **more)
    ends = copy.deepcopy(caps.cluster.pod("ends"))
    ends["metadata"]["deletionTimestamp"] = "2026-11-24T00:00:00Z"
    caps.cluster.put(PODS, ends)
    new = copy.deepcopy(caps.cluster.pod("new"))
    now = caps.ledger.context.now
    new["metadata"]["annotations"]["gpushare.io/decided-at"] = _rfc3339(now - SETTLED_SECONDS / 2)
    caps.cluster.put(PODS, new)
    await caps.report(node="n1", ends=0)
    await caps.report(node="n2", new=0)
    await caps.report(node="n3", probe=0)
    await caps.round()
    assert [caps.cap(name) for name in ("ends", "new", "probe")] == ["50", "50", "50"]


def _rfc3339(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_another_writers_decision_is_not_overwritten(caps: Caps) -> None:
    """The agent has corrected the GPU, or another replica the cap, and our watch has not shown it yet."""
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(a=0)
    caps.cluster.flowing.clear()
    for key, text in (("gpushare.io/gpu", "GPU-n2-0"), (CAP, "75")):
        pod = copy.deepcopy(caps.cluster.pod("a"))
        pod["metadata"]["annotations"][key] = text
        caps.cluster.put(PODS, pod)
        caps.changer._tried_at.clear()
        caps.ledger.idle.heard("n1", frozenset({caps.uid("a")}))
        await caps.changer.round()
        assert caps.cluster.pod("a")["metadata"]["annotations"][key] == text
        pod["metadata"]["annotations"] |= {"gpushare.io/gpu": "GPU-n1-0", CAP: "50"}
        caps.cluster.put(PODS, pod)
    caps.cluster.flowing.set()
    assert len(caps.cluster.patches) == 2
    assert caps.changed == 0
    assert caps.changer._pauses_until < caps.clock.now, "others may be changed at once"


async def test_a_successor_of_its_name_is_not_meant(caps: Caps) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    await caps.report(a=0)
    caps.cluster.flowing.clear()
    successor = copy.deepcopy(caps.cluster.pod("a"))
    successor["metadata"]["uid"] = "another"
    caps.cluster.remove(PODS, "default/a")
    caps.cluster.put(PODS, successor)
    await caps.changer.round()
    caps.cluster.flowing.set()
    assert caps.cap("a") == "50"
    caps.cluster.remove(PODS, "default/a")


@pytest.mark.parametrize(
    "error", [Retryable("away", retry_after_seconds=1.0), Forbidden("a policy refuses it", status=403)]
)
async def test_after_an_error_nothing_is_tried_for_ever_longer_waits(
    caps: Caps, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for number in range(1, 9):
        caps.pod(f"p{number}", "0.5", 50, node=f"n{number}", workload="montecarlo-fp32")
    asked = []

    async def fails(*_: Any, **__: Any) -> None:
        asked.append(caps.clock.now)
        raise error

    async def idle_again() -> None:
        for number in range(1, 9):
            await caps.report(node=f"n{number}", **{f"p{number}": 0})
        await caps.changer.round()

    with monkeypatch.context() as patched:
        patched.setattr(caps.cluster, "patch", fails)
        for _ in range(60):
            await idle_again()
            caps.clock.now += 1.0
    waits = [after - before for before, after in itertools.pairwise(asked)]
    assert waits == [BACKOFF.first_seconds * 2**number for number in range(len(waits))]
    assert len(waits) > 3
    assert caps.changed == 0
    caps.clock.now += BACKOFF.longest_seconds
    await idle_again()
    assert caps.changed == MOST_CHANGED, "and then it goes on"


async def test_a_bounded_number_is_written_in_a_round_and_a_pod_once_in_a_while(caps: Caps) -> None:
    def again(name: str) -> None:
        pod = copy.deepcopy(caps.cluster.pod(name))
        pod["metadata"]["annotations"][CAP] = "75"
        caps.cluster.put(PODS, pod)

    for number in range(1, 9):
        caps.pod(f"p{number}", "0.5", 75, node=f"n{number}")
        await caps.report(node=f"n{number}", **{f"p{number}": 0})
    for rounds in range(1, 8 // MOST_CHANGED + 1):
        await caps.round()
        assert caps.changed == rounds * MOST_CHANGED, "none is forgotten"
    again("p1")
    await caps.report(p1=0)
    await caps.round()
    assert caps.cap("p1") == "75", "whoever wrote that: not again so soon"
    caps.clock.now += SETTLED_SECONDS
    await caps.report(p1=0)
    await caps.round()
    assert caps.cap("p1") == "50"


async def test_the_model_is_asked_about_a_bounded_number_in_a_round(
    caps: Caps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods that it says nothing of, such as unknown ones under their share, do not count."""
    looked = []
    monkeypatch.setattr("gpushare.extender.recapping.cap_anew", lambda request, _: looked.append(request.pod_uid))
    for number in range(1, 9):
        workload = "montecarlo-fp32" if number > 2 else None
        caps.pod(f"p{number}", "0.5", 50, node=f"n{number}", workload=workload)
        await caps.report(node=f"n{number}", **{f"p{number}": 0})
    await caps.round()
    assert looked == [caps.uid(f"p{number}") for number in range(1, 3 + MOST_JUDGED)]
    caps.ledger.idle.heard("n9", frozenset(f"nobody-{number}" for number in range(2 * MOST_EXAMINED)))
    await caps.round()
    await caps.round()
    assert looked == [caps.uid(f"p{number}") for number in range(1, 9)]
    assert caps.ledger.idle.take() is not None, "the others have their turn in the next round"


async def test_two_extenders_that_look_at_once_change_it_once(caps: Caps, serve_cluster: Any) -> None:
    caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
    async with serve_cluster(caps.cluster, caps.clock) as other:
        other.extender.caps.round = _nothing
        second = Caps(caps.cluster, other, caps.clock)
        await caps.report(a=0)
        caps.cluster.flowing.clear()
        await caps.changer.round()
        await second.changer.round()
        caps.cluster.flowing.set()
        await caps.cluster.settle()
        assert caps.cap("a") == "100"
        assert (caps.changed, second.changed) == (1, 0)
        assert len(caps.cluster.store.objects(EVENTS)) == 1


def test_reports_are_taken_in_their_order_and_each_pod_once() -> None:
    clock = Clock()
    idle = IdlePods(clock)
    idle.heard("n1", frozenset({"a", "b"}))
    idle.heard("n2", frozenset({"c", "d"}))
    idle.heard("n3", frozenset())
    assert [idle.take() for _ in range(4)] == [("a", "n1"), ("b", "n1"), ("c", "n2"), ("d", "n2")]
    assert idle.take() is None
    idle.heard("n1", frozenset({"a", "b"}))
    idle.heard("n2", frozenset({"c"}))
    idle.heard("n1", frozenset({"b"}))
    idle.drop("n2")
    assert [idle.take(), idle.take()] == [("b", "n1"), None], "the newest report counts"
    idle.heard("n1", frozenset({"a"}))
    clock.now += FRESH_SECONDS + 0.1
    idle.heard("n2", frozenset({"c"}))
    assert [idle.take(), idle.take()] == [("c", "n2"), None], "an old report does not"


async def test_an_extender_that_runs_does_it_itself(
    cluster: Any, serve_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare.extender.server.WAKE_PERIOD_SECONDS", 0.01)
    for number in range(8):
        cluster.add_node(f"n{number + 1}", gpus=1, model=H200)
    async with serve_cluster(cluster) as running:
        caps = Caps(cluster, running, Clock())
        await caps.report()
        caps.pod("a", "0.5", 50, workload="montecarlo-fp32")
        await caps.report(a=0)
        async with asyncio.timeout(60):
            while caps.cap("a") != "100":  # noqa: ASYNC110 - the cluster's objects have no such event
                await asyncio.sleep(0.01)
        assert caps.changed == 1
