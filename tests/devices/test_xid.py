"""GPUs with XID errors: until the driver reports that nothing needs to be done, in this process and the next."""

from collections.abc import Iterator
from typing import Any

import pynvml
import pytest
from fakenvml import HANDLE, OTHER_HANDLE, OTHER_UUID, UUID, FakeNvml, installed

from gpushare.core.gpu import Health
from gpushare.devices.nvml import NvmlDevices
from gpushare.devices.xid import ACTION_SECONDS, MOST_EVENTS, QUIET_SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with installed(monkeypatch) as fake:
        yield fake


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def devices(driver: FakeNvml, clock: Clock) -> NvmlDevices:
    return NvmlDevices.open(clock)


def test_a_critical_xid_lasts_until_the_driver_says_that_it_is_over(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    driver.events = [(HANDLE, 31)]  # a page fault of an application
    assert devices.health(UUID).health is Health.HEALTHY
    driver.events, driver.recovery_action = [(HANDLE, 79)], 1
    assert "XID 79" in devices.health(UUID).reason
    clock.sleep(2 * QUIET_SECONDS)
    assert devices.health(UUID).health is Health.UNHEALTHY  # a reset is still needed
    driver.recovery_action = 0
    assert devices.health(UUID).health is Health.HEALTHY


def test_a_gpu_that_needs_a_reset_stays_unhealthy_when_the_agent_restarts(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    """Before: each new process took a broken GPU for healthy, since XIDs are reported as they happen only."""
    driver.events, driver.recovery_action = [(HANDLE, 95)], pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    assert "XID 95" in devices.health(UUID).reason
    devices.close()
    again = NvmlDevices.open(clock)
    health = again.health(UUID)
    assert (health.health, health.reason) == (Health.UNHEALTHY, "the driver reports: the GPU needs a reset")
    clock.sleep(ACTION_SECONDS)
    driver.codes["nvmlDeviceGetFieldValues"] = pynvml.NVML_ERROR_UNKNOWN
    assert again.health(UUID) == health, "a call that fails heals nothing"
    clock.sleep(ACTION_SECONDS)
    del driver.codes["nvmlDeviceGetFieldValues"]
    driver.recovery_action = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
    assert again.health(UUID).health is Health.HEALTHY


def test_what_a_gpu_needs_is_asked_rarely_and_each_action_has_a_sentence(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    assert devices.health(UUID).health is Health.HEALTHY
    driver.recovery_action = pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET
    clock.sleep(ACTION_SECONDS - 1)
    assert devices.health(UUID).health is Health.HEALTHY
    seen = set()
    for action in range(1, 10):
        driver.recovery_action = action
        clock.sleep(ACTION_SECONDS)
        assert devices.health(UUID).health is Health.UNHEALTHY
        seen.add(devices.health(UUID).reason)
    assert "the driver reports: the GPU must be drained and reset" in seen
    assert "the driver reports: the GPU needs recovery action 9 of NVML" in seen, "one of a later driver"


def test_a_driver_that_does_not_know_what_a_gpu_needs_is_believed(driver: FakeNvml, clock: Clock) -> None:
    driver.missing, driver.recovery_action = {"nvmlDeviceGetFieldValues"}, 1
    assert NvmlDevices.open(clock).health(UUID).health is Health.HEALTHY


def test_a_driver_that_cannot_say_whether_it_recovered_keeps_the_gpu_unhealthy(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    driver.events, driver.missing = [(HANDLE, 79)], {"nvmlDeviceGetFieldValues"}
    devices.health(UUID)
    clock.sleep(2 * QUIET_SECONDS)
    assert devices.health(UUID).health is Health.UNHEALTHY


def test_an_xid_of_a_gpu_that_fell_off_the_bus_is_that_gpus_alone(driver: FakeNvml, clock: Clock) -> None:
    """Its UUID cannot be asked for any more; its handle is known."""
    driver.gpus[OTHER_HANDLE] = OTHER_UUID
    devices = NvmlDevices.open(clock)
    driver.lost, driver.events = {OTHER_HANDLE}, [(OTHER_HANDLE, 79)]
    assert devices.health(UUID).health is Health.HEALTHY
    driver.lost = set()
    assert "XID 79: see" in devices.health(OTHER_UUID).reason


def test_an_xid_of_a_gpu_that_the_driver_does_not_name_counts_for_all_and_says_so(
    driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    driver.gpus[OTHER_HANDLE] = OTHER_UUID
    devices = NvmlDevices.open(clock)
    driver.events = [(OTHER_HANDLE, 95), (0x7F00_0000_0000, 79)]
    driver.codes["nvmlDeviceGetUUID"] = pynvml.NVML_ERROR_GPU_IS_LOST
    reason = "XID 79 of one of this node's GPUs, it is not known which: see NVIDIA's list of XID errors; "
    assert devices.health(UUID).reason == reason + "the GPU may need a reset"
    assert devices.health(OTHER_UUID).reason.startswith("XID 95: see"), "what is known of it stays"
    assert [record.getMessage() for record in caplog.records] == [
        f"GPU {OTHER_UUID} reports XID 95",
        "XID 79 of a GPU that the driver does not name: no GPU of this node gets new pods",
    ]
    clock.sleep(QUIET_SECONDS)
    assert devices.health(UUID).health is Health.HEALTHY, "the driver says that it needs nothing"


class Endless(list[tuple[int, int]]):
    """Events of which there is always another; reading far more than a look takes fails."""

    taken = 0

    def pop(self, at: Any = -1) -> tuple[int, int]:
        self.taken += 1
        assert self.taken < 10 * MOST_EVENTS, "the loop does not end"
        return self[at]


def test_a_driver_that_always_has_another_event_holds_nobody_up(devices: NvmlDevices, driver: FakeNvml) -> None:
    """Before: the look never ended, and with it the agent's loop."""
    driver.events = events = Endless([(HANDLE, 31)])
    assert devices.health(UUID).health is Health.HEALTHY
    assert events.taken == MOST_EVENTS


def test_a_wait_for_events_that_always_fails_is_tried_once_a_look(
    devices: NvmlDevices, driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def wait(*_: object) -> None:
        asked.append("wait")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlEventSetWait", wait)
    for looks in range(1, 4):
        assert devices.health(UUID).health is Health.HEALTHY
        assert len(asked) == looks
