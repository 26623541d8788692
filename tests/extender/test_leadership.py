"""A new leader reads what the former one bound before it decides, however late its own watch is (ADR 0201)."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from gpushare.extender.leadership import ANSWER_SECONDS, SURE_SECONDS, Leadership
from gpushare.kube import LEASES, Retryable

LEASE = "gpushare-scheduler"
HERE = f"{socket.gethostname()}_1"  # as kube-scheduler names itself, in the extender's own pod
ELSEWHERE = "another-pod_2"
MEMORY_MIB = 81920


class Clock:
    """Monotonic seconds, turned by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lead(cluster, holder: str, transitions: int) -> None:
    """What kube-scheduler writes when it takes its lease."""
    metadata = {"name": LEASE, "namespace": "default"}
    cluster.put(
        LEASES, {"metadata": metadata, "spec": {"holderIdentity": holder, "leaseTransitions": transitions}}
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextlib.asynccontextmanager
async def two_replicas(cluster, serve_cluster, clock):
    """Two extenders, each beside a kube-scheduler of its own pod; the first one's leads."""
    lead(cluster, "first_1", 1)
    async with (
        serve_cluster(cluster, clock=clock, lease=LEASE) as first,
        serve_cluster(cluster, clock=clock, lease=LEASE) as second,
    ):
        first.extender.leadership._host, second.extender.leadership._host = "first", "second"
        yield first, second
        cluster.flowing.set()


async def test_a_new_leader_does_not_give_memory_away_twice(cluster, serve_cluster, clock):
    cluster.add_node("n1", gpus=1, memory_mib=MEMORY_MIB)
    for name in ("a", "b"):
        cluster.make_pod(name, "0.3", memory="50Gi")
    async with two_replicas(cluster, serve_cluster, clock) as (first, second):
        cluster.flowing.clear()  # the second's watches are far behind
        assert (await first.filter("a"))["NodeNames"] == ["n1"]
        assert await first.bind("a", "n1") == ""
        lead(cluster, "second_2", 2)
        refused = await second.filter("b")
        assert refused["NodeNames"] == []
        assert "MiB" in refused["FailedNodes"]["n1"]
        assert set(second.held()) == {"a"}


async def test_a_former_leader_that_goes_on_binds_nothing(cluster, serve_cluster, clock):
    """Before: kube-scheduler, continued after 20 s, led for ten seconds more by its own belief, and its extender
    bound a pod to a GPU 0.3 s after the new leader's had taken the room: 105 percent were given.
    """
    cluster.add_node("n1", gpus=1, memory_mib=MEMORY_MIB)
    for name, share in (("a", "0.5"), ("b", "0.6"), ("c", "0.6"), ("d", "0.3")):
        cluster.make_pod(name, share)
    async with two_replicas(cluster, serve_cluster, clock) as (first, second):
        assert (await first.filter("b"))["NodeNames"] == ["n1"]
        clock.now += 5.0  # its kube-scheduler stands still, and the other takes the lease
        lead(cluster, "second_2", 2)
        assert (await second.filter("a"))["NodeNames"] == ["n1"]
        assert await second.bind("a", "n1") == ""
        cluster.flowing.clear()
        sentence = "another kube-scheduler leads, by its lease: the extender beside that one answers"
        assert await first.bind("b", "n1") == sentence
        for name in ("b", "c", "d"):
            clock.now += SURE_SECONDS / 4
            assert (await first.filter(name))["Error"] == sentence, "however often it asks"
            assert await first.bind(name, "n1") == sentence
        assert await second.bind("d", "n1") == ""
        lead(cluster, "first_3", 3)
        assert await first.bind("b", "n1") != "", "it leads again, and has read what the other bound"
        assert set(first.held()) == {"a", "d"}


async def test_whoever_led_once_is_not_refused_for_a_lease_that_is_not_read(cluster, serve_cluster, clock):
    cluster.add_node("n1", gpus=1, memory_mib=MEMORY_MIB)
    cluster.make_pod("a", "0.5")
    async with two_replicas(cluster, serve_cluster, clock) as (first, _):
        assert (await first.filter("a"))["NodeNames"] == ["n1"]
        clock.now += 5.0
        cluster.get_fails = ["no answer"]
        assert (await first.filter("a"))["NodeNames"] == ["n1"]


async def test_without_a_change_of_the_leader_the_pods_are_not_read_again(cluster, serve_cluster, clock):
    cluster.add_node("n1", gpus=1, memory_mib=MEMORY_MIB)
    for name in ("a", "b", "c"):
        cluster.make_pod(name, "0.1")
    lead(cluster, HERE, 1)
    async with serve_cluster(cluster, clock=clock, lease=LEASE) as own:
        lists = count_lists(cluster, own)
        for name in ("a", "b", "c"):
            assert (await own.filter(name))["NodeNames"] == ["n1"]
            clock.now += 5.0
        assert lists == []
        lead(cluster, ELSEWHERE, 2)
        lead(cluster, HERE, 3)
        await own.filter("c")
        assert lists == ["pods"], "it has led, but another in between"


def count_lists(cluster, served) -> list[str]:
    found: list[str] = []
    pods = served.extender._pods
    before = pods._list

    async def counted() -> str:
        found.append(pods.name)
        return await before()

    pods._list = counted
    return found


class TestLeadership:
    async def test_the_lease_is_read_only_after_a_pause_between_questions(self, cluster, clock):
        lead(cluster, HERE, 1)
        leadership = Leadership(cluster, LEASE, "default", clock)
        await leadership.note()
        assert not await leadership.has_changed()
        lead(cluster, HERE, 3)
        for _ in range(10):
            clock.now += SURE_SECONDS * 0.9
            assert not await leadership.has_changed(), "it asks all the time, so it leads"
        clock.now += SURE_SECONDS * 1.1
        assert await leadership.has_changed()
        clock.now += SURE_SECONDS * 1.1
        assert not await leadership.has_changed(), "once for each change"

    async def test_while_another_leads_the_lease_is_read_at_every_question(self, cluster, clock):
        lead(cluster, ELSEWHERE, 1)
        leadership = Leadership(cluster, LEASE, "default", clock)
        await leadership.note()
        assert leadership.is_elsewhere
        assert not await leadership.has_changed()
        lead(cluster, HERE, 2)
        assert await leadership.has_changed()
        assert not leadership.is_elsewhere
        lead(cluster, "", 2)  # given back: nobody leads, and nothing is sure
        clock.now += SURE_SECONDS * 1.1
        assert await leadership.has_changed()
        assert not leadership.is_elsewhere
        lead(cluster, ELSEWHERE, 3)
        assert await leadership.has_changed()
        assert leadership.is_elsewhere

    async def test_a_leader_that_was_not_known_at_the_start_is_a_new_one(self, cluster, clock):
        lead(cluster, HERE, 1)
        leadership = Leadership(cluster, LEASE, "default", clock)
        cluster.get_fails = ["no answer"]
        await leadership.note()
        assert await leadership.has_changed()

    async def test_a_lease_that_is_not_read_is_asked_for_at_the_next_question(self, cluster, clock, caplog):
        lead(cluster, HERE, 1)
        leadership = Leadership(cluster, LEASE, "default", clock)
        await leadership.note()
        lead(cluster, ELSEWHERE, 2)
        cluster.get_fails = ["no answer", "no answer"]
        assert [await leadership.has_changed() for _ in range(4)] == [False, False, True, False]
        assert [one.message for one in caplog.records] == [f"lease default/{LEASE} is not read: no answer"]

    async def test_an_api_server_that_hangs_holds_no_question_up_for_long(self, cluster, clock, monkeypatch, turn):
        leadership = Leadership(cluster, LEASE, "default", clock)

        async def hangs(*_args, **_more):
            await asyncio.Event().wait()

        monkeypatch.setattr(cluster, "get", hangs)
        asking = asyncio.create_task(leadership.has_changed())
        await asyncio.sleep(0)
        await turn(ANSWER_SECONDS)
        assert asking.done()
        assert not asking.result()

    async def test_without_a_lease_nothing_is_read(self, cluster, clock, monkeypatch):
        async def fails(*_args, **_more):
            raise Retryable("not to be asked", retry_after_seconds=1)

        monkeypatch.setattr(cluster, "get", fails)
        leadership = Leadership(cluster, "", "default", clock)
        await leadership.note()
        assert not await leadership.has_changed()

    async def test_before_the_first_leader_there_is_no_lease(self, cluster, clock):
        leadership = Leadership(cluster, LEASE, "default", clock)
        await leadership.note()
        assert not await leadership.has_changed()
        lead(cluster, HERE, 0)
        clock.now += SURE_SECONDS * 1.1
        assert await leadership.has_changed()


@pytest.mark.parametrize(("holder", "is_here"), [("pod-1_uid", True), ("pod-10_uid", False), ("", False)])
async def test_who_leads_is_told_by_the_host_name(cluster, clock, holder, is_here):
    lead(cluster, holder, 1)
    assert await Leadership(cluster, LEASE, "default", clock, host="pod-1").is_here() is is_here
    cluster.get_fails = ["away"]
    assert not await Leadership(cluster, LEASE, "default", clock, host="pod-1").is_here()
    assert await Leadership(cluster, "", "default", clock).is_here(), "nobody is elected"
