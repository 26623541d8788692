"""The throttle on a simulated freezer, with time as argument: whom it freezes, whom it refuses, what it says."""

import errno
import json
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare.core.api import JobClass
from gpushare.mps.asks import LEASE_SECONDS, ThrottleAsk, ThrottleAsks
from gpushare.mps.duty import MAX_FREEZE_SECONDS, MAX_STOP_SECONDS
from gpushare.mps.freezer import FreezeState, SimulatedFreezer
from gpushare.mps.frozen import recorded, thaw_recorded
from gpushare.mps.layout import (
    Decisions,
    GpuDirectory,
    PodDecision,
    throttle_in_force,
    throttled_reader,
    write_atomically,
    write_decisions,
    write_throttle,
)
from gpushare.mps.status import GateState, GateStatus, PodThrottle, ThrottleRefusal, ThrottleStatus
from gpushare.mps.throttle import Throttle

POD, OTHER, SERVICE = "pod", "other", "service"


class Node:
    """Two GPUs, pods on the first, and a clock that the test turns."""

    def __init__(self, base) -> None:
        self.base, self.now = base, 1000.0
        self.gpus = [GpuDirectory.of(base, f"GPU-{index}") for index in range(2)]
        for gpu in self.gpus:
            gpu.create()
        self.freezer = SimulatedFreezer()
        for uid in (POD, OTHER, SERVICE):
            self.freezer.add(uid)
        self.decide(0, pod=JobClass.THROUGHPUT, other=JobClass.THROUGHPUT, service=JobClass.LATENCY)
        self.throttle = Throttle(base, self.freezer)
        self.frozen_seconds = defaultdict[str, float](float)
        self.longest = defaultdict[str, float](float)
        self._began: dict[str, float] = {}

    def decide(self, gpu: int, **pods: JobClass) -> None:
        decisions = Decisions({uid: PodDecision(50, 1024, job_class) for uid, job_class in pods.items()})
        write_decisions(self.gpus[gpu], decisions)

    def ask(self, gpu: int = 0, **pods: ThrottleAsk) -> None:
        write_throttle(self.gpus[gpu], ThrottleAsks(pods, self.now))

    def look(self) -> float:
        due = self.throttle.look(self.now)
        for uid, state in self.freezer.cgroups.items():
            if state is FreezeState.FROZEN:
                began = self._began.setdefault(uid, self.now)
                self.longest[uid] = max(self.longest[uid], self.now - began)
            else:
                self._began.pop(uid, None)
        return due

    def run(self, seconds: float, **pods: ThrottleAsk) -> None:
        """Time passes; where pods are given the agent asks for them every second."""
        end, ask_at = self.now + seconds, self.now
        while self.now < end:
            if pods and self.now >= ask_at:
                self.ask(**pods)
                ask_at = self.now + 1.0
            due = min(end, self.look())
            assert due > self.now
            for uid, state in self.freezer.cgroups.items():
                if state is FreezeState.FROZEN:
                    self.frozen_seconds[uid] += due - self.now
            self.now = due

    def status(self, gpu: int = 0) -> ThrottleStatus:
        return throttle_in_force(throttled_reader(self.gpus[gpu]), self.now)

    def refused(self, gpu: int = 0) -> dict[str, ThrottleRefusal]:
        return {one.pod_uid: one.reason for one in self.status(gpu).refused}


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_pods_run_for_the_share_of_time_that_is_asked_for(node):
    node.run(20.0, pod=ThrottleAsk(0.5), other=ThrottleAsk(0.2))
    assert node.frozen_seconds[POD] == pytest.approx(10.0, abs=0.6)
    assert node.frozen_seconds[OTHER] == pytest.approx(16.0, abs=0.6)
    assert max(node.longest.values(), default=0.0) <= MAX_FREEZE_SECONDS + 1e-6
    status = node.status()
    assert status.pods == (PodThrottle(OTHER, 0.2), PodThrottle(POD, 0.5))
    assert status.problem == ""
    assert status.freezes >= 40
    assert status.refused == ()


def test_a_reading_stops_a_pod_and_says_so(node):
    node.ask(pod=ThrottleAsk(stopped_until=node.now + 1.0))
    node.run(0.5)
    assert node.freezer.cgroups[POD] is FreezeState.FROZEN
    assert node.status().pods == (PodThrottle(POD, 1.0, is_stopped=True),)
    node.run(1.0)
    assert node.freezer.cgroups[POD] is FreezeState.THAWED
    assert node.frozen_seconds[POD] == pytest.approx(1.0, abs=0.01)
    assert node.longest[POD] <= MAX_STOP_SECONDS


def test_a_pod_that_somebody_else_thawed_is_not_called_stopped(node):
    node.ask(pod=ThrottleAsk(stopped_until=node.now + 1.0))
    node.run(0.3)
    assert node.status().pods[0].is_stopped
    node.freezer.cgroups[POD] = FreezeState.THAWED
    node.run(0.1)
    assert node.status().pods == (PodThrottle(POD, 1.0),)


def test_the_status_says_which_process_wrote_it(node):
    began = node.now
    node.run(5.0)
    assert (node.status().started_at, node.status().beat) == (began, pytest.approx(began + 5.0, abs=1.0))
    node.throttle = Throttle(node.base, node.freezer)
    node.look()
    assert node.status().started_at == began + 5.0
    told = node.status().to_json()
    del told["started_at"]
    assert ThrottleStatus.from_json({**told, "of_a_later_version": 1}).started_at == 0.0


def test_a_silent_agent_lets_everyone_run(node):
    node.ask(pod=ThrottleAsk(0.1))
    node.run(LEASE_SECONDS)
    frozen = node.frozen_seconds[POD]
    assert frozen > 3.0
    node.look()
    assert node.throttle.frozen == frozenset()
    node.run(60.0)
    assert node.frozen_seconds[POD] == frozen
    assert node.status().pods == ()
    assert recorded(node.base) == ()


def test_a_pod_that_a_killed_throttle_froze_and_that_could_not_be_thawed_at_once_is_thawed_later(node, caplog):
    """Before: never, as long as the successor lived, which took it for frozen by others."""
    node.ask(pod=ThrottleAsk(stopped_until=node.now + 1.0))
    node.look()
    assert node.freezer.cgroups[POD] is FreezeState.FROZEN
    node.freezer.error = OSError(errno.ENFILE, "Too many open files in system")
    thaw_recorded(node.base, node.freezer)  # as each throttle does when it starts
    node.throttle = Throttle(node.base, node.freezer)
    node.ask(other=ThrottleAsk(0.5))
    node.run(4.0)
    assert node.freezer.cgroups[POD] is FreezeState.FROZEN
    assert sum(f"cannot thaw pod {POD}" in message for message in caplog.messages) == 1, "not each second"
    node.freezer.error = None
    node.run(1.0)
    assert node.freezer.cgroups[POD] is FreezeState.THAWED
    assert {mark.name for mark in recorded(node.base)} <= {OTHER}, "those that it froze itself are its own"
    node.run(3.0, pod=ThrottleAsk(0.5))
    assert node.refused() == {}


def test_a_latency_pod_and_one_that_is_not_decided_here_are_never_frozen(node):
    node.decide(1, stranger=JobClass.THROUGHPUT)
    node.freezer.add("stranger")
    node.run(3.0, service=ThrottleAsk(0.1), stranger=ThrottleAsk(0.1), pod=ThrottleAsk(0.5))
    assert node.frozen_seconds[SERVICE] == 0.0
    assert node.freezer.cgroups["stranger"] is FreezeState.THAWED
    assert node.refused() == {SERVICE: ThrottleRefusal.LATENCY, "stranger": ThrottleRefusal.NO_DECISION}
    assert node.status().refusals == {"LatencyClass": 1, "NoDecision": 1}, "counted once, not at each look"
    assert node.status().pods == (PodThrottle(POD, 0.5),)


def test_a_pod_that_becomes_a_latency_pod_is_thawed(node):
    node.ask(pod=ThrottleAsk(0.2))
    node.look()
    assert node.throttle.frozen == {POD}
    node.decide(0, pod=JobClass.LATENCY)
    node.look()
    assert node.freezer.cgroups[POD] is FreezeState.THAWED
    assert node.refused() == {POD: ThrottleRefusal.LATENCY}


def test_a_pod_of_a_class_that_only_a_later_agent_knows_is_not_frozen(node):
    decision = {"thread_percentage": 25, "memory_mib": 1024, "job_class": "batch"}
    write_atomically(node.gpus[0].decisions, {"version": 1, "pods": {POD: decision}})
    node.run(3.0, pod=ThrottleAsk(0.1))
    assert node.frozen_seconds[POD] == 0.0
    assert node.refused() == {POD: ThrottleRefusal.UNKNOWN_CLASS}


def test_a_pod_is_throttled_on_one_gpu_at_a_time(node):
    node.decide(1, pod=JobClass.THROUGHPUT)
    node.ask(0, pod=ThrottleAsk(0.5))
    node.ask(1, pod=ThrottleAsk(0.5))
    node.run(3.0)
    assert node.longest[POD] <= MAX_FREEZE_SECONDS + 1e-6
    assert node.refused(1) == {POD: ThrottleRefusal.ANOTHER_GPU}
    assert node.refused(0) == {}


def test_a_pod_without_a_cgroup_is_told_and_taken_up_when_it_has_one(node):
    node.freezer.remove(POD)
    node.run(2.0, pod=ThrottleAsk(0.5))
    assert node.refused() == {POD: ThrottleRefusal.NO_CGROUP}
    assert node.status().pods == ()
    node.freezer.add(POD)
    node.run(3.0, pod=ThrottleAsk(0.5))
    assert node.frozen_seconds[POD] > 0.5
    assert node.refused() == {}
    assert node.status().refusals == {"NoCgroup": 1}


def test_a_pod_that_somebody_else_froze_is_told_and_left_alone(node):
    node.freezer.freeze(node.freezer.find(POD))
    writes = node.freezer.writes
    node.run(3.0, pod=ThrottleAsk(0.5))
    assert node.freezer.writes == writes
    assert node.refused() == {POD: ThrottleRefusal.FROZEN_BY_OTHERS}
    node.freezer.thaw(node.freezer.find(POD))
    node.run(3.0, pod=ThrottleAsk(0.5))
    assert node.refused() == {}


def test_a_freezer_that_cannot_be_written_is_said_once_and_stops_nothing_else(node, caplog):
    node.freezer.error = OSError(errno.EROFS, "Read-only file system")
    node.run(5.0, pod=ThrottleAsk(0.5), service=ThrottleAsk(0.5))
    assert "Read-only" in node.status().problem
    assert node.refused() == {POD: ThrottleRefusal.NOT_WRITABLE, SERVICE: ThrottleRefusal.LATENCY}
    assert node.status().refusals == {"FreezerNotWritable": 1, "LatencyClass": 1}
    assert caplog.text.count("no pod can be throttled on this node") == 1
    assert caplog.text.count("is not throttled") == 2
    node.freezer.error = None
    node.run(5.0, pod=ThrottleAsk(0.5))
    assert node.status().problem == ""
    assert node.frozen_seconds[POD] > 1.0


def test_a_pod_that_sticks_in_freezing_is_thawed_reported_and_tried_again(node):
    node.freezer.sticks[POD] = 10**6
    node.run(4.0, pod=ThrottleAsk(0.2))
    assert node.refused() == {POD: ThrottleRefusal.STUCK}
    assert node.status().refusals == {"StuckInFreezing": 1}
    del node.freezer.sticks[POD]
    node.run(4.0, pod=ThrottleAsk(0.2))
    assert node.refused() == {}


def test_a_broken_file_counts_for_nothing_new_and_the_lease_goes_on(node, caplog):
    node.ask(pod=ThrottleAsk(0.2))
    node.run(1.0)
    node.gpus[0].throttle.write_text(
        json.dumps({"version": 1, "beat": node.now, "pods": {POD: {"duty_ratio": 7}}})
    )
    node.run(LEASE_SECONDS)
    node.look()
    assert node.throttle.frozen == frozenset()
    assert "duty_ratio 7 is not 0 to 1" in caplog.text


def test_a_gpu_that_appears_later_is_throttled_too(node):
    node.run(0.5)
    late = GpuDirectory.of(node.base, "GPU-9")
    late.create()
    node.gpus.append(late)
    node.freezer.add("new")
    node.decide(2, new=JobClass.THROUGHPUT)
    for _ in range(3):
        node.ask(2, new=ThrottleAsk(0.2))
        node.run(1.0)
    assert node.status(2).pods == (PodThrottle("new", 0.2),)
    assert node.status(2).freezes >= 2


def test_the_end_thaws_everyone(node):
    node.ask(pod=ThrottleAsk(0.2), other=ThrottleAsk(stopped_until=node.now + 1.0))
    node.look()
    assert node.throttle.frozen == {POD, OTHER}
    assert node.throttle.thaw_all()
    assert set(node.freezer.cgroups.values()) == {FreezeState.THAWED}
    assert recorded(node.base) == ()


def test_the_gates_status_carries_it_and_a_later_versions_reason_is_read_as_other(node):
    node.run(2.0, pod=ThrottleAsk(0.5), service=ThrottleAsk(0.5))
    status = GateStatus("GPU-0", GateState.ACTIVE, 1.0, throttle=node.status())
    data = json.loads(json.dumps(status.to_json()))
    assert GateStatus.from_json(data) == status
    data["throttle"]["refused"][0]["reason"] = "OfALaterVersion"
    assert GateStatus.from_json(data).throttle.refused[0].reason is ThrottleRefusal.OTHER
    del data["throttle"]
    assert "without a throttle" in GateStatus.from_json(data).throttle.problem, "of an earlier version"


def test_a_silent_throttle_does_nothing(node):
    assert node.status().problem == "the throttle does not run"
    node.run(1.0)
    assert node.status().problem == ""
    node.now += 60.0
    assert node.status().problem == "the throttle does not run"


asks = st.builds(ThrottleAsk, st.floats(0, 1), st.one_of(st.none(), st.floats(995, 1030)))
wishes = st.dictionaries(st.sampled_from([POD, OTHER, SERVICE, "nobody"]), asks, max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.tuples(wishes, st.floats(0.05, 7)), min_size=1, max_size=4), st.data())
def test_whatever_is_asked_only_throughput_pods_are_frozen_and_never_for_long(tmp_path_factory, sequence, data):
    node = Node(tmp_path_factory.mktemp("node"))
    for wished, seconds in sequence:
        if data.draw(st.booleans(), "a neighbour sticks"):
            node.freezer.sticks[OTHER] = data.draw(st.integers(0, 40), "nudges")
        node.ask(**wished)
        node.run(seconds)
        assert node.throttle.frozen <= wished.keys() & {POD, OTHER}
        assert {mark.name for mark in recorded(node.base)} == node.throttle.frozen
    assert node.frozen_seconds[SERVICE] == 0.0
    assert max(node.longest.values(), default=0.0) <= MAX_STOP_SECONDS + 1e-6
    node.run(LEASE_SECONDS + 0.01)
    node.look()
    assert node.throttle.frozen == frozenset()
