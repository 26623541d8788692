"""What the agent concludes: decisions, health, notices, and when it writes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deviceplugin.fakes import GPU_A, GPU_B, WELL, Clock, client, gate, make_pod, tenant

from gpushare.core.api import Ceilings, GpuNodeStatus, JobClass, MpsFault, MpsState, WorkloadSignature, names
from gpushare.core.gpu import GpuHealth, Health
from gpushare.mps.layout import GpuDirectory, decisions_reader, write_status
from gpushare.mps.status import (
    GateState,
    HeldStatus,
    HoldReason,
    Mismatch,
    MismatchKind,
    SelfTest,
    SelfTestResult,
)
from gpushare.runtime.wakeups import JointWakeups
from gpushare_deviceplugin.decisions import DecisionWriter, decide
from gpushare_deviceplugin.gates import (
    RECENT_SECONDS,
    Gates,
    RecentTenants,
    conclude_health,
    health_notices,
    mps_status,
    notices,
)
from gpushare_deviceplugin.state import FORGOTTEN_SECONDS, PRESUMED_SECONDS, NodeState, problem_in_words
from gpushare_deviceplugin.status import (
    LOOK_SECONDS,
    GpuMeasure,
    StatusWriter,
    TenantMeasure,
    build_status,
    tenants_of,
)


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

    @pytest.mark.parametrize(
        ("ahead_seconds", "ends_after", "clock_errors"),
        [(0, 27, 0), (-0.9, 26.1, 0), (-5, 22, 1), (-600, -573, 1), (600, 27, 0)],
        ids=["right", "nearly right", "behind", "far behind", "ahead"],
    )
    def test_a_clock_that_is_behind_ends_a_deleted_pods_clients_before_kubelets_kill_too(
        self, ahead_seconds: float, ends_after: float, clock_errors: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Before: the API server's clock alone counted, so they ended after the kill on a node 3 s behind it."""
        deleted_at = 1000.0  # by the API server's clock; kubelet kills by its timer, 30 s after it has seen that
        state = NodeState(lambda: 0.0, wall=lambda: deleted_at + ahead_seconds)
        deletion = {"deletionTimestamp": "1970-01-01T00:17:10Z", "deletionGracePeriodSeconds": 30}
        for name in ("a", "b"):
            state.put_pod(make_pod(name, phase="Running"))
            for _ in range(2):  # what changes later does not count the period anew
                state.put_pod(make_pod(name, phase="Running", metadata=deletion))
        assert [pod.ends_at for pod in state.pods.values()] == pytest.approx([deleted_at + ends_after] * 2)
        assert state.counts.errors.get("clock", 0) == 2 * clock_errors
        assert caplog.text.count("this node's clock is") == clock_errors

    def test_a_second_deletion_with_a_shorter_period_counts_from_when_it_is_seen(self) -> None:
        now = 400.0  # ten minutes behind
        state = NodeState(lambda: 0.0, wall=lambda: now)
        state.put_pod(make_pod("a", phase="Running"))
        for elapsed, grace, ends_at in ((0, 30, 427.0), (5, 10, 412.0), (13, 8, 412.0)):
            now = 400.0 + elapsed
            stamp = f"1970-01-01T00:{16 + (40 + grace) // 60}:{(40 + grace) % 60:02d}Z"
            deletion = {"deletionTimestamp": stamp, "deletionGracePeriodSeconds": grace}
            state.put_pod(make_pod("a", phase="Running", metadata=deletion))
            assert state.pods["uid-a"].ends_at == ends_at

    @pytest.mark.parametrize(("grace", "phase"), [(0, "Running"), (30, "Running"), (0, "Pending")])
    def test_a_pod_deleted_by_force_is_ended_at_once_though_the_api_has_forgotten_it(
        self, state: NodeState, clock: Clock, monkeypatch: pytest.MonkeyPatch, grace: int, phase: str
    ) -> None:
        """Before: kubelet killed it seconds later, with a kernel under way, which ended its neighbours."""
        monkeypatch.setattr(state, "_wall", lambda: 1000.0)
        state.put_pod(make_pod("a", phase=phase))
        deletion = {
            "deletionTimestamp": f"1970-01-01T00:16:{40 + grace % 20}Z",
            "deletionGracePeriodSeconds": grace,
        }
        state.put_pod(make_pod("a", phase=phase, metadata=deletion))
        state.drop_pod("uid-a")
        assert not state.pods
        assert decide(state)[GPU_A].pods["uid-a"].ends_at == 1000.0
        clock.now += FORGOTTEN_SECONDS
        assert decide(state)[GPU_A].pods == {}

    def test_a_pod_that_only_leaves_the_watch_or_has_ended_is_not_ended_again(self, state: NodeState) -> None:
        """Its label may have been taken off: it runs on. Whoever has ended has no clients left."""
        deletion = {"deletionTimestamp": "1970-01-01T00:16:40Z", "deletionGracePeriodSeconds": 0}
        state.put_pod(make_pod("unlabelled", phase="Running"))
        state.put_pod(make_pod("ended", phase="Succeeded", metadata=deletion))
        for name in ("unlabelled", "ended"):
            state.drop_pod(f"uid-{name}")
        assert decide(state)[GPU_A].pods == {}

    def test_a_pod_that_a_list_brings_back_is_decided_as_the_list_has_it(
        self, state: NodeState, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(state, "_wall", lambda: 1000.0)
        deletion = {"deletionTimestamp": "1970-01-01T00:17:10Z", "deletionGracePeriodSeconds": 30}
        state.put_pod(make_pod("a", phase="Running", metadata=deletion))
        state.drop_pod("uid-a")
        state.put_pod(make_pod("a", phase="Running", metadata=deletion))
        assert decide(state)[GPU_A].pods["uid-a"].ends_at == 1027.0

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

    def test_each_pod_has_its_shares_part_of_the_clients(self, state: NodeState) -> None:
        state.put_pod(make_pod("quarter", share=25))
        state.put_pod(make_pod("least", share=1))
        state.put_pod(make_pod("two-gpus", share=200))
        state.put_pod(make_pod("admitted-before", share=1, **{names.PROCESSES: "3"}))
        decided = decide(state)[GPU_A].pods
        clients = {uid: decision.clients for uid, decision in decided.items()}
        assert clients == {"uid-quarter": 12, "uid-least": 1, "uid-two-gpus": 48, "uid-admitted-before": 1}

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

    @pytest.mark.parametrize(
        "broken",
        [{"threads": "lots"}, {names.CLASS: "fast"}, {names.PROCESSES: "many"}],
        ids=["decision", "class", "processes"],
    )
    def test_a_pod_with_a_bad_annotation_ends_like_any_other(
        self, state: NodeState, broken: dict[str, str]
    ) -> None:
        """Before, nothing of it was seen any more: its clients were not ended before kubelet killed them, and once
        it had succeeded it had its memory and a decision all the same."""
        valid = {names.CLASS: "latency", names.PROCESSES: "2", names.WORKLOAD: "web"}
        state.put_pod(make_pod("a", phase="Pending", **valid))
        before = decide(state)[GPU_A].pods["uid-a"]
        state.put_pod(make_pod("a", phase="Running", **{**valid, **broken}))
        pod = state.pods["uid-a"]
        assert pod.problem
        assert (pod.phase, pod.job_class, pod.has_class) == ("Running", JobClass.LATENCY, True)
        assert (pod.processes, pod.workload) == (2, "shop/web")
        assert decide(state)[GPU_A].pods["uid-a"] == before
        deletion = {"deletionTimestamp": "2026-11-21T11:00:00Z", "deletionGracePeriodSeconds": 30}
        state.put_pod(make_pod("a", phase="Running", metadata=deletion, **{**valid, **broken}))
        ends_at = decide(state)[GPU_A].pods["uid-a"].ends_at
        assert ends_at is not None
        state.put_pod(make_pod("a", phase="Succeeded", metadata=deletion, **{**valid, **broken}))
        assert not decide(state)[GPU_A].pods
        assert not state.holding(GPU_A)

    def test_what_is_decided_anew_counts_though_another_annotation_is_bad(self, state: NodeState) -> None:
        state.put_pod(make_pod("a", threads="50"))
        state.put_pod(make_pod("a", threads="30", **{names.CLASS: "fast"}))
        assert decide(state)[GPU_A].pods["uid-a"].thread_percentage == 30
        state.put_pod(make_pod("a", threads="20"))
        assert decide(state)[GPU_A].pods["uid-a"].thread_percentage == 20
        assert not state.pods["uid-a"].problem

    def test_a_bad_annotation_is_told_with_what_follows(self) -> None:
        assert problem_in_words(make_pod("a")) == ""
        assert problem_in_words(make_pod("a", threads="lots")) == (
            "annotation gpushare.io/thread-percentage: 'lots' is not 1 to 100; no decision can be read, "
            "so its processes wait at the gate"
        )
        told = problem_in_words(make_pod("a", **{names.CLASS: "fast"}))
        assert told.startswith('annotation gpushare.io/class: "fast" is not a class')
        assert told.endswith("; what was decided for the pod stays in force")

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

    def test_one_that_runs_keeps_it_while_no_list_names_it(self, state: NodeState, clock: Clock) -> None:
        """Kubelet restarts or PodResources fails just after the call; before, it was no tenant after 30 s."""
        state.set_allocations({})
        state.put_pod(make_pod("a"))
        assert state.presume({GPU_A: 25}) is not None
        state.put_pod(make_pod("a", phase="Running"))
        clock.now += PRESUMED_SECONDS + 1
        assert [pod.name for pod, _ in tenants_of(state, GPU_A)] == ["a"]
        assert [pod.name for pod in state.asking()] == ["a"], "a kubelet without its checkpoint may ask anew"
        state.set_allocations({"uid-b": {GPU_A: 75}})
        assert [pod.name for pod, _ in tenants_of(state, GPU_A)] == ["a"]
        changed = state.subscribe()
        state.put_pod(make_pod("b", share=80, phase="Running"))
        state.set_allocations({"uid-b": {GPU_A: 80}})  # kubelet has freed its ids: its containers have ended
        assert [(pod.name, share) for pod, share in tenants_of(state, GPU_A)] == [("b", 80)]
        assert changed.is_set()

    def test_when_another_pod_had_the_shares_the_presumed_one_waits_again(self, state: NodeState) -> None:
        """In a burst kubelet admits pods in an order of its own; whoever was forgotten got another GPU's ids."""
        state.set_allocations({})
        for number, name in enumerate(("first", "second", "third")):
            state.put_pod(make_pod(name, decided_at=f"2026-11-21T10:00:0{number}Z"))
        for meant in ("first", "second"):
            presumed = state.presume({GPU_A: 25})
            assert presumed is not None
            assert presumed.name == meant
        state.set_allocations({"uid-third": {GPU_A: 25}})
        assert {pod.name for pod in state.pending()} == {"second"}
        state.set_allocations({"uid-third": {GPU_A: 25}, "uid-second": {GPU_A: 25}})
        assert {pod.name for pod in state.pending()} == {"first"}
        state.set_allocations({"uid-third": {GPU_A: 25}, "uid-second": {GPU_A: 25}, "uid-first": {GPU_B: 25}})
        assert state.pending() == []

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

    def test_it_is_served_once_nobody_of_its_size_waits(self, state: NodeState) -> None:
        """A kubelet that has lost its checkpoint allocates anew for pods whose phase is still Running."""
        listed = make_pod("listed", phase="Running", decided_at="2026-11-21T09:00:00Z")
        state.put_pod(listed)
        state.set_allocations({"uid-listed": {GPU_A: 25}})
        state.put_pod(make_pod("runs", phase="Running", decided_at="2026-11-21T10:00:00Z"))
        state.put_pod(make_pod("over", phase="Failed", decided_at="2026-11-21T09:00:00Z"))
        state.put_pod(make_pod("waits", decided_at="2026-11-21T11:00:00Z"))
        assert [pod.name for pod in state.asking()] == ["waits", "runs"]
        assert [pod.name for pod in state.fitting({GPU_A: 25})] == ["waits"], "its limit alone counts at its call"
        for name in ("waits", "runs"):
            presumed = state.presume({GPU_A: 25})
            assert presumed is not None
            assert presumed.name == name
        assert state.asking() == []

    def test_one_that_a_later_list_lacks_may_ask_again_and_keeps_its_gpu(self, state: NodeState) -> None:
        state.put_pod(make_pod("a", phase="Running"))
        state.set_allocations({"uid-a": {GPU_A: 25}})
        assert state.asking() == []
        state.set_allocations({})
        assert [pod.name for pod in state.asking()] == ["a"]
        assert state.gpus_of(state.pods["uid-a"]) == (GPU_A,)


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

    def test_who_began_a_fault_is_in_the_gpunode(self) -> None:
        shown = mps_status(gate(last_fault_at=1_795_000_000.0, last_fault_by="u1"))
        assert shown.last_fault == MpsFault("2026-11-18T11:06:40Z", "u1")
        assert mps_status(gate()).last_fault is None

    def test_a_pod_of_too_many_processes_is_told_how_to_divide_its_cap(self) -> None:
        (told,) = notices(
            gate(), gate(waiting_connections=(HeldStatus(7, "u1", HoldReason.POD_CAP, 2.0),)), ["u1"]
        )
        assert (told.pod_uid, told.reason) == ("u1", "HeldPodCapInUse")
        assert "waits at the gate" in told.note
        assert "gpushare.io/processes" in told.note
        (told,) = notices(
            gate(), gate(waiting_connections=(HeldStatus(7, "u1", HoldReason.POD_CLIENTS, 2.0),)), ["u1"]
        )
        assert "gpushare.io/processes" in told.note

    def test_what_is_new_is_told_once_to_those_concerned(self) -> None:
        old = gate(gate_started_at=1.0)
        waiting = HeldStatus(7, "u1", HoldReason.CLIENTS, 2.0)
        wrong = Mismatch(MismatchKind.STALE_CEILING, "u2", 8, "process 8 connected outside its turn")
        new = gate(
            gate_started_at=1.0,
            faults=1,
            last_fault="illegal access",
            waiting_connections=(waiting,),
            mismatches=(wrong,),
        )
        told = notices(old, new, ["u1", "u2"])
        assert all("server, or on its way to it: " in n.note for n in told if n.reason == "GpuFault")
        assert {(n.pod_uid, n.reason) for n in told} == {
            ("u1", "GpuFault"),
            ("u2", "GpuFault"),
            (None, "GpuFault"),
            ("u1", "HeldTooManyClients"),
            ("u2", "MismatchStaleCeiling"),
        }
        assert notices(new, new, ["u1", "u2"]) == ()
        late = gate(gate_started_at=1.0, faults=2, last_fault="illegal access", last_fault_pods=("u3", "u2"))
        assert [n.pod_uid for n in notices(new, late, ["u2"])] == ["u3", "u2", None]
        assert [n.pod_uid for n in notices(new, late, ["u2", "came-after"])] == ["u3", "u2", None]
        more = replace(late, last_fault_pods=("u3", "u2", "u4"))  # turned away a moment later
        assert [(n.pod_uid, n.reason) for n in notices(late, more, ["u2", "u4"])] == [("u4", "GpuFault")]
        assert notices(more, more, ["u2", "u4"]) == ()
        two = replace(late, faults=3)  # the record is of the last one
        assert [n.pod_uid for n in notices(new, two, ["u1", "u2"])] == ["u1", "u2", "u3", None]
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

    async def test_it_looks_at_what_is_due_after_a_round_of_the_sampler(
        self, state: NodeState, clock: Clock
    ) -> None:
        sink, wakeups = Sink(), JointWakeups()
        clients = 1

        def build() -> GpuNodeStatus:
            return build_status(state, {GPU_A: gate(clients=(client("x"),) * clients)}, {})

        running = asyncio.create_task(StatusWriter(state, build, sink, clock, wakeups).run())
        for written in (1, 2):
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(sink.written) == written
            clients += 1
            clock.now += 10
            wakeups.wake(LOOK_SECONDS)
        running.cancel()

    async def test_at_once_when_a_pods_last_process_has_left_but_that_every_ten_seconds(
        self, state: NodeState, clock: Clock
    ) -> None:
        """The extender chooses its cap anew then; a pod whose programs come and go costs one write more in ten."""
        sink = Sink()
        tenant(state, "a")
        clients: int | None = 0

        async def step(count: int | None) -> int:
            nonlocal clients
            clients = count
            assert await writer.step()
            return len(sink.written)

        def build() -> GpuNodeStatus:
            return build_status(state, {}, {GPU_A: GpuMeasure(None, {"uid-a": TenantMeasure(clients)})})

        writer = StatusWriter(state, build, sink, clock)
        assert await step(0) == 1
        clock.now += 1
        assert await step(2) == 1, "processes that came can wait"
        clock.now += 9
        assert await step(2) == 2
        clock.now += 1
        assert await step(1) == 2, "one is left"
        assert await step(None) == 2, "how many is not known"
        assert await step(0) == 3
        assert sink.written[-1].gpus[0].tenants[0].clients == 0
        for _ in range(9):
            clock.now += 1
            assert await step(1) == 3
            assert await step(0) == 3, "it is known to have come to that"
        clock.now += 1
        assert await step(1) == 4, "a figure, after ten seconds"
        assert await step(0) == 5, "and ten seconds after the last early one"
        clock.now += 1
        assert await step(1) == 5
        assert await step(0) == 5

    async def test_at_once_when_a_workload_was_profiled_but_that_every_ten_seconds(
        self, state: NodeState, clock: Clock
    ) -> None:
        """Three of six profiles that were taken on an H200 were lost: their pods ended soon after."""
        sink = Sink()
        tenant(state, "a")
        tenant(state, "b")
        profiled: dict[str, WorkloadSignature] = {}

        def build() -> GpuNodeStatus:
            tenants = {uid: TenantMeasure(1, profile=profiled.get(uid)) for uid in ("uid-a", "uid-b")}
            return build_status(state, {}, {GPU_A: GpuMeasure(None, tenants)})

        writer = StatusWriter(state, build, sink, clock)
        assert await writer.step()
        clock.now += 1
        profiled["uid-a"] = WorkloadSignature("NVIDIA H200", {"sm_util": 0.5}, window_seconds=5.0)
        assert await writer.step()
        assert len(sink.written) == 2
        assert {each.pod_uid: each.profile for each in sink.written[-1].gpus[0].tenants} == {
            "uid-a": profiled["uid-a"],
            "uid-b": None,
        }
        clock.now += 1
        profiled["uid-a"] = replace(profiled["uid-a"], window_seconds=10.0)
        profiled["uid-b"] = replace(profiled["uid-a"], window_seconds=1.0)
        assert await writer.step()
        assert len(sink.written) == 2, "the other one waits, and so does a longer window"
        clock.now += 9
        assert await writer.step()
        assert len(sink.written) == 3
