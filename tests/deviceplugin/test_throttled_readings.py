"""Reading in place where pods are throttled: no freeze outlasts a probe, and a program is seen as it is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock
from tests.deviceplugin.test_loop import Node
from tests.deviceplugin.test_readings import STEP_SECONDS, Bench, Gpu, known_with_all_threads_only

from gpushare.mps.asks import ThrottleAsk, ThrottleAsks
from gpushare.mps.duty import NOBODY, schedule
from gpushare.mps.layout import GpuDirectory, throttle_reader
from gpushare.mps.status import PodThrottle, ThrottleStatus
from gpushare.mps.throttle import IDLE_READ_SECONDS, READ_EVERY_SECONDS
from gpushare_deviceplugin.readings import PROBE_MARGIN_SECONDS
from gpushare_deviceplugin.state import NodeState

PROBE_SECONDS = 1.0  # Kubernetes' default


class ThrottledGpu(Gpu):
    """A GPU on which the agent's loop asks for `duties`, and the MPS host freezes by its own schedule."""

    def __init__(self, state: NodeState, clock: Clock, root: Path, duties: Mapping[str, float]) -> None:
        super().__init__(state, clock)
        node = Node(state, clock, root)
        self.is_stuck = False
        self._loop, self._asks = node.loop, node.reader
        self._live: Mapping[str, ThrottleAsk] = {}
        self._read_again_at = 0.0
        self._schedule = NOBODY
        self._loop.beat()
        watched = self._loop._gpus[GPU_A]
        watched.actions = replace(watched.actions, duties=duties)
        self._loop._write(GPU_A, watched)

    def stop(self, uuid: str, stops: Mapping[str, float] | None) -> None:
        self._loop.stop(uuid, stops)

    def throttled(self, uuid: str) -> ThrottleStatus:
        now = self.clock()
        if now >= self._read_again_at and not (self.is_stuck and self._live):
            self._live = self._asks.read().pods
            self._read_again_at = now + (READ_EVERY_SECONDS if self._live else IDLE_READ_SECONDS)
        self._schedule = schedule(self._schedule, ThrottleAsks(self._live, now), now)
        frozen = self._schedule.frozen
        pods = tuple(
            PodThrottle(uid, ask.duty_ratio, is_stopped=uid in frozen and now < (ask.stopped_until or 0.0))
            for uid, ask in self._live.items()
        )
        return ThrottleStatus(now, pods=pods, started_at=1.0)

    def is_stopped(self, uid: str) -> bool:
        return uid in self._schedule.frozen

    def look(self) -> None:
        super().look()
        gate = self.gates[GPU_A]
        assert gate is not None
        self.gates[GPU_A] = replace(gate, throttle=self.throttled(GPU_A))


def throttled_bench(
    state: NodeState, clock: Clock, root: Path, duties: Mapping[str, float]
) -> tuple[Bench, ThrottledGpu]:
    made = Bench(state, clock)
    made.gpu = gpu = ThrottledGpu(state, clock, root, duties)
    made.readings = made.another(gpu.sleep)
    return made, gpu


@pytest.mark.parametrize("duty", [0.9, 0.7, 0.5, 0.3, 0.1])
@pytest.mark.parametrize("offset_seconds", [0.0, 0.35, 0.7])
async def test_a_throttled_pod_with_a_probe_stands_still_for_less_than_its_time_out(
    state: NodeState, clock: Clock, tmp_path: Path, duty: float, offset_seconds: float
) -> None:
    """A stop that followed on a throttle's freeze lasted up to 1.2 s; 0.9 s of each second restarted a pod."""
    bench, gpu = throttled_bench(state, clock, tmp_path, {"uid-old": duty})
    bench.add("old", probe_seconds=PROBE_SECONDS)
    bench.add("other", probe_seconds=PROBE_SECONDS)
    await gpu.sleep(5.0 + offset_seconds)
    bench.add("new", known=False)
    await bench.run(40.0)
    for uid in ("uid-old", "uid-other"):
        assert gpu.longest[uid] <= PROBE_SECONDS - PROBE_MARGIN_SECONDS + STEP_SECONDS
    assert bench.of("new") is not None, "it is read all the same"
    assert bench.readings.counts[GPU_A].failed == 0


@pytest.mark.parametrize("duty", [0.7, 0.5, 0.3])
async def test_a_throttled_pod_is_read_as_if_it_were_not(
    state: NodeState, clock: Clock, tmp_path: Path, duty: float
) -> None:
    """Its point at 25% fell from 0.852 to 0.721 with its duty, and its promise with it."""
    found = []
    for each in (1.0, duty):
        bench, _ = throttled_bench(state, clock, tmp_path, {"uid-old": each})
        bench.add("old")
        bench.add("other")
        known_with_all_threads_only(bench)
        await bench.run(104.0)
        assert bench.readings.counts[GPU_A].taken > bench.readings.counts[GPU_A].failed
        learnt = bench.of("old")
        assert learnt is not None
        found.append(learnt.cap_curve[25])
    assert found[1] == pytest.approx(found[0], abs=0.01)


async def test_where_the_host_does_not_lift_a_throttle_in_time_nobody_is_stopped(
    state: NodeState, clock: Clock, tmp_path: Path
) -> None:
    bench, gpu = throttled_bench(state, clock, tmp_path, {"uid-old": 0.5})
    bench.add("old", probe_seconds=PROBE_SECONDS)
    bench.add("new", known=False)
    await gpu.sleep(1.0)
    gpu.is_stuck = True
    assert await bench.run(40.0) > 0
    counts = bench.readings.counts[GPU_A]
    assert (counts.failed, counts.stopped_seconds) == (counts.taken, 0.0)
    assert gpu.longest["uid-old"] <= PROBE_SECONDS / 2 + STEP_SECONDS


class UnequalGpu(Gpu):
    """A GPU on which one pod's freeze succeeds later than the others'."""

    def is_stopped(self, uid: str) -> bool:
        since, _ = self._asked.get(uid, (0.0, 0.0))
        return super().is_stopped(uid) and (uid != "uid-other" or self.clock() >= since + 0.35)


async def test_who_is_stopped_first_waits_no_longer_for_who_is_stopped_late(
    state: NodeState, clock: Clock
) -> None:
    """All were stopped anew for the whole time once the last one was."""
    bench = Bench(state, clock)
    bench.gpu = gpu = UnequalGpu(state, clock)
    bench.readings = bench.another(gpu.sleep)
    bench.add("old", probe_seconds=PROBE_SECONDS)
    bench.add("other")
    bench.add("new", known=False)
    await bench.run(30.0)
    assert bench.readings.counts[GPU_A].taken > 0
    assert gpu.longest["uid-old"] <= PROBE_SECONDS - PROBE_MARGIN_SECONDS + STEP_SECONDS


def test_the_loop_throttles_nobody_during_a_reading_and_as_before_after_it(
    state: NodeState, clock: Clock, tmp_path: Path
) -> None:
    node = Node(state, clock, tmp_path)
    node.add_two()
    node.windows(20)
    asks = throttle_reader(GpuDirectory.of(tmp_path, GPU_A))
    before = asks.read().pods
    assert before["uid-bad"].duty_ratio < 1.0
    node.loop.stop(GPU_A, {})
    node.loop.beat()
    assert asks.read().pods == {}
    node.loop.stop(GPU_A, {"uid-bad": clock() + 1.0})
    assert asks.read().pods == {"uid-bad": ThrottleAsk(1.0, clock() + 1.0)}
    node.loop.stop(GPU_A, None)
    assert asks.read().pods == before
