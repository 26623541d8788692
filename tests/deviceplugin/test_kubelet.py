"""Reconciliation with kubelet's lists while the pods change during its calls."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, Clock, make_pod

from gpushare.core.api import Decision
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.allocation import device_ids, shares_by_gpu
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.kubelet import NO_RECORD, UNRECORDED_SECONDS, AllocationReconciler
from gpushare_deviceplugin.plugin import DevicePlugin
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import tenants_of


class Source:
    """Lists that the test gives, once it lets them arrive."""

    def __init__(self, listed: dict[str, dict[str, int]]) -> None:
        self.listed = listed
        self.has_read, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def list(self) -> dict[str, dict[str, int]]:
        listed = dict(self.listed)
        self.has_read.set()
        await self.may_answer.wait()
        return listed


class Corrections:
    """Corrections that succeed."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[str, ...]]] = []

    async def __call__(self, pod: ManagedPod, decision: Decision) -> bool:
        self.made.append((pod.uid, decision.gpu_uuids))
        return True


class Refused(Exception):
    """What kubelet is answered instead of a grant."""


class Context:
    async def abort(self, _code: object, text: str) -> None:
        raise Refused(text)


def listed_of(state: NodeState) -> Callable[[], Awaitable[frozenset[str]]]:
    async def refresh() -> frozenset[str]:
        return frozenset(state.pods)

    return refresh


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_correction_keeps_what_the_watch_delivered_meanwhile(state: NodeState, is_deleted: bool) -> None:
    pod = make_pod("a", gpu=GPU_A)
    corrected: list[tuple[str, tuple[str, ...]]] = []

    async def correct(given: ManagedPod, decision: Decision) -> bool:
        corrected.append((given.uid, decision.gpu_uuids))
        if is_deleted:
            state.drop_pod("uid-a")
        else:
            state.put_pod(replace(pod, phase="Running", ip="10.0.0.7", ends_at=1027.0))
        return True

    state.put_pod(pod)
    await AllocationReconciler(state, Source({"shop/a": {GPU_B: 25}}), correct).reconcile()
    assert corrected == [("uid-a", (GPU_B,))]
    if is_deleted:
        assert state.pods == {}
    else:
        found = state.pods["uid-a"]
        assert (found.phase, found.ip, found.ends_at) == ("Running", "10.0.0.7", 1027.0)
        assert found.decision is not None
        assert found.decision.gpu_uuids == (GPU_B,)


async def test_a_pod_that_goes_during_anothers_correction_is_not_corrected(state: NodeState) -> None:
    corrected: list[str] = []

    async def correct(given: ManagedPod, decision: Decision) -> bool:
        corrected.append(given.uid)
        state.drop_pod("uid-b")
        return True

    state.put_pod(make_pod("a", gpu=GPU_A))
    state.put_pod(make_pod("b", gpu=GPU_A))
    source = Source({"shop/a": {GPU_B: 25}, "shop/b": {GPU_B: 25}})
    await AllocationReconciler(state, source, correct).reconcile()
    assert corrected == ["uid-a"]
    assert state.pods.keys() == {"uid-a"}


async def test_a_pod_does_not_get_the_gpu_of_its_predecessor_of_one_name(state: NodeState) -> None:
    old = make_pod("web-0", gpu=GPU_A, phase="Running", uid="uid-old")
    new = make_pod("web-0", gpu=GPU_B, uid="uid-new")
    state.put_pod(old)
    source, corrections = Source({"shop/web-0": {GPU_A: 25}}), Corrections()
    reconciler = AllocationReconciler(state, source, corrections)
    await reconciler.reconcile()
    assert state.allocations == {"uid-old": {GPU_A: 25}}

    source.has_read.clear()
    source.may_answer.clear()
    reconciling = asyncio.create_task(reconciler.reconcile())
    await source.has_read.wait()
    state.drop_pod("uid-old")
    state.put_pod(new)
    source.may_answer.set()
    await reconciling
    assert (corrections.made, state.allocations, state.pending()) == ([], {}, [new])

    source.listed = {"shop/web-0": {GPU_B: 25}}
    await reconciler.reconcile()
    assert (corrections.made, state.allocations) == ([], {"uid-new": {GPU_B: 25}})


async def test_shares_of_a_name_that_two_pods_have_are_nobodys_until_one_is_left(state: NodeState) -> None:
    """The agent's own list can know the new pod before the watch tells that the old one is gone."""
    state.put_pod(make_pod("web-0", gpu=GPU_A, phase="Running", uid="uid-old"))
    state.put_pod(make_pod("web-0", gpu=GPU_B, uid="uid-new"))
    source, corrections = Source({"shop/web-0": {GPU_A: 25}}), Corrections()
    reconciler = AllocationReconciler(state, source, corrections)
    await reconciler.reconcile()
    assert (corrections.made, state.allocations) == ([], {})
    state.drop_pod("uid-new")
    await reconciler.reconcile()
    assert (corrections.made, state.allocations) == ([], {"uid-old": {GPU_A: 25}})


class TestAListThatLacksPods:
    """Kubelet restarts, and answers before it knows its pods: for minutes if the API server is away."""

    async def test_every_tenant_stays_until_it_is_over_or_gone(self, state: NodeState) -> None:
        """Before: throttles were dropped, and what the loop knew of the pods was lost."""
        for name in ("runs", "ends", "goes"):
            state.put_pod(make_pod(name, gpu=GPU_A, phase="Running"))
        source = Source({f"shop/{name}": {GPU_A: 25} for name in ("runs", "ends", "goes")})
        reconciler = AllocationReconciler(state, source, Corrections())
        await reconciler.reconcile()
        source.listed = {}
        await reconciler.reconcile()
        assert {pod.name for pod, _ in tenants_of(state, GPU_A)} == {"runs", "ends", "goes"}
        state.put_pod(make_pod("ends", gpu=GPU_A, phase="Succeeded"))
        state.drop_pod("uid-goes")
        await reconciler.reconcile()
        assert state.allocations == {"uid-runs": {GPU_A: 25}}
        source.listed = {"shop/runs": {GPU_A: 25}}
        await reconciler.reconcile()
        assert state.allocations == {"uid-runs": {GPU_A: 25}}

    async def test_a_pod_that_pulls_its_image_does_not_wait_again(self, state: NodeState) -> None:
        """Before: the next pod of its size got its GPU."""
        state.put_pod(make_pod("pulls", gpu=GPU_A))
        source = Source({"shop/pulls": {GPU_A: 25}})
        reconciler = AllocationReconciler(state, source, Corrections())
        await reconciler.reconcile()
        source.listed = {}
        await reconciler.reconcile()
        new = make_pod("new", gpu=GPU_B, decided_at="2026-11-28T10:00:00Z")
        state.put_pod(new)
        assert state.pending() == [new]
        presumed = state.presume({GPU_B: 25})
        assert presumed == new
        source.listed = {"shop/pulls": {GPU_A: 25}}
        await reconciler.reconcile()
        assert state.pending() == [], "that the list has it again is no sign that another was presumed wrongly"

    async def test_where_the_list_gives_its_ids_to_another_it_has_them_no_more(self, state: NodeState) -> None:
        """Kubelet frees the ids of a pod that has ended before the API server knows of its end."""
        state.put_pod(make_pod("ended", gpu=GPU_A, share=60, phase="Running"))
        state.put_pod(make_pod("elsewhere", gpu=GPU_B, share=60, phase="Running"))
        source = Source({"shop/ended": {GPU_A: 60}, "shop/elsewhere": {GPU_B: 60}})
        reconciler = AllocationReconciler(state, source, Corrections())
        await reconciler.reconcile()
        state.put_pod(make_pod("next", gpu=GPU_A, share=50))
        source.listed = {"shop/next": {GPU_A: 50}}
        await reconciler.reconcile()
        assert state.allocations == {"uid-next": {GPU_A: 50}, "uid-elsewhere": {GPU_B: 60}}
        assert {pod.name for pod, _ in tenants_of(state, GPU_A)} == {"next"}

    async def test_a_pod_that_gets_other_ids_afterwards_has_those(self, state: NodeState) -> None:
        state.put_pod(make_pod("a", gpu=GPU_A, phase="Running"))
        source, corrections = Source({"shop/a": {GPU_A: 25}}), Corrections()
        reconciler = AllocationReconciler(state, source, corrections)
        for source.listed in ({"shop/a": {GPU_A: 25}}, {}, {"shop/a": {GPU_B: 25}}):
            await reconciler.reconcile()
        assert state.allocations == {"uid-a": {GPU_B: 25}}
        assert corrections.made == [("uid-a", (GPU_B,))]


class TestALostCheckpoint:
    """Kubelet knows the pods, and not their ids."""

    async def test_a_pod_that_is_listed_without_ids_for_long_is_told_of_once(
        self, state: NodeState, clock: Clock
    ) -> None:
        told: list[Notice] = []

        async def tell(notice: Notice) -> None:
            told.append(notice)

        for name in ("lost", "lives"):
            state.put_pod(make_pod(name, gpu=GPU_A, phase="Running"))
        state.put_pod(make_pod("undecided", gpu=None))
        deletion = {"deletionTimestamp": "2026-11-28T10:00:30Z", "deletionGracePeriodSeconds": 30}
        state.put_pod(make_pod("leaves", gpu=GPU_A, phase="Running", metadata=deletion))
        nothing: dict[str, int] = {}
        source = Source({f"shop/{name}": nothing for name in ("lost", "undecided", "leaves", "stranger")})
        reconciler = AllocationReconciler(state, source, Corrections(), tell=tell, clock=clock)
        await reconciler.reconcile()
        source.listed |= {"shop/lives": nothing}  # its allocation has only begun
        clock.now += UNRECORDED_SECONDS - 1
        await reconciler.reconcile()
        source.listed["shop/lives"] = {GPU_A: 25}
        clock.now += 1
        await reconciler.reconcile()
        clock.now += UNRECORDED_SECONDS
        await reconciler.reconcile()
        [notice] = told
        assert (notice.pod_uid, notice.reason) == ("uid-lost", NO_RECORD)
        assert "none of its containers can start again" in notice.note

    async def test_a_kubelet_that_does_not_know_its_pods_yet_is_not_one(
        self, state: NodeState, clock: Clock
    ) -> None:
        told: list[Notice] = []

        async def tell(notice: Notice) -> None:
            told.append(notice)

        state.put_pod(make_pod("a", gpu=GPU_A, phase="Running"))
        source = Source({"shop/a": {GPU_A: 25}})
        reconciler = AllocationReconciler(state, source, Corrections(), tell=tell, clock=clock)
        await reconciler.reconcile()
        source.listed = {}
        for _ in range(3):
            clock.now += UNRECORDED_SECONDS
            await reconciler.reconcile()
        assert told == []

    @pytest.mark.parametrize("phase", ["Running", "Pending"])
    async def test_two_pods_that_ask_again_get_their_own_gpus_and_no_gpus_memory_is_exceeded(
        self, state: NodeState, phase: str
    ) -> None:
        """Before: a pod whose phase was Running got the fullest GPU, and its annotation was set to it."""
        for name, gpu in (("a", GPU_B), ("b", GPU_A)):
            state.put_pod(make_pod(name, gpu=gpu, share=50, memory_mib=120_000, phase=phase))
        plugin = DevicePlugin(state, Path("/run/gpushare"), memory_reserve_mib=1024)
        free = {*device_ids(GPU_A), *device_ids(GPU_B)}
        source, corrections = Source({}), Corrections()
        reconciler = AllocationReconciler(state, source, corrections)
        await reconciler.reconcile()
        for name in ("a", "b"):
            asked = api_pb2.ContainerPreferredAllocationRequest(
                available_deviceIDs=sorted(free), allocation_size=50
            )
            request = api_pb2.PreferredAllocationRequest(container_requests=[asked])
            answer = await plugin.GetPreferredAllocation(request, None)
            ids = list(answer.container_responses[0].deviceIDs)
            granted = api_pb2.ContainerAllocateRequest(devices_ids=ids)
            await plugin.Allocate(api_pb2.AllocateRequest(container_requests=[granted]), None)
            free -= set(ids)
            source.listed[f"shop/{name}"] = shares_by_gpu(ids)
            await reconciler.reconcile()
        assert state.allocations == {"uid-a": {GPU_B: 50}, "uid-b": {GPU_A: 50}}
        assert corrections.made == []

    async def test_a_running_pod_that_asks_again_is_refused_where_its_memory_is_not_free(
        self, state: NodeState
    ) -> None:
        state.put_pod(make_pod("new", gpu=GPU_A, share=25, memory_mib=120_000, phase="Running"))
        state.put_pod(make_pod("old", gpu=GPU_A, share=50, memory_mib=120_000, phase="Running"))
        state.set_allocations({"uid-new": {GPU_A: 25}})
        plugin = DevicePlugin(state, Path("/run/gpushare"), refresh_pods=listed_of(state), memory_reserve_mib=1024)
        granted = api_pb2.ContainerAllocateRequest(devices_ids=list(device_ids(GPU_A)[:50]))
        with pytest.raises(Refused, match="other pods hold 120000 MiB"):
            await plugin.Allocate(api_pb2.AllocateRequest(container_requests=[granted]), Context())
