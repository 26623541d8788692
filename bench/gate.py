"""python -m bench gate flood|turns [--processes N] [--starts N]: a hostile pod before the gate, on the twin

The real MPS host with a simulated GPU and real processes; a substitute for /proc maps them to pods.

flood: N processes of one pod connect in a loop, half of them keeping what they open; neighbours start meanwhile.
turns: processes of one pod take the turn as a client does and exit just before the time-out, again and again.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from bench.figures import resident_mib
from gpushare.mps.identity import is_alive
from gpushare.mps.layout import (
    Decisions,
    PodDecision,
    gpu_directories,
    status_reader,
    write_decisions,
)
from gpushare.mps.status import GateState

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "0badf00d-0000-4000-8000-000000000000"
QUIET = "11111111-1111-4111-8111-111111111111"
LOG_LEVEL = os.environ.get("GPUSHARE_LOG_LEVEL", "ERROR")
PATIENCE_SECONDS = 180.0
STALE_SECONDS = 10.0  # after this time without a write the agent treats a gate as silent

CONNECT = """
import resource, socket, sys, time
sys.stdin.readline()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
kept = []
while True:
    try:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])
        kept.append(s) if sys.argv[2] == "keep" else s.close()
    except OSError:
        time.sleep(0.05)
"""
# As busy as one that connects in a loop, without connecting: what a neighbour's start loses to the cores alone.
SPIN = """
import sys
sys.stdin.readline()
while True:
    pass
"""
# Takes the turn as a client does, then sits until just before the gate's time-out of 8 s.
SIT = """
import array, socket, sys, time
sys.stdin.readline()
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])
s.recv(64); s.send(b"OUTBCRED\\0"); s.send(bytes.fromhex("02000000"))
s.recvmsg(64, socket.CMSG_SPACE(16)); s.send(bytes(4))
time.sleep(7.5)
"""


class Host:
    """A running MPS host with one simulated GPU."""

    def __init__(self, base: Path) -> None:
        self._base, self._proc = base / "run", base / "proc"
        self._proc.mkdir()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpushare.mps.host",
                "--directory",
                str(self._base),
                "--simulated",
                "H200:1",
                "--node-name",
                "n",
                "--port",
                "0",
                "--proc",
                str(self._proc),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "GPUSHARE_LOG_LEVEL": LOG_LEVEL},
        )
        self.until(lambda: bool(gpu_directories(self._base)), "a GPU directory")
        [self.gpu] = gpu_directories(self._base)
        self._reader = status_reader(self.gpu)
        self.until(lambda: (s := self._reader.read()) is not None and s.state is GateState.ACTIVE, "ACTIVE")
        pods = {uid: PodDecision(50, 40000, processes=8) for uid in (HOSTILE, QUIET)}
        write_decisions(self.gpu, Decisions(pods))

    @staticmethod
    def until(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                sys.exit(f"not within {PATIENCE_SECONDS:g} s: {what}")
            time.sleep(0.01)

    def status(self):  # type: ignore[no-untyped-def]
        status = self._reader.read()
        assert status is not None
        return status

    def belongs(self, pid: int, pod_uid: str) -> None:
        """Put a process into a pod."""
        directory = self._proc / str(pid)
        directory.mkdir(exist_ok=True)
        (directory / "cgroup").write_text(f"0::/kubepods/besteffort/pod{pod_uid}/c\n")

    def spawn(self, pod_uid: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program of a pod; it waits for the word to go."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, str(self.gpu.control), *arguments], stdin=subprocess.PIPE
        )
        self.belongs(process.pid, pod_uid)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        return process

    def start_seconds(self) -> float:
        """Return how long a quiet pod's process takes from its first connect to its context."""
        with tempfile.TemporaryFile("w+") as log:
            program = [sys.executable, "-m", "gpushare.twin.mps.tenant", "--workload", "latency-probe"]
            tenant = subprocess.Popen(
                [*program, "--memory-mib", "16"],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(ROOT / "src"),
                    "CUDA_MPS_PIPE_DIRECTORY": str(self.gpu.tenant),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            self.belongs(tenant.pid, QUIET)

            def output() -> str:
                return os.pread(log.fileno(), 2**16, 0).decode()

            try:
                self.until(lambda: "connected after" in output(), "a neighbour's start")
                assert "without MPS" not in output()
                # A client that leaves before the server lists it has wasted its turn.
                self.until(lambda: tenant.pid in [c.pid for c in self.status().clients], "it is listed")
                return float(output().partition("connected after ")[2].split()[0])
            finally:
                tenant.terminate()
                tenant.wait()
                self.until(lambda: tenant.pid not in [c.pid for c in self.status().clients], "it left")

    def close(self) -> None:
        daemon = self.status().daemon_pid
        self.process.terminate()
        self.process.wait(60)
        if daemon and is_alive(daemon):
            os.kill(daemon, 9)


class StatusWatch:
    """Watcher of the status file: each state, and the longest time without an update."""

    def __init__(self, host: Host) -> None:
        self.states: set[str] = set()
        self.longest_silence = 0.0
        self.most_unread = self.most_connections = 0
        self._host, self._stop = host, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        reader = status_reader(self._host.gpu)
        written, since = 0.0, time.monotonic()
        while not self._stop.wait(0.02):
            status = reader.read()
            if status is None:
                continue
            self.states.add(str(status.state))
            self.most_unread = max(self.most_unread, status.unread)
            self.most_connections = max(self.most_connections, status.connections)
            self.longest_silence = max(self.longest_silence, time.monotonic() - since)
            if status.written_at != written:
                written, since = status.written_at, time.monotonic()


@contextlib.contextmanager
def running(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@contextlib.contextmanager
def hosted() -> Iterator[Host]:
    base = Path(tempfile.mkdtemp(prefix="gb", dir="/tmp"))
    host = Host(base)
    try:
        yield host
    finally:
        host.close()
        shutil.rmtree(base, ignore_errors=True)


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def shown(seconds: list[float]) -> dict[str, float]:
    return {
        "median_s": round(statistics.median(seconds), 3),
        "max_s": round(max(seconds), 3),
        "starts": len(seconds),
    }


def flood(processes: int, starts: int) -> dict[str, object]:
    """Measure starts of a quiet pod, alone and during another pod's flood of connections."""
    with hosted() as host:
        gate = host.status().gate_pid
        usual = [host.start_seconds() for _ in range(starts)]
        with running([host.spawn(HOSTILE, SPIN) for _ in range((processes + 1) // 2)]):
            busy = [host.start_seconds() for _ in range(starts)]
        before = resident_mib(gate)
        flooders = [host.spawn(HOSTILE, CONNECT, "keep" if n % 2 else "close") for n in range(processes)]
        with running(flooders), StatusWatch(host) as health:
            host.until(lambda: health.most_unread > 0, "connections that come too fast")
            during = [host.start_seconds() for _ in range(starts)]
            after = resident_mib(gate)
        host.until(lambda: host.status().connections == 0, "nothing left of the flood")
        status = host.status()
        return {
            "usual": shown(usual),
            "beside_busy_loops": shown(busy),
            "flooded": shown(during),
            "slower_median_s": round(statistics.median(during) - statistics.median(usual), 3),
            "slower_max_s": round(max(during) - max(usual), 3),
            "states": sorted(health.states),
            "longest_silence_s": round(health.longest_silence, 1),
            "silent_from_s": STALE_SECONDS,
            "most_connections": health.most_connections,
            "most_held_unread": health.most_unread,
            "gate_rss_mib": [round(before, 1), round(after, 1)],
            "gate_threads": threads(gate),
            "same_gate": status.gate_pid == gate,
            "refused": dict(status.refused),
        }


def turns(processes: int, starts: int) -> dict[str, object]:
    """Measure starts of a quiet pod, alone and beside a pod whose processes waste their turns."""
    with hosted() as host:
        usual = [host.start_seconds() for _ in range(starts)]
        stop = threading.Event()

        def waste() -> None:
            while not stop.is_set():
                process = host.spawn(HOSTILE, SIT)
                while process.poll() is None and not stop.wait(0.05):
                    pass
                process.kill()
                process.wait()

        wasters = [threading.Thread(target=waste) for _ in range(processes)]
        for waster in wasters:
            waster.start()
        try:
            with StatusWatch(host) as health:
                host.until(
                    lambda: any(h.pod_uid == HOSTILE for h in host.status().waiting_connections),
                    "wasters that wait",
                )
                began = time.monotonic()
                beside = [host.start_seconds() for _ in range(starts)]
                lasted = time.monotonic() - began
        finally:
            stop.set()
            for waster in wasters:
                waster.join()
        usual_median = statistics.median(usual)
        return {
            "usual": shown(usual),
            "beside": shown(beside),
            "waited_beyond_usual_s": round(sum(max(0.0, each - usual_median) for each in beside), 2),
            "lasted_s": round(lasted, 1),
            "states": sorted(health.states),
            "turns_that_led_nowhere": host.status().turns.timeouts,
        }


MODES = {"flood": flood, "turns": turns}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench gate", description=__doc__)
    parser.add_argument("mode", choices=sorted(MODES))
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--starts", type=int, default=20)
    options = parser.parse_args(arguments)
    load = os.getloadavg()
    result = MODES[options.mode](options.processes, options.starts)
    machine = {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": [round(each, 1) for each in load],
    }
    print(json.dumps({"machine": machine, options.mode: result}, indent=1))
