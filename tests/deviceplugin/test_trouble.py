"""What trouble with the hardware looks like from outside: on the GpuNode, in the metrics, and over time."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.deviceplugin.fakes import GPU_A, Clock, make_pod

from gpushare.core.api import ConditionStatus
from gpushare.core.gpu import Counters, DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample, Health, Standstill
from gpushare.exporter import NodeCollector
from gpushare.mps.layout import GpuDirectory, write_status
from gpushare.mps.status import ClientStatus, GateState, GateStatus
from gpushare.twin.devices import driver_file
from gpushare_deviceplugin import sampler as sampling
from gpushare_deviceplugin.agent import HUNG_SECONDS, Agent, devices_opener
from gpushare_deviceplugin.options import parse_options
from gpushare_deviceplugin.sampler import BACKOFF
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import conditions_of

WELL = GpuHealth(Health.HEALTHY)
BUSY = Counters(sm_util=0.7, fp32_util=0.5, dram_bw_util=0.2, integer_util=0.1)
NO_DRIVER = DevicesError("NVML cannot be used: the driver's library libnvidia-ml.so.1 is not here", retryable=True)


@dataclass
class Driver:
    """A driver that the test breaks; one H200."""

    opens: bool = True
    lists: bool = True
    health_now: GpuHealth = WELL
    counters: Counters = field(default_factory=lambda: BUSY)
    error: DevicesError | None = None
    answers: threading.Event = field(default_factory=threading.Event)
    opened: int = 0
    closed_in: list[str] = field(default_factory=list)  # names of threads
    list_error: DevicesError | None = None
    unread: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.answers.set()

    def open(self) -> "Driver":
        self.opened += 1
        if not self.opens:
            raise NO_DRIVER
        return self

    def list(self) -> tuple[GpuInfo, ...]:
        self.answers.wait(30)
        if self.list_error is not None:
            raise self.list_error
        return (GpuInfo(GPU_A, 0, "NVIDIA H200", 143771, 132),) if self.lists else ()

    def left_out(self) -> dict[int, str]:
        return self.unread

    def driver_version(self) -> str | None:
        return "580.159.04"

    def health(self, uuid: str) -> GpuHealth:
        return self.health_now

    def sample(self, uuid: str) -> GpuSample | None:
        if self.error is not None:
            raise self.error
        return GpuSample(self.counters, 1.0, 2000, 0.9)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        return ()

    def close(self) -> None:
        self.closed_in.append(threading.current_thread().name)


class Bench:
    """An agent without its process: rounds are turned by hand, and what it would tell is read."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.driver, self.clock, self.place = Driver(), clock, GpuDirectory.of(directory, GPU_A)
        options = parse_options(["--node-name", "n1", "--directory", str(directory)], {})
        self.agent = Agent(options, cast("Any", None), self.driver.open, clock)
        self.place.create()
        self.gate(at=time.time())
        self.agent.state.put_pod(make_pod("a", gpu=GPU_A, threads="100", phase="Running"))
        self.agent.state.set_allocations({"uid-a": {GPU_A: 25}})

    def gate(self, state: GateState = GateState.ACTIVE, detail: str = "", at: float = 1.0) -> None:
        clients = (ClientStatus(42, "uid-a", 100, 8192, 900),) if state is GateState.ACTIVE else ()
        write_status(self.place, GateStatus(GPU_A, state, at, detail=detail, clients=clients))

    async def rounds(self, count: int = 3) -> list[float]:
        delays = []
        for number in range(count):
            self.clock.now += 1
            if number:
                self.gate_is_alive()
            delays.append(await self.agent.sampler.step())
        return delays

    def gate_is_alive(self) -> None:
        status = self.agent.sampler.gates.get(GPU_A)
        if status is not None:
            self.gate(status.state, status.detail, status.written_at + 1)

    def condition(self, kind: str) -> tuple[ConditionStatus, str]:
        [found] = [c for c in self.agent.build().conditions if c.type == kind]
        return found.status, found.message or ""

    @property
    def health(self) -> tuple[Health, str]:
        [gpu] = self.agent.build().gpus
        return gpu.health, gpu.health_reason or ""

    def metrics(self) -> dict[str, float]:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(self.agent.figures))
        lines = generate_latest(registry).decode().splitlines()
        rows = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        found: dict[str, float] = {}
        for name, _, value in rows:
            found[name.partition("{")[0] + _reason(name)] = float(value)
        return found


def _reason(name: str) -> str:
    return "".join(f" {label}" for label in ('part="devices"', 'part="sampling"', 'state="Down"') if label in name)


FIGURES = (
    "gpushare_gpu_pipe_utilization_ratio",
    "gpushare_gpu_sm_activity_ratio",
    "gpushare_pod_progress_ratio",
    "gpushare_pod_pipe_utilization_ratio",
)


def has_figures(bench: Bench) -> bool:
    found = bench.metrics()
    present = [name for name in FIGURES if name in found]
    assert present in ([], list(FIGURES)), f"some figures and not others: {present}"
    [gpu] = bench.agent.build().gpus
    assert (gpu.utilization is not None and gpu.utilization.fp32 is not None) == bool(present)
    assert (gpu.tenants[0].progress_ratio is not None) == bool(present)
    return bool(present)


@pytest.fixture
def bench(tmp_path: Path, clock: Clock) -> Bench:
    return Bench(tmp_path, clock)


async def test_all_is_well(bench: Bench) -> None:
    assert set(await bench.rounds()) == {1.0}
    assert bench.condition("DevicesReady") == (ConditionStatus.TRUE, "")
    assert bench.condition("CountersReady") == (ConditionStatus.TRUE, "")
    assert bench.condition("ModelCalibrated") == (ConditionStatus.TRUE, "")
    assert bench.health == (Health.HEALTHY, "")
    assert has_figures(bench)
    assert bench.metrics()["gpushare_agent_driver_ready"] == 1
    assert bench.agent.trouble() == ""


def test_a_gpu_that_no_model_was_fitted_on_is_told(clock: Clock) -> None:
    state = NodeState(clock)
    state.set_gpus((GpuInfo(GPU_A, 0, "NVIDIA L4", 23034, 58),))
    [found] = [each for each in conditions_of(state) if each.type == "ModelCalibrated"]
    assert (found.status, found.reason) == (ConditionStatus.FALSE, "FittedElsewhere")
    assert "NVIDIA L4 (1.75 times as wide)" in (found.message or "")


async def test_no_driver_backs_off_and_is_no_reason_to_restart(bench: Bench) -> None:
    bench.driver.opens = False
    delays = await bench.rounds(9)
    assert delays == [2.0, 4.0, 8.0, 16.0, 32.0, *[BACKOFF.longest_seconds] * 4]
    assert bench.condition("DevicesReady") == (ConditionStatus.FALSE, str(NO_DRIVER))
    assert bench.condition("CountersReady")[0] is ConditionStatus.FALSE
    found = bench.metrics()
    assert found["gpushare_agent_driver_ready"] == 0
    assert found['gpushare_agent_errors_total part="devices"'] == 9
    assert "gpushare_gpu_healthy" not in found
    bench.agent.sampler.beat_at = bench.clock.now
    bench.clock.now += BACKOFF.longest_seconds
    assert bench.agent.trouble() == "", "an agent that waits for a driver is alive"
    bench.driver.opens = True
    await bench.rounds()
    assert bench.condition("DevicesReady")[0] is ConditionStatus.TRUE
    assert bench.metrics()["gpushare_agent_driver_ready"] == 1


async def test_a_driver_that_is_too_old_offers_no_gpu_until_it_is_upgraded(tmp_path: Path, clock: Clock) -> None:
    options = parse_options(["--node-name", "n1", "--directory", str(tmp_path), "--simulated", "H200:2"], {})
    agent = Agent(options, cast("Any", None), devices_opener(options, clock), clock)
    driver_file(tmp_path).write_text("470.82.01")
    assert await agent.sampler.step() == BACKOFF.first_seconds
    status = agent.build()
    [found] = [each for each in status.conditions if each.type == "DevicesReady"]
    assert (found.status, found.message) == (
        ConditionStatus.FALSE,
        "the driver is 470.82.01, and gpushare needs 525 or later",
    )
    assert (status.gpus, agent.state.gpus) == ((), {})
    driver_file(tmp_path).write_text("525.60.13")
    await agent.sampler.step()
    status = agent.build()
    assert (len(status.gpus), status.driver_version) == (2, "525.60.13")
    assert [each.status for each in status.conditions if each.type == "DevicesReady"] == [ConditionStatus.TRUE]


async def test_a_gpu_that_the_driver_counts_and_cannot_read_is_told_until_it_can(bench: Bench) -> None:
    """Before: only the agent's log named it, and the node looked as if it had one GPU less."""
    bench.driver.unread = {3: "Insufficient Permissions", 1: "Unknown Error"}
    await bench.rounds()
    status, message = bench.condition("DevicesReady")
    assert (status, message.split("; ")) == (
        ConditionStatus.FALSE,
        [
            "GPU 1 cannot be read and is left out: Unknown Error",
            "GPU 3 cannot be read and is left out: Insufficient Permissions",
        ],
    )
    [reason] = [each.reason for each in bench.agent.build().conditions if each.type == "DevicesReady"]
    assert reason == "UnreadableGpu"
    assert bench.health == (Health.HEALTHY, ""), "the other GPU is shared as before"
    assert bench.metrics()["gpushare_agent_driver_ready"] == 1
    bench.driver.opens, bench.driver.list_error = False, NO_DRIVER
    await bench.rounds(1)
    assert bench.condition("DevicesReady") == (ConditionStatus.FALSE, str(NO_DRIVER)), "nothing else is known now"
    bench.driver.opens, bench.driver.list_error, bench.driver.unread = True, None, {}
    changed = bench.agent.state.subscribe()
    await bench.rounds()
    assert changed.is_set()
    assert bench.condition("DevicesReady") == (ConditionStatus.TRUE, "")


async def test_a_node_whose_only_gpu_cannot_be_read_is_not_ready(bench: Bench) -> None:
    bench.driver.lists, bench.driver.unread = False, {0: "Insufficient Permissions"}
    await bench.rounds()
    assert bench.agent.build().gpus == ()
    assert bench.condition("DevicesReady")[0] is ConditionStatus.FALSE


async def test_no_gpm_leaves_memory_and_says_what_is_missing(bench: Bench) -> None:
    bench.driver.counters = Counters()
    await bench.rounds()
    status, message = bench.condition("CountersReady")
    assert (status, GPU_A in message, "GPM" in message) == (ConditionStatus.FALSE, True, True)
    assert bench.health == (Health.HEALTHY, ""), "it still takes tenants"
    found = bench.metrics()
    assert found["gpushare_gpu_memory_used_bytes"] == 2000 * 2**20
    assert "gpushare_gpu_pipe_utilization_ratio" not in found
    bench.driver.counters = BUSY
    await bench.rounds(8)
    assert bench.condition("CountersReady") == (ConditionStatus.TRUE, "")
    assert has_figures(bench)


async def test_missing_sm_activity_is_a_condition_that_names_the_field(bench: Bench) -> None:
    """What dcgm-exporter's own list has of profiling."""
    bench.driver.counters = Counters(graphics_util=0.9, any_tensor_util=0.0, dram_bw_util=0.3)
    await bench.rounds()
    status, message = bench.condition("CountersReady")
    assert status is ConditionStatus.FALSE
    assert "DCGM_FI_PROF_SM_ACTIVE" in message


async def test_counters_that_stand_still_are_said_and_nothing_is_inferred_from_them(bench: Bench) -> None:
    await bench.rounds(8)
    assert has_figures(bench)
    watch = Standstill()
    for _ in range(4):
        watch = watch.after(BUSY, 0.9)
    bench.driver.error = DevicesError(watch.problem, retryable=True)  # as the real side raises it
    await bench.rounds()
    status, message = bench.condition("CountersReady")
    assert status is ConditionStatus.FALSE
    assert message == f"GPU {GPU_A}: its counters have read the same to the last digit for 3 windows"
    assert not has_figures(bench)
    assert bench.health == (Health.HEALTHY, ""), "it still takes tenants"


async def test_no_permission_is_said_once_counted_and_over_when_it_is_over(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.rounds()
    bench.driver.error = DevicesError(f"GPU {GPU_A} cannot be sampled: Insufficient Permissions", retryable=True)
    await bench.rounds(5)
    assert "Insufficient Permissions" in bench.condition("CountersReady")[1]
    assert not has_figures(bench), "the figures of before are gone"
    assert bench.metrics()['gpushare_agent_errors_total part="sampling"'] == 5
    assert len([r for r in caplog.records if "Insufficient Permissions" in r.getMessage()]) == 1
    bench.driver.error = None
    await bench.rounds()
    assert bench.condition("CountersReady")[0] is ConditionStatus.TRUE
    assert has_figures(bench)


@pytest.mark.parametrize(
    ("break_it", "word"),
    [
        (lambda d: setattr(d, "health_now", GpuHealth(Health.UNHEALTHY, "XID 79: see NVIDIA's list")), "XID 79"),
        (lambda d: setattr(d, "lists", False), "does not list this GPU"),
    ],
)
async def test_a_vanished_gpu_is_out_and_has_no_figures(
    bench: Bench, break_it: Callable[[Driver], None], word: str
) -> None:
    await bench.rounds()
    assert has_figures(bench)
    break_it(bench.driver)
    assert set(await bench.rounds()) == {1.0}
    health, reason = bench.health
    assert (health, word in reason) == (Health.UNHEALTHY, True)
    assert not has_figures(bench)
    assert bench.metrics()["gpushare_gpu_healthy"] == 0
    bench.driver.health_now, bench.driver.lists = WELL, True
    await bench.rounds()
    assert bench.health == (Health.HEALTHY, "")
    assert has_figures(bench)


async def test_a_driver_call_that_hangs_is_said_and_in_the_end_a_reason_to_restart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.rounds()
    monkeypatch.setattr(sampling, "HUNG_SECONDS", 0.02)
    bench.driver.answers.clear()
    changed = bench.agent.state.subscribe()
    stuck = asyncio.create_task(bench.agent.sampler.step())
    async with asyncio.timeout(60):
        while not bench.agent.state.problem:
            changed.clear()
            await changed.wait()
    assert bench.condition("DevicesReady") == (ConditionStatus.FALSE, "the driver does not answer")
    assert bench.health == (Health.UNHEALTHY, "the driver does not answer")
    assert not has_figures(bench)
    bench.agent.sampler.beat_at = bench.clock.now
    bench.clock.now += HUNG_SECONDS + BACKOFF.longest_seconds + 1
    assert "no round of sampling" in bench.agent.trouble()
    bench.driver.answers.set()
    await stuck
    monkeypatch.undo()
    bench.gate(at=88.0)
    await bench.rounds(8)
    assert bench.health == (Health.HEALTHY, "")
    assert has_figures(bench)


@pytest.mark.parametrize("error", [None, NO_DRIVER])
async def test_devices_in_which_a_call_hung_are_closed_once_and_in_their_own_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: DevicesError | None
) -> None:
    await bench.rounds(2)
    assert (bench.driver.opened, bench.driver.closed_in) == (1, [])
    monkeypatch.setattr(sampling, "HUNG_SECONDS", 0.02)
    bench.driver.answers.clear()
    bench.driver.list_error = error
    stuck = asyncio.create_task(bench.agent.sampler.step())
    changed = bench.agent.state.subscribe()
    async with asyncio.timeout(60):
        while not bench.agent.state.problem:
            changed.clear()
            await changed.wait()
    assert bench.driver.closed_in == [], "a call is still under way"
    bench.driver.answers.set()
    await stuck
    monkeypatch.undo()
    bench.driver.list_error = None
    await bench.rounds(3)
    assert bench.agent.state.problem == ""
    [closed_in] = bench.driver.closed_in
    assert (bench.driver.opened, closed_in.startswith("devices")) == (2, True)


async def test_a_run_that_something_it_awaited_cancels_is_no_end_of_the_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part is started again; before, its devices' thread was shut down as at the agent's end, for good."""
    await bench.rounds()
    sampler = bench.agent.sampler

    def cancelled(_: float) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(sampler, "_on_round", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await sampler.run()
    monkeypatch.undo()
    await bench.rounds()
    assert has_figures(bench)


async def test_a_hung_daemon_takes_its_gpu_out(bench: Bench) -> None:
    await bench.rounds()
    bench.gate(GateState.DOWN, "no answer for 12 s: nvidia-cuda-mps-control did not answer within 15 s", 50.0)
    await bench.rounds()
    health, reason = bench.health
    assert (health, "no answer for 12 s" in reason) == (Health.UNHEALTHY, True)
    assert bench.metrics()['gpushare_mps_state state="Down"'] == 1
    assert "gpushare_pod_progress_ratio" not in bench.metrics()
    bench.gate(GateState.ACTIVE, at=99.0)
    await bench.rounds(8)
    assert bench.health == (Health.HEALTHY, "")
    assert has_figures(bench)


async def test_a_gate_that_cannot_write_is_down_and_back_when_it_can(bench: Bench) -> None:
    """A full disk keeps the host's old file; the same word for too long is silence."""
    await bench.rounds()
    for _ in range(12):
        bench.clock.now += 1
        await bench.agent.sampler.step()
    assert bench.health == (Health.UNHEALTHY, "the MPS host does not report")
    bench.gate(at=77.0)
    await bench.rounds(8)
    assert bench.health == (Health.HEALTHY, "")
    assert has_figures(bench)


async def test_what_a_dead_host_left_behind_is_not_believed(bench: Bench) -> None:
    bench.gate(at=time.time() - 3600)
    await bench.rounds(1)
    assert bench.health == (Health.UNHEALTHY, "the MPS host does not report")
    bench.gate(at=time.time())
    await bench.rounds()
    assert bench.health == (Health.HEALTHY, "")


async def test_a_wall_clock_that_jumps_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.rounds(20)  # until its pod's profile, and so its promise, is known
    before = bench.metrics()
    for now in (1.0, 4e9, 1e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        bench.gate(at=now)
        await bench.rounds()
        assert bench.health == (Health.HEALTHY, "")
        assert bench.metrics() == before
