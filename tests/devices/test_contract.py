"""One contract, every side of `Devices`."""

import sys
import time
from pathlib import Path

import pytest
from fakenvml import OTHER_HANDLE, OTHER_UUID, UUID, installed
from tests.devices.contract import check_compute_mode, check_contract, check_driver, check_left_out, check_lost

from gpushare.core.gpu import Counters, DevicesError
from gpushare.mps.layout import GpuDirectory, write_atomically
from gpushare.twin.devices import SimulatedDevices, driver_file, lost_mark, unreadable_mark
from gpushare.twin.gpus import parse_simulated
from gpushare.twin.mps.state import TwinClient, TwinState, state_path


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def write_twin(directory: Path, clock: Clock, node: str = "n") -> None:
    for gpu in parse_simulated("H200:2", node):
        place = GpuDirectory.of(directory, gpu.uuid)
        place.path.mkdir(exist_ok=True)
        client = TwinClient(77, "resnet50", True, 50, 66, 8192, 900, 0.8, 12.0)
        outside = TwinClient(78, "stray", False, 100, 132, 0, 100, 0.1, 1.0)
        counters = Counters(sm_util=0.4, fp32_util=0.2, graphics_util=0.9)
        state = TwinState(
            gpu.uuid,
            gpu.model,
            gpu.memory_mib,
            gpu.sm_count,
            clock.now,
            1,
            2,
            "ACTIVE",
            counters,
            1000,
            (client, outside),
        )
        write_atomically(state_path(place), state.to_json())


def test_simulated(tmp_path: Path) -> None:
    clock = Clock()
    write_twin(tmp_path, clock)
    devices = SimulatedDevices(parse_simulated("H200:2", "n"), tmp_path, clock)
    check_contract(devices, clock.sleep)
    check_compute_mode(devices)
    assert [(p.pid, p.is_mps_client) for p in devices.processes(devices.list()[0].uuid)] == [
        (77, True),
        (78, False),
    ]


def test_the_simulated_driver(tmp_path: Path) -> None:
    clock = Clock()
    write_twin(tmp_path, clock)
    gpus = parse_simulated("H200:2", "n")
    check_driver(lambda: SimulatedDevices(gpus, tmp_path, clock), driver_file(tmp_path).write_text)
    driver_file(tmp_path).unlink()
    assert SimulatedDevices(gpus, tmp_path, clock).driver_version() == "580.159.04"


def test_the_real_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old one may lack functions that list GPUs: until now they were left out, and only the log said so."""
    from gpushare.devices.nvml import NvmlDevices  # noqa: PLC0415 - the driver's library, only here

    with installed(monkeypatch) as fake:

        def be(version: str) -> None:
            fake.driver_version = version.encode()
            fake.missing = {"nvmlDeviceGetNumGpuCores"} if version == "470.82.01" else set()

        check_driver(lambda: NvmlDevices.open(Clock()), be)
        assert fake.opened == 0


def test_a_simulated_gpu_that_falls_off_the_bus(tmp_path: Path) -> None:
    clock = Clock()
    write_twin(tmp_path, clock)
    devices = SimulatedDevices(parse_simulated("H200:2", "n"), tmp_path, clock)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        write_twin(tmp_path, clock)

    check_lost(
        devices,
        lambda uuid: lost_mark(tmp_path, uuid).touch(),
        lambda uuid: lost_mark(tmp_path, uuid).unlink(),
        sleep,
    )


def test_a_real_gpu_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpushare.devices.nvml import NvmlDevices  # noqa: PLC0415 - the driver's library, only here
    from gpushare.devices.search import GpuSearch  # noqa: PLC0415

    clock = Clock()
    with installed(monkeypatch) as fake:
        fake.broken_gpus = 1
        search = GpuSearch((sys.executable, "-c", f"print({UUID!r}, {OTHER_UUID!r})"))

        def find() -> None:
            fake.broken_gpus, fake.gpus[OTHER_HANDLE] = 0, OTHER_UUID

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            if search._process is not None:
                search._process.wait(60)

        check_left_out(lambda: NvmlDevices.open(clock, search=search), lambda: None, find, sleep)


def test_a_simulated_gpu_that_cannot_be_read(tmp_path: Path) -> None:
    clock = Clock()
    write_twin(tmp_path, clock)
    gpus = parse_simulated("H200:2", "n")
    mark = unreadable_mark(tmp_path, gpus[1].uuid)
    check_left_out(lambda: SimulatedDevices(gpus, tmp_path, clock), mark.touch, mark.unlink, clock.sleep)


def test_a_twin_that_stopped_gives_no_figures_instead_of_old_ones(tmp_path: Path) -> None:
    clock = Clock()
    write_twin(tmp_path, clock)
    devices = SimulatedDevices(parse_simulated("H200:2", "n"), tmp_path, clock)
    uuid = devices.list()[0].uuid
    devices.sample(uuid)
    clock.sleep(1)
    assert devices.sample(uuid) is not None
    clock.sleep(10)
    assert devices.sample(uuid) is None
    assert devices.processes(uuid) == ()
    write_twin(tmp_path, clock)
    clock.sleep(1)
    assert devices.sample(uuid) is not None


@pytest.mark.gpu
def test_real() -> None:
    from gpushare.devices.nvml import NvmlDevices  # noqa: PLC0415 - the driver's library, only here

    try:
        devices = NvmlDevices.open(time.monotonic)
    except DevicesError as error:
        pytest.skip(str(error))
    check_contract(devices, time.sleep)
    devices.close()
