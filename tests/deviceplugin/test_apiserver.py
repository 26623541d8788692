"""The agent's own list of its pods, beside the watch that goes on during it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.deviceplugin.fakes import GPU_A, raw_pod

from gpushare.kube import PODS
from gpushare.kube.fake import FakeApi
from gpushare_deviceplugin.apiserver import AgentApi
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
