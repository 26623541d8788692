"""kill -9 of the throttle's parts, with real processes in real cgroups: nobody stays frozen."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import NoReturn

import pytest
from busy import is_busy

from gpushare.core.api import JobClass
from gpushare.core.backoff import Backoff
from gpushare.mps import thawing
from gpushare.mps.alive import throttle_sign_of
from gpushare.mps.asks import ThrottleAsk, ThrottleAsks, boottime
from gpushare.mps.freezer import FreezeState
from gpushare.mps.frozen import recorded
from gpushare.mps.identity import is_alive
from gpushare.mps.layout import (
    Decisions,
    GpuDirectory,
    PodDecision,
    status_reader,
    throttle_in_force,
    throttled_reader,
    write_decisions,
    write_throttle,
)
from gpushare.mps.status import PodThrottle
from gpushare.mps.thawing import ThrottleProcess

from .cgroups import RealPods
from .conftest import SRC, is_stopped, until

pytestmark = pytest.mark.slow

PROMISED_SECONDS = 2.0
HOST = """
import sys, threading
from pathlib import Path
from gpushare.mps.thawing import ThrottleProcess, thaw_ours
thaw_ours(sys.argv[1], Path(sys.argv[2]))
ThrottleProcess(sys.argv[1], Path(sys.argv[2]), kill_seconds=float(sys.argv[3])).start()
threading.Event().wait()
"""


class Agent:
    """Asks for as long as it lives."""

    def __init__(self, gpu: GpuDirectory) -> None:
        self._gpu, self._end = gpu, threading.Event()
        self.asks: dict[str, ThrottleAsk] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.2):
            write_throttle(self._gpu, ThrottleAsks(dict(self.asks), boottime()))

    def kill(self) -> None:
        self._end.set()
        self._thread.join()


class Node:
    """A throttle's host, the agent's file, and a pod with a process in a real cgroup."""

    def __init__(self, base: Path, version: str) -> None:
        self.kill_seconds = 4.0  # of time in which the host ran: on a busy machine this may take long
        self.base, self.pods = base, RealPods(version)
        self.uid = str(uuid.uuid4())
        self.cgroup = self.pods.add(self.uid)
        self.output = base / "output"
        self.pods.run(self.cgroup, self.output)
        self.gpu = GpuDirectory.of(base / "run", "GPU-1")
        self.gpu.create()
        write_decisions(self.gpu, Decisions({self.uid: PodDecision(50, 1024, JobClass.THROUGHPUT)}))
        self.agent = Agent(self.gpu)
        self.processes: list[subprocess.Popen] = []
        self.start()

    def start(self) -> None:
        self.host = subprocess.Popen(
            [sys.executable, "-c", HOST, str(self.base / "run"), str(self.pods.root), str(self.kill_seconds)],
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        self.processes.append(self.host)

    def start_thawer(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gpushare.mps.thawer"]
        thawer = subprocess.Popen(
            [*command, "--directory", str(self.base / "run"), "--cgroup-root", str(self.pods.root)],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(thawer)
        return thawer

    def throttler(self) -> int:
        until(lambda: throttlers(self.host.pid), "the throttle's process")
        return throttlers(self.host.pid)[0]

    def state(self) -> FreezeState:
        return self.pods.freezer.state(self.cgroup)

    def until_throttled(self) -> None:
        self.agent.asks[self.uid] = ThrottleAsk(0.1)
        until(lambda: self.state() is FreezeState.FROZEN, "frozen")

    def until_it_runs(self) -> None:
        until(lambda: self.state() is FreezeState.THAWED, "thawed")
        size = self.output.stat().st_size
        until(lambda: self.output.stat().st_size > size + 20, "it goes on")
        until(lambda: not recorded(self.base / "run"), "nobody on record")

    def stop_host(self) -> None:
        """Stop every thread of the host.

        `kill` returns before: the kernel wakes the first thread for it, and until that one has got CPU time, the
        one that watches the throttle goes on, and thaws.
        """
        os.kill(self.host.pid, signal.SIGSTOP)
        until(lambda: set(thread_states(self.host.pid)) == {"T"}, "the host stopped")

    def stop_dead_while_frozen(self) -> int:
        """Kill the throttle's process just when the pod is frozen, with a host that cannot help; its pid."""
        for _ in range(50):
            self.until_throttled()
            pid = self.throttler()
            self.stop_host()
            until(lambda: self.state() is FreezeState.FROZEN, "frozen")
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not is_alive(pid), "killed")
            if self.state() is FreezeState.FROZEN:
                return pid
            os.kill(self.host.pid, signal.SIGCONT)
            until(lambda pid=pid: pid not in throttlers(self.host.pid), "reaped")
        raise AssertionError("never caught it frozen")

    def restart(self, *, kill_seconds: float) -> None:
        """Start another host, which has more patience with its throttle."""
        throttler = self.throttler()
        self.host.kill()
        self.host.wait(30)
        until(lambda: not is_alive(throttler), "the throttle's process ended with its host")
        self.kill_seconds = kill_seconds
        self.start()

    def hang_while_frozen(self) -> int:
        """Stop the throttle's process just when the pod is frozen; its pid."""
        for _ in range(50):
            self.until_throttled()
            pid = self.throttler()
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: not is_alive(pid) or is_stopped(pid), "it stands still")
            if self.state() is FreezeState.FROZEN:
                return pid
            os.kill(pid, signal.SIGCONT)
        raise AssertionError("never caught it frozen")

    def close(self) -> None:
        self.agent.kill()
        left = [pid for process in self.processes for pid in throttlers(process.pid)]
        for process in self.processes:
            process.kill()
            process.wait(30)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            until(lambda pid=pid: not is_alive(pid), "the throttle's process ended with its host")
        self.pods.close()


def thread_states(pid: int) -> list[str]:
    """The letter of each thread's state."""
    stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def throttlers(parent: int) -> list[int]:
    """Pids of the throttle's processes that this host started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"gpushare.mps.throttler" in command:
            found.append(int(process.name))
    return found


@pytest.fixture(params=["v1", "v2"])
def node(request, tmp_path):
    node = Node(tmp_path, request.param)
    yield node
    node.close()


def test_the_agents_end_is_the_throttles(node):
    node.until_throttled()
    node.agent.kill()
    until(lambda: not throttle_in_force(throttled_reader(node.gpu), boottime()).pods, "no lease, nobody throttled")
    node.until_it_runs()


def test_a_killed_host_leaves_nobody_frozen(node):
    node.until_throttled()
    throttler = node.throttler()
    node.host.kill()
    until(
        lambda: not is_alive(throttler), "the throttle's process thawed and ended, though the agent goes on asking"
    )
    node.until_it_runs()


def test_a_killed_throttle_is_thawed_after_by_the_host_and_replaced(node):
    killed = node.stop_dead_while_frozen()
    os.kill(node.host.pid, signal.SIGCONT)
    until(lambda: throttlers(node.host.pid) not in ([], [killed]), "another")
    node.until_throttled()
    node.agent.kill()
    node.until_it_runs()


def test_a_throttle_that_hangs_while_it_holds_a_pod_is_ended(node):
    hung = node.hang_while_frozen()
    node.agent.kill()
    until(lambda: not is_alive(hung), "ended")
    node.until_it_runs()


def test_a_throttle_that_stood_still_throttles_on_and_its_pod_ran_meanwhile(node):
    node.restart(kill_seconds=3600.0)
    stalled = node.hang_while_frozen()
    until(lambda: node.state() is FreezeState.THAWED, "thawed by the host")
    size = node.output.stat().st_size
    until(lambda: node.output.stat().st_size > size + 100, "it runs, though it is on record")
    assert [mark.name for mark in recorded(node.base / "run")] == [node.uid]
    assert is_stopped(stalled)
    os.kill(stalled, signal.SIGCONT)
    until(lambda: node.state() is FreezeState.FROZEN, "throttled again")
    assert throttlers(node.host.pid) == [stalled]
    node.agent.kill()
    node.until_it_runs()


def test_a_pod_that_is_frozen_while_its_throttle_stands_still_is_thawed_again(node):
    """As by a throttle that stood still between the record and the freeze."""
    node.restart(kill_seconds=3600.0)
    node.hang_while_frozen()
    for _ in range(3):
        until(lambda: node.state() is FreezeState.THAWED, "thawed")
        node.pods.freezer.freeze(node.cgroup)
    until(lambda: node.state() is FreezeState.THAWED, "thawed")


def test_after_host_and_throttle_were_killed_at_once_the_next_host_thaws(node):
    node.stop_dead_while_frozen()
    node.agent.kill()
    host = thread_states(node.host.pid)
    node.host.kill()
    node.host.wait(30)
    assert node.state() is FreezeState.FROZEN, f"nobody is left to thaw it, and the host's threads were {host}"
    node.start()
    node.until_it_runs()


def until_waiting(thawer: subprocess.Popen[str], base: Path) -> None:
    """Until it has seen the throttle's sign of life, and waits for its end."""

    def opened() -> set[str]:
        with contextlib.suppress(FileNotFoundError):  # closed in between
            return {str(link.readlink()) for link in Path(f"/proc/{thawer.pid}/fd").iterdir()}
        return set()

    until(lambda: str(throttle_sign_of(base / "run")) in opened(), "the thawer waits")


def test_beside_a_host_that_stands_still_the_thawer_thaws_who_a_dead_throttle_left_frozen(node):
    """Before, the pod stayed frozen until the host ran on or ended."""
    thawer = node.start_thawer()
    node.until_throttled()
    until_waiting(thawer, node.base)
    killed = node.stop_dead_while_frozen()
    killed_at = time.monotonic()
    until(lambda: node.state() is FreezeState.THAWED, "thawed by the thawer")
    seconds = time.monotonic() - killed_at
    assert seconds <= PROMISED_SECONDS or is_busy(), seconds
    assert set(thread_states(node.host.pid)) == {"T"}
    size = node.output.stat().st_size
    until(lambda: node.output.stat().st_size > size + 20, "it goes on, though it is on record")
    os.kill(node.host.pid, signal.SIGCONT)
    until(lambda: throttlers(node.host.pid) not in ([], [killed]), "the host has another throttle")
    for _ in range(5):
        until(lambda: node.state() is FreezeState.FROZEN, "throttled as before")
        until(lambda: node.state() is FreezeState.THAWED, "runs")
    node.agent.kill()
    node.until_it_runs()
    thawer.terminate()
    node.host.kill()
    _, told = thawer.communicate(timeout=60)
    assert {line.rpartition(" WARNING ")[2] for line in told.splitlines()} == {told_of(node)}


def told_of(node: Node) -> str:
    words = "the throttle ended and left it frozen, and its host did not thaw"
    return f"gpushare.mps.thawer thawed pod {node.uid}: {words}"


def test_after_host_and_throttle_were_killed_at_once_the_thawer_thaws(node):
    thawer = node.start_thawer()
    node.until_throttled()
    until_waiting(thawer, node.base)
    node.stop_dead_while_frozen()
    killed_at = time.monotonic()
    node.host.kill()
    until(lambda: node.state() is FreezeState.THAWED, "thawed by the thawer")
    seconds = time.monotonic() - killed_at
    assert seconds <= PROMISED_SECONDS or is_busy(), seconds
    size = node.output.stat().st_size
    until(lambda: node.output.stat().st_size > size + 20, "it goes on")
    node.host.wait(30)
    node.agent.kill()
    node.start()
    until(lambda: not recorded(node.base / "run"), "the next host cleared the record")
    until_waiting(thawer, node.base)
    node.host.kill()
    thawer.terminate()
    _, told = thawer.communicate(timeout=60)
    assert {line.rpartition(" WARNING ")[2] for line in told.splitlines()} == {told_of(node)}
    assert thawer.returncode == 0


def test_a_thawer_that_starts_late_thaws_at_once(node):
    node.start_thawer().kill()
    node.stop_dead_while_frozen()
    node.host.kill()
    node.host.wait(30)
    assert node.state() is FreezeState.FROZEN
    node.start_thawer()
    until(lambda: node.state() is FreezeState.THAWED, "thawed by the next thawer")


def test_the_thawer_leaves_the_cycle_of_a_live_throttle_alone(node):
    thawer = node.start_thawer()
    node.until_throttled()
    until_waiting(thawer, node.base)
    thawer.terminate()  # as at the end of the pod: it stays for as long as the host does
    for _ in range(5):
        until(lambda: node.state() is FreezeState.THAWED, "runs")
        until(lambda: node.state() is FreezeState.FROZEN, "frozen")
    assert thawer.poll() is None
    node.agent.kill()
    node.until_it_runs()
    node.host.kill()
    assert thawer.communicate(timeout=60)[1] == "", "it thawed nobody"


def test_a_throttle_that_is_told_to_end_thaws(node):
    node.until_throttled()
    node.stop_host()  # it takes no part
    throttler = node.throttler()
    os.kill(throttler, signal.SIGTERM)
    node.until_it_runs()
    os.kill(node.host.pid, signal.SIGCONT)


@pytest.mark.parametrize("flag", [[], ["--no-throttle"]])
def test_the_mps_host_tells_in_its_status_whom_it_throttles(short_path, flag):
    pods = RealPods("v2")
    uid = str(uuid.uuid4())
    pods.run(pods.add(uid), short_path / "output")
    host = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gpushare.mps.host",
            "--directory",
            str(short_path / "run"),
            "--simulated",
            "H200:1",
            "--node-name",
            "n",
            "--port",
            "0",
            "--cgroup-root",
            str(pods.root),
            *flag,
        ],
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    agent = daemon = None
    try:
        until(lambda: list((short_path / "run").glob("GPU-*/gate.json")), "a status")
        gpu = GpuDirectory(next((short_path / "run").glob("GPU-*")))
        write_decisions(gpu, Decisions({uid: PodDecision(50, 1024)}))
        agent = Agent(gpu)
        agent.asks[uid] = ThrottleAsk(0.4)
        reader = status_reader(gpu)

        def throttle():
            status = reader.read()
            assert status is not None
            return status.throttle

        until(lambda: reader.read().daemon_pid, "a daemon")
        daemon = reader.read().daemon_pid
        if flag:
            until(lambda: throttle().problem == "the throttle does not run", "off")
        else:
            until(lambda: throttle().pods == (PodThrottle(uid, 0.4),) and throttle().freezes > 2, "throttled")
            assert throttle().problem == ""
    finally:
        host.terminate()
        host.wait(30)
        if agent is not None:
            agent.kill()
        if daemon and is_alive(daemon):
            os.kill(daemon, signal.SIGKILL)
        assert not recorded(short_path / "run")
        pods.close()


def test_no_failure_ends_the_thread_that_keeps_the_throttle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, anything but an OSError did, and nobody started or thawed again."""
    tries: list[float] = []

    def fails(*_: object) -> NoReturn:
        tries.append(time.monotonic())
        raise ValueError("odd")

    monkeypatch.setattr(ThrottleProcess, "_start", fails)
    monkeypatch.setattr(thawing, "thaw_ours", fails)
    monkeypatch.setattr(thawing, "BACKOFF", Backoff(first_seconds=0.01, longest_seconds=0.01))
    process = ThrottleProcess(tmp_path, tmp_path)
    process.start()
    until(lambda: len(tries) > 3, "it is tried again")
    monkeypatch.undo()
    process.stop()
    assert {"cannot start the throttle's process: odd", "cannot thaw: odd"} <= set(caplog.messages)
