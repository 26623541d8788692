"""Fixtures of the node agent's tests."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, Clock, FakeKubelet

from gpushare.core.gpu import GpuInfo
from gpushare_deviceplugin.state import NodeState


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> NodeState:
    made = NodeState(clock)
    made.set_gpus((GpuInfo(GPU_A, 0, "NVIDIA H200", 143771, 132), GpuInfo(GPU_B, 1, "NVIDIA H200", 143771, 132)))
    return made


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose sockets fit the 108 characters of a unix address."""
    with tempfile.TemporaryDirectory(prefix="gs") as path:
        yield Path(path)


@pytest.fixture
async def kubelet(short_path: Path) -> AsyncIterator[FakeKubelet]:
    fake = FakeKubelet(short_path / "kubelet")
    await fake.start()
    yield fake
    await fake.stop()
