"""No list of PodResources while kubelet allocates, no allocation during a list: else two pods get the same ids.

Found by hack/chaos --soak. The kubelet here keeps its books as its devicemanager/manager.go does (v1.35).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, Clock, make_pod

from gpushare.core.api import Decision
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.allocation import device_ids
from gpushare_deviceplugin.kubelet import (
    CALM_SECONDS,
    CHECKPOINT,
    FAST_POLLS_SECONDS,
    LONGEST_WAIT_SECONDS,
    PERIOD_SECONDS,
    POLL_SECONDS,
    QUIET_SECONDS,
    AllocationReconciler,
    AllocationsUnderWay,
    PodResourcesError,
)
from gpushare_deviceplugin.plugin import DevicePlugin
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.state import NodeState

IDS = frozenset(device_ids(GPU_A))
SOON = 60.0


class Kubelet:
    """Books of ids: those taken, and by pod; a list frees what pods that are gone had."""

    def __init__(self, plugin: DevicePlugin, checkpoint: Path | None = None) -> None:
        self.plugin, self._checkpoint = plugin, checkpoint
        self.active: set[str] = set()
        self.by_pod: dict[str, frozenset[str]] = {}
        self.taken: frozenset[str] = frozenset()
        self.may_note, self.may_list = asyncio.Event(), asyncio.Event()
        self.may_note.set()
        self.may_list.set()
        self.looks_early = False

    async def admit(self, pod: str, size: int) -> None:
        self.active.add(pod)
        self._free_the_ids_of_the_gone()
        asked = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(IDS - self.taken), allocation_size=size
        )
        preferred = await self.plugin.GetPreferredAllocation(
            api_pb2.PreferredAllocationRequest(container_requests=[asked]), None
        )
        chosen = frozenset(preferred.container_responses[0].deviceIDs)
        self.taken |= chosen
        granted = api_pb2.ContainerAllocateRequest(devices_ids=sorted(chosen))
        await self.plugin.Allocate(api_pb2.AllocateRequest(container_requests=[granted]), None)
        await self.may_note.wait()
        self.note(pod, chosen)

    def note(self, pod: str, ids: frozenset[str]) -> None:
        self.by_pod[pod] = ids
        if self._checkpoint is not None:
            new = self._checkpoint.with_suffix(".new")
            new.write_text(str(self.by_pod))
            new.replace(self._checkpoint)

    async def list(self) -> dict[str, dict[str, int]]:
        """It may take long to begin, and between the look at the pods and that at the books."""
        early = set(self.active)
        await self.may_list.wait()
        self._free_the_ids_of_the_gone(early if self.looks_early else self.active)
        return {}

    def _free_the_ids_of_the_gone(self, active: set[str] | None = None) -> None:
        gone = self.by_pod.keys() - (self.active if active is None else active)
        if gone:
            self.by_pod = {pod: ids for pod, ids in self.by_pod.items() if pod not in gone}
            self.taken = frozenset().union(*self.by_pod.values())

    def shared(self) -> set[str]:
        """Ids that two pods have, and pods that have none."""
        every = [one for ids in self.by_pod.values() for one in ids]
        return {one for one in every if every.count(one) > 1} | (self.active - self.by_pod.keys())


async def correct(*_: object) -> bool:
    return True


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("looks_early", [False, True])
async def test_an_allocation_waits_for_the_list_in_flight(
    state: NodeState, tmp_path: Path, looks_early: bool
) -> None:
    under_way = AllocationsUnderWay()
    kubelet = Kubelet(DevicePlugin(state, tmp_path, under_way=under_way))
    reconciler = AllocationReconciler(state, kubelet, correct, under_way)
    await kubelet.admit("gone", 10)
    under_way._answered_at = None  # long ago
    kubelet.looks_early = looks_early
    kubelet.may_list.clear()
    listing = asyncio.create_task(reconciler.reconcile())
    await turns()
    if not looks_early:
        kubelet.may_note.clear()
    first = asyncio.create_task(kubelet.admit("a", 10))
    await turns()
    kubelet.active.remove("gone")
    kubelet.may_list.set()
    await asyncio.wait_for(listing, SOON)
    await turns()
    kubelet.may_note.set()
    await asyncio.wait_for(first, SOON)
    await asyncio.wait_for(kubelet.admit("b", 30), SOON)
    assert kubelet.by_pod.keys() == {"a", "b"}
    assert kubelet.shared() == set()


@pytest.mark.parametrize("noted_after_seconds", [0.0, QUIET_SECONDS * 2, LONGEST_WAIT_SECONDS * 0.9])
async def test_a_list_waits_until_kubelet_has_noted_whose_the_ids_are(
    state: NodeState, clock: Clock, tmp_path: Path, noted_after_seconds: float
) -> None:
    checkpoint = tmp_path / CHECKPOINT
    checkpoint.write_text("{}")
    under_way = AllocationsUnderWay(clock, checkpoint)
    kubelet = Kubelet(DevicePlugin(state, tmp_path, under_way=under_way), checkpoint)
    await kubelet.admit("gone", 10)
    kubelet.active.remove("gone")
    kubelet.may_note.clear()
    admitting = asyncio.create_task(kubelet.admit("a", 10))
    await turns()
    begun = clock.now

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now - begun >= noted_after_seconds:
            kubelet.may_note.set()
            await asyncio.wait_for(admitting, SOON)

    async with under_way.listing(sleep):
        await kubelet.list()
    assert clock.now - begun <= noted_after_seconds + 2 * POLL_SECONDS
    await asyncio.wait_for(kubelet.admit("b", 30), SOON)
    assert kubelet.by_pod.keys() == {"a", "b"}
    assert kubelet.shared() == set()


async def waits(under_way: AllocationsUnderWay, clock: Clock) -> float:
    """Seconds until a list may begin."""

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    begun = clock.now
    async with under_way.listing(sleep):
        return clock.now - begun


async def test_where_the_file_is_not_seen_kubelet_is_given_a_moment(clock: Clock, tmp_path: Path) -> None:
    under_way = AllocationsUnderWay(clock, tmp_path / "nothing")
    assert await waits(under_way, clock) == 0.0
    with under_way.allocating():
        assert under_way.seconds_left() > 0
    clock.now += QUIET_SECONDS / 2
    assert await waits(under_way, clock) == pytest.approx(QUIET_SECONDS / 2)
    assert await waits(under_way, clock) == 0.0


async def test_between_kubelets_two_questions_there_is_no_list(clock: Clock) -> None:
    under_way = AllocationsUnderWay(clock)
    async with under_way.choosing():
        assert under_way.seconds_left() > 0
    assert under_way.seconds_left() > 0
    with under_way.allocating():
        assert under_way.seconds_left() > 0
    clock.now += QUIET_SECONDS
    assert under_way.seconds_left() == 0.0


@pytest.mark.parametrize("asked", [False, True])
async def test_a_new_agent_lists_nothing_before_the_calls_that_were_held_for_it(clock: Clock, asked: bool) -> None:
    under_way = AllocationsUnderWay(clock)
    under_way.expect()
    assert under_way.seconds_left() > 0
    clock.now += LONGEST_WAIT_SECONDS / 2
    if asked:  # while we register
        async with under_way.choosing():
            pass
    under_way.expect_no_more()
    assert under_way.seconds_left() > 0
    clock.now += QUIET_SECONDS
    assert (under_way.seconds_left() > 0) == asked
    with under_way.allocating():
        pass
    clock.now += QUIET_SECONDS
    assert under_way.seconds_left() == 0.0


async def test_a_new_agent_that_kubelet_does_not_take_lists_after_a_while(clock: Clock) -> None:
    under_way = AllocationsUnderWay(clock)
    under_way.expect()
    assert await waits(under_way, clock) == pytest.approx(LONGEST_WAIT_SECONDS, abs=2 * POLL_SECONDS)
    under_way.expect_no_more()
    assert await waits(under_way, clock) == 0.0


async def test_an_allocation_that_does_not_end_is_not_waited_for_without_end(clock: Clock, tmp_path: Path) -> None:
    checkpoint = tmp_path / CHECKPOINT
    checkpoint.write_text("{}")
    for name in ("open", "no Allocate came", "never noted"):
        under_way = AllocationsUnderWay(clock, checkpoint)
        if name == "open":
            with under_way.allocating():
                seconds = await waits(under_way, clock)
        else:
            async with under_way.choosing():
                pass
            if name == "never noted":
                with under_way.allocating():
                    pass
            seconds = await waits(under_way, clock)
            assert await waits(under_way, clock) == 0.0, name
        assert seconds == pytest.approx(LONGEST_WAIT_SECONDS, abs=2 * POLL_SECONDS), name


async def test_the_reconciler_lists_only_after_the_plugins_answer(
    state: NodeState, clock: Clock, tmp_path: Path
) -> None:
    under_way = AllocationsUnderWay(clock)
    listed_with: list[float] = []

    class Source:
        async def list(self) -> dict[str, dict[str, int]]:
            listed_with.append(under_way.seconds_left())
            return {}

    plugin = DevicePlugin(state, tmp_path, under_way=under_way)
    reconciler = AllocationReconciler(state, Source(), correct, under_way)
    request = api_pb2.AllocateRequest(
        container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=list(device_ids(GPU_A)[:10]))]
    )
    await plugin.Allocate(request, None)
    assert under_way.seconds_left() > 0
    reconciling = asyncio.create_task(reconciler.reconcile())
    await turns()
    assert listed_with == []
    clock.now += QUIET_SECONDS
    await asyncio.wait_for(reconciling, SOON)
    assert listed_with == [0.0]


async def test_the_reconciler_lists_rarely_once_lists_are_the_same_and_nothing_is_awaited(
    state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.put_pod(make_pod("a", gpu=GPU_A))
    state.put_pod(make_pod("b", gpu=GPU_A))
    listed: dict[str, dict[str, int]] = {}
    waits: list[float] = []
    may_correct = [True]

    class Source:
        is_away = False

        async def list(self) -> dict[str, dict[str, int]]:
            if self.is_away:
                raise PodResourcesError("away")
            return dict(listed)

    class Waited:
        """Instead of asyncio.timeout: the wait for an allocation is over at once, in vain unless one was told."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        async def __aenter__(self) -> None:
            waits.append(self.seconds)
            reconciler_waits.set()
            await goes_on.wait()
            goes_on.clear()
            if not is_poked.is_set():
                raise TimeoutError
            is_poked.clear()

        async def __aexit__(self, *_: object) -> None:
            return None

    async def correct(pod: ManagedPod, decision: Decision) -> bool:
        return may_correct[0]

    async def no_time(_: float) -> None:
        polls.append(1)

    async def next_wait(*, poke: bool = False) -> float:
        """Let the present wait end, by an allocation or not; return how long the next one would last."""
        if poke:
            is_poked.set()
            reconciler.poke()
        reconciler_waits.clear()
        goes_on.set()
        await reconciler_waits.wait()
        return waits[-1]

    reconciler_waits, goes_on, is_poked, polls = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[int]()
    source = Source()
    reconciler = AllocationReconciler(state, source, correct)
    monkeypatch.setattr("gpushare_deviceplugin.kubelet.asyncio.timeout", Waited)
    monkeypatch.setattr("gpushare_deviceplugin.kubelet.asyncio.sleep", no_time)
    running = asyncio.create_task(reconciler.run())
    await reconciler_waits.wait()
    assert waits == [PERIOD_SECONDS], "the first list is news"
    assert await next_wait() == CALM_SECONDS

    assert await next_wait(poke=True) == PERIOD_SECONDS, "what was allocated is not listed yet"
    assert len(polls) == len(FAST_POLLS_SECONDS)
    assert await next_wait() == PERIOD_SECONDS
    listed["shop/a"] = {GPU_A: 25}
    assert await next_wait() == PERIOD_SECONDS
    assert await next_wait() == CALM_SECONDS

    listed["shop/b"] = {GPU_A: 25}
    assert await next_wait(poke=True) == CALM_SECONDS, "seen by the first list after the allocation"
    assert len(polls) == len(FAST_POLLS_SECONDS) + 1

    source.is_away = True
    assert await next_wait() == PERIOD_SECONDS
    source.is_away = False
    assert await next_wait() == CALM_SECONDS

    may_correct[0], listed["shop/b"] = False, {GPU_B: 25}
    assert [await next_wait(), await next_wait()] == [PERIOD_SECONDS, PERIOD_SECONDS], "not corrected yet"
    may_correct[0] = True
    assert await next_wait() == CALM_SECONDS
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
