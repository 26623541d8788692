"""kubelet's DevicePlugin service (v1beta1): translate the request, ask `allocation`, answer."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from gpushare.core.api import Rejection
from gpushare.mps.layout import GpuDirectory
from gpushare.mps.packets import is_listening
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.allocation import (
    ContainerGrant,
    check_grant,
    check_memory,
    device_ids,
    grant,
    prefer,
    shares_by_gpu,
)
from gpushare_deviceplugin.api_pb2_grpc import DevicePluginServicer
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.kubelet import AllocationsUnderWay
from gpushare_deviceplugin.limit_variables import MEMORY_MIB, common_limits
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
REFRESH_SECONDS: Final = 2.0  # kubelet waits for the answer; after this time the API server counts as unreachable
NO_MEMORY: Final = "NotEnoughGpuMemory"
GATE_SECONDS: Final = 20.0  # kubelet gives up after 30 s, without our sentence
GATE_LOOK_SECONDS: Final = 0.1
_MOST_NAMED: Final = 8  # pods in one line of the log


class DevicePlugin(DevicePluginServicer):
    """Device plugin for the resource `gpushare.io/share`.

    Args:
        directory: the node's gpushare directory, one folder a GPU.
        by_cdi: returns whether a container gets these GPUs by CDI.
        refresh_pods: lists this node's pods from the API, in case kubelet's watch was faster than ours; returns
            their uids, or None if the API server cannot be asked.
        tell: write an event.
        memory_reserve_mib: MiB of each GPU that no tenant gets.
        jax_variable: JAX's variable that containers also get their memory fraction in; empty for none.
        on_allocated: called after each Allocate that was granted.
        under_way: notified of each call that is part of an allocation.
        sleep: waits for a number of seconds.

    Attributes:
        has_lost_kubelet: whether kubelet has stopped watching: most likely it restarts.
    """

    def __init__(
        self,
        state: NodeState,
        directory: Path,
        *,
        by_cdi: Callable[[Sequence[str]], bool] = lambda _: False,
        refresh_pods: Callable[[], Awaitable[frozenset[str] | None]] | None = None,
        tell: Callable[[Notice], Awaitable[None]] | None = None,
        memory_reserve_mib: int = 0,
        jax_variable: str = "",
        on_allocated: Callable[[], None] = lambda: None,
        under_way: AllocationsUnderWay | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.has_lost_kubelet = False
        self._under_way = under_way or AllocationsUnderWay()
        self._state = state
        self._directory = directory
        self._by_cdi = by_cdi
        self._refresh_pods = refresh_pods
        self._tell = tell
        self._memory_reserve_mib = memory_reserve_mib
        self._jax_variable = jax_variable
        self._on_allocated = on_allocated
        self._sleep = sleep
        self._streams: set[asyncio.Event] = set()  # one for each open ListAndWatch

    async def GetDevicePluginOptions(
        self, request: api_pb2.Empty, context: Context
    ) -> api_pb2.DevicePluginOptions:
        """Ask for GetPreferredAllocation, and for a call before each container starts."""
        return options()

    async def ListAndWatch(
        self, request: api_pb2.Empty, context: Context
    ) -> AsyncIterator[api_pb2.ListAndWatchResponse]:
        """Send every id with its GPU's listed health, and again at each change, until `end_streams`."""
        changed = self._state.subscribe()
        self._streams.add(changed)
        self.has_lost_kubelet = False
        sent: api_pb2.ListAndWatchResponse | None = None
        try:
            while changed in self._streams:
                changed.clear()
                listing = self.listing()
                if listing != sent:
                    yield listing
                    sent = listing
                await changed.wait()
        finally:
            self.has_lost_kubelet = self._streams == {changed}
            self._streams.discard(changed)
            self._state.unsubscribe(changed)

    def end_streams(self) -> None:
        """End every open ListAndWatch with status OK, so that its server stops without waiting for kubelet."""
        streams, self._streams = self._streams, set()
        for changed in streams:
            changed.set()

    def listing(self) -> api_pb2.ListAndWatchResponse:
        """Return all ids with the health that kubelet is told."""
        devices = [
            api_pb2.Device(ID=device_id, health=self._state.listed_health.of(uuid).value)
            for uuid in sorted(self._state.gpus, key=lambda each: self._state.gpus[each].index)
            for device_id in device_ids(uuid)
        ]
        return api_pb2.ListAndWatchResponse(devices=devices)

    async def GetPreferredAllocation(
        self, request: api_pb2.PreferredAllocationRequest, context: Context
    ) -> api_pb2.PreferredAllocationResponse:
        """Return ids of the GPU that was chosen for the pending pod of that size."""
        async with self._under_way.choosing():
            responses = []
            for asked in request.container_requests:
                await self._know_pending(asked.allocation_size)
                chosen = prefer(
                    list(asked.available_deviceIDs),
                    list(asked.must_include_deviceIDs),
                    asked.allocation_size,
                    self._state.asking(),
                )
                responses.append(api_pb2.ContainerPreferredAllocationResponse(deviceIDs=chosen))
            return api_pb2.PreferredAllocationResponse(container_responses=responses)

    async def Allocate(self, request: api_pb2.AllocateRequest, context: Context) -> api_pb2.AllocateResponse:
        """Return each container's settings; refuse an invalid combination of ids."""
        with self._under_way.allocating():
            return await self._allocate(request, context)

    async def _allocate(self, request: api_pb2.AllocateRequest, context: Context) -> api_pb2.AllocateResponse:
        responses = []
        for asked in request.container_requests:
            shares = check_grant(list(asked.devices_ids), self._state.gpus)
            refusal = shares if isinstance(shares, Rejection) else await self._short_of_memory(shares)
            if isinstance(shares, Rejection) or refusal is not None:
                self._state.counts.refused_allocations += 1
                _log.error("allocation refused: %s", refusal)
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
            limits = await self._limits(shares)
            likely = self._state.likely(shares)
            self._state.presume(shares)
            extra = {"gpus": list(shares), "pod": likely[0].uid if len(likely) == 1 else None}
            _log.info("allocated %s to %s", shares, _in_words(likely), extra=extra)
            gpus = tuple(shares)
            granted = grant(gpus, self._directory, by_cdi=self._by_cdi(gpus), limits=limits)
            responses.append(_container_response(granted))
        self._on_allocated()
        return api_pb2.AllocateResponse(container_responses=responses)

    async def PreStartContainer(
        self, request: api_pb2.PreStartContainerRequest, context: Context
    ) -> api_pb2.PreStartContainerResponse:
        """Let a container start once a gate listens on its GPU, or refuse after GATE_SECONDS; kubelet asks again.

        A CUDA program that finds no gate runs without MPS, on all SMs (docs/facts.md 6). Kubelet asks before each
        start of a container, restarts included. Several whole GPUs are used without MPS, so nothing is waited for.
        """
        gpus = list(shares_by_gpu(request.devices_ids))
        if len(gpus) == 1:
            await self._wait_for_gate(gpus[0], context)
        return api_pb2.PreStartContainerResponse()

    async def _wait_for_gate(self, uuid: str, context: Context) -> None:
        control = GpuDirectory.of(self._directory, uuid).control
        waited = 0.0
        while not is_listening(control):
            if waited >= GATE_SECONDS:
                self._state.counts.refused_starts += 1
                refusal = (
                    f"no MPS gate listens on GPU {uuid}, so the container's programs would run without limits: "
                    "does the MPS host of this node run? Kubelet tries again"
                )
                _log.error("start refused: %s", refusal)
                await context.abort(grpc.StatusCode.UNAVAILABLE, refusal)
            await self._sleep(GATE_LOOK_SECONDS)
            waited += GATE_LOOK_SECONDS

    async def _limits(self, shares: Mapping[str, int]) -> dict[str, str]:
        """Return the variables that hold for whichever pod this Allocate call is for (docs/adr/0250).

        Kubelet allocates in the order in which pods were bound, and our watch delivers them in that order. So if a
        pod of this size waits for its ids, no later one is asked for; else the API server is asked who there is.
        """
        size = sum(shares.values())
        if not await self._know_pending(size):
            return {}
        pods = self._state.candidates(size)
        limits = common_limits(pods, [self._state.gpus[uuid] for uuid in shares], self._jax_variable)
        if MEMORY_MIB not in limits and pods:
            keys = ", ".join(sorted(pod.key for pod in pods))
            _log.warning("a container is not told its memory limit: it can be any of %s, which differ in it", keys)
        return limits

    async def _short_of_memory(self, shares: Mapping[str, int]) -> Rejection | None:
        """Return why a GPU's memory is not enough, after asking the API server; None if it is, or cannot be asked.

        The extender counts by its own watch. A pod whose end it has already seen but we have not must not block
        the pod that it placed since.
        """
        if self._memory_refusal(shares, self._state.pods.keys()) is None or self._refresh_pods is None:
            return None
        listed = await self._refresh()
        refusal = self._memory_refusal(shares, listed) if listed is not None else None
        if refusal is not None and listed is not None and self._tell is not None:
            asking = [pod for pod in self._state.fitting(shares) if pod.uid in listed]
            notice = Notice(asking[0].uid if len(asking) == 1 else None, NO_MEMORY, str(refusal))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS):
                    await self._tell(notice)
        return refusal

    def _memory_refusal(self, shares: Mapping[str, int], listed: Collection[str]) -> Rejection | None:
        asking = [pod for pod in self._state.fitting(shares) if pod.uid in listed]
        for uuid in shares:
            holding = [pod for pod in self._state.holding(uuid) if pod.uid in listed and pod not in asking]
            refusal = check_memory(self._state.gpus[uuid], self._memory_reserve_mib, asking, holding)
            if refusal is not None:
                return refusal
        return None

    async def _refresh(self) -> frozenset[str] | None:
        if self._refresh_pods is None:
            return None
        try:
            async with asyncio.timeout(REFRESH_SECONDS):
                return await self._refresh_pods()
        except TimeoutError:
            _log.warning("the API server did not list the node's pods in time")
            return None

    async def _know_pending(self, size: int) -> bool:
        """Ask the API server unless a pod of this size waits for its ids; return whether the pods are known."""
        if any(pod.share_units == size for pod in self._state.pending()):
            return True
        return await self._refresh() is not None


def options() -> api_pb2.DevicePluginOptions:
    """Return the plugin's options, sent at registration and on request."""
    return api_pb2.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


def _in_words(pods: Sequence[ManagedPod]) -> str:
    """Name the pod of an Allocate call, or the pods that it can be for: kubelet does not say which."""
    if not pods:
        return "a pod not known yet"
    keys = ", ".join(pod.key for pod in pods[:_MOST_NAMED])
    more = f" and {len(pods) - _MOST_NAMED} more" if len(pods) > _MOST_NAMED else ""
    return keys if len(pods) == 1 else f"one of {keys}{more}"


def _container_response(granted: ContainerGrant) -> api_pb2.ContainerAllocateResponse:
    mounts = [
        api_pb2.Mount(container_path=inside, host_path=outside, read_only=True)
        for inside, outside in granted.mounts.items()
    ]
    return api_pb2.ContainerAllocateResponse(
        envs=dict(granted.envs),
        mounts=mounts,
        cdi_devices=[api_pb2.CDIDevice(name=name) for name in granted.cdi_devices],
    )
