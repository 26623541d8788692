"""A stopped client is terminated while its launching threads are held, then killed: real processes, no GPU."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpushare.mps.ending import Endings, EndingStep, Termination
from gpushare.mps.errors import CommandRefusedError
from gpushare.mps.freezer import FreezeState
from gpushare.mps.identity import is_alive, start_ticks_of
from gpushare.mps.ptrace import HeldThreads
from gpushare.mps.terminating import OTHERS_SECONDS, Terminator

from .cgroups import RealPods
from .conftest import is_stopped, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="ptrace of another process needs root")

CLIENT = """
import ctypes, threading, time
def answers():
    ctypes.CDLL(None).prctl(15, b"cuda-EvtHandlr", 0, 0, 0)
    threading.Event().wait()
threading.Thread(target=answers, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.001)
"""


class PatientThreads(HeldThreads):
    """Waits for a thread that gets no CPU for a while."""

    def hold(self, timeout_seconds: float = 60.0) -> None:
        super().hold(timeout_seconds)


def patient(ask: Callable[[int, float], None]) -> Terminator:
    """Return one whose own limits do not pass, however busy the machine is."""
    return Terminator(ask, hold=PatientThreads, clock=lambda: 0.0)


def tracer_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    raise AssertionError("the kernel tells no tracer")


@pytest.fixture
def clients() -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for client in started:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
    yield started
    for client in started:
        client.kill()
        until(lambda pid=client.pid: not is_alive(pid), "ended, and its held threads are collected")


def ended(endings: Endings, pid: int, ticks: int | None, **how: float) -> list[EndingStep]:
    """Look until the client is gone; return its steps, each once, without how long the kernel takes to end it."""
    steps: list[EndingStep] = []

    def look() -> bool:
        step = endings.end(pid, ticks, **how)
        if step not in steps and step is not EndingStep.DIES:
            steps.append(step)
        return step is EndingStep.GONE

    until(look, "gone")
    return steps


def test_a_client_is_asked_while_it_is_held_and_killed_then(clients):
    seen: list[tuple[int, int, str]] = []

    def ask(pid: int, _seconds: float) -> None:
        states = {
            (path / "comm").read_text().strip(): (path / "stat").read_text().rpartition(")")[2].split()[0]
            for path in Path(f"/proc/{pid}/task").iterdir()
        }
        seen.append((pid, tracer_of(pid), states["cuda-EvtHandlr"]))

    client = clients[0]
    steps = ended(Endings(terminate=patient(ask)), client.pid, start_ticks_of(client.pid), drain_seconds=600)
    assert steps == [EndingStep.STOPPED, EndingStep.DRAINS, EndingStep.KILLED, EndingStep.GONE], (
        "10 min were not over"
    )
    (asked,) = seen
    assert asked[0] == client.pid
    assert asked[2] in {"S", "R"}, "CUDA's thread is not held: it waits, or runs again for a moment as it does"
    assert seen[0][1] in {int(path.name) for path in Path("/proc/self/task").iterdir()}, "and we trace it"


def test_one_that_the_server_does_not_end_is_stopped_again_let_go_and_killed_in_time(clients, caplog):
    def ask(_pid: int, _seconds: float) -> None:
        raise CommandRefusedError("Invalid process")

    client = clients[0]
    ticks = start_ticks_of(client.pid)
    endings = Endings(terminate=(terminate := patient(ask)))
    assert endings.end(client.pid, ticks, drain_seconds=600) is EndingStep.STOPPED
    until(lambda: is_stopped(client.pid), "stopped")
    until(lambda: terminate(client.pid, ticks) is Termination.FAILED, "failed")
    until(lambda: tracer_of(client.pid) == 0, "let go")
    assert is_stopped(client.pid)
    assert "Invalid process" in caplog.text
    assert endings.end(client.pid, ticks) is EndingStep.DRAINS, "its kernels get all their time"


def test_one_that_does_not_answer_is_let_go_after_a_second(clients, caplog):
    never = threading.Event()
    client = clients[0]
    ticks = start_ticks_of(client.pid)
    terminate = patient(lambda _pid, _seconds: never.wait(300) and None)
    os.kill(client.pid, signal.SIGSTOP)
    until(lambda: terminate(client.pid, ticks) is Termination.FAILED, "failed")
    until(lambda: tracer_of(client.pid) == 0 and is_stopped(client.pid), "let go, stopped")
    assert "no answer" in caplog.text
    never.set()


def test_who_may_not_be_traced_is_killed_after_its_time_and_it_is_said_once(clients, caplog):
    class Refusing(HeldThreads):
        def hold(self, timeout_seconds: float = 0.0) -> None:
            raise PermissionError(1, "Operation not permitted")

    def ask(_pid: int, _seconds: float) -> None:
        raise AssertionError("asked though it runs")

    terminate = Terminator(ask, hold=Refusing)
    with caplog.at_level(logging.INFO):
        for client in clients:
            steps = ended(Endings(terminate=terminate), client.pid, start_ticks_of(client.pid), drain_seconds=1.5)
            assert steps[-2:] == [EndingStep.KILLED, EndingStep.GONE]
    assert caplog.text.count("may not trace") == 1


def test_of_two_that_end_together_none_is_killed_before_both_are_terminated(clients, monkeypatch):
    monkeypatch.setattr("gpushare.mps.terminating.ANSWER_SECONDS", 300.0)
    first, second = ((client.pid, start_ticks_of(client.pid)) for client in clients)
    go_on, asked = threading.Event(), []

    def ask(pid: int, _seconds: float) -> None:
        asked.append(pid)
        if pid == second[0]:
            go_on.wait(300)

    now = [0.0]
    terminate = Terminator(ask, hold=PatientThreads, clock=lambda: now[0])
    for pid, _ in (first, second):
        os.kill(pid, signal.SIGSTOP)
    for client in (first, second):
        assert terminate(*client) is Termination.IN_PROGRESS
    until(lambda: asked == [first[0], second[0]], "the second is asked")
    assert terminate(*first) is Termination.IN_PROGRESS, "its kill could end the second one"
    now[0] = OTHERS_SECONDS + 1
    assert terminate(*first) is Termination.DONE, "but not for ever"
    go_on.set()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_one_whose_pod_is_frozen_is_left_to_its_kill_and_nothing_of_it_stays(tmp_path, version):
    """In cgroup v1 it stops for us only when it is thawed, in v2 as it is."""
    pods = RealPods(version)
    try:
        cgroup = pods.add("11111111-1111-4111-8111-111111111111")
        process = pods.run(cgroup, tmp_path / "out")
        ticks = start_ticks_of(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_stopped(process.pid), "stopped")
        pods.freezer.freeze(cgroup)
        until(lambda: pods.freezer.state(cgroup) is FreezeState.FROZEN, "frozen")
        endings = Endings(terminate=(terminate := Terminator(lambda _pid, _seconds: None)))
        until(lambda: terminate(process.pid, ticks) is not Termination.IN_PROGRESS, "over")
        if version == "v1":
            assert terminate(process.pid, ticks) is Termination.FAILED
        endings.end(process.pid, ticks, drain_seconds=0.0)
        endings.end(process.pid, ticks)
        pods.freezer.thaw(cgroup)
        until(lambda: not is_alive(process.pid) and process.poll() is not None, "gone, its threads collected")
    finally:
        pods.close()


def test_one_that_was_frozen_and_is_not_killed_runs_on_when_it_is_thawed_and_continued(tmp_path):
    pods = RealPods("v1")
    try:
        cgroup = pods.add("11111111-1111-4111-8111-111111111111")
        process = pods.run(cgroup, tmp_path / "out")
        ticks = start_ticks_of(process.pid)
        pods.freezer.freeze(cgroup)
        until(lambda: pods.freezer.state(cgroup) is FreezeState.FROZEN, "frozen")
        terminate = Terminator(lambda _pid, _seconds: None)
        until(lambda: terminate(process.pid, ticks) is Termination.FAILED, "does not stop")
        pods.freezer.thaw(cgroup)
        until(lambda: tracer_of(process.pid) == 0, "let go")
        os.kill(process.pid, signal.SIGCONT)
        size = (tmp_path / "out").stat().st_size
        until(lambda: (tmp_path / "out").stat().st_size > size, "it runs")
    finally:
        pods.close()


def test_another_process_with_the_pid_is_neither_held_nor_asked(clients):
    asked: list[int] = []
    terminate = Terminator(lambda pid, _seconds: asked.append(pid))
    ticks = start_ticks_of(clients[0].pid)
    assert ticks is not None
    until(lambda: terminate(clients[0].pid, ticks + 1) is Termination.FAILED, "failed")
    assert not asked
    assert tracer_of(clients[0].pid) == 0


def test_endings_go_on_without_a_start_time_or_a_terminator(clients):
    def never(_pid: int, _ticks: int) -> Termination:
        raise AssertionError("asked about a process that may be another one")

    assert ended(Endings(terminate=never), clients[0].pid, None)[-1] is EndingStep.GONE
    assert ended(Endings(), clients[1].pid, start_ticks_of(clients[1].pid))[-1] is EndingStep.GONE


def test_a_flood_of_looks_asks_once(clients):
    asked: list[int] = []
    terminate = patient(lambda pid, _seconds: asked.append(pid))
    ticks = start_ticks_of(clients[0].pid)
    assert ticks is not None
    os.kill(clients[0].pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while terminate(clients[0].pid, ticks) is not Termination.DONE and time.monotonic() < deadline:
        pass
    for _ in range(100):
        assert terminate(clients[0].pid, ticks) is Termination.DONE
    assert asked == [clients[0].pid]
