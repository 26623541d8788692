"""The agent's own list of its pods, beside the watch that goes on during it, and the GpuNode that it writes."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from tests.deviceplugin.fakes import GPU_A, raw_pod

from gpushare.core.admission import Defaults
from gpushare.core.api import GpuNodeStatus, GpuShare, JobClass, PodView, to_json
from gpushare.core.control import SILENT_SECONDS, OperatorSettings, status_of
from gpushare.kube import EVENTS, GPUNODES, GPUSHARES, NODES, PODS, Forbidden, Json, Resource, Retryable
from gpushare.kube.fake import FakeApi
from gpushare_deviceplugin.apiserver import AgentApi
from gpushare_deviceplugin.shares import Terms, terms_of
from gpushare_deviceplugin.state import NodeState

SOON = 60.0


class SlowApi(FakeApi):
    """A client whose lists arrive only when the test lets them, as they were when they were read."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def list(self, *args: Any, **options: Any) -> Any:
        listing = await super().list(*args, **options)
        self.has_read.set()
        await self.may_answer.wait()
        return listing


async def until(state: NodeState, is_true: Callable[[], bool]) -> None:
    changed = state.subscribe()
    while not is_true():
        await changed.wait()
        changed.clear()


async def refresh_during(
    state: NodeState, api: SlowApi, change: Callable[[], object], is_watched: Callable[[], bool]
) -> frozenset[str] | None:
    """Return what a refresh answers, whose list was read before a change that the watch delivers during it."""
    cluster = AgentApi(api, "n1", state)
    async with asyncio.timeout(SOON), cluster.pods() as pods:
        await pods.synced.wait()
        api.has_read.clear()
        api.may_answer.clear()
        refreshing = asyncio.create_task(cluster.refresh_pods())
        await api.has_read.wait()
        change()
        await until(state, is_watched)
        api.may_answer.set()
        return await refreshing


@pytest.fixture
def api() -> SlowApi:
    made = SlowApi()
    made.store.put(PODS, raw_pod("a", GPU_A))
    made.store.put(PODS, raw_pod("b", GPU_A))
    return made


async def test_pods_beyond_the_list_of_their_gpushare_run_on_its_terms_too(state: NodeState, api: SlowApi) -> None:
    """1,100 pods of one GpuShare, of which its status lists 1,000; which ones changes with their names."""
    last = raw_pod("web-1099", GPU_A)
    pods = [raw_pod(f"web-{number:04}", GPU_A, node="n2") for number in range(1099)] + [last]
    for pod in pods:
        pod["metadata"]["labels"]["app"] = "web"
    spec = {"selector": {"matchLabels": {"app": "web"}}, "class": "latency", "profile": {"mode": "Off"}}
    web = {"metadata": {"namespace": "shop", "name": "web", "uid": "s", "resourceVersion": "1"}, "spec": spec}
    views = [PodView.from_object(pod) for pod in pods]
    status = status_of(GpuShare.from_object(web), views, {}, OperatorSettings(Defaults()), "2026-11-28T10:00:00Z")
    assert last["metadata"]["uid"] not in {placement.pod_uid for placement in status.placements}
    api.store.put(PODS, last)
    cluster = AgentApi(api, "n1", state)
    async with asyncio.timeout(SOON), cluster.pods() as watched, cluster.profiles() as profiles:
        await watched.synced.wait()
        await profiles.synced.wait()
        pod = state.pods["uid-web-1099"]
        assert not terms_of(pod, cluster.shares, Defaults()).is_certain
        api.store.put(GPUSHARES, {**web, "status": to_json(status)})
        await until(state, lambda: len(cluster.shares) == 1)
        assert terms_of(pod, cluster.shares, Defaults()) == Terms(JobClass.LATENCY, 1.1)
        assert [each.is_profiled for each in cluster.shares.of("shop", pod.uid)] == [False]
        assert not terms_of(state.pods["uid-a"], cluster.shares, Defaults()).is_certain
        api.store.remove(GPUSHARES, "shop/web")
        await until(state, lambda: not cluster.shares)
        assert not terms_of(pod, cluster.shares, Defaults()).is_certain


async def test_a_list_does_not_take_back_what_the_watch_delivered_during_it(
    state: NodeState, api: SlowApi
) -> None:
    new = raw_pod("a", GPU_A, phase="Running")
    new["status"]["podIP"] = "10.0.0.7"
    new["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:30Z", "deletionGracePeriodSeconds": 30}
    listed = await refresh_during(
        state, api, lambda: api.store.put(PODS, new), lambda: state.pods["uid-a"].phase == "Running"
    )
    pod = state.pods["uid-a"]
    assert (pod.phase, pod.ip, pod.ends_at is not None) == ("Running", "10.0.0.7", True)
    assert listed == {"uid-a", "uid-b"}


async def test_a_list_does_not_bring_back_a_pod_that_was_deleted_during_it(state: NodeState, api: SlowApi) -> None:
    listed = await refresh_during(
        state, api, lambda: api.store.remove(PODS, "shop/a"), lambda: "uid-a" not in state.pods
    )
    assert [pod.uid for pod in state.pending()] == ["uid-b"]
    assert listed == {"uid-b"}


async def test_a_list_does_not_bring_back_a_pod_whose_name_another_got_during_it(
    state: NodeState, api: SlowApi
) -> None:
    new = raw_pod("a", GPU_A)
    new["metadata"]["uid"] = "uid-new"
    listed = await refresh_during(state, api, lambda: api.store.put(PODS, new), lambda: "uid-new" in state.pods)
    assert state.pods.keys() == {"uid-new", "uid-b"}
    assert listed == {"uid-new", "uid-b"}


async def test_a_refresh_lists_what_the_watch_has_not_delivered(state: NodeState, api: SlowApi) -> None:
    cluster = AgentApi(api, "n1", state)
    assert await cluster.refresh_pods() == {"uid-a", "uid-b"}
    assert state.pods.keys() == {"uid-a", "uid-b"}


NODE = {"metadata": {"name": "n1", "uid": "uid-of-node-1"}}
STATUS = GpuNodeStatus.of((), driver_version="1")


class GuardedApi(FakeApi):
    """An API server that lets only those set owners who may delete the object."""

    asked = 0

    async def patch(self, resource: Resource, name: str, body: Any, **options: Any) -> Json:
        if "ownerReferences" in body.get("metadata", {}):
            self.asked += 1
            raise Forbidden("cannot set an owner of an object that one may not delete", status=403)
        return await super().patch(resource, name, body, **options)


def owners(api: FakeApi) -> list[str]:
    return [each["uid"] for each in api.store.objects(GPUNODES)["n1"]["metadata"].get("ownerReferences", ())]


async def test_an_agent_that_outlives_its_node_does_not_make_its_gpunode_again(
    state: NodeState, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing would delete it: before, it kept the machine's GPUs from the name under which it joined again."""
    api = FakeApi()
    api.store.put(NODES, NODE)
    cluster = AgentApi(api, "n1", state)
    assert await cluster.write(STATUS)
    assert owners(api) == ["uid-of-node-1"]
    api.store.remove(NODES, "n1")
    api.store.remove(GPUNODES, "n1")  # as the garbage collector does
    assert not await cluster.write(STATUS)
    assert not await cluster.write(STATUS)
    assert "n1" not in api.store.objects(GPUNODES)
    [logged] = [each.getMessage() for each in caplog.records if "not written" in each.getMessage()]
    assert "nodes" in logged
    api.store.put(NODES, {"metadata": {"name": "n1", "uid": "uid-of-node-2"}})
    assert await cluster.write(STATUS)
    assert owners(api) == ["uid-of-node-2"]


class ReadOnlyApi(FakeApi):
    """An API server that answers reads and, while `why` is set, refuses writes."""

    why = ""

    async def patch(self, resource: Resource, name: str, body: Any, **options: Any) -> Json:
        if self.why:
            raise Retryable(self.why, status=500, retry_after_seconds=1)
        return await super().patch(resource, name, body, **options)


@pytest.mark.parametrize("seconds", [140, 600])
async def test_after_an_outage_of_writes_alone_the_node_says_why_its_agent_was_silent(
    state: NodeState, seconds: int
) -> None:
    """Before: nothing but the agent's log told it from an agent that did not run."""
    api, now = ReadOnlyApi(), [1000.0]
    api.store.put(NODES, NODE)
    cluster = AgentApi(api, "n1", state, clock=lambda: now[0])
    assert await cluster.write(STATUS)
    for api.why in ("etcdserver: no leader", "etcdserver: mvcc: database space exceeded"):
        assert not await cluster.write(STATUS)
        now[0] += seconds / 2
    api.why = ""
    for _ in range(2):
        assert await cluster.write(STATUS)
    told = [
        (one["regarding"]["kind"], one["regarding"]["name"], one["reason"], one["note"])
        for one in api.store.objects(EVENTS).values()
    ]
    note = (
        "the agent could not write its GpuNode for 600 s and so counted as silent, although it ran: "
        "etcdserver: mvcc: database space exceeded"
    )
    assert told == ([("Node", "n1", "GpuNodeNotWritten", note)] if seconds > SILENT_SECONDS else [])


async def test_the_log_tells_during_an_outage_of_writes_that_the_agent_counts_as_silent(
    state: NodeState, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: one line at the first failure, whose cause may have been another, and the event only afterwards."""
    api, now = ReadOnlyApi(), [1000.0]
    api.store.put(NODES, NODE)
    cluster = AgentApi(api, "n1", state, clock=lambda: now[0])
    for _ in range(2):
        assert await cluster.write(STATUS)
        caplog.clear()
        for number in range(100):
            api.why = "etcdserver: mvcc: database space exceeded" if number else "etcdserver: no leader"
            assert not await cluster.write(STATUS)
            now[0] += 2.0
        api.why = ""
        first, during = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert first.getMessage() == "GpuNode n1 not written, retrying: etcdserver: no leader"
        assert during.getMessage() == (
            "GpuNode n1 not written for 152 s, so its agent counts as silent and it gets no new pods: "
            "etcdserver: mvcc: database space exceeded"
        )


async def test_a_gpunode_without_an_owner_gets_it_once_its_node_is_present(state: NodeState) -> None:
    api = FakeApi()
    api.store.put(GPUNODES, {"metadata": {"name": "n1", "uid": "uid-of-gpunode"}})
    cluster = AgentApi(api, "n1", state)
    assert await cluster.write(STATUS)
    assert owners(api) == []
    api.store.put(NODES, NODE)
    assert await cluster.write(STATUS)
    assert owners(api) == ["uid-of-node-1"]


async def test_an_agent_that_may_not_set_an_owner_tries_it_once(state: NodeState) -> None:
    api = GuardedApi()
    api.store.put(NODES, NODE)
    api.store.put(GPUNODES, {"metadata": {"name": "n1", "uid": "uid-of-gpunode"}})
    cluster = AgentApi(api, "n1", state)
    assert await cluster.write(STATUS)
    assert await cluster.write(STATUS)
    assert (api.asked, owners(api)) == (1, [])
