"""Who is stopped and killed when, without processes; then with one."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.mps.ending import DRAIN_SECONDS, Endings, EndingStep, send_signal
from gpushare.mps.freezer import FreezeState
from gpushare.mps.identity import RunState, start_ticks_of

from .cgroups import RealPods
from .conftest import is_stopped, state_of, until


class Processes:
    """Who lives, and what was sent when."""

    def __init__(self) -> None:
        self.now, self.alive, self.sent = 0.0, {7, 8}, []
        self.frozen: set[int] = set()

    def send(self, pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        if pid not in self.alive:
            return False
        self.sent.append((self.now, pid, number))
        if number is signal.SIGKILL and pid not in self.frozen:
            self.alive.discard(pid)
        return True


def test_a_client_is_stopped_drains_and_is_killed():
    processes = Processes()
    endings = Endings(send=processes.send, clock=lambda: processes.now)
    steps = []
    for processes.now in (0.0, 0.4, 0.9, 1.0, 1.1):
        steps.append(endings.end(7))
    step = EndingStep
    assert steps == [step.STOPPED, step.DRAINS, step.DRAINS, step.KILLED, step.GONE]


@given(st.lists(st.tuples(st.sampled_from([7, 8]), st.floats(0.0, 2.0)), max_size=30))
def test_nobody_is_killed_before_its_kernels_had_their_time_nor_without_a_stop(looks):
    processes = Processes()
    endings = Endings(send=processes.send, clock=lambda: processes.now)
    for pid, pause in looks:
        processes.now += pause
        endings.end(pid)
    for at, pid, number in processes.sent:
        if number is signal.SIGKILL:
            stops = [when for when, other, stop in processes.sent if other == pid and stop is signal.SIGSTOP]
            assert at - min(stops) >= DRAIN_SECONDS


def test_another_process_with_the_pid_of_one_that_left_begins_anew():
    processes = Processes()
    endings = Endings(send=processes.send, clock=lambda: processes.now)
    assert endings.end(7, 100) is EndingStep.STOPPED
    processes.now = 5.0
    assert endings.end(7, 200) is EndingStep.STOPPED, "not killed in the other one's place"
    assert processes.alive == {7, 8}


def test_who_was_stopped_is_killed_also_when_the_reason_has_gone():
    processes = Processes()
    endings = Endings(send=processes.send, clock=lambda: processes.now)
    endings.end(7)
    killed = []
    for processes.now in (0.5, 1.0, 1.5):
        killed.append(endings.go_on())
    assert killed == [(), (7,), ()], "nobody stays stopped"
    assert processes.alive == {8}


def test_a_kill_that_waits_for_a_thaw_is_told_once_and_sent_until_it_works():
    processes = Processes()
    processes.frozen = {7}
    endings = Endings(send=processes.send, clock=lambda: processes.now)
    endings.end(7)
    steps = []
    for processes.now in (1.0, 1.1, 1.2):
        steps.append(endings.end(7))
    processes.frozen, processes.now = set(), 1.3
    steps += [endings.end(7), endings.end(7)]
    step = EndingStep
    assert steps == [step.KILLED, step.DIES, step.DIES, step.DIES, step.GONE]


def test_who_was_continued_gets_its_time_anew_twice_and_is_killed_then():
    processes = Processes()
    state = RunState.STOPPED
    endings = Endings(send=processes.send, state=lambda _pid: state, clock=lambda: processes.now)
    endings.end(7)
    killed_at = []
    for eighth in range(1, 48):
        processes.now = eighth / 8
        # something in its container continues it every 7/8 s
        state = RunState.RUNS if eighth % 7 == 0 else RunState.STOPPED
        if endings.end(7) is EndingStep.KILLED:
            killed_at.append(processes.now)
    assert killed_at == [2.75], "a second after the second time, 1.75"


@pytest.mark.parametrize("state", [RunState.RUNS, RunState.UNKNOWN])
def test_whose_stop_is_not_seen_is_killed_in_time(state):
    """Frozen, within the kernel, or the stop hidden by a tracer."""
    processes = Processes()
    endings = Endings(send=processes.send, state=lambda _pid: state, clock=lambda: processes.now)
    endings.end(7)
    processes.now = DRAIN_SECONDS
    assert endings.end(7) is EndingStep.KILLED


def test_the_next_gate_goes_on_with_whom_a_killed_one_had_stopped(tmp_path):
    processes = Processes()
    record = tmp_path / "endings.json"
    first = Endings(send=processes.send, clock=lambda: processes.now, record=record)
    first.end(7, 100, drain_seconds=3.5)
    first.end(8, 200)
    processes.now = 60.0
    second = Endings(send=processes.send, clock=lambda: processes.now, record=record)
    killed = []
    for processes.now in (60.5, 61.0, 63.4, 63.5):
        killed.append(second.go_on())
    assert killed == [(), (8,), (), (7,)], "its kernels get their whole time again: nobody watched it"
    assert second.go_on() == ()
    assert json.loads(record.read_text()) == {"processes": []}
    assert Endings(send=processes.send, record=record).go_on() == ()


def test_the_record_is_written_before_the_stop(tmp_path):
    record = tmp_path / "endings.json"
    seen = []

    def send(pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        seen.append((number, [each["pid"] for each in json.loads(record.read_text())["processes"]]))
        return True

    Endings(send=send, record=record).end(7, 100)
    assert seen == [(signal.SIGSTOP, [7])]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"processes": 3}',
        '{"processes": [{"pid": 8}]}',
        '{"processes": [{"pid": 8, "start_ticks": 1, "drain_seconds": NaN}]}',
        '{"processes": [{"pid": 8, "start_ticks": 1, "drain_seconds": 1e9}]}',
    ],
)
def test_a_broken_record_ends_nobody_and_stops_nothing(tmp_path, text):
    processes = Processes()
    record = tmp_path / "endings.json"
    record.write_text(text)
    endings = Endings(send=processes.send, clock=lambda: processes.now, record=record)
    assert endings.go_on() == ()
    assert endings.end(7, 100) is EndingStep.STOPPED
    assert json.loads(record.read_text())["processes"][0]["pid"] == 7


def test_a_record_that_cannot_be_read_keeps_no_gate_from_starting(tmp_path, caplog):
    Endings(record=tmp_path)  # a directory
    assert "cannot read" in caplog.text


def test_a_record_that_cannot_be_written_keeps_nobody_from_being_ended(tmp_path, caplog):
    processes = Processes()
    endings = Endings(send=processes.send, clock=lambda: processes.now, record=tmp_path / "none" / "endings.json")
    assert endings.end(7, 100) is EndingStep.STOPPED
    assert "cannot write" in caplog.text


def test_a_reason_that_is_added_does_not_shorten_the_time_to_finish():
    processes = Processes()
    endings = Endings(send=processes.send, clock=lambda: processes.now)
    endings.end(7, drain_seconds=3.5)
    processes.now = 2.0
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


def test_a_process_without_its_first_thread_is_stopped_and_killed(headless):
    began = start_ticks_of(headless.pid)
    now = 0.0
    endings = Endings(clock=lambda: now)
    assert endings.end(headless.pid, began) is EndingStep.STOPPED
    threads = Path(f"/proc/{headless.pid}/task")
    until(lambda: "T" in {state_of(int(each.name)) for each in threads.iterdir()}, "its other thread stopped")
    now = DRAIN_SECONDS
    assert endings.end(headless.pid, began) is EndingStep.KILLED
    assert headless.wait(60) == -signal.SIGKILL


def test_a_sibling_that_continues_it_without_pause_does_not_keep_it_alive():
    victim = subprocess.Popen(["sleep", "600"])
    hammer = f"import os, signal\nwhile True:\n os.kill({victim.pid}, signal.SIGCONT)"
    sibling = subprocess.Popen([sys.executable, "-c", hammer], stderr=subprocess.DEVNULL)
    try:
        began, now, steps = start_ticks_of(victim.pid), 0.0, []
        endings = Endings(clock=lambda: now)
        while EndingStep.KILLED not in steps:
            steps.append(endings.end(victim.pid, began))
            now += 0.125
            assert now <= 3.5, "a drain, and two more"
            time.sleep(0.01)  # for the sibling
        assert victim.wait(60) == -signal.SIGKILL
    finally:
        for process in (victim, sibling):
            process.kill()
            process.wait(60)


def test_a_zombie_is_gone():
    process = subprocess.Popen(["true"])
    began = start_ticks_of(process.pid)
    until(lambda: state_of(process.pid) == "Z", "ended, and nobody has waited for it")
    assert Endings().end(process.pid, began) is EndingStep.GONE
    process.wait(60)


def test_a_frozen_client_is_killed_when_it_is_thawed(tmp_path):
    """In cgroup v1 a kill waits for the thaw; the throttle freezes for half a second at most."""
    pods = RealPods("v1")
    try:
        cgroup = pods.add("11111111-1111-4111-8111-111111111111")
        process = pods.run(cgroup, tmp_path / "out")
        began = start_ticks_of(process.pid)
        now = 0.0
        endings = Endings(clock=lambda: now)
        pods.freezer.freeze(cgroup)
        until(lambda: pods.freezer.state(cgroup) is FreezeState.FROZEN, "frozen")
        assert endings.end(process.pid, began) is EndingStep.STOPPED
        pods.freezer.thaw(cgroup)
        until(lambda: is_stopped(process.pid), "stopped as it is thawed, before it runs")
        pods.freezer.freeze(cgroup)
        until(lambda: pods.freezer.state(cgroup) is FreezeState.FROZEN, "frozen, stopped as it is")
        now = 0.5
        assert endings.end(process.pid, began) is EndingStep.DRAINS
        now = 1.0
        assert endings.end(process.pid, began) is EndingStep.KILLED
        pods.freezer.thaw(cgroup)
        assert process.wait(60) == -signal.SIGKILL
        assert endings.go_on() == ()
    finally:
        pods.close()


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1])
def test_what_is_no_process_is_gone(pid):
    """Before: pid 0 of a client list was an error that took the keeper's round down."""
    assert Endings().end(pid, 100) is EndingStep.GONE


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_a_node_without_pidfds_refuses(monkeypatch, number):
    def refuse(_pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert Endings().end(os.getpid(), start_ticks_of(os.getpid())) is EndingStep.REFUSED


def test_what_is_not_permitted_is_an_error(monkeypatch):
    def refuse(_fd: int, _number: signal.Signals) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    assert Endings().end(os.getpid()) is EndingStep.REFUSED
