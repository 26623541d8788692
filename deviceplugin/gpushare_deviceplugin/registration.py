"""Serve the plugin on its socket and keep it registered, through restarts of kubelet."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc

from gpushare.core.api import names
from gpushare.core.backoff import Backoff
from gpushare.runtime.tasks import end_if_asked
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.api_pb2_grpc import RegistrationStub, add_DevicePluginServicer_to_server
from gpushare_deviceplugin.plugin import DevicePlugin, options
from gpushare_deviceplugin.rpc import CALL_ERRORS, bind_server, describe, open_channel
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)

API_VERSION: Final = "v1beta1"
SOCKET: Final = "gpushare.sock"
NOTICE: Final = "unregistered"  # written by the front while kubelet does not have the plugin that it took from us
WATCH_SECONDS: Final = 1.0  # each watch is a stat of two files; kubelet itself needs seconds to restart
QUICK_SECONDS: Final = 0.05  # during a restart: pods bound before we register are rejected for good
BACKOFF: Final = Backoff(first_seconds=0.5, longest_seconds=30.0)
REGISTER_SECONDS: Final = 10.0
STOP_SECONDS: Final = 0.2  # for calls in progress; then they are cancelled


class Registrar:
    """Registrar that keeps the plugin served and registered until cancelled.

    When kubelet starts it removes every plugin's socket and knows no plugin. So if its own socket is a different
    file than before, or ours is missing, the plugin is served and registered again.

    Args:
        sleep: waits for a number of seconds; may end early, in the agent with a round of its sampler.
        on_registered: called after each registration.

    Attributes:
        is_registered: whether kubelet accepted the last registration, and has it still.
        why_not: why it has it no more, as the front tells it; empty otherwise.
    """

    def __init__(
        self,
        plugin: DevicePlugin,
        state: NodeState,
        plugins_directory: Path,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_registered = False
        self.why_not = ""
        self._on_registered = on_registered
        self._sleep = sleep
        self._plugin = plugin
        self._state = state
        self._socket = plugins_directory / SOCKET
        self._kubelet = plugins_directory / "kubelet.sock"
        self._notice = plugins_directory / NOTICE

    async def run(self) -> None:
        """Serve, register and watch for a restart of kubelet, until cancelled."""
        failures = 0
        while True:
            end_if_asked()  # a server's stop can lose the cancellation
            server: grpc.aio.Server | None = None
            try:
                server = self._bind()
                await server.start()
                inode = _inode(self._kubelet)
                await self._register()
                end_if_asked()
                failures = 0
                self.is_registered = True
                self._state.counts.registrations += 1
                self._on_registered()
                _log.info("registered %s with kubelet", names.SHARE_RESOURCE)
                while _inode(self._kubelet) == inode and _inode(self._socket) is not None:
                    await self._sleep(QUICK_SECONDS if self._plugin.has_lost_kubelet else WATCH_SECONDS)
                    self._read_notice()
                _log.info("kubelet restarted: registering again")
            except (*CALL_ERRORS, RuntimeError) as error:
                self._state.counts.error(AgentPart.REGISTRATION)
                failures += 1
                delay = BACKOFF.seconds(failures)
                _log.warning("kubelet not reached, again in %.1f s: %s", delay, describe(error))
                await self._wait_for_kubelet(delay)
            finally:
                self.is_registered, self.why_not = False, ""
                if server is not None:
                    await self._stop(server)

    def _read_notice(self) -> None:
        """Learn from the front whether kubelet still has the plugin; to us the front is kubelet, and stays."""
        try:
            why_not = self._notice.read_text(errors="replace")
        except OSError:  # kubelet has it, or there is no front
            why_not = ""
        if why_not and not self.why_not:
            self._state.counts.error(AgentPart.REGISTRATION)
            _log.warning("kubelet does not have the device plugin any more: %s", why_not)
        elif self.why_not and not why_not:
            _log.info("kubelet has the device plugin again")
        self.is_registered, self.why_not = not why_not, why_not

    def _bind(self) -> grpc.aio.Server:
        self._socket.unlink(missing_ok=True)
        server = bind_server(self._socket)
        add_DevicePluginServicer_to_server(self._plugin, server)
        return server

    async def _stop(self, server: grpc.aio.Server) -> None:
        self._plugin.end_streams()
        await server.stop(STOP_SECONDS)

    async def _register(self) -> None:
        request = api_pb2.RegisterRequest(
            version=API_VERSION, endpoint=SOCKET, resource_name=names.SHARE_RESOURCE, options=options()
        )
        async with open_channel(self._kubelet) as channel:
            await RegistrationStub(channel).Register(request, timeout=REGISTER_SECONDS)

    async def _wait_for_kubelet(self, delay: float) -> None:
        """Wait out the back-off, but no longer than until kubelet makes a new socket."""
        before = _inode(self._kubelet)
        waited = 0.0
        while waited < delay:
            step = min(WATCH_SECONDS, delay - waited)
            await self._sleep(step)
            waited += step
            now = _inode(self._kubelet)
            if now is not None and now != before:
                return


def _inode(path: Path) -> tuple[int, int] | None:
    """Return device and inode, which tell a file from a later one of the same name; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
