"""A tenant of the twin whose pod is frozen makes no progress, and its neighbours run as without it."""

from pathlib import Path

import pytest

from gpushare.core.gpu import Counters
from gpushare.mps.freezer import SimulatedFreezer
from gpushare.mps.layout import GpuDirectory, write_atomically
from gpushare.twin.devices import SimulatedDevices
from gpushare.twin.gpus import parse_simulated
from gpushare.twin.mps.state import TwinState, state_path
from gpushare.twin.mps.stopped import SEARCH_SECONDS, StoppedTenants

GPU = parse_simulated("H200:1", "n")[0]


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_process_is_stopped_while_its_pods_cgroup_is_frozen() -> None:
    freezer, clock = SimulatedFreezer(), Clock()
    pods = {11: "a", 12: "a", 13: "b"}
    stopped = StoppedTenants(freezer, pods.get, clock)
    assert not stopped.is_stopped(11), "its pod has no cgroup yet"
    for uid in "ab":
        freezer.add(uid)
    clock.now += SEARCH_SECONDS
    cgroup = freezer.find("a")
    assert cgroup is not None
    freezer.freeze(cgroup)
    assert [stopped.is_stopped(pid) for pid in (11, 12, 13, 99)] == [True, True, False, False]
    freezer.thaw(cgroup)
    assert not stopped.is_stopped(11)
    freezer.freeze(cgroup)
    freezer.remove("a")
    assert not stopped.is_stopped(11)


def test_a_cgroup_that_is_missing_is_not_searched_for_at_every_look() -> None:
    asked: list[int] = []
    clock = Clock()

    def pod_of(pid: int) -> str | None:
        asked.append(pid)
        return None

    stopped = StoppedTenants(SimulatedFreezer(), pod_of, clock)
    for _ in range(20):
        assert not stopped.is_stopped(7)
    clock.now += SEARCH_SECONDS
    assert not stopped.is_stopped(7)
    assert asked == [7, 7]


def write(directory: Path, at: float, counters: Counters, counted: dict[str, float], daemon: int = 1) -> None:
    place = GpuDirectory.of(directory, GPU.uuid)
    place.path.mkdir(exist_ok=True)
    state = TwinState(
        GPU.uuid, GPU.model, GPU.memory_mib, GPU.sm_count, at, daemon, 2, "ACTIVE", counters, 9, (), counted, at
    )
    write_atomically(state_path(place), state.to_json())


def test_the_devices_counters_are_a_mean_over_the_window(tmp_path: Path) -> None:
    clock = Clock()
    devices = SimulatedDevices((GPU,), tmp_path, clock)

    def sm_util() -> float:
        sample = devices.sample(GPU.uuid)
        assert sample is not None
        assert sample.counters.sm_util is not None
        return sample.counters.sm_util

    write(tmp_path, clock.now, Counters(sm_util=0.8), {"sm_util": 40.0})
    assert devices.sample(GPU.uuid) is None
    clock.now += 0.5
    assert sm_util() == pytest.approx(0.8), "nothing was written since: its last counters hold"
    # It ran for another quarter of a second, then half of the GPU's tenants were frozen.
    write(tmp_path, clock.now + 0.25, Counters(sm_util=0.2), {"sm_util": 40.0 + 0.75 * 0.8})
    clock.now += 1.0
    assert sm_util() == pytest.approx(0.25 * 0.8 + 0.75 * 0.2)
    # Another daemon counts from zero: its present counters are all that is known.
    write(tmp_path, clock.now, Counters(sm_util=0.6), {"sm_util": 0.0}, daemon=3)
    clock.now += 1.0
    assert sm_util() == pytest.approx(0.6)
