"""A kubelet on real sockets, and the front with a stand-in for the agent, in processes of their own."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.deviceplugin import conftest as deviceplugin
from tests.deviceplugin.fakes import FakeKubelet

from gpushare_deviceplugin import api_pb2
from gpushare_deviceplugin.allocation import device_ids, shares_by_gpu
from gpushare_deviceplugin.api_pb2_grpc import DevicePluginStub

short_path, kubelet = deviceplugin.short_path, deviceplugin.kubelet

SOON = 60.0
Until = Callable[[Callable[[], object], str], Any]


async def until(true: Callable[[], object], what: str) -> None:
    """Poll until it is so."""
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def registered(kubelet: FakeKubelet) -> Any:
    """The next registration that kubelet takes."""
    return await asyncio.wait_for(kubelet.registered.get(), SOON)


def shares(listing: Any) -> dict[str, int]:
    """How many healthy ids each GPU of a list has."""
    return shares_by_gpu(device.ID for device in listing.devices if device.health == "Healthy")


def allocation(gpu: str, count: int = 25) -> api_pb2.AllocateRequest:
    """What kubelet asks for one container."""
    ids = list(device_ids(gpu))[:count]
    return api_pb2.AllocateRequest(container_requests=[api_pb2.ContainerAllocateRequest(devices_ids=ids)])


class FrontProcess:
    """The front as it is deployed, beside a kubelet of ours."""

    def __init__(self, root: Path, kubelet: FakeKubelet) -> None:
        self.root, self.kubelet = root, kubelet
        self.log = root / "front.log"
        self.process: asyncio.subprocess.Process | None = None
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            "TMPDIR": str(root),
            "AGENT_FOLDER": str(root),
            "GPUSHARE_KUBELET_DIRECTORY": str(kubelet.directory),
        }

    def set(self, name: str, value: str) -> None:
        """Set a variable for what starts from now on."""
        self._environment[name] = value

    async def start(self, *command: str, module: str = "gpushare.front") -> None:
        agent = command or (sys.executable, "-m", "tests.front.agent")
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *agent, env=self._environment, stderr=log
            )

    def do(self, name: str, *, is_so: bool = True) -> None:
        """Let the next agent, or the present one, behave so."""
        if is_so:
            (self.root / name).touch()
        else:
            (self.root / name).unlink(missing_ok=True)

    @property
    def agent_pid(self) -> int:
        """Of the latest agent."""
        return int((self.root / "pid").read_text())

    async def next_agent(self, before: int) -> int:
        """Wait for another agent than that one, and return its pid."""
        await until(lambda: self.agent_pid != before, "no other agent")
        return self.agent_pid

    def kill_agent(self) -> int:
        """kill -9; return whom."""
        pid = self.agent_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Signal the front, and return its status."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), SOON)

    @asynccontextmanager
    async def plugin(self) -> AsyncIterator[DevicePluginStub]:
        """What kubelet has of the plugin."""
        async with grpc.aio.insecure_channel(f"unix://{self.kubelet.plugins}/gpushare.sock") as channel:
            yield DevicePluginStub(channel)


@asynccontextmanager
async def ended_at_last(made: FrontProcess) -> AsyncIterator[FrontProcess]:
    """Kill it in the end, if it still runs."""
    yield made
    if made.process is not None and made.process.returncode is None:
        await made.end(signal.SIGKILL)


@pytest.fixture
async def front(short_path: Path, kubelet: FakeKubelet) -> AsyncIterator[FrontProcess]:
    async with ended_at_last(FrontProcess(short_path, kubelet)) as made:
        yield made
    print(made.log.read_text())


@pytest.fixture
async def standby(short_path: Path, kubelet: FakeKubelet) -> AsyncIterator[FrontProcess]:
    """Another one in the same folder."""
    async with ended_at_last(FrontProcess(short_path, kubelet)) as made:
        yield made
