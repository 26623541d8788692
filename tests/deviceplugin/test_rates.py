"""Rates on a node: from a pod's counter over HTTP to throttle, GpuNode and metrics (docs/adr/0261)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from tests.deviceplugin.fakes import GPU_A, Clock, make_pod
from tests.deviceplugin.test_loop import Node
from tests.deviceplugin.test_slo import tell_queued
from tests.deviceplugin.test_slo_sources import Site, site

from gpushare.core.api import ConditionStatus, JobClass, names
from gpushare.core.control import CounterReading, Question, RateSample, SloReading, WatchSettings
from gpushare.core.progress import Prior
from gpushare_deviceplugin.figures import node_figures
from gpushare_deviceplugin.loop import Loop
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import Terms
from gpushare_deviceplugin.slo import READ_SECONDS, SloReader
from gpushare_deviceplugin.slo_sources import SloSources
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import build_status, urgent_part

__all__ = ["site"]
ALONE_RATE = 40.0  # steps a second of "victim" alone


class Counting(Node):
    """The loop's node, whose tenant "victim" counts its steps on a page; `makes` is what it truly makes.

    By the counters it makes 0.95 beside "calm", whatever its steps say. Its promise is 0.75.
    """

    def __init__(self, state: NodeState, clock: Clock, root: Path, site: Site) -> None:
        self.site = site
        self.steps = 1234.0
        self.makes: Callable[[], float] = lambda: 0.95
        self.sources = SloSources(timeout_seconds=30.0)
        super().__init__(state, clock, root)
        self.slos = SloReader(state, self.terms, self.sources.fetch, tell=self.tell, clock=clock)
        self.loop = Loop(
            state,
            self.signatures,
            self.terms,
            root,
            tell=self.tell,
            clock=clock,
            settings=WatchSettings(),
            boot=clock,
            slos=self.slos,
        )
        target = {names.SLO: f"rate>{0.75 * ALONE_RATE:g}", names.SLO_FROM: f"port={site.port},series=steps"}
        uid = self.add("victim", 50, "2026-11-22T10:00:00Z", **target)
        state.put_pod(replace(state.pods[uid], ip="127.0.0.1"))
        self.profiles["shop/victim"] = replace(self.profiles["shop/victim"], max_slowdown=1.2)
        self.add("calm", 25, "2026-11-22T10:30:00Z")

    def expected(self, uuid: str, question: Question) -> list[Prior]:
        """The model knows little, so that the counters decide."""
        return [replace(prior, error=0.3) for prior in super().expected(uuid, question)]

    async def tell(self, notice: object) -> None:
        self.told.append(notice)  # type: ignore[arg-type]

    async def seconds(self, number: int) -> None:
        for second in range(number):
            self.steps += ALONE_RATE * self.makes()
            self.site.text = (
                f"# TYPE steps_total counter\nsteps_total {float(int(self.steps))}\nsteps_created 17\n"
            )
            self.window()
            if second % int(READ_SECONDS) == 0:
                await self.slos.step()
                await tell_queued(self.slos)

    def status(self) -> object:
        return build_status(self.state, {GPU_A: self.gate()}, {}, keeping=self.loop.keeping)

    def slo(self):
        [tenant] = [each for each in self.status().gpus[0].tenants if each.pod == "victim"]
        return tenant.slo


async def failing(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


@pytest.fixture
def counting(state: NodeState, clock: Clock, tmp_path: Path, site: Site) -> Counting:
    return Counting(state, clock, tmp_path, site)


async def test_steps_that_are_missing_have_the_neighbour_throttled_though_the_counters_show_none(
    counting: Counting,
) -> None:
    made = counting
    async with made.sources:
        await made.seconds(30)
        assert made.asked()["calm"] == 1.0
        assert made.slo().met is ConditionStatus.TRUE
        assert made.slo().measured_per_second == pytest.approx(0.95 * ALONE_RATE, rel=0.03)
        made.makes = lambda: 0.95 - 0.3 * made.asked()["calm"]
        await made.seconds(20)
        assert made.asked()["calm"] < 1.0
        await made.seconds(60)
    assert made.makes() >= 0.74
    assert made.slo().met is not ConditionStatus.FALSE
    assert made.loop.counts[GPU_A].broken >= 1
    assert made.loop.counts[GPU_A].retractions == 0
    figures = node_figures(
        "n1",
        made.state,
        {GPU_A: made.gate()},
        {},
        {},
        ended={},
        loop=made.loop,
        keeping=made.loop.keeping,
        readings={},
        slo_failures=made.slos.failures,
        is_registered=True,
    )
    [of_pod] = [each for each in figures.tenants if each.pod == "victim"]
    assert (of_pod.slo_target_per_second, of_pod.slo_target_seconds) == (0.75 * ALONE_RATE, None)
    assert of_pod.slo_measured_per_second == made.slo().measured_per_second


async def test_without_the_counter_the_same_tenant_is_left_as_the_counters_show_it(counting: Counting) -> None:
    made = counting
    made.makes = lambda: 0.95 - 0.3 * made.asked()["calm"]
    made.state.put_pod(replace(made.state.pods["uid-victim"], slo=None))
    async with made.sources:
        await made.seconds(60)
    assert made.asked()["calm"] == 1.0
    assert made.slo() is None


async def test_a_report_that_the_counters_leave_impossible_is_told_and_not_used(counting: Counting) -> None:
    made = counting
    made.makes = lambda: 0.2
    async with made.sources:
        await made.seconds(20)
        before = made.status()
        assert made.slo().met is ConditionStatus.FALSE
        await made.seconds(180)
        assert (made.slo().met, made.slo().reason) == (ConditionStatus.UNKNOWN, "Implausible")
        assert "by its target it makes 0.20 of its progress alone" in made.slo().message
        assert urgent_part(made.status()) != urgent_part(before), "written at once"
        await made.seconds(120)
        assert made.asked()["calm"] == 1.0, "it got its time back"
        made.makes = lambda: 5.0  # more than there is: it meets its target by its own word
        await made.seconds(100)
        assert (made.slo().met, made.slo().reason) == (ConditionStatus.TRUE, "Met")


async def test_a_page_that_fails_for_a_moment_makes_nobody_forget_that_neighbours_are_not_the_cause(
    counting: Counting,
) -> None:
    """Before: with each failure of its page, a pod that misses its target alone got its neighbours' time again."""
    made = counting
    made.makes = lambda: 0.55
    async with made.sources:
        asked = []
        for _ in range(24):
            await made.seconds(5)
            asked.append(made.asked()["calm"])
        assert min(asked) < 1.0
        assert asked[-1] == 1.0, "given up: it makes no more beside a neighbour that is stopped"
        made.site.handler = failing
        await made.seconds(40)
        assert made.slo().reason == "Unreachable"
        made.site.handler = made.site.page
        for _ in range(30):
            await made.seconds(10)
            assert made.asked()["calm"] == 1.0


async def test_windows_over_a_reading_in_place_are_not_used(counting: Counting) -> None:
    made = counting
    async with made.sources:
        await made.seconds(31)
        made.makes = lambda: 0.65
        made.loop.stop(GPU_A, {"uid-calm": made.clock() + 5})
        await made.seconds(10)
        assert not made.loop.is_broken(GPU_A, "uid-victim"), "while neighbours are stopped nothing is heard"
        made.loop.stop(GPU_A, None)
        await made.seconds(4)
        assert not made.loop.is_broken(GPU_A, "uid-victim"), "no window lies after it"
        await made.seconds(15)
        assert made.loop.is_broken(GPU_A, "uid-victim")


async def test_a_gpushare_that_says_latency_leaves_a_rate_without_meaning(state: NodeState, clock: Clock) -> None:
    asked: list[str] = []
    job_class = JobClass.LATENCY

    async def read(pod: ManagedPod, slo: object) -> SloReading:
        asked.append(f"{pod.name} {slo}")
        clock.now += 0.2
        return CounterReading(101.0 * len(asked) + 36)

    async def tell(_: object) -> None:
        """Write no event."""

    pod = make_pod("train", phase="Running", **{names.SLO: "rate>20", names.SLO_FROM: "port=9100,series=steps"})
    state.put_pod(pod)
    reader = SloReader(state, lambda _: Terms(job_class, 1.5), read, tell=tell, clock=clock)
    await reader.step()
    found = reader.status(pod)
    assert found is not None
    assert (found.reason, found.target, found.target_per_second) == ("NotThroughput", "rate>20", 20.0)
    assert (asked, reader.rate(pod)) == ([], None)
    job_class = JobClass.THROUGHPUT
    for _ in range(3):
        clock.now += READ_SECONDS
        await reader.step()
    assert asked[0] == "train rate>20"
    sign = reader.rate(pod)
    assert sign is not None
    assert sign.trail[-1].took_seconds == pytest.approx(0.2)
    window = sign.since(0.0, clock())
    assert window is not None
    assert window.per_second == pytest.approx(101 / (READ_SECONDS + 0.2))
    assert reader.sign(pod.uid) is None, "no latency is known of it"


async def test_a_query_gives_the_rate_itself(state: NodeState, clock: Clock) -> None:
    async def read(_pod: ManagedPod, _slo: object) -> SloReading:
        return RateSample(12.5, clock())

    async def tell(_: object) -> None:
        """Write no event."""

    pod = make_pod(
        "train", phase="Running", **{names.SLO: "rate>20", names.SLO_QUERY: "sum(rate(steps_total[1m]))"}
    )
    state.put_pod(pod)
    reader = SloReader(state, lambda _: Terms(JobClass.THROUGHPUT, 1.5), read, tell=tell, clock=clock)
    for _ in range(2):
        clock.now += READ_SECONDS
        await reader.step()
    found = reader.status(pod)
    assert found is not None
    assert (found.met, found.measured_per_second) == (ConditionStatus.FALSE, 12.5)
