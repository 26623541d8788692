"""The plugin's registration ends when it is asked to, whatever it waits for at that moment."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.deviceplugin.fakes import FakeKubelet, Sleeper

from gpushare_deviceplugin import registration, rpc
from gpushare_deviceplugin.plugin import DevicePlugin
from gpushare_deviceplugin.registration import Registrar
from gpushare_deviceplugin.state import NodeState

SOON = 60.0


class LosesCancellation:
    """A server whose stop ends in the turn of the loop in which its caller is cancelled, and loses that."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.stopping = asyncio.Event()
        self.start, self.add_generic_rpc_handlers = server.start, server.add_generic_rpc_handlers
        self.add_registered_method_handlers = server.add_registered_method_handlers

    async def stop(self, seconds: float) -> None:
        self.stopping.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await self._server.stop(seconds)


async def test_it_ends_though_the_stop_of_its_server_loses_the_cancellation(
    state: NodeState, kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = Sleeper()
    servers = []

    def bind(socket: Path) -> Any:
        servers.append(LosesCancellation(rpc.bind_server(socket)))
        return servers[-1]

    monkeypatch.setattr(registration, "bind_server", bind)
    registrar = Registrar(DevicePlugin(state, Path("/run")), state, kubelet.plugins, sleep)
    task = asyncio.create_task(registrar.run())
    async with asyncio.timeout(SOON):
        await kubelet.registered.get()
        await sleep.asleep()
        await kubelet.stop()
        await kubelet.start()
        await sleep.turn()
        [server] = servers
        await server.stopping.wait()
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled()
    assert len(servers) == 1
    assert kubelet.registered.empty()
