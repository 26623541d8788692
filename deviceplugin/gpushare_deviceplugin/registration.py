"""Serve the plugin on its socket and keep it registered, through restarts of kubelet."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.server import Server

from gpushare.core.api import names
from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.api_grpc import RegistrationStub
from gpushare_deviceplugin.plugin import DevicePlugin, options
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)

API_VERSION: Final = "v1beta1"
SOCKET: Final = "gpushare.sock"
WATCH_SECONDS: Final = 1.0  # a stat of two files; kubelet itself needs seconds to restart
FIRST_BACKOFF_SECONDS: Final = 0.5
LAST_BACKOFF_SECONDS: Final = 30.0
REGISTER_SECONDS: Final = 10.0
STOP_SECONDS: Final = 0.2  # kubelet may keep its connection; the calls on it are cancelled

# What a call to kubelet ends with when it does not end well; asking again can help.
CALL_ERRORS: Final = (GRPCError, ProtocolError, StreamTerminatedError, OSError, TimeoutError)


class Registrar:
    """Keeps the plugin served and registered until cancelled.

    kubelet removes every plugin's socket when it starts, and knows no plugin then: a new inode of its own socket,
    or ours missing, means serve anew and register anew.

    Args:
        sleep: waits so many seconds.

    Attributes:
        is_registered: whether kubelet took the last registration.
    """

    def __init__(
        self, plugin: DevicePlugin, state: NodeState, plugins_directory: Path,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self.is_registered = False
        self._sleep = sleep
        self._plugin = plugin
        self._state = state
        self._socket = plugins_directory / SOCKET
        self._kubelet = plugins_directory / "kubelet.sock"

    async def run(self) -> None:
        """Serve, register, watch; for ever."""
        failures = 0
        while True:
            server: Server | None = None
            try:
                server = await self._serve()
                inode = _inode(self._kubelet)
                await self._register()
                failures = 0
                self.is_registered = True
                self._state.counts.registrations += 1
                _log.info("registered %s with kubelet", names.SHARE_RESOURCE)
                while _inode(self._kubelet) == inode and _inode(self._socket) is not None:
                    await self._sleep(WATCH_SECONDS)
                _log.info("kubelet restarted: registering again")
            except (*CALL_ERRORS, RuntimeError) as error:
                self._state.counts.error("registration")
                delay = min(LAST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16))
                failures += 1
                _log.warning("kubelet not reached, again in %.1f s: %s", delay, words_of(error))
                await self._wait_for_kubelet(delay)
            finally:
                self.is_registered = False
                if server is not None:
                    await _stop(server)

    async def _serve(self) -> Server:
        self._socket.unlink(missing_ok=True)
        server = Server([self._plugin])
        await server.start(path=str(self._socket))
        return server

    async def _register(self) -> None:
        request = api_pb2.RegisterRequest(
            version=API_VERSION, endpoint=SOCKET, resource_name=names.SHARE_RESOURCE, options=options()
        )
        async with Channel(path=str(self._kubelet)) as channel:
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


async def _stop(server: Server) -> None:
    server.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server.wait_closed(), STOP_SECONDS)


def _inode(path: Path) -> tuple[int, int] | None:
    """What tells one file of that name from the next: its inode and its time of change."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def words_of(error: Exception) -> str:
    """What went wrong with a call, for a log line."""
    if isinstance(error, GRPCError):
        return error.message or error.status.name
    return str(error) or type(error).__name__
