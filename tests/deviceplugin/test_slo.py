"""Latency targets on a node: from a pod's page over HTTP to throttle, events, GpuNode and metrics."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock, make_pod
from tests.deviceplugin.test_loop import Node
from tests.deviceplugin.test_slo_sources import Site, site

from gpushare.core.api import ConditionStatus, JobClass, names
from gpushare.core.control import QuantileSample, SloReading, SloReason, SloTrouble, WatchSettings
from gpushare.core.gpu import GpuSample
from gpushare_deviceplugin.figures import node_figures
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.loop import Loop
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import Terms
from gpushare_deviceplugin.slo import EVENT_SECONDS, READ_SECONDS, SloReader
from gpushare_deviceplugin.slo_sources import SloSources
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import Keeping, build_status, urgent_part

__all__ = ["site"]
TARGET = {names.SLO: "p99<50ms", names.SLO_FROM: "port=8080,series=request_seconds", names.CLASS: "latency"}
DEAD = SloTrouble(SloReason.UNREACHABLE, "port 8080 of the pod cannot be read: refused")
BAD, GOOD = QuantileSample(0.2), QuantileSample(0.01)


class Reads:
    """A reader, and readings that a test names."""

    def __init__(self, state: NodeState, clock: Clock) -> None:
        self.state, self.clock = state, clock
        self.next: SloReading = DEAD
        self.asked: list[str] = []
        self.told: list[Notice] = []
        self.job_class = JobClass.LATENCY
        self.is_certain = True
        self.pod = make_pod("web", phase="Running", **TARGET)
        state.put_pod(self.pod)
        self.reader = SloReader(state, self.terms, self.read, tell=self.tell, clock=clock)

    def terms(self, _: object) -> Terms:
        return Terms(self.job_class, 1.1, is_certain=self.is_certain)

    async def read(self, pod: object, slo: object) -> SloReading:
        self.asked.append(str(slo))
        return self.next

    async def tell(self, notice: Notice) -> None:
        self.told.append(notice)

    async def step(self, *readings: SloReading) -> None:
        for reading in readings:
            self.next = reading
            self.clock.now += READ_SECONDS
            await self.reader.step()
            await tell_queued(self.reader)

    def met(self) -> ConditionStatus | None:
        found = self.reader.status(self.pod)
        return found.met if found is not None else None


@pytest.fixture
def reads(state: NodeState, clock: Clock) -> Reads:
    return Reads(state, clock)


async def tell_nobody(_: Notice) -> None:
    """Write no event."""


async def tell_queued(reader: SloReader) -> None:
    """Let a reader write the events that are in its queue now."""
    telling = asyncio.create_task(reader.tell_all())
    await asyncio.sleep(0)  # one turn suffices: an event that is written at once suspends nobody
    telling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await telling


def reasons(told: Sequence[Notice]) -> list[tuple[str, bool]]:
    return [(notice.reason, notice.is_warning) for notice in told]


async def test_changes_are_told_and_published(reads: Reads) -> None:
    assert reads.met() is ConditionStatus.UNKNOWN
    await reads.step(BAD)
    assert not reads.told
    await reads.step(BAD)
    assert reads.met() is ConditionStatus.FALSE
    assert reasons(reads.told) == [("SloMissed", True)]
    assert "misses its target p99<50ms: p99 is 200ms" in reads.told[0].note
    await reads.step(GOOD, GOOD)
    assert reasons(reads.told[1:]) == [("SloMet", False)]
    await reads.step(DEAD, DEAD, DEAD, DEAD)
    assert reads.met() is ConditionStatus.UNKNOWN
    assert reasons(reads.told[2:]) == [("SloUnknown", True)]
    assert "(Unreachable): port 8080 of the pod cannot be read" in reads.told[2].note
    assert reads.reader.failures == {"Unreachable": 4}
    assert reads.asked[0] == "p99<50ms"


async def test_what_never_could_be_read_is_told_too(reads: Reads) -> None:
    await reads.step(DEAD, DEAD)
    assert reasons(reads.told) == [("SloUnknown", True)]
    found = reads.reader.status(reads.pod)
    assert found is not None
    assert (found.reason, found.target, found.target_seconds) == ("Unreachable", "p99<50ms", 0.05)
    assert found.measured_seconds is None


async def test_events_of_a_kind_come_once_a_minute(reads: Reads) -> None:
    for _ in range(6):
        await reads.step(BAD, BAD, GOOD, GOOD)
    began = reads.clock.now
    kinds = [notice.reason for notice in reads.told]
    assert kinds.count("SloMissed") <= 2 + (6 * 4 * READ_SECONDS) // EVENT_SECONDS
    assert began - 1000.0 == 6 * 4 * READ_SECONDS


async def test_a_gpushare_that_says_throughput_leaves_the_target_without_meaning(reads: Reads) -> None:
    reads.job_class = JobClass.THROUGHPUT
    await reads.step(BAD, BAD)
    assert not reads.asked
    found = reads.reader.status(reads.pod)
    assert found is not None
    assert found.reason == "NotLatency"
    assert reads.reader.sign(reads.pod.uid) is None


async def test_before_its_gpushare_is_read_nothing_is_told_of_a_target(reads: Reads) -> None:
    """At an agent's restart pods got a warning that their GpuShares say class throughput."""
    reads.job_class, reads.is_certain = JobClass.THROUGHPUT, False
    await reads.step(BAD, BAD, BAD)
    assert not reads.asked
    found = reads.reader.status(reads.pod)
    assert found is not None
    assert (found.met, found.reason) == (ConditionStatus.UNKNOWN, "Starting")
    assert found.message == "its GpuShare was not read yet, so its class is unknown"
    assert (reads.told, reads.reader.failures) == ([], {})
    reads.job_class, reads.is_certain = JobClass.LATENCY, True
    await reads.step(GOOD, GOOD)
    assert reasons(reads.told) == [("SloMet", False)]


async def test_only_running_pods_with_a_target_are_read(reads: Reads) -> None:
    reads.state.put_pod(make_pod("plain", phase="Running"))
    reads.state.put_pod(make_pod("early", phase="Pending", **TARGET))
    await reads.step(BAD)
    assert len(reads.asked) == 1
    assert reads.reader.status(make_pod("plain")) is None
    reads.state.put_pod(replace(reads.pod, phase="Succeeded"))
    await reads.step(BAD)
    assert len(reads.asked) == 1


async def test_many_slow_pages_take_turns_so_that_the_others_are_read_in_each_round(
    state: NodeState, clock: Clock
) -> None:
    """A tenant with a hundred pages that hang for 3 s made a round last 40 s instead of 5."""
    state.put_pod(make_pod("web", phase="Running", **TARGET))
    for number in range(40):
        state.put_pod(make_pod(f"slow-{number}", phase="Running", **TARGET))
    hang = True
    rounds: list[list[str]] = []

    async def read(pod: ManagedPod, _: object) -> SloReading:
        rounds[-1].append(pod.name)
        clock.now += 3.0 if hang and pod.name != "web" else 0.01
        return GOOD

    reader = SloReader(state, lambda _: Terms(JobClass.LATENCY, 1.1), read, tell=tell_nobody, clock=clock)
    for _ in range(5):
        rounds.append([])
        await reader.step()
    assert [len(each) for each in rounds] == [41, 17, 17, 17, 17]
    assert all(each[0] == "web" for each in rounds)
    turns = [name for each in rounds[1:4] for name in each[1:]]
    assert len(set(turns)) == 40, "each has its turn"
    hang = False
    for _ in range(4):
        rounds.append([])
        await reader.step()
    assert [len(each) for each in rounds[5:]] == [17, 33, 41, 41], "who answers in time is read each time again"


async def test_one_pods_slow_page_does_not_keep_the_others_waiting_for_ever(reads: Reads) -> None:
    for number in range(20):
        reads.state.put_pod(make_pod(f"web-{number}", phase="Running", **TARGET))
    await reads.step(BAD)
    assert len(reads.asked) == 21


async def test_an_api_server_that_is_away_keeps_no_reading_waiting(reads: Reads) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(notice: Notice) -> None:
        reads.told.append(notice)
        asked.set()
        await answered.wait()

    reads.reader = SloReader(reads.state, reads.terms, reads.read, tell=wait_for_ever, clock=reads.clock)
    running = asyncio.create_task(reads.reader.run())
    reads.next = DEAD
    async with asyncio.timeout(30):
        await asked.wait()
        reads.next = BAD
        for _ in range(2):
            reads.clock.now += EVENT_SECONDS
            await reads.reader.step()
    assert reads.met() is ConditionStatus.FALSE
    assert reasons(reads.told) == [("SloUnknown", True)], "the first event is still under way"
    assert not running.done()
    running.cancel()


async def test_an_event_that_fails_ends_neither_readings_nor_later_events(reads: Reads) -> None:
    async def fail_once(notice: Notice) -> None:
        reads.told.append(notice)
        if len(reads.told) == 1:
            raise RuntimeError("not written")

    reads.reader = SloReader(reads.state, reads.terms, reads.read, tell=fail_once, clock=reads.clock)
    await reads.step(DEAD, BAD, BAD)
    assert reasons(reads.told) == [("SloUnknown", True), ("SloMissed", True)]


async def test_a_pod_whose_reading_fails_unexpectedly_leaves_the_others_theirs(reads: Reads) -> None:
    async def read(pod: ManagedPod, slo: object) -> SloReading:
        if pod.uid == reads.pod.uid:
            raise RuntimeError("a defect")
        await asyncio.sleep(0)
        return GOOD

    other = make_pod("web-2", phase="Running", **TARGET)
    reads.state.put_pod(other)
    reads.reader = SloReader(reads.state, reads.terms, read, tell=reads.tell, clock=reads.clock)
    await reads.step(GOOD, GOOD)
    found = reads.reader.status(other)
    assert found is not None
    assert found.met is ConditionStatus.TRUE
    broken = reads.reader.status(reads.pod)
    assert broken is not None
    assert (broken.met, broken.reason) == (ConditionStatus.UNKNOWN, "BadAnswer")


async def test_the_loop_hears_nothing_of_a_target_that_is_not_read_any_more(reads: Reads) -> None:
    await reads.step(BAD, BAD)
    assert reads.reader.sign(reads.pod.uid) is not None
    reads.clock.now += 120.0
    assert reads.reader.sign(reads.pod.uid) is None


async def test_alternating_reasons_are_neither_urgent_nor_logged_each_time(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = SloTrouble(SloReason.NO_SERIES, "no such series")
    reads.state.set_allocations({reads.pod.uid: {GPU_A: 25}})
    parts = []
    for _ in range(6):
        for reading in (DEAD, other):
            await reads.step(reading)
            status = build_status(
                reads.state, {}, {}, keeping=lambda _uuid, pod, _share: Keeping(slo=reads.reader.status(pod))
            )
            [tenant] = status.gpus[0].tenants
            assert tenant.slo is not None
            assert tenant.slo.reason == reading.reason
            parts.append(urgent_part(status))
    assert len(set(parts)) == 1
    lines = [record for record in caplog.records if "p99<50ms" in record.getMessage()]
    assert len(lines) == 2, "a minute has one of each reason"
    await reads.step(DEAD, other, DEAD)
    lines = [record for record in caplog.records if "p99<50ms" in record.getMessage()]
    assert len(lines) == 4


class Served(Node):
    """The loop's node, whose tenant "victim" serves requests that take longer while "calm" runs.

    Its inferred progress tells nothing of that: "calm" costs it none.
    """

    def __init__(self, state: NodeState, clock: Clock, root: Path, site: Site) -> None:
        self.site = site
        self.counts = [0, 0, 0]
        self.is_overloaded = False
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

    async def tell(self, notice: Notice) -> None:
        self.told.append(notice)

    def serve(self) -> None:
        """A hundred requests a second; the more "calm" runs, the more of them are slow."""
        slow = 50 if self.is_overloaded else round(20 * max(0.0, self.asked()["calm"] - 0.5))
        self.counts = [self.counts[0] + 100 - slow, self.counts[1] + 100, self.counts[2] + 100]
        lines = [
            f'request_seconds_bucket{{le="{bound}"}} {count}'
            for bound, count in zip(("0.05", "1", "+Inf"), self.counts, strict=True)
        ]
        self.site.text = "\n".join(lines) + "\n"

    async def seconds(self, number: int) -> None:
        for second in range(number):
            self.serve()
            self.window()
            if second % int(READ_SECONDS) == 0:
                await self.slos.step()
                await tell_queued(self.slos)


@pytest.fixture
def served(state: NodeState, clock: Clock, tmp_path: Path, site: Site) -> Served:
    made = Served(state, clock, tmp_path, site)
    target = {**TARGET, names.SLO_FROM: f"port={site.port},series=request_seconds"}
    uid = made.add("victim", 50, "2026-11-22T10:00:00Z", **target)
    state.put_pod(replace(state.pods[uid], ip="127.0.0.1"))
    made.add("calm", 25, "2026-11-22T10:30:00Z")
    return made


async def test_windows_are_short_until_a_target_is_given_up(served: Served) -> None:
    served.is_overloaded = True
    async with served.sources:
        await served.seconds(20)
        assert served.loop.is_due(GPU_A, [GpuSample(served.seen, 1.0, 900, 0.9)] * 2)
        await served.seconds(200)
        found = served.slos.status(served.state.pods["uid-victim"])
    assert found is not None
    assert found.met is ConditionStatus.FALSE
    assert served.asked()["calm"] == 1.0, "it got its time back"
    assert not served.loop.is_due(GPU_A, [GpuSample(served.seen, 1.0, 900, 0.9)] * 2)
    assert served.loop.is_broken(GPU_A, "uid-victim") is False
    assert served.loop.counts[GPU_A].broken == 0


async def test_a_missed_target_is_met_again_by_throttling_the_neighbour(served: Served) -> None:
    made, state = served, served.state
    async with made.sources:
        await made.seconds(25)
        assert made.slos.status(state.pods["uid-victim"]).met is ConditionStatus.FALSE
        assert made.asked()["calm"] < 1.0
        assert made.loop.is_broken(GPU_A, "uid-victim") is False, "its promise of progress is kept"
        await made.seconds(40)
    found = made.slos.status(state.pods["uid-victim"])
    assert found.met is ConditionStatus.TRUE
    assert 0.3 < made.asked()["calm"] < 0.7, "no more than needed"
    assert not made.loop.is_broken(GPU_A, "uid-victim")
    assert {"SloMissed", "SloMet"} <= {notice.reason for notice in made.told}

    status = build_status(state, {GPU_A: made.gate()}, {}, keeping=made.loop.keeping)
    [tenant] = [each for each in status.gpus[0].tenants if each.pod == "victim"]
    assert tenant.slo == found
    figures = node_figures(
        "n1",
        state,
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
    assert of_pod.is_slo_met is True
    assert of_pod.slo_target_seconds == 0.05
    assert of_pod.slo_measured_seconds == found.measured_seconds

    async with made.sources:
        made.site.text = ""
        for _ in range(5):
            made.clock.now += READ_SECONDS
            await made.slos.step()
    changed = build_status(state, {GPU_A: made.gate()}, {}, keeping=made.loop.keeping)
    assert urgent_part(changed) != urgent_part(status), "written at once"
    assert made.slos.failures == {"NoSeries": 5}
