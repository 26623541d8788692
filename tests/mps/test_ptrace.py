"""Threads of a real process are held, left, stepped and let go, without a GPU."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpushare.mps import ptrace
from gpushare.mps.identity import is_alive
from gpushare.mps.ptrace import MOST_THREADS, HeldThreads

from .conftest import state_of, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="ptrace of another process needs root")

# Each thread counts in a shared page; the first one may do nothing else.
PROGRAM = """
import ctypes, mmap, sys, threading, time
file = open(sys.argv[1], "r+b")
page = mmap.mmap(file.fileno(), 4096)
counts = (ctypes.c_uint64 * 3).from_buffer(page)
def named(name, run):
    def go():
        ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
        run()
    threading.Thread(target=go, daemon=True).start()
def answers():
    while True:
        counts[2] += 1
        time.sleep(0.01)
def works():
    while True:
        counts[1] += 1
        time.sleep(0.001)
named("cuda-EvtHandlr", answers)
named("worker", works)
while True:
    counts[0] += 1
    if sys.argv[2] == "sleeps":
        time.sleep(0.001)
"""


class Program:
    """A process of three threads, and how far each has counted."""

    def __init__(self, page: Path, how: str) -> None:
        page.write_bytes(bytes(4096))
        self.page = page
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(page), how])
        self.pid = self.process.pid
        until(lambda: all(self.counts()), "every thread counts")

    def counts(self) -> list[int]:
        return list((ctypes.c_uint64 * 3).from_buffer_copy(self.page.read_bytes()[:24]))

    def end(self) -> None:
        """Kill it; threads that a failed test left held have to be waited for, too."""
        self.process.kill()
        while self.process.poll() is None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG | 0x40000000)
            time.sleep(0.01)

    def going(self) -> list[bool]:
        """Return which threads count within a second at most."""
        before, deadline = self.counts(), time.monotonic() + 1
        while time.monotonic() < deadline and not all(self._moved(before)):
            time.sleep(0.01)
        return self._moved(before)

    def _moved(self, before: list[int]) -> list[bool]:
        return [now > then for now, then in zip(self.counts(), before, strict=True)]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.end()


def test_all_threads_but_cudas_own_are_held_and_go_on_afterwards(tmp_path, programs):
    programs.append(program := Program(tmp_path / "page", "sleeps"))
    threads = HeldThreads(program.pid)
    threads.hold(30)
    before = program.counts()
    until(lambda: program.counts()[2] > before[2] + 50, "CUDA's thread goes on")
    assert program.counts()[:2] == before[:2]
    threads.release()
    until(lambda: all(program.going()), "all go on")


def test_a_process_that_is_stopped_is_held_and_cudas_thread_goes_on_once_it_is_continued(tmp_path, programs):
    programs.append(program := Program(tmp_path / "page", "sleeps"))
    os.kill(program.pid, signal.SIGSTOP)
    until(lambda: not any(program.going()), "stopped")
    threads = HeldThreads(program.pid)
    threads.hold(30)
    os.kill(program.pid, signal.SIGCONT)
    until(lambda: program.going() == [False, False, True], "CUDA's thread alone goes on")
    threads.release()


def test_a_lock_that_a_held_thread_has_is_released_by_stepping(tmp_path, programs):
    """The interpreter's lock stands for the driver's: the first thread has it nearly always."""
    programs.append(program := Program(tmp_path / "page", "spins"))
    for _ in range(20):
        threads = HeldThreads(program.pid)
        threads.hold(30)
        if not any(program.going()):
            break
        threads.release()
    else:
        pytest.fail("was never held while it had the lock")
    before = program.counts()
    threads.step(lambda: program.counts()[2] > before[2], 60)
    until(lambda: program.counts()[2] > before[2], "the waiting thread got the lock")
    assert program.counts()[0] - before[0] < 10_000, "the holder has hardly run"
    threads.release()
    until(lambda: all(program.going()), "all go on")


def test_one_that_has_ended_or_ends_meanwhile(tmp_path, programs):
    programs.append(program := Program(tmp_path / "page", "sleeps"))
    threads = HeldThreads(program.pid)
    threads.hold(30)
    assert not threads.collect(), "it lives"
    os.kill(program.pid, signal.SIGKILL)
    until(threads.collect, "every thread has ended, and nothing else keeps it from being collected")
    assert not is_alive(program.pid)
    with pytest.raises(ProcessLookupError):
        HeldThreads(program.pid).hold()
    threads.release()
    threads.step(lambda: False, 1)


def test_one_that_is_killed_while_it_is_stepped_is_collected(tmp_path, programs):
    """Before: nobody else could collect it, so its container did not end, nor its pod, before the gate did."""
    programs.append(Program(tmp_path / "page", "runs"))
    threads = HeldThreads(programs[0].pid)
    threads.hold()

    def killed() -> bool:
        programs[0].process.kill()
        until(lambda: state_of(programs[0].pid) != "t", "it has left its stop")
        return False

    threads.step(killed, 0.5)
    until(threads.collect, "all threads are collected")
    assert not Path(f"/proc/{programs[0].pid}").exists(), "who traces it, here its parent too, has collected it"


def test_what_another_tracer_has_is_refused(tmp_path, programs):
    programs.append(program := Program(tmp_path / "page", "sleeps"))
    threads = HeldThreads(program.pid)
    threads.hold(30)
    code = (
        f"from gpushare.mps.ptrace import HeldThreads\n"
        f"try:\n    HeldThreads({program.pid}).hold()\nexcept PermissionError:\n    print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "refused\n"
    threads.release()


Crowd = Callable[[int], int]


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    """Start processes of so many threads; return their pids."""
    started: list[subprocess.Popen[str]] = []

    def start(threads: int) -> int:
        program = (
            "import threading\nthreading.stack_size(65536)\nstay = threading.Event()\n"
            f"for _ in range({threads - 1}):\n    threading.Thread(target=stay.wait, daemon=True).start()\n"
            "print('ready', flush=True)\nstay.wait()"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        with contextlib.suppress(ChildProcessError):
            process.wait(60)


def traced_of(pid: int) -> int:
    """Return how many of a process's threads have a tracer."""
    texts = [(path / "status").read_text() for path in Path(f"/proc/{pid}/task").iterdir()]
    return sum("\nTracerPid:\t0\n" not in text for text in texts)


def test_a_process_of_very_many_threads_is_refused_and_none_of_them_is_touched(crowd):
    pid = crowd(MOST_THREADS + 1)
    threads = HeldThreads(pid)
    with pytest.raises(TimeoutError, match=f"more than {MOST_THREADS} threads"):
        threads.hold(600)
    assert traced_of(pid) == 0
    assert threads.release()


def test_many_threads_are_held_as_long_as_there_is_time_and_let_go(crowd, monkeypatch):
    """At 1 ms a look at the clock, 0.5 s are enough to list 300 threads and not to hold them all."""
    pid = crowd(300)
    clock = count()
    clocks = SimpleNamespace(monotonic=lambda: next(clock) / 1000, sleep=time.sleep)
    monkeypatch.setattr(ptrace, "time", clocks)
    threads = HeldThreads(pid)
    with pytest.raises(TimeoutError, match=r"\d+ threads of process \d+ are not stopped in time"):
        threads.hold(0.4)
    assert 0 < traced_of(pid) < 300
    until(threads.release, "every thread is let go")
    assert traced_of(pid) == 0


def test_who_gets_no_cpu_between_a_look_and_its_deadline_looks_again(crowd, monkeypatch):
    """Before: threads that had stopped meanwhile were let go, and the client was killed without the server."""
    pid, now = crowd(3), [0.0]
    waitpid = os.waitpid

    def starved(thread: int, options: int) -> tuple[int, int]:
        if now[0]:
            return waitpid(thread, options)
        now[0] = 100.0
        return 0, 0

    def stopped(_: float) -> None:
        threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
        until(lambda: all(state_of(thread) == "t" for thread in threads), "stopped")

    threads = HeldThreads(pid)
    with monkeypatch.context() as patched:
        patched.setattr(ptrace, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=stopped))
        patched.setattr(os, "waitpid", starved)
        threads.hold(0.5)
    assert traced_of(pid) == 3
    until(threads.release, "every thread is let go")


def test_hundreds_of_threads_are_held(crowd):
    pid = crowd(600)
    threads = HeldThreads(pid)
    threads.hold(300)
    assert traced_of(pid) == 600
    until(threads.release, "every thread is let go")


def test_who_dies_lets_everybody_go_on(tmp_path, programs):
    programs.append(program := Program(tmp_path / "page", "sleeps"))
    code = (
        "import os\nfrom gpushare.mps.ptrace import HeldThreads\n"
        f"HeldThreads({program.pid}).hold(30)\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    until(lambda: all(program.going()), "all go on")
