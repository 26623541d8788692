"""GPUs with XID errors: until the driver reports that nothing needs to be done, in this process and the next."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pynvml
import pytest
from fakenvml import HANDLE, OTHER_HANDLE, OTHER_UUID, UUID, FakeNvml, installed

from gpushare.core.gpu import Health
from gpushare.devices.nvml import NvmlDevices
from gpushare.devices.search import GpuSearch
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


def test_an_xid_whose_event_names_no_gpu_is_of_the_gpu_whose_events_were_asked_for(
    driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: it counted for all, until each had been quiet for a minute."""
    driver.gpus[OTHER_HANDLE] = OTHER_UUID
    devices = NvmlDevices.open(clock)
    driver.events, driver.event_device = [(OTHER_HANDLE, 79)], 0x7F00_0000_0000
    driver.codes["nvmlDeviceGetUUID"] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert devices.health(UUID).health is Health.HEALTHY
    assert devices.health(OTHER_UUID).reason.startswith("XID 79: see")
    assert [record.getMessage() for record in caplog.records] == [f"GPU {OTHER_UUID} reports XID 79"]


def test_a_lost_gpu_hides_no_other_gpus_xid(
    driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: all events were in one set, of which each wait failed with GPU_IS_LOST."""
    driver.gpus[OTHER_HANDLE] = OTHER_UUID
    devices = NvmlDevices.open(clock)
    driver.lost, driver.loses_waits, driver.events = {OTHER_HANDLE}, True, [(HANDLE, 95)]
    for _ in range(3):
        assert "lost the GPU" in devices.health(OTHER_UUID).reason
        assert "XID 95" in devices.health(UUID).reason
    [unwatched, _] = [record.getMessage() for record in caplog.records]
    assert unwatched == f"XID errors of GPU {OTHER_UUID} cannot be watched now: GPU is lost", "once"
    driver.lost, driver.events = set(), [(OTHER_HANDLE, 94)]
    assert "XID 94" in devices.health(OTHER_UUID).reason, "what came meanwhile is read then"


def test_the_xid_of_a_lost_gpu_is_logged_while_it_is_lost(
    driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    devices = NvmlDevices.open(clock)
    driver.lost, driver.events = {HANDLE}, [(HANDLE, 79)]
    assert "lost the GPU" in devices.health(UUID).reason
    assert [record.getMessage() for record in caplog.records] == [f"GPU {UUID} reports XID 79"]


def test_a_gpu_whose_events_cannot_be_registered_keeps_no_other_from_being_watched(
    driver: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.gpus[OTHER_HANDLE] = OTHER_UUID
    register = pynvml.nvmlDeviceRegisterEvents

    def refuse_one(handle: Any, kinds: int, events: Any) -> None:
        if ctypes.cast(handle, ctypes.c_void_p).value == HANDLE:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        register(handle, kinds, events)

    monkeypatch.setattr(pynvml, "nvmlDeviceRegisterEvents", refuse_one)
    devices = NvmlDevices.open(clock)
    driver.events = [(HANDLE, 95), (OTHER_HANDLE, 95)]
    assert devices.health(UUID).health is Health.HEALTHY
    assert devices.health(OTHER_UUID).health is Health.UNHEALTHY
    devices.close()
    assert driver.event_sets == {}


class Answering(GpuSearch):
    """Has found that these GPUs answer, once."""

    answer: frozenset[str] | None = None

    def found(self) -> frozenset[str] | None:
        answer, self.answer = self.answer, None
        return answer


def test_an_xid_that_comes_right_before_the_driver_is_opened_anew_for_another_gpu_counts(
    driver: FakeNvml, clock: Clock
) -> None:
    """Before: it was freed unread, and a driver before r555 never tells it again."""
    driver.gpus[OTHER_HANDLE], driver.missing = OTHER_UUID, {"nvmlDeviceGetFieldValues"}
    search = Answering()
    devices = NvmlDevices.open(clock, search=search)
    driver.lost = {OTHER_HANDLE}
    devices.health(OTHER_UUID)
    driver.lost, search.answer, driver.events = set(), frozenset({UUID, OTHER_UUID}), [(HANDLE, 95)]
    devices.list()
    assert "XID 95" in devices.health(UUID).reason
    assert devices.health(OTHER_UUID).health is Health.HEALTHY


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
