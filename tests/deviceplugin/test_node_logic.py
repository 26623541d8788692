"""What the agent concludes: decisions, health, notices, when it writes, and what it measures of whom."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, Clock, make_pod

from gpushare.core.api import Ceilings, GpuNodeStatus, MpsState, WorkloadSignature, names
from gpushare.core.gpu import Counters, DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample, Health
from gpushare.core.progress import Prior, at_full_threads, attribute
from gpushare.mps.layout import GpuDirectory, decisions_reader, write_status
from gpushare.mps.status import (
    ClientStatus,
    GateState,
    GateStatus,
    HeldStatus,
    HoldReason,
    Mismatch,
    MismatchKind,
    SelfTest,
    SelfTestResult,
)
from gpushare_deviceplugin.decisions import DecisionWriter, decide
from gpushare_deviceplugin.forecasts import Question
from gpushare_deviceplugin.gates import (
    RECENT_SECONDS,
    Gates,
    RecentTenants,
    conclude_health,
    health_notices,
    mps_status,
    notices,
)
from gpushare_deviceplugin.measuring import Measurer
from gpushare_deviceplugin.pods import reduce_pod
from gpushare_deviceplugin.sampler import Sampler
from gpushare_deviceplugin.shares import SharedProfile, SoloSignature, reduce_gpushare
from gpushare_deviceplugin.signatures import Signatures
from gpushare_deviceplugin.state import PRESUMED_SECONDS, NodeState
from gpushare_deviceplugin.status import StatusWriter, build_status

WELL = GpuHealth(Health.HEALTHY)
FP32 = Counters(fp32_util=0.6, dram_bw_util=0.2, integer_util=0.2, sm_util=0.7)
MEMORY = Counters(fp32_util=0.1, dram_bw_util=0.9, integer_util=0.15, sm_util=0.9)


def gate(state: GateState = GateState.ACTIVE, at: float = 1.0, **fields: object) -> GateStatus:
    return GateStatus(GPU_A, state, at, **fields)  # type: ignore[arg-type]  # fields by name


def client(uid: str | None, threads: int | None = 50, used: int | None = 500) -> ClientStatus:
    return ClientStatus(hash(uid) % 9999, uid, threads, 8192, used)


def window(counters: Counters, seconds: float = 1.0) -> GpuSample:
    return GpuSample(counters, seconds, 2000, 0.9)


def mix(*parts: tuple[Counters, float]) -> Counters:
    names = parts[0][0].as_dict()
    return Counters(**{n: min(1.0, sum(getattr(c, n) * p for c, p in parts)) for n in names})


def tenant(state: NodeState, name: str, gpu: str = GPU_A, share: int = 25, threads: str = "50") -> str:
    pod = make_pod(name, gpu=gpu, share=share, threads=threads, phase="Running", **{"gpushare.io/workload": name})
    state.put_pod(pod)
    gpus = gpu.split(",")
    state.set_allocations({**(state.allocations or {}), pod.uid: {g: share // len(gpus) for g in gpus}})
    return pod.uid


class TestDecisions:
    @pytest.mark.parametrize(("grace", "ends_at"), [(30, 1027.0), (3, 1027.0), (1, 1029.0), (0, 1030.0)])
    def test_a_deleted_pods_clients_end_shortly_before_kubelet_kills_it(
        self, state: NodeState, grace: int, ends_at: float, tmp_path: Path
    ) -> None:
        deleted = {"deletionTimestamp": "1970-01-01T00:17:10Z", "deletionGracePeriodSeconds": grace}
        state.put_pod(make_pod("leaves", metadata=deleted))
        state.put_pod(make_pod("stays"))
        writer = DecisionWriter(state, tmp_path)
        assert writer.write()
        written = decisions_reader(GpuDirectory.of(tmp_path, GPU_A)).read()
        assert {uid: d.ends_at for uid, d in written.pods.items()} == {"uid-leaves": ends_at, "uid-stays": None}
        assert written.unknown == 0

    def test_decisions_that_are_gone_from_the_disk_are_written_again(
        self, state: NodeState, tmp_path: Path
    ) -> None:
        state.put_pod(make_pod("a"))
        writer = DecisionWriter(state, tmp_path)
        gpu = GpuDirectory.of(tmp_path, GPU_A)
        assert writer.write()
        gpu.decisions.unlink()
        assert writer.write()
        assert set(decisions_reader(gpu).read().pods) == {"uid-a"}

    def test_every_pod_that_may_run_has_its_ceilings_where_it_runs(self, state: NodeState) -> None:
        state.put_pod(make_pod("a", gpu=GPU_A))
        state.put_pod(make_pod("done", gpu=GPU_A, phase="Succeeded"))
        state.put_pod(make_pod("moved", gpu=GPU_A, threads="30"))
        state.put_pod(make_pod("undecided", gpu=None))
        state.set_allocations({"uid-moved": {GPU_B: 25}})
        decided = decide(state)
        assert set(decided[GPU_A].pods) == {"uid-a"}
        assert {uid: d.thread_percentage for uid, d in decided[GPU_B].pods.items()} == {"uid-moved": 30}

    def test_a_bad_annotation_is_said_once_and_what_runs_keeps_its_last_decision(
        self, state: NodeState, caplog: pytest.LogCaptureFixture
    ) -> None:
        state.put_pod(make_pod("a", gpu=GPU_A))
        for _ in range(3):
            state.put_pod(make_pod("a", gpu=GPU_A, threads="lots"))
            state.put_pod(make_pod("b", gpu=GPU_A, threads="101"))
        state.put_pod(make_pod("c", gpu=GPU_A))
        assert set(decide(state)[GPU_A].pods) == {"uid-a", "uid-c"}
        assert state.counts.bad_pods == 2
        assert len([r for r in caplog.records if "thread-percentage" in r.getMessage()]) == 2

    def test_a_full_disk_keeps_the_old_file_and_is_tried_again(self, state: NodeState, tmp_path: Path) -> None:
        state.put_pod(make_pod("a", gpu=GPU_A))
        writer = DecisionWriter(state, tmp_path)
        assert writer.write()
        state.put_pod(make_pod("b", gpu=GPU_A))
        with pytest.MonkeyPatch.context() as broken:

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            broken.setattr("gpushare_deviceplugin.decisions.write_decisions", full)
            assert not writer.write()
            assert not writer.write()
        assert set(decisions_reader(GpuDirectory.of(tmp_path, GPU_A)).read().pods) == {"uid-a"}
        assert state.counts.errors == {"decisions": 2}
        assert writer.write()
        assert set(decisions_reader(GpuDirectory.of(tmp_path, GPU_A)).read().pods) == {"uid-a", "uid-b"}

    def test_a_new_agent_does_not_touch_a_file_that_is_right(self, state: NodeState, tmp_path: Path) -> None:
        state.put_pod(make_pod("a", gpu=GPU_A))
        DecisionWriter(state, tmp_path).write()
        path = GpuDirectory.of(tmp_path, GPU_A).decisions
        before = path.stat().st_ino
        DecisionWriter(state, tmp_path).write()
        assert path.stat().st_ino == before


class TestPresumedAllocation:
    def test_the_first_decided_of_one_size_on_that_gpu_is_meant(self, state: NodeState, clock: Clock) -> None:
        state.set_allocations({})
        state.put_pod(make_pod("late", decided_at="2026-11-21T10:00:02Z"))
        state.put_pod(make_pod("early", decided_at="2026-11-21T10:00:01Z"))
        state.put_pod(make_pod("elsewhere", gpu=GPU_B, decided_at="2026-11-21T09:00:00Z"))
        meant = state.presume({GPU_A: 25})
        assert meant is not None
        assert meant.name == "early"
        assert {pod.name for pod in state.pending()} == {"late", "elsewhere"}
        clock.now += PRESUMED_SECONDS + 1  # kubelet never listed it: it was refused after all
        assert {pod.name for pod in state.pending()} == {"early", "late", "elsewhere"}

    def test_before_pod_resources_answered_a_running_pod_has_what_was_decided(self, state: NodeState) -> None:
        state.put_pod(make_pod("a", phase="Running"))
        state.put_pod(make_pod("b", phase="Pending"))
        assert [pod.name for pod in state.pending()] == ["b"]

    def test_a_running_pod_that_pod_resources_does_not_list_is_never_taken_for_a_waiting_one(
        self, state: NodeState
    ) -> None:
        state.set_allocations({})
        state.put_pod(make_pod("a", phase="Running"))
        assert state.pending() == []


class TestGates:
    def test_only_a_gpu_whose_mps_is_up_takes_tenants(self) -> None:
        assert conclude_health(WELL, gate()) == WELL
        words = {
            GateState.FAULT: "FAULT",
            GateState.DOWN: "down",
            GateState.SELF_TEST: "ceilings bind",
            GateState.STARTING: "starting",
        }
        for status, word in [(None, "does not report"), *((gate(state), word) for state, word in words.items())]:
            assert conclude_health(WELL, status).health is Health.UNHEALTHY
            assert word in conclude_health(WELL, status).reason
        broken = GpuHealth(Health.UNHEALTHY, "XID 79")
        assert conclude_health(broken, gate()) == broken

    def test_a_gate_beside_which_something_hangs_still_takes_tenants_and_says_what(self) -> None:
        degraded = gate(GateState.DEGRADED, detail="the driver has not told processes' memory for 9 s")
        assert conclude_health(WELL, degraded) == WELL
        shown = mps_status(degraded)
        assert shown.state is MpsState.ACTIVE
        assert "has not told" in (shown.message or "")

    def test_a_silent_gate_is_down_by_our_own_clock_whatever_the_wall_clock_does(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        place = GpuDirectory.of(tmp_path, GPU_A)
        place.create()
        gates = Gates(tmp_path, clock)
        assert gates.read(GPU_A) is None
        write_status(place, gate(at=5000.0))
        assert gates.read(GPU_A) is not None
        clock.now += 8
        write_status(place, gate(at=10.0))  # the wall clock jumped back by more than an hour
        assert gates.read(GPU_A) is not None
        clock.now += 8
        assert gates.read(GPU_A) is not None
        clock.now += 8
        assert gates.read(GPU_A) is None
        assert mps_status(None).state is MpsState.DOWN

    def test_a_self_test_that_failed_is_shown(self) -> None:
        shown = mps_status(gate(self_test=SelfTest(SelfTestResult.FAILED, "asked 20%, got 100%")))
        assert shown.ceilings is Ceilings.NOT_ENFORCED
        assert "got 100%" in (shown.message or "")

    def test_a_pod_of_too_many_processes_is_told_how_to_divide_its_cap(self) -> None:
        (told,) = notices(gate(), gate(held=(HeldStatus(7, "u1", HoldReason.POD_CAP, 2.0),)), ["u1"])
        assert (told.pod_uid, told.reason) == ("u1", "HeldPodCapInUse")
        assert "waits at the gate" in told.note
        assert "gpushare.io/processes" in told.note

    def test_what_is_new_is_told_once_to_those_concerned(self) -> None:
        old = gate(gate_started_at=1.0)
        held = HeldStatus(7, "u1", HoldReason.CLIENTS, 2.0)
        wrong = Mismatch(MismatchKind.WRONG_GPU, "u2", 8, "pod u2 came to another GPU")
        new = gate(gate_started_at=1.0, faults=1, last_fault="illegal access", held=(held,), mismatches=(wrong,))
        told = notices(old, new, ["u1", "u2"])
        assert {(n.pod_uid, n.reason) for n in told} == {
            ("u1", "GpuFault"),
            ("u2", "GpuFault"),
            (None, "GpuFault"),
            ("u1", "HeldTooManyClients"),
            ("u2", "MismatchWrongGpu"),
        }
        assert notices(new, new, ["u1", "u2"]) == ()
        late = gate(gate_started_at=1.0, faults=2, last_fault="illegal access", last_fault_pods=("u3", "u2"))
        assert [n.pod_uid for n in notices(new, late, ["u2"])] == ["u2", "u3", None]
        sick = GpuHealth(Health.UNHEALTHY, "XID 79")
        assert health_notices(GPU_A, None, sick, ["u1"]) == ()  # a new agent does not tell what is old
        assert {(n.pod_uid, n.reason, n.is_warning) for n in health_notices(GPU_A, WELL, sick, ["u1"])} == {
            ("u1", "GpuUnhealthy", True),
            (None, "GpuUnhealthy", True),
        }
        assert health_notices(GPU_A, sick, GpuHealth(Health.UNHEALTHY, "lost"), ["u1"]) == ()
        assert [n.is_warning for n in health_notices(GPU_A, sick, WELL, ["u1"])] == [False, False]
        for again in (gate(gate_started_at=1.0, daemon_restarts=1), gate(gate_started_at=1.0, server_restarts=1)):
            assert {(n.pod_uid, n.reason) for n in notices(old, again, ["u1"])} == {
                ("u1", "MpsRestarted"),
                (None, "MpsRestarted"),
            }
        lost = gate(gate_started_at=9.0)  # a gate that found no status counts from zero: no fault happened
        assert notices(new, lost, ["u1"]) == ()

    def test_a_restarted_mps_host_is_told_though_its_gate_is_new_too(self) -> None:
        old = gate(gate_started_at=1.0, daemon_restarts=2, faults=1, last_fault="illegal access")
        host = gate(gate_started_at=9.0, daemon_restarts=3, faults=1, last_fault="illegal access")
        told = [(n.pod_uid, n.reason) for n in notices(old, host, ["u1", "u2"])]
        assert told == [("u1", "MpsRestarted"), ("u2", "MpsRestarted"), (None, "MpsRestarted")]
        assert notices(host, host, ["u1", "u2"]) == ()
        alone = gate(gate_started_at=9.0, daemon_restarts=2, faults=1, last_fault="illegal access")
        assert notices(old, alone, ["u1", "u2"]) == ()  # the gate alone was killed: tenants go on
        fault = gate(gate_started_at=9.0, daemon_restarts=2, faults=2, last_fault="XID 31")
        assert [n.reason for n in notices(old, fault, ["u1"])] == ["GpuFault", "GpuFault"]
        assert notices(None, host, ["u1"]) == ()  # an agent that starts does not tell what is old
        young = gate(
            gate_started_at=1.0, daemon_restarts=2, faults=1, clients=(client("u2"), client("u3"), client(None))
        )
        told = [n.pod_uid for n in notices(young, host, ["u2"])]
        assert told == ["u2", "u3", None]  # connected, though kubelet's list does not have it yet

    def test_a_pod_that_a_fault_ended_still_hears_of_it_for_a_while(self) -> None:
        now = [100.0]
        recent = RecentTenants(lambda: now[0])
        assert recent.of(GPU_A, ["u1", "u2"]) == ["u1", "u2"]
        now[0] += 2
        assert recent.of(GPU_A, ["u2"]) == ["u1", "u2"]
        assert recent.of(GPU_B, []) == []
        now[0] += RECENT_SECONDS
        assert recent.of(GPU_A, ["u2"]) == ["u2"]


class Sink:
    def __init__(self) -> None:
        self.written: list[GpuNodeStatus] = []
        self.works = True

    async def write(self, status: GpuNodeStatus) -> bool:
        if self.works:
            self.written.append(status)
        return self.works


class TestStatusWriter:
    async def test_at_once_on_health_and_tenants_else_every_ten_seconds(
        self, state: NodeState, clock: Clock
    ) -> None:
        sink = Sink()
        clients = 1
        writer = StatusWriter(
            state, lambda: build_status(state, {GPU_A: gate(clients=(client("x"),) * clients)}, {}), sink, clock
        )
        await writer.step()
        clients = 2  # a figure changed: it waits
        await writer.step()
        assert len(sink.written) == 1
        clock.now += 10
        await writer.step()
        assert len(sink.written) == 2
        tenant(state, "a")
        await writer.step()
        assert [t.pod_uid for t in sink.written[-1].gpus[0].tenants] == ["uid-a"]
        state.set_health(GPU_B, GpuHealth(Health.UNHEALTHY, "XID 79"))
        sink.works = False
        assert not await writer.step()
        sink.works = True
        assert await writer.step()
        assert sink.written[-1].gpus[1].health_reason == "XID 79"
        assert state.counts.errors == {"gpunode": 1}
        before = len(sink.written)
        clock.now += 30
        await writer.step()
        assert len(sink.written) == before  # nothing changed
        clock.now += 31
        await writer.step()
        assert len(sink.written) == before + 1  # a sign of life


class TestMeasuring:
    def measurer(self, state: NodeState, profiles: dict[str, SharedProfile] | None = None) -> Measurer:
        return Measurer(state, Signatures(profiles or {}))

    def test_a_pod_alone_and_uncapped_teaches_its_signature(self, state: NodeState) -> None:
        measurer = self.measurer(state)
        a = tenant(state, "a", threads="100")
        alone = gate(clients=(client(a, 100),))
        for _ in range(10):
            measured = measurer.measure(GPU_A, alone, window(FP32)).tenants[a]
        assert (measured.progress_ratio, measured.pipes["fp32"]) == (1.0, 0.6)
        b = tenant(state, "b", threads="100")
        both = gate(clients=(client(a, 100), client(b, 100)))
        mixed = window(mix((FP32, 0.5), (MEMORY, 0.7)))
        found = measurer.measure(GPU_A, both, mixed).tenants
        assert found[a].progress_ratio is None  # b has no signature: nothing can be told apart
        assert found[b].pipes == {}
        state.set_allocations({b: {GPU_A: 25}})
        for _ in range(10):
            measurer.measure(GPU_A, gate(clients=(client(b, 100),)), window(MEMORY))
        tenant(state, "a", threads="100")
        found = measurer.measure(GPU_A, both, mixed).tenants
        assert found[a].progress_ratio == pytest.approx(0.5, abs=0.1)
        assert found[b].progress_ratio == pytest.approx(0.7, abs=0.1)
        assert found[a].slowdown_ratio == pytest.approx(2.0, rel=0.25)
        assert found[a].pipes["fp32"] == pytest.approx(0.3, abs=0.06)  # its own, not the device's 0.37

    def test_a_capped_pod_alone_teaches_a_signature_under_its_cap_and_is_measured_against_its_profile(
        self, state: NodeState
    ) -> None:
        a = tenant(state, "a", threads="50")
        capped = gate(clients=(client(a, 50),))
        half = window(mix((FP32, 0.5)))
        without = self.measurer(state)
        for _ in range(10):
            found = without.measure(GPU_A, capped, half).tenants[a]
        whole, progress = at_full_threads(half.counters, 0.5)
        assert found.progress_ratio == pytest.approx(progress, abs=0.01)
        assert found.profile is not None
        assert found.profile.thread_percentage == 50
        assert [p.thread_percentage for p in found.profile.cap_curve] == [50]
        assert found.profile.as_counters().fp32_util == pytest.approx(whole.fp32_util, abs=1e-3)
        profile = SharedProfile(frozenset({a}), "NVIDIA H200", SoloSignature(FP32, {50: 0.52}))
        known = self.measurer(state, {"shop/a": profile}).measure(GPU_A, capped, half).tenants[a]
        assert known.progress_ratio == pytest.approx(0.5, abs=0.05)
        assert known.pipes == half.counters.pipes()

    def test_tenants_whose_windows_no_signature_explains_are_doubted_and_measured_by_what_is_read_then(
        self, state: NodeState
    ) -> None:
        a, b = tenant(state, "a", threads="50"), tenant(state, "b", threads="50")
        profiles = {
            "shop/a": SharedProfile(frozenset({a}), "NVIDIA H200", SoloSignature(FP32)),
            "shop/b": SharedProfile(frozenset({b}), "NVIDIA H200", SoloSignature(MEMORY)),
        }
        signatures = Signatures(profiles)
        measurer = Measurer(state, signatures)
        both = gate(clients=(client(a), client(b)))
        pods = [state.pods[uid] for uid in (a, b)]

        def progress(*parts: tuple[Counters, float], windows: int = 1) -> list[float | None]:
            for _ in range(windows):
                found = measurer.measure(GPU_A, both, window(mix(*parts), 5.0)).tenants
            return [found[uid].progress_ratio for uid in (a, b)]

        assert progress((FP32, 0.6), (MEMORY, 0.4), windows=40) == pytest.approx([0.6, 0.4], abs=0.05)
        assert not any(signatures.is_doubted(pod, "NVIDIA H200") for pod in pods)
        turned = Counters(fp32_util=0.05, dram_bw_util=0.1, integer_util=0.7, sm_util=0.8)
        progress((turned, 0.6), (MEMORY, 0.4), windows=20)
        assert all(signatures.is_doubted(pod, "NVIDIA H200") for pod in pods), "it may be either"
        for pod, drawn in zip(pods, (turned, MEMORY), strict=True):
            while signatures.is_doubted(pod, "NVIDIA H200"):
                signatures.learn(pod, "NVIDIA H200", window(drawn), is_reading=True)
        assert [len(signatures.phases(pod, "NVIDIA H200")) for pod in pods] == [2, 1]
        assert progress((turned, 0.6), (MEMORY, 0.4)) == pytest.approx([0.6, 0.4], abs=0.05)
        assert progress((FP32, 0.6), (MEMORY, 0.4)) == pytest.approx([0.6, 0.4], abs=0.05), "it may come back"

    def test_phases_that_do_not_explain_the_windows_are_not_tried_in_each_of_them_until_the_set_changes(
        self, state: NodeState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = tenant(state, "a"), tenant(state, "b")
        turned = Counters(fp32_util=0.05, dram_bw_util=0.1, integer_util=0.7, sm_util=0.8)
        strange = Counters(fp32_util=0.9, dram_bw_util=0.9, integer_util=0.9, sm_util=0.2)
        signatures = Signatures({})
        for uid, drawn in ((a, [FP32] * 3 + [turned] * 3), (b, [MEMORY] * 3)):
            for each in drawn:
                signatures.learn(state.pods[uid], "NVIDIA H200", window(each, 5.0))
        assert [len(signatures.phases(state.pods[uid], "NVIDIA H200")) for uid in (a, b)] == [2, 1]
        measurer, inferences = Measurer(state, signatures), 0

        def counted(*arguments: Any) -> Any:
            nonlocal inferences
            inferences += 1
            return attribute(*arguments)

        monkeypatch.setattr("gpushare.core.progress.phases.attribute", counted)

        def of_windows(count: int, threads: int) -> int:
            before = inferences
            for _ in range(count):
                measurer.measure(GPU_A, gate(clients=(client(a, threads), client(b))), window(strange))
            return inferences - before

        assert of_windows(20, threads=50) == 21, "the other phase once"
        assert of_windows(5, threads=50) == 5
        assert of_windows(5, threads=40) == 6, "another cap: once more"
        assert of_windows(40, threads=40) == 41, "and after half a minute"

    def test_a_pod_that_lowers_its_own_threads_teaches_nothing_and_is_measured_under_its_own_cap(
        self, state: NodeState
    ) -> None:
        uid = tenant(state, "a", threads="100")
        lowered = make_pod("a", threads="100", phase="Running", env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"})
        assert lowered.uid == uid
        state.put_pod(lowered)
        alone = gate(clients=(client(uid, 100),))
        half = window(mix((FP32, 0.5)))
        profile = SharedProfile(frozenset({uid}), "NVIDIA H200", SoloSignature(FP32, {50: 0.52}))
        for profiles, progress in (({}, None), ({"shop/a": profile}, pytest.approx(0.5, abs=0.05))):
            measurer = self.measurer(state, profiles)
            for _ in range(10):
                found = measurer.measure(GPU_A, alone, half).tenants[uid]
            assert found.progress_ratio == progress
            assert found.profile is None

    def test_a_pod_of_several_processes_is_measured_under_their_parts_together(self, state: NodeState) -> None:
        uid = tenant(state, "a", threads="100")
        half = window(mix((FP32, 0.5)))
        profile = SharedProfile(frozenset({uid}), "NVIDIA H200", SoloSignature(FP32, {50: 0.52}))
        parts = gate(clients=(client(uid, 25), client(uid, 25)))
        found = self.measurer(state, {"shop/a": profile}).measure(GPU_A, parts, half).tenants[uid]
        assert found.progress_ratio == pytest.approx(0.5, abs=0.05)

    @pytest.mark.parametrize(
        ("value", "percentage"),
        [
            ("95", 95),
            ("12.5", 12),
            ("0.4", 1),
            ("100", 100),
            ("0", None),
            ("200", None),
            ("many", None),
            ("nan", None),
        ],
    )
    def test_only_a_percentage_is_taken_for_one(self, value: str, percentage: int | None) -> None:
        assert make_pod("a", env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": value}).own_percentage == percentage
        assert make_pod("a", env={"OTHER": value}).own_percentage is None

    def test_what_was_seen_alone_is_published_until_the_gpushare_keeps_as_good(self, state: NodeState) -> None:
        profiles: dict[str, SharedProfile] = {}
        measurer = Measurer(state, Signatures(profiles))
        a = tenant(state, "a", threads="100")
        alone = gate(clients=(client(a, 100),))

        def published() -> WorkloadSignature | None:
            return measurer.measure(GPU_A, alone, window(FP32)).tenants[a].profile

        assert published() is None, "one window is too little"
        news = [published() for _ in range(10)][-1]
        assert news is not None
        assert (news.gpu_model, news.as_counters()) == ("NVIDIA H200", FP32)
        profiles["shop/a"] = SharedProfile(frozenset({a}), news.gpu_model, SoloSignature(FP32), kept=news)
        assert published() is None
        assert [published() for _ in range(40)][-1] is not None, "a look four times as long is news again"

    def test_nobody_speaks_for_a_workload_of_another_namespace(self, state: NodeState) -> None:
        annotations = {names.FRACTION: "0.25", names.WORKLOAD: "resnet"}
        victim, thief = (
            reduce_pod({"metadata": {"uid": uid, "namespace": place, "name": "a", "annotations": annotations}})
            for uid, place in (("victim", "shop"), ("thief", "bank"))
        )
        forged = SharedProfile(frozenset({"victim"}), "", SoloSignature(MEMORY))
        signatures = Signatures({"bank/forged": forged})
        sample = window(MEMORY)
        for _ in range(10):
            signatures.learn(thief, "NVIDIA H200", sample)
        assert signatures.of(victim, "NVIDIA H200") is None
        assert signatures.news(victim, "NVIDIA H200") is None
        assert signatures.of(thief, "NVIDIA H200") is not None
        known = Signatures({"bank/forged": forged, "shop/own": replace(forged, signature=SoloSignature(FP32))})
        assert known.of(victim, "NVIDIA H200") == SoloSignature(FP32)

    def test_a_stranger_on_the_gpu_makes_progress_unknown(self, state: NodeState) -> None:
        a = tenant(state, "a", threads="100")
        profile = SharedProfile(frozenset({a}), "", SoloSignature(FP32))
        mixed = window(mix((FP32, 0.5), (MEMORY, 0.5)))
        found = self.measurer(state, {"shop/a": profile}).measure(
            GPU_A, gate(clients=(client(a, 100), client(None))), mixed
        )
        assert found.tenants[a].progress_ratio is None

    def test_the_models_expectation_is_asked_with_the_caps_that_are_in_force(self, state: NodeState) -> None:
        asked: list[Question] = []

        def expected(uuid: str, question: Question) -> list[Prior]:
            asked.append(question)
            return [Prior(0.5, 0.05), Prior(0.7, 0.05)]

        a, b = tenant(state, "a"), tenant(state, "b")
        profiles = {
            "shop/a": SharedProfile(frozenset({a}), "", SoloSignature(FP32)),
            "shop/b": SharedProfile(frozenset({b}), "", SoloSignature(MEMORY)),
        }
        mixed = window(mix((FP32, 0.5), (MEMORY, 0.7)))
        both = gate(clients=(client(a, 30), client(b, None)))
        found = Measurer(state, Signatures(profiles), expected).measure(GPU_A, both, mixed)
        assert [found.tenants[uid].predicted_progress_ratio for uid in (a, b)] == [0.5, 0.7]
        [question] = asked
        assert (question.gpu_model, question.tenants) == ("NVIDIA H200", (a, b))
        assert [load.thread_percentage for load in question.loads] == [30, 50]  # in force; else as decided

    def test_memory_is_the_pods_own_or_absent(self, state: NodeState) -> None:
        a, b = tenant(state, "a"), tenant(state, "b")
        status = gate(clients=(client(a, used=300), client(a, used=200), client(b, used=None)))
        found = self.measurer(state).measure(GPU_A, status, None).tenants
        assert (found[a].memory_used_mib, found[a].clients) == (500, 2)
        assert found[b].memory_used_mib is None

    def test_a_pod_with_whole_gpus_owns_their_counters(self, state: NodeState) -> None:
        a = tenant(state, "a", gpu=f"{GPU_A},{GPU_B}", share=200, threads="100")
        found = self.measurer(state).measure(GPU_A, gate(), window(FP32)).tenants[a]
        assert (found.progress_ratio, found.clients, found.pipes["fp32"]) == (None, None, 0.6)

    def test_a_gpushare_without_a_profile_is_passed_over(self) -> None:
        assert reduce_gpushare({"status": {"phase": "Pending"}}) is None
        shared = reduce_gpushare(
            {
                "status": {
                    "profile": {
                        "gpuModel": "NVIDIA H200",
                        "counters": {"fp32_util": 0.5},
                        "capCurve": [{"threadPercentage": 50, "progress": 0.6}],
                    },
                    "placements": [{"podUid": "u1", "pod": "a"}],
                }
            }
        )
        assert shared is not None
        assert shared.signature == SoloSignature(Counters(fp32_util=0.5), {50: 0.6})
        assert shared.pod_uids == {"u1"}

    def test_a_profile_that_contradicts_itself_is_as_good_as_none_and_gives_way(self, state: NodeState) -> None:
        a = tenant(state, "a", threads="100")
        profile = {"gpuModel": "NVIDIA H200", "counters": {"sm_util": 0.1, "fp32_util": 0.6}, "windowSeconds": 900}
        shared = reduce_gpushare({"status": {"profile": profile, "placements": [{"podUid": a, "pod": "a"}]}})
        assert shared is not None
        assert shared.signature is None
        known = Signatures({"shop/a": shared})
        for _ in range(3):
            known.learn(state.pods[a], "NVIDIA H200", window(FP32, 6.0))
        found = known.of(state.pods[a], "NVIDIA H200")
        assert found is not None
        assert found.counters.as_dict() == pytest.approx(FP32.as_dict())
        assert known.news(state.pods[a], "NVIDIA H200") is not None


class BrokenDevices:
    """Devices that the test breaks."""

    def __init__(self, gpus: tuple[GpuInfo, ...]) -> None:
        self.gpus = gpus
        self.error: DevicesError | None = None

    def list(self) -> tuple[GpuInfo, ...]:
        if self.error is not None:
            raise self.error
        return self.gpus

    def driver_version(self) -> str | None:
        return "580"

    def health(self, uuid: str) -> GpuHealth:
        return WELL

    def sample(self, uuid: str) -> GpuSample | None:
        return window(FP32)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        return ()

    def close(self) -> None: ...


class TestSampler:
    def make(
        self, state: NodeState, clock: Clock, tmp_path: Path, devices: BrokenDevices, opens: list[bool]
    ) -> Sampler:
        def open_devices() -> BrokenDevices:
            if not opens.pop(0):
                raise DevicesError("NVML cannot be used: Driver Not Loaded", retryable=True)
            return devices

        gates = Gates(tmp_path, clock)
        return Sampler(
            state, open_devices, gates, Measurer(state, Signatures({})), clock=clock, period_seconds=1.0
        )

    async def test_no_driver_is_said_and_tried_again_with_back_off(
        self, clock: Clock, tmp_path: Path, state: NodeState
    ) -> None:
        devices = BrokenDevices(tuple(state.gpus.values()))
        empty = NodeState(clock)
        sampler = self.make(empty, clock, tmp_path, devices, [False, False, False, True])
        delays = [await sampler.step() for _ in range(4)]
        assert delays == [2.0, 4.0, 8.0, 1.0]
        assert empty.problem == ""
        assert set(empty.gpus) == {GPU_A, GPU_B}
        assert empty.counts.errors == {"devices": 3}

    async def test_a_gpu_that_vanishes_stays_known_and_unhealthy(
        self, clock: Clock, tmp_path: Path, state: NodeState
    ) -> None:
        for uuid in (GPU_A, GPU_B):
            place = GpuDirectory.of(tmp_path, uuid)
            place.create()
            write_status(place, GateStatus(uuid, GateState.ACTIVE, 1.0))
        devices = BrokenDevices(tuple(state.gpus.values()))
        sampler = self.make(state, clock, tmp_path, devices, [True, True])
        await sampler.step()
        assert state.health[GPU_B] == WELL
        whole = devices.gpus
        devices.gpus = whole[:1]
        await sampler.step()
        assert "does not list" in state.health[GPU_B].reason
        assert GPU_B in state.gpus
        assert GPU_B not in sampler.measures  # and no figure of before
        devices.error = DevicesError("GPU is lost", retryable=True)
        await sampler.step()
        assert "GPU is lost" in state.health[GPU_A].reason
        assert sampler.measures == {}
        devices.error, devices.gpus = None, whole
        await sampler.step()
        assert state.health == {GPU_A: WELL, GPU_B: WELL}

    async def test_a_window_across_a_change_of_tenants_is_no_window(
        self, clock: Clock, tmp_path: Path, state: NodeState
    ) -> None:
        devices = BrokenDevices(tuple(state.gpus.values()))
        sampler = self.make(state, clock, tmp_path, devices, [True])
        await sampler.step()
        await sampler.step()
        assert sampler.measures[GPU_A].sample is not None
        tenant(state, "a")
        await sampler.step()
        assert sampler.measures[GPU_A].sample is None
        await sampler.step()
        assert sampler.measures[GPU_A].sample is not None
