"""What a calibration reads from the driver, over a library that the test plays."""

import pytest
from fakenvml import MIB, UNKNOWN, installed

from gpushare.devices.gpm import METRICS
from gpushare.research.calibration.counters import DriverCounters, NoCounters


@pytest.fixture
def driver(monkeypatch):
    with installed(monkeypatch) as fake:
        yield fake


def test_the_counters_of_a_run_and_who_was_measured(driver):
    driver.gpm = dict.fromkeys(METRICS.values(), (0, 12.34567)) | {METRICS["fp16_util"]: (3, 1.0)}
    counters = DriverCounters()
    assert counters.about() == {"gpu_model": "NVIDIA H200", "driver": "580.159.04"}
    counters.start()
    assert driver.marks == 1
    assert counters.stop() == {name: 0.1235 for name in METRICS if name != "fp16_util"}
    assert driver.marks == 2


def test_a_run_that_the_driver_does_not_count_has_no_counters(driver):
    counters = DriverCounters()
    driver.is_lost = True
    counters.start()
    driver.is_lost = False
    assert counters.stop() == {}, "there was no start"
    counters.start()
    driver.is_lost = True
    assert counters.stop() == {}
    assert counters.memory_by_pid() == {}


def test_memory_by_process_without_those_that_nobody_tells(driver):
    driver.clients = [(11, 500 * MIB), (13, UNKNOWN)]
    driver.processes = [(10, 30 * MIB), (12, 7 * MIB), (14, UNKNOWN)]
    assert DriverCounters().memory_by_pid() == {11: 500, 12: 7}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda driver: setattr(driver, "has_gpm", False), "has no GPM"),
        (lambda driver: driver.missing.add("nvmlGpmQueryDeviceSupport"), "this driver is too old"),
        (lambda driver: driver.missing.add("nvmlInitWithFlags"), "NVML cannot be used: this driver is too old"),
    ],
)
def test_a_gpu_that_cannot_be_measured_is_one_sentence(driver, spoil, words):
    spoil(driver)
    with pytest.raises(RuntimeError, match=words):
        DriverCounters()


def test_a_gpu_that_is_not_there_is_one_sentence(driver):
    with pytest.raises(RuntimeError, match="the driver lists no GPU 3"):
        DriverCounters(3)


def test_a_dry_run_has_none():
    none = NoCounters()
    none.start()
    assert (none.stop(), none.memory_by_pid()) == ({}, {})
