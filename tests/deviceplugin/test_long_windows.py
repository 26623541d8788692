"""GPUs before Hopper: windows of dcgm-exporter that began while neighbours still worked are nobody's own."""

import pytest
from tests.deviceplugin.fakes import GPU_A, WELL, Clock, make_pod
from tests.deviceplugin.test_readings import DRAWS, Bench

from gpushare.core.api import ConditionStatus, names
from gpushare.core.gpu import Counters, GpuHealth, GpuInfo, GpuProcess, GpuSample
from gpushare.devices.dcgm import DcgmReadings
from gpushare.mps.status import ClientStatus, GateState, GateStatus
from gpushare_deviceplugin.measuring import Measurer
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.sampler import LONG_WINDOWS, Sampler
from gpushare_deviceplugin.shares import NodeShares
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import conditions_of

A100 = "NVIDIA A100-SXM4-80GB"


class Exporter:
    """A GPU before Hopper with its exporter, which shows the mean over an interval of DCGM; and the GPU's gate.

    Args:
        delay: how long after DCGM measured the exporter reads it; None if it reads when it is asked.
    """

    def __init__(self, clock: Clock, interval: int, delay: int | None) -> None:
        self.clock, self.interval, self.delay = clock, interval, delay or 0
        self.reach_intervals = 1 if delay is None else 2
        self._measured: list[Counters | None] = [None] * (self.delay + 1)
        self.present = ("old", "other")
        self._readings = DcgmReadings(clock)
        self._page: Counters | None = None
        self._last: Counters | None = None
        self._drawn: list[Counters] = []

    def second(self) -> None:
        """Let a second pass; no two are alike to the last digit."""
        self.clock.now += 1.0
        drawn = [DRAWS[name].as_dict() for name in self.present]
        names_ = {name for each in drawn for name in each}
        noise = 1.0 + self.clock.now % 7 / 1e5
        summed = {name: min(1.0, noise * sum(each.get(name, 0.0) for each in drawn)) for name in names_}
        self._drawn.append(Counters(**summed))
        if len(self._drawn) == self.interval:
            means = {
                name: sum(getattr(each, name) or 0.0 for each in self._drawn) / self.interval for name in names_
            }
            self._last, self._drawn = Counters(**means), []
        self._measured = [*self._measured[1:], self._last]
        self._page = self._measured[0]

    def list(self) -> tuple[GpuInfo, ...]:
        return (GpuInfo(GPU_A, 0, A100, 81_920, 108),)

    def health(self, uuid: str) -> GpuHealth:
        return WELL

    def sample(self, uuid: str) -> GpuSample | None:
        window = None if self._page is None else self._readings.window(self._page, self.reach_intervals)
        if window is None or self._page is None:
            return None
        return GpuSample(self._page, window, 900, 0.9, None, self._readings.reach_seconds)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        return ()

    def left_out(self) -> dict[int, str]:
        return {}

    def driver_version(self) -> str:
        return "535"

    def close(self) -> None: ...

    def read(self, uuid: str) -> GateStatus:
        clients = tuple(ClientStatus(at, f"uid-{name}", 100) for at, name in enumerate(self.present, 1))
        return GateStatus(GPU_A, GateState.ACTIVE, self.clock(), clients=clients)


class Agent:
    """The sampler beside an exporter, with two pods, of which one is looked at."""

    def __init__(self, state: NodeState, clock: Clock, gpu: Exporter) -> None:
        self.gpu, self._signatures = gpu, Signatures(NodeShares())
        self.old, other = (make_pod(name, threads="100", phase="Running") for name in ("old", "other"))
        for pod in (self.old, other):
            state.put_pod(pod)
        state.set_allocations({pod.uid: {GPU_A: 25} for pod in (self.old, other)})
        self._sampler = Sampler(
            state,
            lambda: gpu,  # type: ignore[arg-type, return-value]  # as much of the devices as it asks
            gpu,  # type: ignore[arg-type]  # and of the gates
            Measurer(state, self._signatures),
            clock=clock,
            period_seconds=1.0,
        )

    async def second(self) -> None:
        self.gpu.second()
        await self._sampler.step()

    @property
    def learnt(self) -> Counters | None:
        found = self._signatures.of(self.old, A100)
        return found.counters if found is not None else None

    @property
    def is_blind(self) -> bool:
        return self._sampler.measures[GPU_A].sample is None


@pytest.mark.parametrize("ends_at", [60, 61, 63])
@pytest.mark.parametrize("delay", [None, 0, 2, 4])
async def test_a_window_that_began_beside_a_neighbour_is_not_learnt_as_the_others_own(
    state: NodeState, clock: Clock, ends_at: int, delay: int | None
) -> None:
    agent = Agent(state, clock, Exporter(clock, 5, delay))
    for second in range(180):
        if second == ends_at:
            agent.gpu.present = ("old",)  # the other's program ends
        await agent.second()
        if agent.learnt is not None:
            assert agent.learnt.as_dict() == pytest.approx(DRAWS["old"].as_dict(), rel=1e-3)
    assert agent.learnt is not None, "from windows that lie wholly after the other's end"
    assert state.unreadable == {GPU_A: LONG_WINDOWS}
    [told] = [each for each in conditions_of(state) if each.type == names.READINGS_READY]
    assert (told.status, told.reason) == (ConditionStatus.FALSE, "LongWindows")
    assert told.message == f"GPU {GPU_A}: {LONG_WINDOWS}"


@pytest.mark.parametrize(("delay", "least", "most"), [(None, 32, 61), (0, 63, 92), (29, 63, 92)])
async def test_how_long_nothing_is_measured_after_a_change_where_the_interval_is_30_s(
    state: NodeState, clock: Clock, delay: int | None, least: int, most: int
) -> None:
    """An exporter up to 3.3 may be late by its interval, and nobody sees whether it is."""
    agent, blind = Agent(state, clock, Exporter(clock, 30, delay)), []
    for phase in range(0, 30, 3):
        for _ in range(200):
            await agent.second()
        assert not agent.is_blind
        while clock.now % 30 != phase:
            await agent.second()
        agent.gpu.present = ("old",) if len(agent.gpu.present) == 2 else ("old", "other")
        blind.append(0)
        await agent.second()
        while agent.is_blind:
            blind[-1] += 1
            await agent.second()
    assert (min(blind) >= least, max(blind) <= most) == (True, True), blind


def test_nothing_is_told_of_readings_where_they_are_possible(state: NodeState) -> None:
    state.set_unreadable(GPU_A, "")
    assert names.READINGS_READY not in {each.type for each in conditions_of(state)}


@pytest.fixture
def bench(state: NodeState, clock: Clock) -> Bench:
    made = Bench(state, clock)
    made.add("old")
    made.add("new", known=False)
    return made


async def test_a_reading_whose_window_began_before_the_neighbours_stopped_tells_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = bench.gpu.sample_now

    async def sample_now(uuid: str) -> GpuSample:
        seen = await exact(uuid)
        return GpuSample(seen.counters, seen.window_seconds, 900, 0.9, None, 4.0)

    monkeypatch.setattr(bench.gpu, "sample_now", sample_now)
    assert await bench.run(30.0) > 0
    counts = bench.readings.counts[GPU_A]
    assert counts.failed == counts.taken
    assert bench.of("new") is None


@pytest.mark.parametrize("why", [LONG_WINDOWS, None])
async def test_nobody_is_stopped_for_counters_whose_windows_are_too_long_or_unknown(
    bench: Bench, why: str | None
) -> None:
    bench.state.unreadable = {} if why is None else {GPU_A: why}
    assert await bench.run(30.0) == 0
    assert bench.gpu.stopped_seconds == {}
    bench.state.set_unreadable(GPU_A, "")
    assert await bench.run(10.0) > 0


def windows(
    readings: DcgmReadings, clock: Clock, pages: list[float], seconds: float = 1.0, intervals: int = 2
) -> list[float | None]:
    """Return each page's reach where it shows a new reading, one page after the other."""
    found: list[float | None] = []
    for page in pages:
        clock.now += seconds
        is_new = readings.window(Counters(sm_util=page), intervals) is not None
        found.append(readings.reach_seconds if is_new else None)
    return found


def test_a_new_reading_may_have_begun_up_to_two_of_the_exporters_intervals_ago(clock: Clock) -> None:
    """The interval lies between the looks that saw the last two changes, one look more at most."""
    readings = DcgmReadings(clock)
    assert windows(readings, clock, [0.3, 0.4, 0.5, 0.6]) == [None, 70.0, 70.0, 4.0]
    assert windows(readings, clock, [0.6] * 9 + [0.7] + [0.7] * 9 + [0.8])[-1] == 2 * 11.0
    assert windows(readings, clock, [0.7], seconds=600.0) == [70.0], "it was away"


def test_the_first_reading_of_a_gpu_that_was_idle_may_have_begun_as_long_ago_as_any(clock: Clock) -> None:
    """Idle ones repeat, and each of them counts as new: that they follow each other tells no interval."""
    readings = DcgmReadings(clock)
    windows(readings, clock, [0.0] * 60)
    assert windows(readings, clock, [0.5]) == [70.0]


def test_where_the_exporter_reads_when_it_is_asked_a_new_reading_began_one_interval_ago(clock: Clock) -> None:
    readings = DcgmReadings(clock)
    ratios = [page / 100 for page in range(1, 9) for _ in range(30)]
    reaches = [reach for reach in windows(readings, clock, ratios, intervals=1) if reach is not None]
    assert reaches[-1] == 31.0
    idle = windows(readings, clock, [0.0] * 60, intervals=1)
    assert idle[0] == 31.0
    assert idle[-1] == 70.0, "as old as it can get"


def test_a_page_with_half_of_a_readings_figures_shortens_no_reach(clock: Clock) -> None:
    """DCGM may be writing them just then, so the page changes twice."""
    readings = DcgmReadings(clock)
    ratios = [page / 100 for page in range(1, 9) for _ in range(30)]
    windows(readings, clock, ratios, intervals=1)
    assert windows(readings, clock, [0.5, 0.6], intervals=1) == [31.0, 31.0]
