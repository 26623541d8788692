"""Reconcile PodResources, kubelet's record of allocated device ids, with the decisions."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from gpushare.core.api import Decision, names
from gpushare.runtime.tasks import end_if_asked
from gpushare_deviceplugin import podresources_pb2
from gpushare_deviceplugin.allocation import shares_by_gpu
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.podresources_pb2_grpc import PodResourcesListerStub
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.rpc import CALL_ERRORS, describe, open_channel
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)

LIST_SECONDS: Final = 5.0
PERIOD_SECONDS: Final = 10.0  # while lists differ, fail, lack what was allocated, or a correction fails
# Once two lists are the same. Each call wakes gRPC's threads up for long (docs/measurements/agent-h200.md); an
# Allocate leads to lists at once.
CALM_SECONDS: Final = 30.0
FAST_POLLS_SECONDS: Final = (0.02, 0.03, 0.05, 0.1, 0.1, 0.2, 0.2, 0.3, 0.5, 0.5)  # after an Allocate


CHECKPOINT: Final = "kubelet_internal_checkpoint"
"""Kubelet's file beside the plugins' sockets, rewritten once it has recorded which pod has an allocation's ids."""
# If that file is not visible: kubelet records an allocation within milliseconds of the plugin's answer.
QUIET_SECONDS: Final = 0.25
POLL_SECONDS: Final = 0.05
# Kubelet may have given up, or be starting many pods: after this time allocations are read anyway.
LONGEST_WAIT_SECONDS: Final = 5.0
# How long kubelet must list a pod without ids: an allocation takes milliseconds, a slow one 30 s.
UNRECORDED_SECONDS: Final = 120.0
NO_RECORD: Final = "NoDeviceIds"


class AllocationsUnderWay:
    """Lock that prevents lists of PodResources during kubelet's allocations.

    During a list kubelet frees the ids of ended pods, and it also forgets the ids of an allocation in progress
    (UpdateAllocatedDevices in its devicemanager/manager.go, v1.35): the next pod may then get the same ids. An
    allocation is in progress from the answer to GetPreferredAllocation until kubelet has recorded, after Allocate,
    which pod has the ids. No list begins in between, and that answer waits until a list in flight has ended.

    Args:
        checkpoint: kubelet's file; only its time of writing is read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, checkpoint: Path | None = None) -> None:
        self._clock, self._checkpoint = clock, checkpoint
        self._open = 0
        self._allocate_by = self._expected_until = -math.inf
        self._answered_at: float | None = None
        self._written_before: tuple[int, int] | None = None
        self._no_list = asyncio.Event()
        self._no_list.set()

    def expect(self) -> None:
        """Treat an allocation as in progress: the previous agent may have begun one that the front has kept."""
        self._expected_until = self._clock() + LONGEST_WAIT_SECONDS

    def expect_no_more(self) -> None:
        """Shorten `expect` to a moment: a call that the front kept arrives right after we registered."""
        self._expected_until = min(self._expected_until, self._clock() + QUIET_SECONDS)

    @asynccontextmanager
    async def choosing(self) -> AsyncIterator[None]:
        """Mark a GetPreferredAllocation call, which begins an allocation, once no list is in flight."""
        self._open += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LIST_SECONDS):
                    await self._no_list.wait()
            yield
        finally:
            self._open -= 1
            self._allocate_by = self._clock() + LONGEST_WAIT_SECONDS

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Mark an Allocate call in progress."""
        self._open += 1
        written_before = self._written()
        try:
            yield
        finally:
            self._open -= 1
            self._allocate_by = -math.inf
            self._answered_at, self._written_before = self._clock(), written_before

    @asynccontextmanager
    async def listing(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> AsyncIterator[None]:
        """Mark a list in progress, once no allocation is; wait for that at most `LONGEST_WAIT_SECONDS`."""
        until = self._clock() + LONGEST_WAIT_SECONDS
        while (seconds := self.seconds_left()) > 0 and self._clock() < until:
            await sleep(seconds)
        self._no_list.clear()
        try:
            yield
        finally:
            self._no_list.set()

    def seconds_left(self) -> float:
        """Return how long to wait before checking again; 0 if no allocation is in progress."""
        now = self._clock()
        if self._open or now < max(self._allocate_by, self._expected_until):
            return POLL_SECONDS
        if self._answered_at is None:
            return 0.0
        if self._written_before is None:
            return max(0.0, self._answered_at + QUIET_SECONDS - now)
        is_noted = self._written() != self._written_before
        return 0.0 if is_noted or now >= self._answered_at + LONGEST_WAIT_SECONDS else POLL_SECONDS

    def _written(self) -> tuple[int, int] | None:
        """Return a value that changes when kubelet replaces the file; None if the file is not visible."""
        if self._checkpoint is None:
            return None
        try:
            status = self._checkpoint.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


class PodResourcesError(Exception):
    """kubelet does not answer; a later call can succeed."""


class PodResourcesSource(Protocol):
    """Source of allocated shares: "namespace/name" -> shares by GPU, empty for none. Raises PodResourcesError."""

    async def list(self) -> dict[str, dict[str, int]]:
        """Return kubelet's present allocations."""
        ...


class PodResources:
    """kubelet's PodResources API v1 over its socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def list(self) -> dict[str, dict[str, int]]:
        """Return the shares by GPU of every pod that kubelet lists."""
        try:
            async with open_channel(self._socket) as channel:
                stub = PodResourcesListerStub(channel)
                answer = await stub.List(podresources_pb2.ListPodResourcesRequest(), timeout=LIST_SECONDS)
        except CALL_ERRORS as error:
            end_if_asked()
            raise PodResourcesError(describe(error)) from error
        end_if_asked()
        found: dict[str, dict[str, int]] = {}
        for pod in answer.pod_resources:
            ids = [
                device_id
                for container in pod.containers
                for devices in container.devices
                if devices.resource_name == names.SHARE_RESOURCE
                for device_id in devices.device_ids
            ]
            found[f"{pod.namespace}/{pod.name}"] = shares_by_gpu(ids)
        return found


class AllocationReconciler:
    """Reconciler of the state with PodResources, and of the annotations with the state.

    Args:
        correct: writes a pod's decision annotations; if it raises, it is retried in the next round.
        under_way: kubelet's allocations; none may be in progress during a list.
        tell: writes an event.
    """

    def __init__(
        self,
        state: NodeState,
        source: PodResourcesSource,
        correct: Callable[[ManagedPod, Decision], Awaitable[bool]],
        under_way: AllocationsUnderWay | None = None,
        *,
        tell: Callable[[Notice], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._under_way = under_way or AllocationsUnderWay()
        self._state = state
        self._source = source
        self._correct = correct
        self._tell, self._clock = tell, clock
        self._poked = asyncio.Event()
        self._unrecorded: dict[str, float] = {}  # since when kubelet lists a pod without ids, by its uid
        self._told: set[str] = set()
        self._counted: set[tuple[str, tuple[str, ...]]] = set()
        self._failing = self._uncorrected = self._unassigned = False

    def poke(self) -> None:
        """Reconcile soon and often after an Allocate call, until its pod is known."""
        self._poked.set()

    async def run(self) -> None:
        """Reconcile until cancelled: at once after an allocation, and every PERIOD_SECONDS or CALM_SECONDS."""
        is_awaited = False  # an allocation that no list has shown yet
        while True:
            has_changed = await self._has_changed()
            is_awaited = is_awaited and not has_changed
            is_calm = not (has_changed or is_awaited or self._failing or self._uncorrected or self._unassigned)
            try:  # not wait_for: before Python 3.12 it can swallow a cancellation
                async with asyncio.timeout(CALM_SECONDS if is_calm else PERIOD_SECONDS):
                    await self._poked.wait()
            except TimeoutError:
                continue
            self._poked.clear()
            is_awaited = True
            for delay in FAST_POLLS_SECONDS:
                await asyncio.sleep(delay)
                if await self._has_changed() and not self._unassigned:
                    is_awaited = False
                    if not self._poked.is_set():
                        break

    async def _has_changed(self) -> bool:
        """Run one round; return whether the allocations are others than before."""
        before = self._state.allocations
        await self.reconcile()
        return self._state.allocations != before

    async def reconcile(self) -> None:
        """Run one round; log a problem once until it is over, and count it.

        A list names no uids. What it has for a name is a pod's own only if that pod alone had the name before and
        after it: a StatefulSet's next pod must not get its predecessor's GPU.
        """
        try:
            async with self._under_way.listing():
                uids_before = self._uids_by_key()
                by_key = await self._source.list()
        except PodResourcesError as error:
            self._state.counts.error(AgentPart.PODRESOURCES)
            if not self._failing:
                _log.warning("kubelet's PodResources does not answer, allocations stay as last known: %s", error)
            self._failing = True
            return
        self._failing = self._uncorrected = self._unassigned = False
        uids_now = self._uids_by_key()
        listed: dict[str, dict[str, int]] = {}
        for key, shares in by_key.items():
            uids = uids_now.get(key, set())
            if len(uids) == 1 and uids == uids_before.get(key):
                listed |= dict.fromkeys(uids, shares)
            elif uids and shares:
                self._unassigned = True  # the next list shows whose they are
        allocations = {uid: shares for uid, shares in listed.items() if shares}
        self._state.set_allocations(allocations)
        for uid, shares in allocations.items():
            if uid in self._state.pods:
                await self._hold_to(self._state.pods[uid], shares)
        await self._tell_of(listed.keys() - allocations.keys())

    async def _tell_of(self, unrecorded: Collection[str]) -> None:
        """Write an event for each decided pod that kubelet has listed for long without ids.

        It has lost its checkpoint. As it calls us before each start of a container (PreStartContainer), it refuses
        the start: it looks for the ids before it would allocate them anew (GetDeviceRunContainerOptions in its
        devicemanager/manager.go, v1.35).
        """
        now, pods = self._clock(), self._state.pods
        self._unrecorded = {
            uid: self._unrecorded.get(uid, now)
            for uid in unrecorded
            if uid in pods and pods[uid].decision is not None and pods[uid].ends_at is None
        }
        self._told &= self._unrecorded.keys()
        for uid, since in list(self._unrecorded.items()):
            if now - since < UNRECORDED_SECONDS or uid in self._told:
                continue
            self._told.add(uid)
            note = (
                "kubelet has lost its record of this pod's share, so none of its containers can start again; what "
                "runs goes on. Delete the pod, so that its owner creates another"
            )
            _log.warning("pod %s: %s", pods[uid].key, note, extra={"pod": uid})
            if self._tell is not None:
                await self._tell(Notice(uid, NO_RECORD, note))

    def _uids_by_key(self) -> dict[str, set[str]]:
        """Return the uids of the pods that may have shares, by namespace/name."""
        found: dict[str, set[str]] = {}
        for pod in self._state.pods.values():
            if not pod.is_over:
                found.setdefault(pod.key, set()).add(pod.uid)
        return found

    async def _hold_to(self, pod: ManagedPod, shares: dict[str, int]) -> None:
        decision = pod.decision
        if decision is None or set(decision.gpu_uuids) == set(shares):
            return
        actual = tuple(
            sorted(shares, key=lambda uuid: self._state.gpus[uuid].index if uuid in self._state.gpus else 0)
        )
        if (pod.uid, actual) not in self._counted:
            self._counted = {(uid, gpus) for uid, gpus in self._counted if uid in self._state.pods}
            self._counted.add((pod.uid, actual))
            self._state.counts.mismatches += 1
            _log.warning(
                "pod %s was decided for %s but kubelet allocated %s: its annotation is corrected",
                pod.key,
                ",".join(decision.gpu_uuids),
                ",".join(actual),
                extra={"pod": pod.uid},
            )
        corrected = replace(decision, gpu_uuids=actual)
        if not await self._correct(pod, corrected):
            self._uncorrected = True
        elif pod.uid in self._state.pods:  # as the watch has it now, if it still exists
            self._state.put_pod(replace(self._state.pods[pod.uid], decision=corrected))
