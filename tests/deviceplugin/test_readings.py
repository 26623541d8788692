"""Reading a workload in place: whom it stops, for how long, and what comes of it. Time is virtual."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock, make_pod

from gpushare.core.api import JobClass, WorkloadSignature
from gpushare.core.control import SoloSignature
from gpushare.core.control.node_signatures import DOUBT_READINGS, LIGHT_READINGS
from gpushare.core.control.reading_rules import (
    FIRST_SECONDS,
    MINUTE_SECONDS,
    MOST_STOPPED_SECONDS,
    PATIENT_BROKEN_SECONDS,
    PATIENT_READINGS,
    QUIET_SECONDS,
)
from gpushare.core.gpu import Counters, GpuSample
from gpushare.core.progress import at_full_threads, progress_alone, shape_misfit
from gpushare.mps.duty import MAX_STOP_SECONDS
from gpushare.mps.status import (
    ClientStatus,
    GateState,
    GateStatus,
    PodThrottle,
    RefusedThrottle,
    ThrottleRefusal,
    ThrottleStatus,
)
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.pods import ManagedPod, reduce_pod
from gpushare_deviceplugin.readings import CALM_LOOK_SECONDS, LOOK_SECONDS, PROBE_MARGIN_SECONDS, Readings
from gpushare_deviceplugin.shares import NodeShares, SharedProfile, Terms
from gpushare_deviceplugin.state import NodeState

H200 = "NVIDIA H200"
STEP_SECONDS = 0.01
HOST_SECONDS = 0.15  # from an ask to the freeze
QUEUE_SECONDS = 0.35  # for which a stopped tenant's work runs on
NEVER = 1e9
DRAWS = {
    "new": Counters(sm_util=0.24, fp32_util=0.2, dram_bw_util=0.05, graphics_util=0.95),
    "old": Counters(sm_util=0.45, fp32_util=0.1, dram_bw_util=0.5, graphics_util=0.9),
    "other": Counters(sm_util=0.2, fp32_util=0.15, dram_bw_util=0.1, graphics_util=0.5),
    "next": Counters(sm_util=0.3, fp32_util=0.05, dram_bw_util=0.3, graphics_util=0.7),
}


class Gpu:
    """One GPU whose tenants draw what they draw; the sampler, the loop and the MPS host at once."""

    def __init__(self, state: NodeState, clock: Clock) -> None:
        self.state, self.clock = state, clock
        self.gates: dict[str, GateStatus | None] = {}
        self.problem = ""
        self.refused: tuple[RefusedThrottle, ...] = ()
        self.is_slow = False
        self.idle: set[str] = set()
        self.gone: set[str] = set()
        self.broken: set[str] = set()
        self.is_held = False
        self._asked: dict[str, tuple[float, float]] = {}  # when, until
        self.stopped_seconds: dict[str, list[float]] = {}
        self._sum: dict[str, float] = {}
        self._read_at = clock.now
        self.longest: dict[str, float] = {}
        self._run: dict[str, float] = {}
        self.throttle_started_at = clock.now
        self.throttle_ends_at, self.throttle_returns_at = NEVER, NEVER
        self.word = ThrottleStatus()

    def hold(self, uuid: str) -> None:
        assert (uuid, self.is_held) == (GPU_A, False)
        self.is_held = True

    def release(self, uuid: str) -> None:
        self.is_held = False

    def stop(self, uuid: str, stops: Mapping[str, float] | None) -> None:
        now, stops = self.clock(), stops or {}
        self._asked = {uid: (self._asked.get(uid, (now, 0.0))[0], until) for uid, until in stops.items()}

    def is_broken(self, uuid: str, pod_uid: str) -> bool | None:
        assert uuid == GPU_A
        return pod_uid in self.broken

    def is_stopped(self, uid: str) -> bool:
        since, until = self._asked.get(uid, (0.0, 0.0))
        since = max(since, self.throttle_started_at)
        return not self.is_slow and self.has_throttle() and since + HOST_SECONDS <= self.clock() < until

    def has_throttle(self) -> bool:
        """Whether the throttle's process runs; the next one serves the asks that it finds."""
        if self.clock() >= self.throttle_returns_at:
            self.throttle_started_at = self.throttle_returns_at
            self.throttle_ends_at, self.throttle_returns_at = NEVER, NEVER
        return self.clock() < self.throttle_ends_at

    def throttled(self, uuid: str) -> ThrottleStatus:
        """The throttle's last word, which stays when its process ends."""
        if self.has_throttle():
            pods = tuple(PodThrottle(uid, 1.0, is_stopped=True) for uid in self._asked if self.is_stopped(uid))
            problem, started_at = self.problem, self.throttle_started_at
            self.word = ThrottleStatus(self.clock(), problem, pods, self.refused, started_at=started_at)
        return self.word

    async def sample_now(self, uuid: str) -> GpuSample:
        assert self.is_held
        seconds = self.clock() - self._read_at
        counters = Counters(**{name: self._sum.get(name, 0.0) / seconds for name in DRAWS["new"].as_dict()})
        self._sum, self._read_at = {}, self.clock()
        return GpuSample(counters, seconds, 900, 0.9)

    async def sleep(self, seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until:
            step = min(STEP_SECONDS, until - self.clock())
            self.clock.now += step
            self.throttled(GPU_A)
            for pod in self.present():
                if self.is_stopped(pod.uid):
                    self._run[pod.uid] = self._run.get(pod.uid, 0.0) + step
                    self.stopped_seconds.setdefault(pod.uid, []).append(self.clock())
                else:
                    self._run[pod.uid] = 0.0
                self.longest[pod.uid] = max(self.longest.get(pod.uid, 0.0), self._run[pod.uid])
                if self._run[pod.uid] <= QUEUE_SECONDS and pod.name not in self.idle:
                    for name, value in DRAWS[pod.name].as_dict().items():
                        self._sum[name] = self._sum.get(name, 0.0) + value * step

    def present(self) -> list[ManagedPod]:
        return [pod for pod in self.state.pods.values() if pod.name not in self.gone]

    def look(self) -> None:
        clients = tuple(ClientStatus(at, pod.uid, 25) for at, pod in enumerate(self.present()))
        throttle = ThrottleStatus(self.clock(), self.problem, refused=self.refused)
        self.gates[GPU_A] = GateStatus(GPU_A, GateState.ACTIVE, self.clock(), clients=clients, throttle=throttle)


class Bench:
    def __init__(self, state: NodeState, clock: Clock) -> None:
        self.state, self.clock, self.gpu = state, clock, Gpu(state, clock)
        state.set_unreadable(GPU_A, "")
        self.profiles = NodeShares()
        self.signatures = Signatures(self.profiles)
        self.classes: dict[str, Terms] = {}
        self.is_profiled = True
        self.readings = self.another(self.gpu.sleep)

    def another(self, rest: Callable[[float], Awaitable[None]]) -> Readings:
        return Readings(
            self.state,
            self.signatures,
            lambda pod: self.classes.get(pod.name, Terms(JobClass.THROUGHPUT, 1.5)),
            self.gpu,
            self.gpu,
            throttled=self.gpu.throttled,
            may_profile=lambda _: self.is_profiled,
            clock=self.clock,
            boot=self.clock,
            sleep=self.gpu.sleep,
            rest=rest,
        )

    def add(self, name: str, *, known: bool = True, **fields: object) -> ManagedPod:
        pod = replace(make_pod(name, threads="25", phase="Running"), **fields)  # type: ignore[arg-type]  # by name
        if known:
            signature = SoloSignature(DRAWS[name], {25: 0.5})
            self.profiles[f"shop/{name}"] = SharedProfile(frozenset({pod.uid}), H200, signature)
        self.state.put_pod(pod)
        self.state.set_allocations({**(self.state.allocations or {}), pod.uid: {GPU_A: 25}})
        return pod

    async def run(self, seconds: float) -> int:
        """Do as `Readings.run` does, for so long; how many readings there were."""
        until, count = self.clock() + seconds, 0
        while self.clock() < until:
            self.gpu.look()
            plan = self.readings.plan(GPU_A)
            if plan is not None:
                await self.readings.read(GPU_A, plan)
                count += 1
            await self.gpu.sleep(0.5)
        return count

    def of(self, name: str) -> SoloSignature | None:
        return self.signatures.of(self.state.pods[f"uid-{name}"], H200)


@pytest.fixture
def bench(state: NodeState, clock: Clock) -> Bench:
    made = Bench(state, clock)
    made.add("old")
    made.add("other")
    return made


async def test_an_unknown_workload_is_profiled_within_30_s_for_a_tenth_of_its_neighbours_minute(
    bench: Bench,
) -> None:
    bench.add("new", known=False)
    await bench.run(30.0)
    found = bench.of("new")
    assert found is not None
    whole, progress = at_full_threads(DRAWS["new"], 0.25)
    assert found.counters.as_dict() == pytest.approx(whole.as_dict(), rel=0.02), "its own, without its neighbours'"
    assert found.cap_curve == {25: pytest.approx(progress, rel=0.02)}
    published = bench.signatures.news(bench.state.pods["uid-new"], H200)
    assert published is not None
    assert (published.thread_percentage, published.is_usable()) == (25, True)
    assert await bench.run(30.0) == 0, "it is known now"
    for uid in ("uid-old", "uid-other"):
        assert len(bench.gpu.stopped_seconds[uid]) * STEP_SECONDS <= 0.1 * MINUTE_SECONDS
        assert bench.gpu.longest[uid] <= MAX_STOP_SECONDS
    assert "uid-new" not in bench.gpu.stopped_seconds


def known_with_all_threads_only(bench: Bench) -> WorkloadSignature:
    """Let "old" be known, but nothing of it near the cap under which it runs."""
    drawn = DRAWS["old"].as_dict()
    whole = WorkloadSignature(H200, {name: value / 0.9 for name, value in drawn.items()}, window_seconds=60.0)
    known = SharedProfile(frozenset({"uid-old"}), H200, SoloSignature(whole.as_counters()), whole)
    bench.profiles["shop/old"] = known
    return whole


async def test_a_known_workload_is_read_only_when_the_loop_has_had_its_windows(bench: Bench) -> None:
    """With a reading in the midst a promise was kept again after 22.7 s in place of 3.1."""
    known_with_all_threads_only(bench)
    assert await bench.run(QUIET_SECONDS - 0.6) == 0, "somebody has just come"
    assert await bench.run(3.0) == 1
    bench.gpu.gone.add("other")
    await bench.run(1.0)
    bench.gpu.gone.clear()
    bench.gpu.broken.add("uid-other")
    assert await bench.run(PATIENT_BROKEN_SECONDS - 0.6) == 0, "its promise is broken: the windows are the loop's"
    assert await bench.run(3.0) == 1, "and stays so: perhaps the promise is wrong"


async def test_readings_of_known_workloads_leave_the_loop_its_windows_after_a_new_profile(bench: Bench) -> None:
    """Before, one followed another every 3 s, and the loop saw no window for 25 s after a profile."""
    known_with_all_threads_only(bench)
    bench.add("new", known=False)
    while bench.of("new") is None:
        await bench.run(0.5)
    assert await bench.run(QUIET_SECONDS - 1.0) == 0
    assert await bench.run(3.0) == 1
    assert await bench.run(QUIET_SECONDS - 2.5) == 0
    assert await bench.run(3.0) == 1


async def test_an_unknown_one_is_read_though_a_promise_is_broken(bench: Bench) -> None:
    bench.add("new", known=False)
    bench.gpu.broken.add("uid-other")
    assert await bench.run(FIRST_SECONDS + 1.0) == 1


async def test_a_known_workload_is_read_under_a_cap_near_which_nothing_was_seen_of_it(bench: Bench) -> None:
    whole = known_with_all_threads_only(bench)
    bench.add("new", known=False)
    bench.gpu.look()
    assert bench.readings.plan(GPU_A) is None, "not in a process's first moments"
    await bench.gpu.sleep(3.0)
    plan = bench.readings.plan(GPU_A)
    assert plan is not None
    assert plan.pod.name == "new", "a workload of which nothing is known comes first"
    await bench.run(40.0)
    found = bench.of("old")
    assert found is not None
    assert found.counters == whole.as_counters()
    assert found.cap_curve == {25: pytest.approx(0.9, abs=0.08)}
    assert found.cap_curve[25] > 0.2 + progress_alone(found.counters, {}, 0.25), (
        "what the law for its counters says"
    )
    assert await bench.run(60.0) == 0, "it is known there now"
    assert len(bench.gpu.stopped_seconds["uid-other"]) * STEP_SECONDS <= 0.1 * MINUTE_SECONDS
    news = bench.signatures.news(bench.state.pods["uid-old"], H200)
    assert news is not None
    assert (news.thread_percentage, news.is_usable()) == (25, True), "for its GpuShare"


async def test_readings_of_several_unknown_workloads_share_the_tenth_of_each_minute(bench: Bench) -> None:
    bench.profiles.clear()
    bench.gpu.idle = {"old", "other"}  # they never show anything, and are looked at again and again
    bench.add("new", known=False)
    began = bench.clock()
    await bench.run(300.0)
    assert bench.of("new") is not None
    for stopped in bench.gpu.stopped_seconds.values():
        for start in range(int(began), int(began) + 240, 5):
            in_minute = [at for at in stopped if start <= at < start + MINUTE_SECONDS]
            assert len(in_minute) * STEP_SECONDS <= MOST_STOPPED_SECONDS + STEP_SECONDS
    counts = bench.readings.counts[GPU_A]
    # Of three pods two are stopped at a time, so all may be for half as long again as each.
    assert counts.stopped_seconds <= 1.5 * (300 / MINUTE_SECONDS * MOST_STOPPED_SECONDS + MAX_STOP_SECONDS)


async def test_a_newcomer_does_not_wait_for_a_minute_that_others_have_used_up(bench: Bench) -> None:
    """On an H200 two pods that came to a GPU after four others had been read there went unread for 35 s."""
    bench.profiles.clear()
    bench.gpu.idle = {"old", "other"}
    await bench.run(30.0)
    spent = bench.readings.counts[GPU_A].stopped_seconds
    assert spent > MOST_STOPPED_SECONDS - MAX_STOP_SECONDS, "by readings of these two"
    bench.gpu.gone = {"old", "other"}
    names = ("new", "next")
    for name in names:
        bench.add(name, known=False)
    began = bench.clock()
    while any(bench.of(name) is None for name in names):
        await bench.run(0.5)
        assert bench.clock() - began < 20.0
    for name in names:
        assert len(bench.gpu.stopped_seconds[f"uid-{name}"]) * STEP_SECONDS <= MOST_STOPPED_SECONDS


@pytest.mark.slow
async def test_one_that_shows_nothing_is_left_in_peace_after_a_while(bench: Bench) -> None:
    bench.add("new", known=False)
    bench.gpu.idle = {"new"}
    await bench.run(150.0)
    assert LIGHT_READINGS <= bench.readings.counts[GPU_A].taken <= PATIENT_READINGS
    assert await bench.run(300.0) <= 3
    light = bench.of("new")
    assert light is not None
    assert light.counters.sm_util == 0.0, "its neighbours' progress can be told meanwhile"
    assert bench.signatures.news(bench.state.pods["uid-new"], H200) is None
    bench.gpu.idle = set()
    await bench.run(600.0)
    found = bench.of("new")
    assert found is not None
    assert found.counters.sm_util == pytest.approx(at_full_threads(DRAWS["new"], 0.25)[0].sm_util, rel=0.02)


async def test_a_pod_with_probes_is_stopped_for_less_than_their_time_out(bench: Bench) -> None:
    bench.add("old", probe_seconds=1.0)
    bench.add("new", known=False)
    await bench.run(30.0)
    assert bench.of("new") is not None
    assert bench.gpu.longest["uid-old"] <= 1.0 - PROBE_MARGIN_SECONDS


@pytest.mark.parametrize(
    "terms", [Terms(JobClass.LATENCY, 1.1), Terms(JobClass.THROUGHPUT, 1.5, is_certain=False)]
)
async def test_beside_latency_pods_and_unknown_classes_nobody_is_stopped(bench: Bench, terms: Terms) -> None:
    bench.classes["other"] = terms
    bench.add("new", known=False)
    assert await bench.run(60.0) == 0
    assert bench.gpu.stopped_seconds == {}


async def test_nobody_is_stopped_where_it_cannot_be_or_would_tell_nothing(bench: Bench) -> None:
    pod = bench.add("new", known=False)
    bench.gpu.problem = "the throttle does not run"
    assert await bench.run(30.0) == 0
    bench.gpu.problem = ""
    bench.gpu.refused = (RefusedThrottle("uid-old", ThrottleRefusal.NO_CGROUP),)
    assert await bench.run(30.0) == 0
    bench.gpu.refused = ()
    bench.is_profiled = False
    assert await bench.run(30.0) == 0
    bench.is_profiled = True
    bench.state.put_pod(replace(pod, own_percentage=10))
    assert await bench.run(30.0) == 0
    bench.state.put_pod(pod)
    bench.state.allocations = {uid: {GPU_A: 25} for uid in ("uid-new", "uid-old")}
    assert await bench.run(30.0) == 0, "a client of a pod that is not known here"
    bench.state.set_allocations({uid: {GPU_A: 25} for uid in ("uid-new", "uid-old", "uid-other")})
    assert await bench.run(30.0) > 0


async def test_a_host_that_does_not_stop_them_in_time_gives_nothing(bench: Bench) -> None:
    bench.add("new", known=False)
    bench.gpu.is_slow = True
    assert await bench.run(60.0) > 0
    counts = bench.readings.counts[GPU_A]
    assert counts.failed == counts.taken > 0
    assert bench.of("new") is None
    assert not bench.gpu.is_held


async def test_a_neighbour_that_comes_or_goes_meanwhile_spoils_the_reading(bench: Bench) -> None:
    bench.add("new", known=False)
    await bench.run(2.0)
    for _ in range(6):
        bench.gpu.gone = set()
        bench.gpu.look()
        plan = bench.readings.plan(GPU_A)
        while plan is None:
            await bench.gpu.sleep(1.0)
            plan = bench.readings.plan(GPU_A)
        bench.gpu.gone = {"other"}
        bench.gpu.look()
        await bench.readings.read(GPU_A, plan)
    assert bench.readings.counts[GPU_A].failed == bench.readings.counts[GPU_A].taken == 6
    assert bench.of("new") is None


@pytest.mark.parametrize("returns_after", [0.05, 0.5, 1.0, NEVER])
@pytest.mark.parametrize("ends_after", [0.25, 0.7, 1.1])
async def test_a_reading_in_whose_midst_the_throttle_ended_tells_nothing(
    bench: Bench, ends_after: float, returns_after: float
) -> None:
    bench.add("new", known=False)
    await bench.run(2.0)
    for _ in range(4):
        bench.gpu.look()
        while (plan := bench.readings.plan(GPU_A)) is None:
            assert bench.of("new") is None
            await bench.gpu.sleep(1.0)
            bench.gpu.look()
        bench.gpu.throttle_ends_at = bench.clock() + ends_after
        bench.gpu.throttle_returns_at = bench.gpu.throttle_ends_at + returns_after
        await bench.readings.read(GPU_A, plan)
        await bench.gpu.sleep(3.0)
        bench.gpu.throttle_returns_at = min(bench.gpu.throttle_returns_at, bench.clock())
    assert bench.readings.counts[GPU_A].failed == bench.readings.counts[GPU_A].taken == 4
    assert bench.of("new") is None
    await bench.run(2 * MINUTE_SECONDS)
    assert bench.of("new") is not None, "the next throttle is as good"


async def test_it_looks_less_often_while_no_unknown_workload_is_to_be_read(bench: Bench) -> None:
    rests: list[float] = []
    is_seen = asyncio.Event()

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 2:
            bench.add("new", known=False)
        elif len(rests) == 4:
            is_seen.set()
            await asyncio.Event().wait()
        await bench.gpu.sleep(seconds)
        bench.gpu.look()

    bench.gpu.look()
    running = asyncio.create_task(bench.another(rest).run())
    await is_seen.wait()
    running.cancel()
    assert rests == [CALM_LOOK_SECONDS, CALM_LOOK_SECONDS, LOOK_SECONDS, LOOK_SECONDS]


async def test_a_throttle_of_a_version_that_does_not_tell_its_start_is_believed(bench: Bench) -> None:
    bench.gpu.throttle_started_at = 0.0
    bench.add("new", known=False)
    await bench.run(30.0)
    assert bench.of("new") is not None


def test_the_shortest_time_out_of_a_pods_probes_counts() -> None:
    def pod(*containers: dict[str, object]) -> ManagedPod:
        metadata = {"uid": "u", "namespace": "shop", "name": "a", "annotations": {}}
        return reduce_pod({"metadata": metadata, "spec": {"containers": list(containers)}})

    http = {"httpGet": {"port": 80}}
    assert pod({}).probe_seconds is None
    assert pod({"livenessProbe": {**http, "timeoutSeconds": 5}}, {"readinessProbe": http}).probe_seconds == 1.0
    assert pod({"startupProbe": {**http, "timeoutSeconds": 3}}).probe_seconds == 3.0


async def test_a_known_workload_that_does_other_work_now_is_read_anew_and_one_that_does_not_is_left_alone(
    state: NodeState, clock: Clock
) -> None:
    bench = Bench(state, clock)
    bench.add("old")
    bench.add("new", known=False)
    new, old = (state.pods[f"uid-{name}"] for name in ("new", "old"))
    before = Counters(sm_util=0.6, fp32_util=0.02, dram_bw_util=0.5, graphics_util=0.9)
    bench.profiles["shop/new"] = SharedProfile(frozenset({new.uid}), H200, SoloSignature(before, {25: 0.5}))
    bench.gpu.look()
    await bench.gpu.sleep(10)
    assert bench.readings.plan(GPU_A) is None, "both are known"
    for pod in (new, old):
        bench.signatures.doubt(pod, H200)
    read: list[str] = []
    for _ in range(240):
        await bench.gpu.sleep(0.5)
        bench.gpu.look()
        if (plan := bench.readings.plan(GPU_A)) is not None:
            read.append(plan.pod.name)
            await bench.readings.read(GPU_A, plan)
    assert 1 <= read.count("old") <= 2
    assert 2 <= read.count("new") <= DOUBT_READINGS
    assert bench.signatures.phases(old, H200) == (SoloSignature(DRAWS["old"], {25: 0.5}),)
    usual, other = bench.signatures.phases(new, H200)
    assert usual.counters == before
    assert shape_misfit(DRAWS["new"], other.counters) == pytest.approx(0.0, abs=1.0)


async def looks(bench: Bench, seconds: float) -> list[str]:
    """Look for so long, without what the tenants draw between readings; return who was read."""
    until, read = bench.clock() + seconds, []
    while bench.clock() < until:
        bench.clock.now += LOOK_SECONDS
        bench.gpu.look()
        if (plan := bench.readings.plan(GPU_A)) is not None:
            read.append(plan.pod.name)
            await bench.readings.read(GPU_A, plan)
    return read


async def test_readings_of_a_doubted_workload_that_always_fail_cost_far_less_than_a_hundredth_of_an_hour(
    bench: Bench,
) -> None:
    """Before, they cost its neighbours 8% of their time, for as long as both ran."""
    old, before = bench.state.pods["uid-old"], bench.of("old")
    bench.signatures.doubt(old, H200)
    bench.gpu.is_slow = True
    read = await looks(bench, 3600.0)
    counts = bench.readings.counts[GPU_A]
    assert set(read) == {"old"}
    assert len(read) >= 5, "it is tried again"
    assert counts.failed == counts.taken == len(read)
    assert counts.stopped_seconds <= 0.004 * 3600.0
    assert bench.signatures.is_doubted(old, H200)
    assert bench.of("old") == before, "the profile counts meanwhile"
    bench.add("new", known=False)
    bench.gpu.is_slow = False
    assert (await looks(bench, 30.0)).count("new") >= 2
    assert bench.of("new") is not None, "as soon as ever"
    read = await looks(bench, 1900.0)
    assert 1 <= read.count("old") <= DOUBT_READINGS
    assert not bench.signatures.is_doubted(old, H200)
    assert bench.of("old") == before


async def test_an_agent_that_starts_again_has_no_doubts_and_reads_at_once_what_it_doubts_anew(
    bench: Bench,
) -> None:
    bench.signatures.doubt(bench.state.pods["uid-old"], H200)
    bench.gpu.is_slow = True
    await looks(bench, 600.0)
    bench.signatures = Signatures(bench.profiles)
    bench.readings = bench.another(bench.gpu.sleep)
    assert await looks(bench, 600.0) == []
    bench.signatures.doubt(bench.state.pods["uid-old"], H200)
    assert await looks(bench, 5.0) == ["old"]
