"""What a calibration reads from the driver, over a library that the test plays."""

import pytest
from fakenvml import MIB, UNKNOWN, installed

from gpushare.devices.gpm import METRICS
from gpushare.research.calibration import run
from gpushare.research.calibration.counters import DriverCounters, NoCounters, take_gpu


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


def test_processes_of_unknown_memory_are_left_out_of_memory_by_process(driver):
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


def test_a_gpu_that_is_counted_and_cannot_be_read_says_why(driver):
    driver.broken_gpus = 1
    with pytest.raises(RuntimeError, match="GPU 1 cannot be read: GPU is lost"):
        take_gpu(1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda driver: None, None),
        (
            lambda driver: setattr(driver, "driver_version", b"470.82.01"),
            "the driver is 470.82.01, and .* needs 525",
        ),
        (lambda driver: setattr(driver, "mig", 1), "cannot be shared: .*MIG"),
        (lambda driver: setattr(driver, "compute_mode", 3), "compute mode ExclusiveProcess, in which nothing"),
        (lambda driver: setattr(driver, "processes", [(41, MIB)]), r"in use by 1 process \(pid 41\): end it"),
        (
            lambda driver: setattr(driver, "processes", [(41, MIB), (42, MIB)]),
            r"in use by 2 processes \(pid 41, 42\): end them first",
        ),
    ],
)
def test_a_gpu_that_is_not_free_for_calibration_is_one_sentence(driver, spoil, words, tmp_path):
    driver.processes = driver.clients = []
    spoil(driver)
    if words is None:
        take_gpu(proc=tmp_path)
    else:
        with pytest.raises(RuntimeError, match=words):
            take_gpu(proc=tmp_path)
    assert (driver.opened, driver.samples) == (0, set()), "nothing is left open"


def test_an_mps_of_somebody_else_is_said_before_its_first_client_comes(driver, tmp_path):
    driver.processes = driver.clients = []
    for pid, name in ((7, "python3"), (8, "nvidia-cuda-mps"), (9, "nvidia-cuda-mps")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
    with pytest.raises(RuntimeError, match=r"MPS is run by somebody else on this machine \(pid 8, 9\)"):
        take_gpu(proc=tmp_path)


def test_a_calibration_that_is_refused_starts_nothing(driver, monkeypatch, tmp_path):
    driver.compute_mode = 3
    started = []
    monkeypatch.setattr(run, "mps_daemon", lambda: started.append("mps"))
    monkeypatch.setattr(run, "_suite", lambda _: ({}, {}))
    monkeypatch.setattr(run, "_names", lambda _: (("a", "b"), ()))
    with pytest.raises(RuntimeError, match="compute mode"):
        run.calibrate(
            tmp_path / "out.jsonl", run.CalibrationOrder(), budget_seconds=60, progress=print, log=lambda _: None
        )
    assert started == []
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_has_none():
    none = NoCounters()
    none.start()
    assert (none.stop(), none.memory_by_pid()) == ({}, {})
