"""The real side over a driver that the test plays: what is read, what is refused, how trouble looks."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.devices.contract import check_contract

from gpushare.core.gpu.devices import DevicesError, Health
from gpushare.devices.gpm import METRICS, counters_of
from gpushare.devices.nvml import REOPEN_SECONDS, NvmlDevices
from gpushare.devices.xid import QUIET_SECONDS

UUID = "GPU-5f0e6a3c-0000-0000-0000-000000000001"


class NVMLError(Exception):
    """pynvml's."""


class Driver:
    """The part of pynvml that is used, over one H200 that the test may break."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    NVML_GPU_RECOVERY_ACTION_NONE = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.lost = False
        self.mig = 0
        self.has_gpm = True
        self.gpm: dict[str, tuple[int, float]] = dict.fromkeys(METRICS, (0, 0.0))
        self.events: list[tuple[str, int]] = []
        self.recovery_action = 0
        self.allocated = 0
        self.samples = 0
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        if name == "c_nvmlGpmMetricsGet_t":
            slots = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in METRICS]
            return lambda: SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=slots)
        raise AttributeError(name)

    def _check(self) -> None:
        if self.lost:
            raise NVMLError("GPU is lost")

    def nvmlShutdown(self) -> None: ...

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle-{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return UUID

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> list[int]:
        return [9, 0]

    def nvmlDeviceGetNumGpuCores(self, handle: str) -> int:
        return 16896

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._check()
        return SimpleNamespace(total=143771 * 2**20, used=1234 * 2**20)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [self.mig, self.mig]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=96)

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.has_gpm))

    def nvmlGpmSampleAlloc(self) -> str:
        self.allocated += 1
        return f"sample-{self.allocated}"

    def nvmlGpmSampleFree(self, sample: str) -> None:
        self.allocated -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: str) -> None:
        self._check()
        self.samples += 1

    def nvmlGpmMetricsGet(self, query: Any) -> None:
        assert query.sample1 != query.sample2
        for slot, name in enumerate(METRICS):
            assert query.metrics[slot].metricId == METRICS[name]
            query.metrics[slot].nvmlReturn, query.metrics[slot].value = self.gpm[name]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=11, usedGpuMemory=500 * 2**20)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [
            SimpleNamespace(pid=10, usedGpuMemory=30 * 2**20),
            SimpleNamespace(pid=11, usedGpuMemory=500 * 2**20),
            SimpleNamespace(pid=12, usedGpuMemory=None),
        ]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        return b"/usr/bin/nvidia-cuda-mps-server" if pid == 10 else b"python"

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, kind: int, events: str) -> None: ...

    def nvmlEventSetFree(self, events: str) -> None: ...

    def nvmlEventSetWait(self, events: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "the sampling loop must never wait"
        if not self.events:
            raise NVMLError("Timeout")
        device, xid = self.events.pop(0)
        return SimpleNamespace(device=device, eventData=xid)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=self.recovery_action))]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def devices(driver: Driver, clock: Clock) -> NvmlDevices:
    return NvmlDevices(driver, clock)


def test_the_contract(devices: NvmlDevices, clock: Clock, driver: Driver) -> None:
    check_contract(devices, clock.sleep)
    [gpu] = devices.list()
    assert (gpu.model, gpu.memory_mib, gpu.sm_count) == ("NVIDIA H200", 143771, 132)
    devices.close()
    assert driver.allocated == 0


def test_counters_are_ratios_and_what_failed_is_absent(devices: NvmlDevices, clock: Clock, driver: Driver) -> None:
    driver.gpm |= {"dfma_tensor_util": (0, 94.6), "fp64_util": (0, 0.05), "hmma_tensor_util": (3, 55.0),
                   "fp32_util": (0, float("nan")), "dram_bw_util": (0, 101.5)}  # fmt: skip
    devices.sample(UUID)
    clock.sleep(1)
    sample = devices.sample(UUID)
    assert sample is not None
    assert sample.window_seconds == pytest.approx(1)
    assert sample.gpu_utilization_ratio == 0.96
    assert sample.counters.pipes()["fp64"] == pytest.approx(0.9465)  # docs/facts.md 21: on the tensor pipe alone
    assert sample.counters.hmma_tensor_util is None
    assert sample.counters.fp32_util is None
    assert sample.counters.dram_bw_util == 1.0


def test_a_reading_that_makes_no_sense_is_no_reading() -> None:
    counters = counters_of({"sm_util": (0, 1e9), "fp32_util": (0, -1.0), "fp16_util": (0, 12.0)})
    assert counters.as_dict() == {"fp16_util": 0.12}


def test_a_gpu_without_gpm_has_memory_but_no_pipes(driver: Driver, clock: Clock) -> None:
    driver.has_gpm = False
    devices = NvmlDevices(driver, clock)
    assert devices.sample(UUID) is None
    clock.sleep(1)
    sample = devices.sample(UUID)
    assert sample is not None
    assert (sample.counters.as_dict(), sample.memory_used_mib) == ({}, 1234)


def test_the_server_is_no_tenant_and_a_stray_is_seen(devices: NvmlDevices) -> None:
    assert [(p.pid, p.memory_used_mib, p.is_mps_client) for p in devices.processes(UUID)] == [
        (11, 500, True),
        (12, None, False),
    ]


def test_a_lost_gpu_is_unhealthy_and_gives_no_figures(devices: NvmlDevices, driver: Driver, clock: Clock) -> None:
    devices.sample(UUID)
    driver.lost = True
    clock.sleep(1)
    assert "lost" in devices.health(UUID).reason
    with pytest.raises(DevicesError) as caught:
        devices.sample(UUID)
    assert caught.value.retryable
    driver.lost = False
    assert devices.health(UUID).health is Health.HEALTHY
    assert devices.sample(UUID) is None  # the pair across the gap is thrown away
    clock.sleep(1)
    assert devices.sample(UUID) is not None


def test_after_a_reset_the_driver_is_opened_anew(devices: NvmlDevices, driver: Driver, clock: Clock) -> None:
    driver.events = [("handle-0", 79)]
    driver.recovery_action = 1
    devices.health(UUID)
    driver.lost = True
    devices.health(UUID)
    clock.sleep(REOPEN_SECONDS - 1)
    devices.list()
    assert driver.opened == 0
    clock.sleep(1)
    driver.lost = False
    assert len(devices.list()) == 1
    assert driver.opened == 1
    assert "XID 79" in devices.health(UUID).reason  # opening anew heals nothing by itself


def test_mig_is_said(devices: NvmlDevices, driver: Driver) -> None:
    driver.mig = 1
    assert "MIG" in devices.health(UUID).reason


def test_a_critical_xid_lasts_until_the_driver_says_that_it_is_over(
    devices: NvmlDevices, driver: Driver, clock: Clock
) -> None:
    driver.events = [("handle-0", 31)]  # a page fault of an application
    assert devices.health(UUID).health is Health.HEALTHY
    driver.events, driver.recovery_action = [("handle-0", 79)], 1
    assert "XID 79" in devices.health(UUID).reason
    clock.sleep(2 * QUIET_SECONDS)
    assert devices.health(UUID).health is Health.UNHEALTHY  # a reset is still needed
    driver.recovery_action = 0
    assert devices.health(UUID).health is Health.HEALTHY
