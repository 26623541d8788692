"""Serve the plugin on its socket and keep it registered, through restarts of kubelet."""

import asyncio
import logging
from pathlib import Path
from typing import Any, Final

import grpc

from gpushare.core import names
from gpushare_deviceplugin import api_pb2, api_pb2_grpc
from gpushare_deviceplugin.plugin import DevicePlugin, options
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)

API_VERSION: Final = "v1beta1"
SOCKET: Final = "gpushare.sock"
WATCH_SECONDS: Final = 1.0  # a stat of two files; kubelet itself needs seconds to restart
FIRST_BACKOFF_SECONDS: Final = 0.5
LAST_BACKOFF_SECONDS: Final = 30.0
REGISTER_SECONDS: Final = 10.0


class Registrar:
    """Keeps the plugin served and registered until cancelled.

    kubelet removes every plugin's socket when it starts, and knows no plugin then: a new inode of its own socket,
    or ours missing, means serve anew and register anew.

    Attributes:
        is_registered: whether kubelet took the last registration.
    """

    def __init__(self, plugin: DevicePlugin, state: NodeState, plugins_directory: Path) -> None:
        self.is_registered = False
        self._plugin = plugin
        self._state = state
        self._socket = plugins_directory / SOCKET
        self._kubelet = plugins_directory / "kubelet.sock"

    async def run(self) -> None:
        """Serve, register, watch; for ever."""
        failures = 0
        while True:
            server: Any = None
            try:
                server = await self._serve()
                inode = _inode(self._kubelet)
                await self._register()
                failures = 0
                self.is_registered = True
                self._state.counts.registrations += 1
                _log.info("registered %s with kubelet", names.SHARE_RESOURCE)
                while _inode(self._kubelet) == inode and _inode(self._socket) is not None:  # noqa: ASYNC110 - files
                    await asyncio.sleep(WATCH_SECONDS)
                _log.info("kubelet restarted: registering again")
            except (grpc.aio.AioRpcError, OSError, RuntimeError, TimeoutError) as error:
                self._state.counts.error("registration")
                delay = min(LAST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16))
                failures += 1
                _log.warning("kubelet not reached, again in %.1f s: %s", delay, _words(error))
                await self._wait_for_kubelet(delay)
            finally:
                self.is_registered = False
                if server is not None:
                    await server.stop(grace=0.2)

    async def _serve(self) -> Any:
        self._socket.unlink(missing_ok=True)
        server = grpc.aio.server()
        api_pb2_grpc.add_DevicePluginServicer_to_server(self._plugin, server)  # type: ignore[no-untyped-call]  # generated
        server.add_insecure_port(f"unix://{self._socket}")
        await server.start()
        return server

    async def _register(self) -> None:
        request = api_pb2.RegisterRequest(
            version=API_VERSION, endpoint=SOCKET, resource_name=names.SHARE_RESOURCE, options=options()
        )
        async with grpc.aio.insecure_channel(f"unix://{self._kubelet}") as channel:
            stub = api_pb2_grpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]  # generated code
            await stub.Register(request, timeout=REGISTER_SECONDS)

    async def _wait_for_kubelet(self, delay: float) -> None:
        """Wait out the back-off, but no longer than until kubelet makes a new socket."""
        before = _inode(self._kubelet)
        waited = 0.0
        while waited < delay:
            step = min(WATCH_SECONDS, delay - waited)
            await asyncio.sleep(step)
            waited += step
            now = _inode(self._kubelet)
            if now is not None and now != before:
                return


def _inode(path: Path) -> tuple[int, int] | None:
    """What tells one file of that name from the next: its inode and its time of change."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _words(error: Exception) -> str:
    return error.details() or str(error.code()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
