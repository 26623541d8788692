"""A throttle that gets no CPU, or hangs: its pods run on, it is ended late, and what it does next freezes nobody.

Throttle and record are the real ones, the freezer is simulated, and the test turns the clock: at every call of the
freezer the throttle may stand still for any time, while the host looks on.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare.core.api import JobClass
from gpushare.mps.asks import ThrottleAsk, ThrottleAsks
from gpushare.mps.duty import MAX_FREEZE_SECONDS, MAX_STOP_SECONDS
from gpushare.mps.freezer import FreezeState, SimulatedFreezer
from gpushare.mps.frozen import recorded, thaw_recorded
from gpushare.mps.layout import Decisions, GpuDirectory, PodDecision, write_decisions, write_throttle
from gpushare.mps.silence import (
    FROZEN_SECONDS,
    KILL_SECONDS,
    LOOK_SECONDS,
    SILENT_SECONDS,
    START_SECONDS,
    Remedy,
    Silence,
    heartbeat,
)
from gpushare.mps.throttle import Throttle

POD, OTHER = "pod", "other"
PODS = (POD, OTHER)
ROUNDING = 0.01  # the clock moves by a millisecond at least, wherever the throttle looks again at once


class KilledError(Exception):
    """The throttle's process ends here."""


class Stalling:
    """The throttle's side of the freezer: before and after each call it may be made to wait."""

    def __init__(self, node: "Node") -> None:
        self._node, self._inner = node, node.freezer

    def problem(self) -> str:
        return ""

    def find(self, pod_uid: str) -> Path | None:
        return self._inner.find(pod_uid)

    def state(self, cgroup: Path) -> FreezeState:
        self._node.stall()
        return self._inner.state(cgroup)

    def freeze(self, cgroup: Path) -> None:
        self._node.stall()
        self._inner.freeze(cgroup)
        self._node.note()
        self._node.stall()

    def thaw(self, cgroup: Path) -> None:
        self._node.stall()
        self._inner.thaw(cgroup)
        self._node.note()

    def nudge(self, cgroup: Path) -> None:
        self._node.stall()
        self._inner.nudge(cgroup)
        self._node.note()
        self._node.stall()


class Node:
    """The host's watch and the throttle of one GPU with two pods, on one clock."""

    def __init__(self, base: Path, stalls: Iterable[float] = ()) -> None:
        self.base, self.now = base, 1000.0
        self.gpu = GpuDirectory.of(base, "GPU-0")
        self.gpu.create()
        decision = PodDecision(50, 1024, JobClass.THROUGHPUT)
        write_decisions(self.gpu, Decisions(dict.fromkeys(PODS, decision)))
        self.freezer = SimulatedFreezer()
        for uid in PODS:
            self.freezer.add(uid)
        self.asks: dict[str, ThrottleAsk] = {}
        self.stalls: Iterator[float] = iter(stalls)
        self.longest = self.frozen_seconds = 0.0
        self.thaws = self.kills = 0
        self._began: dict[str, float] = {}
        self._heartbeats = b""
        self._asked_at = -1.0
        self.start()

    def start(self) -> None:
        self.throttle = Throttle(self.base, Stalling(self))
        self.silence = Silence(self.now, self.now)
        self._heartbeats = heartbeat(self.now)

    def note(self) -> None:
        """Take note of who is frozen now."""
        for uid, state in self.freezer.cgroups.items():
            if state is not FreezeState.THAWED:
                self._began.setdefault(uid, self.now)
            elif (began := self._began.pop(uid, None)) is not None:
                self.longest = max(self.longest, self.now - began)
                self.frozen_seconds += self.now - began

    def stall(self) -> None:
        self.wait(next(self.stalls, 0.0))

    def wait(self, seconds: float) -> None:
        """The throttle does nothing for so long; host and agent go on."""
        end = self.now + seconds
        while self.now < end:
            if self.now - self._asked_at >= 1.0:
                self.ask()
            if self._heartbeats:
                self.silence.hear(self._heartbeats, self.now)
                self._heartbeats = b""
            self.now = min(end, self.now + max(self.silence.wait_seconds(self.now), 1e-4))
            if self.now >= end:
                break
            answer = self.silence.look(self.now)
            if answer is Remedy.THAW:
                self.thaws += bool(thaw_recorded(self.base, self.freezer, keep=True))
                self.note()
            elif answer is Remedy.KILL:
                raise KilledError

    def ask(self) -> None:
        self._asked_at = self.now
        write_throttle(self.gpu, ThrottleAsks(dict(self.asks), self.now))

    def run(self, seconds: float, **asks: ThrottleAsk) -> None:
        """The throttle's process runs for so long, and is started as often as it ends; the agent asks."""
        self.asks = asks
        self.ask()
        end = self.now + seconds
        while self.now < end:
            try:
                now = self.now
                due = self.throttle.look(now)
                self._heartbeats += heartbeat(now, self.throttle.frozen_since)
                self.wait(max(1e-3, min(due, end) - self.now))
            except KilledError:
                self.kills += 1
                thaw_recorded(self.base, self.freezer)
                self.note()
                assert not recorded(self.base)
                self.start()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_process_that_starts_has_a_minute() -> None:
    silence = Silence(0.0, 0.0)
    now = 0.0
    while (answer := silence.look(now)) is Remedy.WAIT:
        now += silence.wait_seconds(now)
    assert answer is Remedy.KILL
    assert now == pytest.approx(START_SECONDS, abs=0.2)


def answers(silence: Silence, now: float, **options: bool) -> list[tuple[float, Remedy]]:
    """Each answer with its time until the process is killed."""
    found = []
    while not found or found[-1][1] is not Remedy.KILL:
        now += silence.wait_seconds(now)
        found.append((now, silence.look(now, **options)))
    return found


def test_a_silent_one_is_thawed_after_again_and_again_and_ended_late() -> None:
    silence = Silence(0.0, 0.0)
    silence.hear(heartbeat(99.5) + heartbeat(100.0), 100.0)
    found = answers(silence, 100.0)
    first = next(now for now, answer in found if answer is Remedy.THAW)
    assert first == pytest.approx(100.0 + SILENT_SECONDS)
    thaws = [now for now, answer in found if answer is Remedy.THAW]
    assert max(after - before for before, after in pairwise(thaws)) <= LOOK_SECONDS + ROUNDING
    assert found[-1][0] == pytest.approx(100.0 + KILL_SECONDS, abs=0.2)


def test_one_that_was_told_to_end_is_ended_soon() -> None:
    silence = Silence(0.0, 0.0)
    silence.hear(heartbeat(100.0), 100.0)
    assert answers(silence, 100.0, is_ending=True)[-1][0] == pytest.approx(100.0 + SILENT_SECONDS, abs=0.2)


def test_a_word_that_is_read_late_counts_from_its_look() -> None:
    silence = Silence(0.0, 0.0)
    silence.hear(heartbeat(100.0), 105.0)  # the host stood still too
    assert silence.wait_seconds(105.0) == 0.0
    assert silence.look(105.0) is Remedy.THAW


def test_where_the_host_stood_still_the_throttle_is_thawed_after_but_not_ended() -> None:
    silence = Silence(0.0, 0.0)
    silence.hear(heartbeat(100.0), 100.0)
    now = 100.0
    for _ in range(20):
        now += KILL_SECONDS
        assert silence.look(now) is Remedy.THAW
    silence.hear(heartbeat(now), now)
    assert silence.look(now + 0.1) is Remedy.WAIT


@pytest.mark.parametrize("heartbeats", [b"Hm", b"x" * 9, heartbeat(float("nan")), heartbeat(float("inf"))])
def test_odd_words_are_words(heartbeats: bytes) -> None:
    silence = Silence(0.0, 0.0)
    silence.hear(heartbeats, 100.0)
    assert (silence.heard_at, silence.look(100.1)) == (100.0, Remedy.WAIT)


def test_a_throttle_that_stood_still_goes_on_and_nobody_was_frozen_for_long(node: Node) -> None:
    node.run(3.0, pod=ThrottleAsk(0.5))
    throttle = node.throttle
    node.run(0.2, pod=ThrottleAsk(0.1))
    assert throttle.frozen == {POD}
    node.wait(8.0)
    assert node.freezer.cgroups[POD] is FreezeState.THAWED
    assert node.longest <= MAX_FREEZE_SECONDS + SILENT_SECONDS + LOOK_SECONDS
    node.longest = node.frozen_seconds = 0.0
    node.run(20.0, pod=ThrottleAsk(0.5))
    assert (node.throttle, node.kills) == (throttle, 0)
    assert node.longest <= MAX_FREEZE_SECONDS + ROUNDING
    assert node.frozen_seconds == pytest.approx(10.0, abs=0.8)


def test_a_pod_thawed_by_the_host_is_not_counted_as_frozen(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.run(0.2, pod=ThrottleAsk(0.1))
    assert node.throttle.frozen == {POD}
    thaw_recorded(node.base, node.freezer, keep=True)
    node.note()
    assert [mark.name for mark in recorded(node.base)] == [POD]
    node.throttle.look(node.now)
    assert node.throttle.frozen == frozenset()
    assert not recorded(node.base)
    assert "somebody else thawed these pods, they run on: pod" in caplog.text
    node.run(10.0, pod=ThrottleAsk(0.5))
    assert node.longest <= MAX_FREEZE_SECONDS + ROUNDING


def test_a_reading_that_was_thawed_is_not_taken_up_again(node: Node) -> None:
    until = node.now + 1.2
    node.run(0.3, pod=ThrottleAsk(stopped_until=until))
    assert node.throttle.frozen == {POD}
    node.freezer.thaw(node.freezer.find(POD))
    node.note()
    node.run(0.25, pod=ThrottleAsk(stopped_until=until))
    assert node.freezer.cgroups[POD] is FreezeState.THAWED


def test_one_that_stands_still_at_the_end_of_a_reading_leaves_nobody_frozen_for_two_seconds(node: Node) -> None:
    node.run(MAX_STOP_SECONDS - 0.1, pod=ThrottleAsk(stopped_until=node.now + MAX_STOP_SECONDS))
    assert node.throttle.frozen == {POD}
    node.wait(5.0)
    assert node.freezer.cgroups[POD] is FreezeState.THAWED
    assert MAX_STOP_SECONDS < node.longest <= FROZEN_SECONDS + LOOK_SECONDS < 2.0


@pytest.mark.parametrize("since", [float("nan"), float("-inf")])
def test_an_odd_time_in_a_heartbeat_costs_one_thaw_at_most(since: float) -> None:
    silence = Silence(0.0, 0.0)
    silence.hear(heartbeat(100.0, since), 100.0)
    assert 0.0 <= silence.wait_seconds(100.0) <= LOOK_SECONDS
    silence.hear(heartbeat(100.1), 100.1)
    assert silence.look(100.2) is Remedy.WAIT


def test_what_a_throttle_freezes_after_the_hosts_thaw_is_thawed_again(tmp_path: Path) -> None:
    """It stood still between the record and the freeze: the host thaws, then it freezes and stands still again."""
    node = Node(tmp_path, [0.0, 3.0, 6.0])  # before the state, the freeze, and what follows it
    node.run(9.5, pod=ThrottleAsk(0.1))
    assert node.thaws >= 1
    assert node.longest <= LOOK_SECONDS + ROUNDING
    assert node.kills == 0


def test_a_throttle_that_stands_still_again_before_it_thaws_gets_no_more_time(tmp_path: Path) -> None:
    node = Node(tmp_path, [0.0, 0.0, 1.0, 2.0])  # in the look that freezes, and in the next one
    node.run(5.0, pod=ThrottleAsk(0.1))
    assert node.longest <= SILENT_SECONDS + LOOK_SECONDS


def test_a_throttle_that_hangs_for_good_is_ended_and_another_one_throttles(tmp_path: Path) -> None:
    node = Node(tmp_path, [0.0, 0.0, 1e9])
    node.run(30.0, pod=ThrottleAsk(0.5))
    assert node.kills == 1
    assert node.longest <= SILENT_SECONDS + LOOK_SECONDS
    assert node.frozen_seconds > 5.0


asks = st.builds(ThrottleAsk, st.floats(0, 1), st.one_of(st.none(), st.floats(1000, 1015)))
stalls = st.lists(
    st.one_of(st.just(0.0), st.floats(0.0, 3.0), st.sampled_from([SILENT_SECONDS, 0.5, 5.0, 12.0])), max_size=30
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(stalls, st.dictionaries(st.sampled_from(PODS), asks, min_size=1), st.integers(0, 3))
def test_wherever_a_throttle_stands_still_nobody_is_frozen_for_long(
    tmp_path_factory: pytest.TempPathFactory,
    stalled: list[float],
    wished: dict[str, ThrottleAsk],
    nudges: int,
) -> None:
    node = Node(tmp_path_factory.mktemp("node"), stalled)
    node.freezer.sticks[OTHER] = nudges
    node.run(12.0, **wished)
    assert node.longest <= FROZEN_SECONDS + LOOK_SECONDS + ROUNDING < 2.0
    node.stalls = iter(())
    node.run(2.0, **dict.fromkeys(wished, ThrottleAsk(0.5)))
    node.longest = 0.0
    node.run(3.0, **dict.fromkeys(wished, ThrottleAsk(0.5)))
    assert node.longest <= MAX_FREEZE_SECONDS + ROUNDING
    node.run(0.5)
    assert set(node.freezer.cgroups.values()) == {FreezeState.THAWED}
    assert not recorded(node.base)
