"""The agent's loop: what its windows say to core.control.watch, and what its answers become on the node.

The GPU is a plant: tenants that are stopped for part of the time, and a law for what the others make without them.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, Clock, make_pod

from gpushare.core.admission import Defaults
from gpushare.core.api import CapPoint, JobClass, WorkloadPhase, WorkloadSignature
from gpushare.core.control import Question, SoloSignature, WatchReason, WatchSettings, turns_of
from gpushare.core.gpu import Counters, GpuSample
from gpushare.core.progress import Prior
from gpushare.mps.asks import ThrottleAsks
from gpushare.mps.layout import GpuDirectory, throttle_reader, write_throttle
from gpushare.mps.status import (
    ClientStatus,
    GateState,
    GateStatus,
    PodThrottle,
    RefusedThrottle,
    ThrottleRefusal,
    ThrottleStatus,
)
from gpushare_deviceplugin.decisions import decide
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.loop import (
    ALERT_SECONDS,
    CALM_SAMPLES,
    EVENT_SECONDS,
    HURRY_SECONDS,
    SETTLED_SECONDS,
    Loop,
)
from gpushare_deviceplugin.measuring import Measurer, TenantMeasure
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import NodeShares, SharedProfile, Terms, reduce_gpushare, terms_of
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import build_status, tenants_of, urgent_part

H200 = "NVIDIA H200"
IDLE = Counters(sm_util=0.3, fp32_util=0.0, hmma_tensor_util=0.0, fp64_util=0.0, dram_bw_util=0.1)
# Each workload draws on one pipe of its own, so that progress can be told from the counters.
ALONE = {
    "victim": SoloSignature(replace(IDLE, fp32_util=0.6), {50: 0.9}),
    "bad": SoloSignature(replace(IDLE, hmma_tensor_util=0.6), {25: 0.45}),
    "calm": SoloSignature(replace(IDLE, fp64_util=0.6), {25: 0.45}),
}
HURT = {("victim", "bad"): 0.45}  # what the first one makes beside the second one; 0.95 beside anybody else


def made(name: str, running: Sequence[str]) -> float:
    """What a tenant makes while these run."""
    if name not in running:
        return 0.0
    kept = 0.95
    for other in running:
        kept = min(kept, HURT.get((name, other), kept))
    return kept if len(running) > 1 else 1.0


def mixture(name: str, duties: dict[str, float]) -> float:
    """What a tenant makes when tenants are stopped for part of the time, one after the other."""
    names = list(duties)
    sets = [(share, [names[at] for at in running]) for share, running in turns_of([*duties.values()])]
    return sum(share * made(name, running) for share, running in sets)


class Node:
    """One GPU with its tenants, an agent's loop, and an MPS host that does as it is asked."""

    def __init__(self, state: NodeState, clock: Clock, root: Path, *, enabled: bool = True) -> None:
        self.state, self.clock, self.root = state, clock, root
        self.gpu = GpuDirectory.of(root, GPU_A)
        self.gpu.create()
        self.reader = throttle_reader(self.gpu)
        self.profiles = NodeShares()
        self.signatures = Signatures(self.profiles)
        self.defaults = Defaults()
        self.told: list[Notice] = []
        self.told_two = asyncio.Event()
        self.seen = Counters()
        self.asleep: set[str] = set()
        self.problem = ""
        self.refused: tuple[RefusedThrottle, ...] = ()
        self.measurer = Measurer(state, self.signatures, self.expected)
        self.loop = self.another_loop(enabled=enabled)

    def another_loop(self, *, enabled: bool = True) -> Loop:
        async def tell(notice: Notice) -> None:
            self.told.append(notice)
            if len(self.told) >= 2:
                self.told_two.set()

        return Loop(
            self.state,
            self.signatures,
            self.terms,
            self.root,
            tell=tell,
            clock=self.clock,
            settings=WatchSettings(),
            enabled=enabled,
            boot=self.clock,
        )

    def terms(self, pod: ManagedPod) -> Terms:
        return terms_of(pod, self.profiles, self.defaults)

    def add(self, name: str, share: int, decided_at: str, **annotations: str) -> str:
        pod = make_pod(name, share=share, threads="100", phase="Running", decided_at=decided_at, **annotations)
        self.profiles[f"shop/{name}"] = SharedProfile(frozenset({pod.uid}), H200, ALONE[name])
        self.state.put_pod(pod)
        self.state.set_allocations({**(self.state.allocations or {}), pod.uid: {GPU_A: share}})
        return pod.uid

    def add_two(self, **annotations: str) -> None:
        """Add a victim, and a pod that takes its time, and came later."""
        self.add("victim", 50, "2026-11-22T10:00:00Z", **annotations)
        self.add("bad", 25, "2026-11-22T11:00:00Z", **annotations)

    def names(self) -> list[str]:
        return [pod.name for pod, _ in tenants_of(self.state, GPU_A)]

    def asked(self) -> dict[str, float]:
        """The duties that the MPS host reads, by pod's name."""
        live = self.reader.read().live(self.clock())
        return {name: live[f"uid-{name}"].duty_ratio if f"uid-{name}" in live else 1.0 for name in self.names()}

    def truth(self, name: str) -> float:
        duties = {each: duty for each, duty in self.asked().items() if each not in self.asleep}
        return mixture(name, duties) if name not in self.asleep else 0.0

    def expected(self, _: str, question: Question) -> list[Prior]:
        duties = dict(zip([uid.removeprefix("uid-") for uid in question.tenants], question.duties, strict=True))
        return [Prior(mixture(name, duties), 0.05) for name in duties]

    def gate(self) -> GateStatus:
        throttles = tuple(PodThrottle(f"uid-{name}", duty) for name, duty in self.asked().items() if duty < 1)
        return GateStatus(
            GPU_A,
            GateState.ACTIVE,
            self.clock(),
            clients=tuple(ClientStatus(at, f"uid-{name}", 100) for at, name in enumerate(self.names())),
            throttle=ThrottleStatus(self.clock(), self.problem, throttles, self.refused),
        )

    def window(self, seconds: float = 1.0) -> bool:
        """Let a window pass, and conclude from it; True when the loop changed something."""
        truths = {name: self.truth(name) for name in self.names()}
        sums = {
            counter: min(
                1.0, sum(truth * getattr(ALONE[name].counters, counter) for name, truth in truths.items())
            )
            for counter in IDLE.as_dict()
        }
        gate = self.gate()
        self.clock.now += seconds
        self.seen = Counters(**sums)
        sample = GpuSample(self.seen, seconds, 900, 0.9)
        self.measurer.learn(GPU_A, gate, [sample])
        changed = self.loop.conclude(GPU_A, gate, self.measurer.measure(GPU_A, gate, sample))
        self.loop.beat()
        return changed

    def windows(self, number: int) -> None:
        for _ in range(number):
            if self.window():
                self.clock.now += 0.45


@pytest.fixture
def node(state: NodeState, clock: Clock, tmp_path: Path) -> Node:
    made = Node(state, clock, tmp_path)
    made.add_two()
    return made


def promise(node: Node, name: str) -> float:
    [tenant] = [t for t in build_node(node).gpus[0].tenants if t.pod == name]
    assert tenant.promise_ratio is not None
    return tenant.promise_ratio


def build_node(node: Node):
    return build_status(node.state, {GPU_A: node.gate()}, {}, keeping=node.loop.keeping)


def test_promises_are_published_with_the_class_and_the_slowdown_of_the_gpushare(node: Node) -> None:
    assert promise(node, "victim") == pytest.approx(0.9 / 1.5, abs=1e-3), "what its cap leaves it alone"
    assert promise(node, "bad") == pytest.approx(0.45 / 1.5, abs=1e-3)
    node.profiles["shop/bad"] = replace(node.profiles["shop/bad"], max_slowdown=3.0)
    assert promise(node, "bad") == pytest.approx(0.45 / 3.0, abs=1e-3)
    node.profiles["shop/victim"] = replace(node.profiles["shop/victim"], job_class=JobClass.LATENCY)
    assert promise(node, "victim") == pytest.approx(0.9 / 1.1, abs=1e-3)
    assert decide(node.state, node.terms)[GPU_A].pods["uid-victim"].job_class is JobClass.LATENCY
    del node.profiles["shop/bad"]
    assert promise(node, "bad") == pytest.approx(0.25 / 1.5, abs=1e-3), "an unknown workload: its share"


def test_a_pod_with_auto_is_promised_its_slowdown_of_a_whole_gpu(node: Node) -> None:
    node.add_two(**{"gpushare.io/fraction": "auto"})
    assert promise(node, "victim") == pytest.approx(1 / 1.5, abs=1e-3)
    assert promise(node, "bad") == pytest.approx(0.45 / 1.5**0.5, abs=1e-3), "its share cannot keep more"
    del node.profiles["shop/bad"]
    assert promise(node, "bad") == pytest.approx(0.25 / 1.5, abs=1e-3), "an unknown workload: its share"


def test_the_promise_of_a_workload_with_phases_holds_in_each_of_them(node: Node) -> None:
    usual = promise(node, "victim")
    kept = WorkloadSignature(
        H200,
        ALONE["victim"].counters.as_dict(),
        cap_curve=(CapPoint(50, 0.9),),
        phases=(WorkloadPhase(ALONE["bad"].counters.as_dict(), cap_curve=(CapPoint(50, 0.6),)),),
    )
    node.profiles["shop/victim"] = replace(node.profiles["shop/victim"], kept=kept)
    assert promise(node, "victim") == pytest.approx(0.6 / 1.5, abs=1e-3) != usual


def test_a_broken_promise_is_kept_by_throttling_within_seconds_and_it_is_said(node: Node) -> None:
    began = node.clock.now
    assert node.truth("victim") < promise(node, "victim")
    while node.truth("victim") < promise(node, "victim"):
        if node.window():
            node.clock.now += 0.45
        assert node.clock.now - began <= 6.0
    node.windows(60)
    assert node.truth("victim") >= promise(node, "victim")
    assert node.truth("bad") >= promise(node, "bad")
    tenants = {t.pod: t for t in build_node(node).gpus[0].tenants}
    assert tenants["bad"].throttle_ratio == pytest.approx(1 - node.asked()["bad"], abs=0.011)
    assert tenants["victim"].throttle_ratio is None
    assert node.loop.counts[GPU_A].broken == 1
    assert node.loop.counts[GPU_A].throttled == 1
    assert node.loop.is_broken(GPU_A, "uid-victim") is False


async def test_events_are_told_with_figures_and_at_most_one_a_minute_of_a_kind(node: Node) -> None:
    running = asyncio.create_task(node.loop.run())
    node.windows(10)
    async with asyncio.timeout(60):
        await node.told_two.wait()
    running.cancel()
    reasons = [(notice.pod_uid, notice.reason, notice.is_warning) for notice in node.told]
    assert ("uid-victim", WatchReason.PROMISE_BROKEN.value, True) in reasons
    assert ("uid-bad", WatchReason.THROTTLED.value, False) in reasons
    assert len(set(reasons)) == len(reasons), "one of a kind in this time"
    assert node.clock.now - 1000.0 < EVENT_SECONDS
    assert all(any(figure.isdigit() for figure in notice.note) for notice in node.told)
    throttled = next(notice.note for notice in node.told if notice.pod_uid == "uid-bad")
    assert "pod victim makes" in throttled
    assert "uid-" not in throttled


def test_what_each_step_acted_by_is_logged_and_the_gpu_suite_reads_it(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "gpu"))
    from loop_steps import steps_of  # noqa: PLC0415 - of the suite that needs a GPU, which this part of it does not

    begin = node.clock.now
    with caplog.at_level(logging.DEBUG, "gpushare_deviceplugin.loop"):
        node.windows(12)
    log = "\n".join(record.getMessage() for record in caplog.records)
    found = steps_of(log, {"uid-victim": "victim", "uid-bad": "bad"}, begin, node.clock.now)
    at = next(number for number, step in enumerate(found) if step["duties"])
    assert [each["rule"] for each in found[at]["tenants"] if each["pod"] == "victim"] == ["throttled"]
    assert found[at]["duties"] == {"bad": pytest.approx(node.asked()["bad"], abs=0.1)}
    victim = next(each for each in found[at]["tenants"] if each["pod"] == "victim")
    assert victim["progress"] == pytest.approx(0.45, abs=0.05)
    assert victim["room"] == pytest.approx(victim["estimate"] - victim["promise"], abs=0.002)
    assert victim["broken"] is True
    assert all(0 < step["at"] <= node.clock.now - begin for step in found)
    assert steps_of(log, {}, node.clock.now + 1, node.clock.now + 2) == []
    by_level = {
        level: [r for r in caplog.records if r.levelno == level and "step on" in r.getMessage()]
        for level in (logging.INFO, logging.DEBUG)
    }
    assert 1 <= len(by_level[logging.INFO]) <= 4, "where another rule decides"
    assert len(by_level[logging.DEBUG]) >= 5


def test_in_calm_no_step_is_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.asleep = {"bad"}
    with caplog.at_level(logging.DEBUG, "gpushare_deviceplugin.loop"):
        node.windows(5)
    assert not [record for record in caplog.records if "step on" in record.getMessage()]


async def test_an_event_does_not_name_pods_of_another_namespace(node: Node) -> None:
    victim = next(pod for pod in node.state.pods.values() if pod.name == "victim")
    node.state.put_pod(replace(victim, namespace="secret"))
    node.profiles["secret/victim"] = node.profiles.pop("shop/victim")
    running = asyncio.create_task(node.loop.run())
    node.windows(10)
    async with asyncio.timeout(60):
        await node.told_two.wait()
    running.cancel()
    throttled = next(notice.note for notice in node.told if notice.pod_uid == "uid-bad")
    assert "a pod of another namespace makes" in throttled
    assert "victim" not in throttled


def test_a_silent_agent_leaves_everyone_free_and_a_new_one_starts_from_free(node: Node) -> None:
    node.windows(10)
    assert node.asked()["bad"] < 1
    node.clock.now += 5.0
    assert node.asked() == {"victim": 1.0, "bad": 1.0}
    node.clock.now -= 5.0
    assert node.asked()["bad"] < 1, "within the lease of an agent that was killed"
    node.loop = node.another_loop()
    node.loop.beat()
    assert node.asked() == {"victim": 1.0, "bad": 1.0}
    node.windows(10)
    assert node.truth("victim") >= promise(node, "victim")


def test_asks_are_renewed_and_nothing_is_written_where_nobody_is_throttled(node: Node) -> None:
    node.windows(10)
    for _ in range(20):
        node.clock.now += 1.0
        node.loop.beat()
        assert node.asked()["bad"] < 1
    calm = node.another_loop()
    node.gpu.throttle.unlink()
    calm.beat()
    assert not node.gpu.throttle.exists()


def test_switched_off_it_shows_promises_and_touches_nothing(
    state: NodeState, clock: Clock, tmp_path: Path
) -> None:
    node = Node(state, clock, tmp_path, enabled=False)
    node.add_two()
    node.windows(20)
    assert not node.gpu.throttle.exists()
    assert promise(node, "victim") > node.truth("victim")
    mine = ThrottleAsks({}, clock())
    write_throttle(node.gpu, mine)
    node.windows(5)
    assert node.reader.read() == mine, "somebody else's asks stay"


def test_a_throttle_that_helps_nobody_is_let_go_though_a_promise_stays_broken(node: Node) -> None:
    node.add("calm", 25, "2026-11-22T12:00:00Z")
    node.profiles["shop/bad"] = replace(node.profiles["shop/bad"], job_class=JobClass.LATENCY)
    node.windows(5)
    assert node.asked()["calm"] < 1.0, "at first each neighbour is as likely"
    assert node.asked()["bad"] == 1.0, "never stopped"
    node.windows(60)
    assert node.loop.is_broken(GPU_A, "uid-victim")
    assert node.asked()["calm"] == 1.0
    node.windows(300)
    assert node.asked()["calm"] == 1.0
    assert node.loop.counts[GPU_A].throttled == 1, "not stopped again"


def test_where_nobody_can_be_frozen_the_newest_is_asked_to_leave_and_that_is_written_at_once(node: Node) -> None:
    node.problem = "/sys/fs/cgroup/freezer is mounted read-only"
    before = urgent_part(build_node(node))
    node.windows(60)
    assert node.asked() == {"victim": 1.0, "bad": 1.0}
    tenants = {t.pod: t for t in build_node(node).gpus[0].tenants}
    assert tenants["victim"].retract is None
    assert tenants["bad"].retract
    assert urgent_part(build_node(node)) != before
    assert node.loop.counts[GPU_A].retractions == 1
    node.state.drop_pod("uid-bad")
    node.windows(3)
    assert [t.retract for t in build_node(node).gpus[0].tenants] == [None]


@pytest.mark.parametrize("reason", [ThrottleRefusal.NO_CGROUP, ThrottleRefusal.FROZEN_BY_OTHERS])
def test_whom_the_host_refuses_to_freeze_is_not_counted_on(node: Node, reason: ThrottleRefusal) -> None:
    node.refused = (RefusedThrottle("uid-bad", reason, "as the host says"),)
    node.windows(20)
    assert node.asked() == {"victim": 1.0, "bad": 1.0}


@pytest.mark.parametrize("reason", [ThrottleRefusal.LATENCY, ThrottleRefusal.FROZEN_BY_OTHERS])
def test_who_may_not_be_stopped_any_more_runs_free_in_the_books_too(node: Node, reason: ThrottleRefusal) -> None:
    """The host stops freezing it, and names it only while it is asked to."""
    node.windows(20)
    assert node.asked()["bad"] < 1.0
    if reason is ThrottleRefusal.LATENCY:
        node.profiles["shop/bad"] = replace(node.profiles["shop/bad"], job_class=JobClass.LATENCY)
    node.refused = (RefusedThrottle("uid-bad", reason, "as the host says"),)
    node.window()
    assert node.asked()["bad"] == 1.0
    assert [t.throttle_ratio for t in build_node(node).gpus[0].tenants] == [None, None]
    assert node.loop.is_broken(GPU_A, "uid-victim") is False, "the window mixes both"
    node.refused = ()
    node.windows(30)
    assert node.asked()["bad"] == 1.0, "not asked for again at once"
    assert node.loop.is_broken(GPU_A, "uid-victim")
    node.windows(60)
    assert (node.asked()["bad"] < 1.0) is (reason is not ThrottleRefusal.LATENCY)


def test_a_pod_whose_class_is_not_known_yet_is_never_stopped(node: Node) -> None:
    signature = node.profiles.pop("shop/bad")
    terms = node.terms(node.state.pods["uid-bad"])
    assert (terms.job_class, terms.is_certain) == (JobClass.THROUGHPUT, False)
    node.profiles["shop/bad"] = signature
    node.defaults = Defaults(job_class=JobClass.LATENCY)
    node.windows(20)
    assert node.asked() == {"victim": 1.0, "bad": 1.0}, "both are of class latency"


def test_a_tenant_that_sleeps_has_no_broken_promise(node: Node) -> None:
    node.asleep = {"victim"}
    node.windows(30)
    assert node.asked() == {"victim": 1.0, "bad": 1.0}
    assert node.loop.counts[GPU_A].broken == 0
    node.asleep = set()
    node.windows(20)
    assert node.truth("victim") >= promise(node, "victim")


def test_a_throttled_pod_whose_container_starts_anew_soon_runs_free(node: Node) -> None:
    node.windows(10)
    assert node.asked()["bad"] < 1.0
    node.asleep = {"bad"}
    node.windows(40)
    assert node.asked() == {"victim": 1.0, "bad": 1.0}
    node.asleep = set()
    node.windows(10)
    assert node.asked()["bad"] < 1.0


def test_nothing_is_told_of_a_promise_when_mps_does_not_serve_for_long(node: Node) -> None:
    node.windows(60)
    assert node.loop.is_broken(GPU_A, "uid-victim") is False
    gate = replace(node.gate(), state=GateState.DOWN)
    for second in range(40):
        sample = GpuSample(node.seen, 1.0, 900, 0.9)
        node.clock.now += 1.0
        node.loop.conclude(GPU_A, gate, node.measurer.measure(GPU_A, gate, sample))
        assert (node.loop.is_broken(GPU_A, "uid-victim") is None) == (second >= 29)


def test_counters_that_stand_still_or_are_missing_lead_to_nothing(node: Node) -> None:
    gate = node.gate()
    for _ in range(40):
        node.clock.now += 1.0
        node.loop.conclude(GPU_A, gate, node.measurer.measure(GPU_A, gate, GpuSample(Counters(), 1.0, 900, None)))
        zero = GpuSample(Counters(sm_util=0.0, fp32_util=0.0, hmma_tensor_util=0.0), 1.0, 900, 0.0)
        node.clock.now += 1.0
        node.loop.conclude(GPU_A, gate, node.measurer.measure(GPU_A, gate, zero))
    assert node.loop.counts[GPU_A].broken == 0
    assert node.asked() == {"victim": 1.0, "bad": 1.0}


def test_windows_are_short_while_something_is_wrong_and_long_else(node: Node) -> None:
    def until_due(counters: Counters) -> int:
        sample = GpuSample(counters, 1.0, 900, 0.9)
        return next(n for n in range(1, 99) if node.loop.is_due(GPU_A, [sample] * n))

    node.state.drop_pod("uid-bad")
    node.add("calm", 25, "2026-11-22T12:00:00Z")
    node.windows(3)
    node.clock.now += ALERT_SECONDS
    node.windows(1)
    seen = node.seen
    assert until_due(seen) == CALM_SAMPLES
    assert until_due(replace(seen, fp32_util=(seen.fp32_util or 0) - 0.2)) == 1, "something has changed"
    node.clock.now += ALERT_SECONDS
    assert until_due(seen) == CALM_SAMPLES
    node.state.drop_pod("uid-calm")
    node.add("bad", 25, "2026-11-22T12:00:00Z")
    node.windows(1)
    assert until_due(node.seen) == 1


def test_what_stays_wrong_without_news_is_watched_in_windows_twice_as_long(node: Node) -> None:
    def until_due(counters: Counters) -> int:
        sample = GpuSample(counters, 1.0, 900, 0.9)
        return next(n for n in range(1, 99) if node.loop.is_due(GPU_A, [sample] * n))

    node.problem = "no freezer"  # nothing can be done about it, so nothing changes
    node.windows(5)
    assert node.loop.is_broken(GPU_A, "uid-victim")
    assert until_due(node.seen) == 1
    node.windows(25)  # somebody is asked to leave, and that is the last news
    node.windows(int(SETTLED_SECONDS))
    assert until_due(node.seen) == 2
    assert until_due(replace(node.seen, fp32_util=(node.seen.fp32_util or 0) - 0.2)) == 1, "something has changed"
    node.windows(int(SETTLED_SECONDS))
    assert until_due(node.seen) == 2
    node.add("calm", 25, "2026-11-22T12:00:00Z")
    gate = node.gate()
    node.loop.conclude(GPU_A, gate, node.measurer.measure(GPU_A, gate, None))
    assert until_due(node.seen) == 1, "somebody came"


def test_samples_are_wanted_sooner_for_moments_after_somebody_came_and_not_for_one_who_is_alone(
    node: Node,
) -> None:
    node.state.drop_pod("uid-bad")
    node.add("calm", 25, "2026-11-22T12:00:00Z")
    gate = node.gate()
    node.loop.conclude(GPU_A, gate, node.measurer.measure(GPU_A, gate, None))
    assert node.loop.pace() == HURRY_SECONDS
    node.windows(3)
    assert node.loop.pace() == math.inf
    node.state.drop_pod("uid-calm")
    gate = node.gate()
    node.loop.conclude(GPU_A, gate, node.measurer.measure(GPU_A, gate, None))
    assert node.loop.pace() == math.inf


def test_asks_that_cannot_be_written_are_counted_and_said_once(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpushare_deviceplugin.loop.write_throttle", full)
    node.windows(10)
    assert node.state.counts.errors["throttle"] > 1
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1


def test_a_gpushare_is_reduced_to_what_its_pods_on_this_node_are_owed() -> None:
    share = {
        "spec": {"class": "latency", "maxSlowdown": 1.2, "profile": {"mode": "Off"}},
        "status": {
            "placements": [{"podUid": "u1", "pod": "a", "node": "n1"}, {"podUid": "u2", "pod": "b", "node": "n2"}]
        },
    }
    here = reduce_gpushare(share, "n1")
    assert here == SharedProfile(
        frozenset({"u1"}), job_class=JobClass.LATENCY, max_slowdown=1.2, is_profiled=False
    )
    assert reduce_gpushare(share, "n3") is None


def test_of_two_gpushares_that_have_a_pod_the_first_by_name_counts_and_its_annotation_beats_both(
    node: Node,
) -> None:
    pod = node.state.pods["uid-bad"]
    node.profiles["shop/zz"] = SharedProfile(frozenset({"uid-bad"}), job_class=JobClass.LATENCY)
    node.profiles["shop/aa"] = SharedProfile(frozenset({"uid-bad"}), max_slowdown=4.0)
    assert node.terms(pod) == Terms(JobClass.THROUGHPUT, 4.0)
    node.profiles["shop/aa"] = SharedProfile(frozenset({"uid-bad"}), job_class=JobClass.LATENCY)
    assert node.terms(pod) == Terms(JobClass.LATENCY, 1.1)
    node.profiles["bank/aa"] = SharedProfile(frozenset({"uid-bad"}), max_slowdown=900.0)
    assert node.terms(pod) == Terms(JobClass.LATENCY, 1.1), "another namespace has no say"
    annotated = make_pod("bad", **{"gpushare.io/class": "throughput"})
    assert node.terms(annotated).job_class is JobClass.THROUGHPUT


def test_the_loop_is_told_who_hardly_uses_the_gpu(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.signatures, "is_light", lambda pod, model: (pod.name, model) == ("bad", H200))
    told = {
        pod.name: node.loop._watched(GPU_A, pod, share, TenantMeasure(), set()).is_light
        for pod, share in tenants_of(node.state, GPU_A)
    }
    assert told == {"victim": False, "bad": True}
