"""The device plugin's gRPC face (v1beta1): translate, ask `allocation`, answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from gpushare.core.api.rejection import Rejection
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.allocation import (
    ContainerGrant,
    DeviceListStrategy,
    check_grant,
    device_ids,
    grant,
    prefer,
)
from gpushare_deviceplugin.api_grpc import DevicePluginBase
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)
REFRESH_SECONDS: Final = 2.0  # kubelet waits for an answer; longer than this the API server is away


class DevicePlugin(DevicePluginBase):
    """One plugin for the resource `gpushare.io/share`.

    Args:
        directory: the node's gpushare directory, one folder a GPU.
        refresh_pods: asks the API for this node's pods, for when kubelet's watch was faster than ours.
        on_allocated: called after each Allocate that was granted.
    """

    def __init__(
        self,
        state: NodeState,
        directory: Path,
        *,
        strategy: DeviceListStrategy = DeviceListStrategy.ENVVAR,
        refresh_pods: Callable[[], Awaitable[None]] | None = None,
        on_allocated: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._directory = directory
        self._strategy = strategy
        self._refresh_pods = refresh_pods
        self._on_allocated = on_allocated

    async def GetDevicePluginOptions(self, stream: Stream[Any, Any]) -> None:  # noqa: N802 - names by gRPC
        """Preferred allocation, and nothing before a start."""
        await stream.recv_message()
        await stream.send_message(options())

    async def ListAndWatch(self, stream: Stream[Any, Any]) -> None:  # noqa: N802 - names by gRPC
        """Every id with its GPU's health, and again at each change."""
        await stream.recv_message()
        changed = self._state.subscribe()
        sent: Any = None
        try:
            while True:
                changed.clear()
                listing = self.listing()
                if listing != sent:
                    await stream.send_message(listing)
                    sent = listing
                await changed.wait()
        finally:
            self._state.unsubscribe(changed)

    def listing(self) -> Any:
        """All ids with their health now."""
        devices = [
            api_pb2.Device(ID=device_id, health=self._state.health[uuid].health.value)
            for uuid in sorted(self._state.gpus, key=lambda each: self._state.gpus[each].index)
            for device_id in device_ids(uuid)
        ]
        return api_pb2.ListAndWatchResponse(devices=devices)

    async def GetPreferredAllocation(self, stream: Stream[Any, Any]) -> None:  # noqa: N802 - names by gRPC
        """Ids of the GPU that was decided for the pending pod of that size."""
        responses = []
        for asked in await _requests(stream):
            await self._know_pending(asked.allocation_size)
            chosen = prefer(
                list(asked.available_deviceIDs), list(asked.must_include_deviceIDs), asked.allocation_size,
                self._state.pending(),
            )  # fmt: skip
            responses.append(api_pb2.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        await stream.send_message(api_pb2.PreferredAllocationResponse(container_responses=responses))

    async def Allocate(self, stream: Stream[Any, Any]) -> None:  # noqa: N802 - names by gRPC
        """What each container is given; ids that make no sense together are refused."""
        responses = []
        for asked in await _requests(stream):
            shares = check_grant(list(asked.devices_ids), self._state.gpus)
            if isinstance(shares, Rejection):
                self._state.counts.refused_allocations += 1
                _log.error("allocation refused: %s", shares)
                raise GRPCError(Status.FAILED_PRECONDITION, str(shares))
            pod = self._state.presume(shares)
            extra = {"gpus": list(shares), "pod": pod.uid if pod else None}
            _log.info("allocated %s to %s", shares, pod.key if pod else "a pod not known yet", extra=extra)
            responses.append(_container_response(grant(tuple(shares), self._directory, self._strategy)))
        self._on_allocated()
        await stream.send_message(api_pb2.AllocateResponse(container_responses=responses))

    async def PreStartContainer(self, stream: Stream[Any, Any]) -> None:  # noqa: N802 - names by gRPC
        """Not asked for by our options; answered for completeness."""
        await stream.recv_message()
        await stream.send_message(api_pb2.PreStartContainerResponse())

    async def _know_pending(self, size: int) -> None:
        if self._refresh_pods is None or any(pod.share_units == size for pod in self._state.pending()):
            return
        try:
            await asyncio.wait_for(self._refresh_pods(), REFRESH_SECONDS)
        except TimeoutError:
            _log.warning("the API server did not answer in time; no decision known for a request of %d%%", size)


async def _requests(stream: Stream[Any, Any]) -> Sequence[Any]:
    request = await stream.recv_message()
    return request.container_requests if request is not None else ()


def options() -> Any:
    """The plugin's options, as said at registration and on request."""
    return api_pb2.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def _container_response(granted: ContainerGrant) -> Any:
    mounts = [
        api_pb2.Mount(container_path=inside, host_path=outside, read_only=True)
        for inside, outside in granted.mounts.items()
    ]
    return api_pb2.ContainerAllocateResponse(
        envs=dict(granted.envs),
        mounts=mounts,
        cdi_devices=[api_pb2.CDIDevice(name=name) for name in granted.cdi_devices],
    )
