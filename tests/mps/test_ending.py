"""Who is stopped and killed when, without processes; then with one."""

import os
import signal
import subprocess

from hypothesis import given
from hypothesis import strategies as st

from gpushare.mps.ending import DRAIN_SECONDS, Endings, EndingStep, send_signal
from gpushare.mps.identity import start_ticks_of

from .conftest import is_stopped, until


class Processes:
    """Who lives, and what was sent when."""

    def __init__(self) -> None:
        self.now, self.alive, self.sent = 0.0, {7, 8}, []

    def send(self, pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        if pid not in self.alive:
            return False
        self.sent.append((self.now, pid, number))
        if number is signal.SIGKILL:
            self.alive.discard(pid)
        return True


def test_a_client_is_stopped_drains_and_is_killed():
    there = Processes()
    endings = Endings(send=there.send, clock=lambda: there.now)
    steps = []
    for there.now in (0.0, 0.4, 0.9, 1.0, 1.1):
        steps.append(endings.end(7))
    step = EndingStep
    assert steps == [step.STOPPED, step.DRAINS, step.DRAINS, step.KILLED, step.GONE]


@given(st.lists(st.tuples(st.sampled_from([7, 8]), st.floats(0.0, 2.0)), max_size=30))
def test_nobody_is_killed_before_its_kernels_had_their_time_nor_without_a_stop(looks):
    there = Processes()
    endings = Endings(send=there.send, clock=lambda: there.now)
    for pid, pause in looks:
        there.now += pause
        endings.end(pid)
    for at, pid, number in there.sent:
        if number is signal.SIGKILL:
            stops = [when for when, other, stop in there.sent if other == pid and stop is signal.SIGSTOP]
            assert at - min(stops) >= DRAIN_SECONDS


def test_who_is_no_client_any_more_begins_anew():
    there = Processes()
    endings = Endings(send=there.send, clock=lambda: there.now)
    endings.end(7)
    there.now = 5.0
    assert endings.go_on([8]) == ()
    assert endings.end(7) is EndingStep.STOPPED, "another process with the pid of one that left"


def test_who_was_stopped_is_killed_also_when_the_reason_has_gone():
    there = Processes()
    endings = Endings(send=there.send, clock=lambda: there.now)
    endings.end(7)
    killed = []
    for there.now in (0.5, 1.0, 1.5):
        killed.append(endings.go_on([7, 8]))
    assert killed == [(), (7,), ()], "nobody stays stopped"
    assert there.alive == {8}


def test_a_reason_that_is_added_does_not_shorten_the_time_to_finish():
    there = Processes()
    endings = Endings(send=there.send, clock=lambda: there.now)
    endings.end(7, drain_seconds=3.5)
    there.now = 2.0
    assert endings.end(7) is EndingStep.DRAINS


def test_a_real_process_by_its_start_time():
    process = subprocess.Popen(["sleep", "600"])
    try:
        began = start_ticks_of(process.pid)
        assert began is not None
        assert not send_signal(process.pid, began + 1, signal.SIGKILL), "another process had the pid"
        assert send_signal(process.pid, began, signal.SIGSTOP)
        until(lambda: is_stopped(process.pid), "stopped")
        assert send_signal(process.pid, None, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        assert not send_signal(process.pid, began, signal.SIGKILL)
    finally:
        process.kill()


def test_what_is_not_permitted_is_an_error(monkeypatch):
    def refuse(_fd: int, _number: signal.Signals) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    assert Endings().end(os.getpid()) is EndingStep.REFUSED
