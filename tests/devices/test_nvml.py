"""The real side over a driver's library that the test plays: what is read, what is refused, how trouble looks."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fakenvml import HANDLE, MIB, OTHER_HANDLE, OTHER_UUID, UNKNOWN, UUID, FakeNvml, installed
from tests.devices.contract import check_compute_mode, check_contract, check_lost

from gpushare.core.gpu import ComputeMode, DevicesError, Health
from gpushare.devices import listing
from gpushare.devices.clock import CALM_READINGS, MOVING_SECONDS, ClockRounds, SmClock
from gpushare.devices.gpm import METRICS, counters_of
from gpushare.devices.nvml import GRAPHICS_SECONDS, MIG_SECONDS, SEARCH_SECONDS, NvmlDevices
from gpushare.devices.search import LISTING, GpuSearch

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "nvml" / "gpm-h200-580.json").read_text())


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


class Search(GpuSearch):
    """Answers in the next round with what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = 0
        self.answer: frozenset[str] | None = None
        self.answering: frozenset[str] = frozenset()

    def start(self) -> None:
        self.starts += 1
        self.answer = self.answering

    def found(self) -> frozenset[str] | None:
        answer, self.answer = self.answer, None
        return answer


@pytest.fixture
def search() -> Search:
    return Search()


@pytest.fixture
def devices(driver: FakeNvml, clock: Clock, search: Search) -> NvmlDevices:
    return NvmlDevices.open(clock, search=search)


def test_the_contract(devices: NvmlDevices, clock: Clock, driver: FakeNvml) -> None:
    check_contract(devices, clock.sleep)
    check_compute_mode(devices)
    [gpu] = devices.list()
    assert (gpu.uuid, gpu.model, gpu.memory_mib, gpu.sm_count) == (UUID, "NVIDIA H200", 143771, 132)
    assert devices.driver_version() == "580.159.04"
    assert driver.samples
    devices.close()
    assert (driver.samples, driver.opened) == (set(), 0)


def test_the_contract_of_a_gpu_that_falls_off_the_bus(driver: FakeNvml, clock: Clock) -> None:
    """Before: the driver tells no UUID of such a GPU, so its XID took every GPU of the node out of service."""
    driver.gpus[OTHER_HANDLE] = OTHER_UUID
    handles = {uuid: handle for handle, uuid in driver.gpus.items()}

    def lose(uuid: str) -> None:
        driver.lost, driver.events = {handles[uuid]}, [(handles[uuid], 79)]

    check_lost(NvmlDevices.open(clock), lose, lambda _: driver.lost.clear(), clock.sleep)


def test_counters_are_ratios_and_what_failed_is_absent(
    devices: NvmlDevices, clock: Clock, driver: FakeNvml
) -> None:
    driver.gpm = {
        METRICS["dfma_tensor_util"]: (0, 94.6),
        METRICS["fp64_util"]: (0, 0.05),
        METRICS["hmma_tensor_util"]: (3, 55.0),
        METRICS["fp32_util"]: (0, float("nan")),
        METRICS["dram_bw_util"]: (0, 101.5),
    }
    devices.sample(UUID)
    clock.sleep(1)
    sample = devices.sample(UUID)
    assert sample is not None
    assert sample.window_seconds == pytest.approx(1)
    assert (sample.gpu_utilization_ratio, sample.memory_used_mib) == (0.96, 1234)
    assert sample.counters.pipes()["fp64"] == pytest.approx(0.9465)  # docs/facts.md 21: on the tensor pipe alone
    assert sample.counters.hmma_tensor_util is None
    assert sample.counters.fp32_util is None
    assert sample.counters.dram_bw_util == 1.0


def clock_after(devices: NvmlDevices, clock: Clock, seconds: float = 1.0) -> float | None:
    clock.sleep(seconds)
    sample = devices.sample(UUID)
    assert sample is not None
    return sample.sm_clock_mhz


def test_without_polling_the_clock_is_read_at_both_ends_of_a_window_and_may_be_unknown(
    devices: NvmlDevices, clock: Clock, driver: FakeNvml
) -> None:
    devices.sample(UUID)
    driver.clock_mhz = 1500
    assert clock_after(devices, clock) == (1980 + 1500) / 2
    driver.codes["nvmlDeviceGetClockInfo"] = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert clock_after(devices, clock) is None
    del driver.codes["nvmlDeviceGetClockInfo"]
    assert clock_after(devices, clock) == 1500  # the window's begin is not known
    driver.clock_mhz = 0
    assert clock_after(devices, clock) is None


def test_readings_in_between_count_by_their_time_and_come_faster_while_the_clock_moves(
    clock: Clock, driver: FakeNvml
) -> None:
    read = SmClock(HANDLE, clock)
    rounds, calm_seconds = ClockRounds({UUID: read}), pytest.approx(CALM_READINGS * MOVING_SECONDS)
    clock.sleep(10)
    assert rounds.step() == calm_seconds
    assert read.mean_mhz() == 1980
    for mhz, seconds in ((1980, 0.4), (1400, 0.0), (1400, 0.6)):  # stopped for 0.6 s of the second
        clock.sleep(seconds)
        driver.clock_mhz = mhz
        assert rounds.step() == (calm_seconds if mhz == 1980 else MOVING_SECONDS)
    assert read.mean_mhz() == pytest.approx(0.4 * 1980 + 0.6 * 1400)
    clock.sleep(1)
    assert read.mean_mhz() == 1400, "each window has its own"


def test_of_eight_clocks_only_those_that_move_are_read_often(clock: Clock, driver: FakeNvml) -> None:
    driver.clocks = {HANDLE + n: 1980 for n in range(1, 9)}
    clocks = {f"GPU-{handle}": SmClock(handle, clock) for handle in driver.clocks}
    rounds = ClockRounds(clocks)

    def readings_each_second(moving: int) -> float:
        """Return how often clocks are read while some go up and down and the others tremble by a step."""
        for seconds in (10, 30):  # the first ones until what was before is forgotten
            before, end = driver.clock_reads, clock.now + seconds
            while clock.now < end:
                clock.sleep(rounds.step())
                for at, (handle, mhz) in enumerate(driver.clocks.items()):
                    driver.clocks[handle] = (1400 if at < moving else 1965) if mhz == 1980 else 1980
        return (driver.clock_reads - before) / seconds

    fast, calm = 1 / MOVING_SECONDS, 1 / (CALM_READINGS * MOVING_SECONDS)
    assert readings_each_second(moving=0) == pytest.approx(8 * calm, rel=0.05)
    assert readings_each_second(moving=1) == pytest.approx(fast + 7 * calm, rel=0.05)
    for each in clocks.values():
        each.mean_mhz()
    assert readings_each_second(moving=8) == pytest.approx(8 * fast, rel=0.05)
    assert [each.mean_mhz() for each in clocks.values()] == pytest.approx([1690] * 8, abs=10), (
        "the mean stays right"
    )


def test_polling_reads_between_samples_and_ends_with_the_devices(driver: FakeNvml) -> None:
    now = iter(range(10**6))
    devices = NvmlDevices.open(lambda: float(next(now)), polls_clock=True)
    try:
        assert devices.sample(UUID) is None
        driver.clock_mhz = 1500
        deadline = time.monotonic() + 60
        while (sample := devices.sample(UUID)) is None or sample.sm_clock_mhz != 1500:
            assert time.monotonic() < deadline
        before = driver.clock_reads
        while driver.clock_reads < before + 3:  # nobody samples meanwhile
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        devices.close()
    assert "sm-clock" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("values", "words"), [(37.5, "the same to the last digit"), (0.0, "zero for 3 windows")])
def test_counters_that_stand_still_are_said_and_come_back_when_they_move(
    values: float, words: str, devices: NvmlDevices, clock: Clock, driver: FakeNvml
) -> None:
    driver.gpm = dict.fromkeys(METRICS.values(), (0, values))
    devices.sample(UUID)
    for _ in range(3 if values else 2):  # until then nobody can know
        clock.sleep(1)
        assert devices.sample(UUID) is not None
    clock.sleep(1)
    with pytest.raises(DevicesError, match=words) as caught:
        devices.sample(UUID)
    assert caught.value.retryable
    for moved in (12.0, 12.5):
        driver.gpm[METRICS["sm_util"]] = (0, moved)
        clock.sleep(1)
        assert devices.sample(UUID) is not None


def test_a_reading_that_makes_no_sense_is_no_reading() -> None:
    counters = counters_of({"sm_util": (0, 1e9), "fp32_util": (0, -1.0), "fp16_util": (0, 12.0)})
    assert counters.as_dict() == {"fp16_util": 0.12}


@pytest.mark.parametrize("reading", RECORDED["readings"], ids=lambda r: r["program"])
def test_counters_recorded_on_an_h200_show_the_busiest_pipe(
    reading: dict[str, Any], devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    driver.gpm = {METRICS[name]: (code, value) for name, (code, value) in reading["gpm"].items()}
    devices.sample(UUID)
    clock.sleep(1)
    sample = devices.sample(UUID)
    assert sample is not None
    assert set(sample.counters.as_dict()) == set(METRICS)
    pipes = sample.counters.pipes()
    busiest = max(pipes, key=lambda pipe: pipes[pipe])
    assert busiest == {"fp64_product": "fp64", "fp16_product": "fp16", "memory_stream": "dram"}[reading["program"]]
    assert 0.85 < pipes[busiest] <= 1.0
    assert reading["utilization_percent"] == 100  # NVML cannot tell these three apart
    assert all(used > 0 for _, used in reading["processes"])


def test_a_window_begins_and_ends_where_its_user_says(devices: NvmlDevices, driver: FakeNvml) -> None:
    driver.gpm = {METRICS["sm_util"]: (0, 40.0)}
    window = devices.gpm_window(UUID)
    window.mark()
    window.mark()
    assert driver.marks == 2
    assert window.counters().sm_util == pytest.approx(0.4)
    assert window.values()["sm_util"] == (0, 40.0)
    driver.is_lost = True
    with pytest.raises(DevicesError, match=f"counters of GPU {UUID} cannot be read: GPU is lost"):
        window.mark()
    window.close()
    assert driver.samples == set()


def test_a_gpu_without_gpm_has_memory_but_no_pipes(driver: FakeNvml, clock: Clock) -> None:
    driver.has_gpm = False
    devices = NvmlDevices.open(clock)
    assert devices.sample(UUID) is None
    clock.sleep(1)
    sample = devices.sample(UUID)
    assert sample is not None
    assert (sample.counters.as_dict(), sample.memory_used_mib) == ({}, 1234)
    with pytest.raises(DevicesError, match="has no GPM") as caught:
        devices.gpm_window(UUID)
    assert not caught.value.retryable


def test_a_stray_is_seen_and_so_is_one_that_is_named_as_the_server(devices: NvmlDevices, driver: FakeNvml) -> None:
    driver.processes.append((15, 9 * MIB))
    driver.names[15] = b"nvidia-cuda-mps-server"
    assert [(p.pid, p.memory_used_mib, p.is_mps_client, p.is_named_server) for p in devices.processes(UUID)] == [
        (11, 500, True, False),
        (10, 30, False, True),
        (12, None, False, False),
        (15, 9, False, True),
    ]


def test_memory_that_nvml_does_not_tell_is_unknown_and_never_none(devices: NvmlDevices, driver: FakeNvml) -> None:
    driver.clients = [(11, UNKNOWN), (13, 0), (14, 3 * MIB)]
    driver.processes = []
    assert {p.pid: p.memory_used_mib for p in devices.processes(UUID)} == {11: None, 13: 0, 14: 3}


def test_a_program_named_in_no_encoding_is_a_stray_as_any_other(devices: NvmlDevices, driver: FakeNvml) -> None:
    driver.names[12] = b"\xff\xfe"
    assert [p.pid for p in devices.processes(UUID) if not (p.is_mps_client or p.is_named_server)] == [12]


def test_a_process_of_graphics_is_seen_and_one_that_computes_too_is_listed_once(
    devices: NvmlDevices, driver: FakeNvml
) -> None:
    driver.graphics = [(11, MIB), (12, MIB), (20, 40 * MIB), (21, UNKNOWN)]
    found = devices.processes(UUID)
    assert sorted(p.pid for p in found) == [10, 11, 12, 20, 21]
    assert [(p.pid, p.memory_used_mib, p.is_mps_client) for p in found if p.is_graphics] == [
        (20, 40, False),
        (21, None, False),
    ]


def test_processes_of_graphics_are_listed_in_every_second_round_and_the_others_in_each(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    def pids() -> list[int]:
        return [p.pid for p in devices.processes(UUID)]

    assert pids() == [11, 10, 12]
    driver.graphics = [(20, 40 * MIB)]
    driver.processes = [*driver.processes, (13, MIB)]
    clock.sleep(1)
    assert pids() == [11, 10, 12, 13]
    clock.sleep(1)
    assert pids() == [11, 10, 12, 13, 20]
    driver.graphics = []
    clock.sleep(GRAPHICS_SECONDS - 0.1)
    assert 20 in pids()
    clock.sleep(0.1)
    assert pids() == [11, 10, 12, 13]


@pytest.mark.parametrize("lacks", ["function", "support"])
def test_a_driver_that_tells_no_graphics_tells_the_rest(
    devices: NvmlDevices, driver: FakeNvml, lacks: str
) -> None:
    driver.graphics = [(20, 40 * MIB)]
    name = "nvmlDeviceGetGraphicsRunningProcesses_v3"
    if lacks == "function":
        driver.missing = {name}
    else:
        driver.codes[name] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert [p.pid for p in devices.processes(UUID)] == [11, 10, 12]


def test_nobody_on_the_gpu(devices: NvmlDevices, driver: FakeNvml) -> None:
    driver.clients = driver.processes = []
    assert devices.processes(UUID) == ()


def test_a_lost_gpu_is_unhealthy_and_gives_no_figures(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    devices.sample(UUID)
    driver.is_lost = True
    clock.sleep(1)
    assert devices.health(UUID).reason == "the driver lost the GPU: GPU is lost"
    for call in (devices.sample, devices.processes):
        with pytest.raises(DevicesError, match="GPU is lost") as caught:
            call(UUID)
        assert caught.value.retryable
    driver.is_lost = False
    assert devices.health(UUID).health is Health.HEALTHY
    assert devices.sample(UUID) is None  # the pair across the gap is thrown away
    clock.sleep(1)
    assert devices.sample(UUID) is not None


def test_after_a_reset_the_driver_is_opened_anew(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock, search: Search
) -> None:
    driver.events = [(HANDLE, 79)]
    driver.recovery_action = 1
    devices.sample(UUID)
    devices.health(UUID)
    driver.is_lost = True
    devices.health(UUID)
    devices.list()
    for _ in range(10):  # it may take longer than a minute
        clock.sleep(SEARCH_SECONDS)
        devices.list()
        assert devices.health(UUID).reason == "the driver lost the GPU: GPU is lost"
    assert (search.starts, [gpu.uuid for gpu in devices.list()]) == (10, [UUID])
    assert driver.samples, "not opened anew while that would bring nothing"
    driver.is_lost, search.answering = False, frozenset({UUID})
    clock.sleep(SEARCH_SECONDS)
    devices.list()
    assert len(devices.list()) == 1
    assert (driver.opened, driver.samples) == (1, set())  # closed, then opened
    assert "XID 79" in devices.health(UUID).reason  # opening anew heals nothing by itself
    clock.sleep(SEARCH_SECONDS)
    devices.list()
    assert search.starts == 11, "nothing is missing any more"


@pytest.mark.parametrize("missed", [False, True])
def test_after_a_reset_a_driver_that_cannot_say_so_is_no_reason_to_keep_the_gpu_out(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock, search: Search, missed: bool
) -> None:
    driver.codes["nvmlDeviceGetFieldValues"] = int(pynvml.NVML_ERROR_NOT_SUPPORTED)  # drivers before r555
    driver.events = [(HANDLE, 79)]
    assert "XID 79" in devices.health(UUID).reason
    driver.is_lost = True
    devices.health(UUID)
    devices.list()
    search.answering = frozenset({UUID})
    for is_lost in (True, False) if missed else (False,):  # lost again while the driver is opened
        driver.is_lost = is_lost
        clock.sleep(SEARCH_SECONDS)
        devices.list()
        assert bool(devices.list()) is not is_lost
    assert devices.health(UUID).health is Health.HEALTHY
    driver.events = [(HANDLE, 79)]
    assert "XID 79" in devices.health(UUID).reason, "another one counts"


def test_a_gpu_that_answers_again_by_itself_is_not_looked_for(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock, search: Search
) -> None:
    driver.is_lost = True
    devices.health(UUID)
    devices.list()
    driver.is_lost = False
    for _ in range(3):
        clock.sleep(SEARCH_SECONDS)
        devices.health(UUID)
        devices.list()
    assert search.starts == 0


def test_a_gpu_that_is_gone_for_good_costs_the_others_nothing(
    driver: FakeNvml, clock: Clock, search: Search
) -> None:
    driver.broken_gpus, search.answering = 1, frozenset({UUID})
    devices = NvmlDevices.open(clock, search=search)
    devices.sample(UUID)
    for _ in range(200):
        clock.sleep(3.0)
        assert [gpu.uuid for gpu in devices.list()] == [UUID]
        assert devices.health(UUID).health is Health.HEALTHY
        assert devices.sample(UUID) is not None, "no window is lost"
    assert search.starts == pytest.approx(600 / SEARCH_SECONDS, abs=1)


def test_a_gpu_that_was_not_ready_at_the_start_is_found_later_even_if_an_opening_misses_it(
    driver: FakeNvml, clock: Clock, search: Search
) -> None:
    driver.codes["nvmlDeviceGetHandleByIndex_v2"] = int(pynvml.NVML_ERROR_UNKNOWN)
    devices = NvmlDevices.open(clock, search=search)
    assert devices.list() == ()
    search.answering = frozenset({UUID})
    for is_ready in (False, True):
        if is_ready:
            driver.codes.clear()
        clock.sleep(SEARCH_SECONDS)
        devices.list()
        assert bool(devices.list()) == is_ready
    driver.is_lost = True
    devices.health(UUID)
    devices.list()
    clock.sleep(SEARCH_SECONDS)
    devices.list()
    assert devices.list() == (), "lost again when the driver was opened"
    driver.is_lost = False
    clock.sleep(SEARCH_SECONDS)
    devices.list()
    assert len(devices.list()) == 1


def test_what_the_search_prints_is_what_would_be_listed(
    driver: FakeNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.broken_gpus = 1
    listing.main()
    assert capsys.readouterr().out == f"{UUID}\n"
    driver.is_lost = True
    listing.main()
    assert capsys.readouterr().out == ""


def found(search: GpuSearch) -> frozenset[str] | None:
    assert search._process is not None
    search._process.wait()
    return search.found()


def test_the_search_runs_beside_us_one_at_a_time() -> None:
    search = GpuSearch((sys.executable, "-c", "print('GPU-1'); print('GPU-2'); input()"))
    assert search.found() is None
    search.start()
    assert found(search) == {"GPU-1", "GPU-2"}
    assert search.found() is None
    hanging = GpuSearch(("sleep", "1000"))
    hanging.start()
    process = hanging._process
    assert hanging.found() is None
    hanging.start()
    assert hanging._process is process
    hanging.close()
    assert found(hanging) == frozenset()
    absent = GpuSearch(("/absent",))
    absent.start()
    assert absent.found() is None


def test_the_search_that_is_shipped_starts() -> None:
    """Without a driver it finds nothing, with one the GPUs of this machine."""
    search = GpuSearch()
    search.start()
    uuids = found(search)
    assert uuids is not None
    assert all(uuid.startswith("GPU-") for uuid in uuids)
    command = subprocess.run(LISTING, capture_output=True, text=True, check=False)
    assert command.returncode == 0 or "NVMLError_LibraryNotFound" in command.stderr


def test_the_reason_of_a_gpu_in_mig_mode_names_mig(devices: NvmlDevices, driver: FakeNvml) -> None:
    driver.mig = 1
    assert "MIG" in devices.health(UUID).reason


def test_whether_mig_is_on_is_asked_rarely_but_at_once_when_a_gpu_answers_again(
    devices: NvmlDevices, driver: FakeNvml, clock: Clock
) -> None:
    assert devices.health(UUID).health is Health.HEALTHY
    driver.mig = 1
    clock.sleep(MIG_SECONDS - 1)
    assert devices.health(UUID).health is Health.HEALTHY
    clock.sleep(1)
    assert "MIG" in devices.health(UUID).reason
    driver.mig, driver.is_lost = 0, True
    assert "lost the GPU" in devices.health(UUID).reason
    driver.is_lost = False
    assert devices.health(UUID).health is Health.HEALTHY, "a reset may have changed it"


def test_a_gpu_that_knows_no_mig_is_healthy(devices: NvmlDevices, driver: FakeNvml) -> None:
    driver.codes["nvmlDeviceGetMigMode"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert devices.health(UUID).health is Health.HEALTHY


def test_what_an_old_driver_lacks_is_named(
    driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    driver.missing = {
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlGpmQueryDeviceSupport",
        "nvmlEventSetCreate",
    }
    with caplog.at_level(logging.WARNING):
        devices = NvmlDevices.open(clock)
        assert devices.sample(UUID) is None
    too_old = "this driver is too old: its NVML has no"
    assert f"XID errors of GPU {UUID} cannot be watched: {too_old} nvmlEventSetCreate" in caplog.text
    assert f"GPM cannot be used: {too_old} nvmlGpmQueryDeviceSupport" in caplog.text
    assert devices.health(UUID).health is Health.HEALTHY
    clock.sleep(1)
    assert devices.sample(UUID) is not None
    with pytest.raises(DevicesError, match="too old: its NVML has no nvmlDeviceGetMPSCompute") as caught:
        devices.processes(UUID)
    assert not caught.value.retryable


def test_a_gpu_that_cannot_be_read_is_left_out_with_a_sentence(
    driver: FakeNvml, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    driver.codes["nvmlDeviceGetNumGpuCores"] = pynvml.NVML_ERROR_NO_PERMISSION
    devices = NvmlDevices.open(clock)
    assert devices.list() == ()
    assert devices.left_out() == {0: "Insufficient Permissions"}
    assert "GPU 0 cannot be read and is left out: Insufficient Permissions" in caplog.text


def test_no_driver_is_one_sentence(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    expected = r"^NVML cannot be used: the driver's library libnvidia-ml.so.1 is not here$"
    with pytest.raises(DevicesError, match=expected) as caught:
        NvmlDevices.open(clock)
    assert caught.value.retryable  # it may be installed later


def test_a_driver_that_cannot_list_is_let_go_of(driver: FakeNvml, clock: Clock) -> None:
    driver.codes["nvmlDeviceGetCount_v2"] = pynvml.NVML_ERROR_UNKNOWN
    with pytest.raises(DevicesError, match="NVML cannot list GPUs: Unknown Error"):
        NvmlDevices.open(clock)
    assert driver.opened == 0


def test_a_compute_mode_that_may_not_be_set_and_one_that_is_not_known(
    devices: NvmlDevices, driver: FakeNvml
) -> None:
    driver.codes = {"nvmlDeviceSetComputeMode": pynvml.NVML_ERROR_NO_PERMISSION}
    with pytest.raises(DevicesError, match="Insufficient Permissions"):
        devices.set_compute_mode(UUID, ComputeMode.EXCLUSIVE_PROCESS)
    driver.codes, driver.compute_mode = {}, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD
    with pytest.raises(DevicesError, match="compute mode 1"):
        devices.compute_mode(UUID)
    driver.compute_mode = pynvml.NVML_COMPUTEMODE_DEFAULT
    devices.set_compute_mode(UUID, ComputeMode.EXCLUSIVE_PROCESS)
    assert driver.compute_mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS == 3
