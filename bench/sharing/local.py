"""Run jobs as processes of this machine, without Kubernetes: the queue here replaces kube-scheduler's."""

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.sharing.deciding import Decider
from bench.sharing.joblog import story
from bench.sharing.launching import Ended, Order
from bench.sharing.policies import FIFO, OURS, SharingPolicy, may_start
from bench.sharing.trace import TraceJob
from bench.sharing.worlds import GpuShareWorld, LocalWorld, world_of
from gpushare.core.gpu import GpuInfo
from gpushare.core.interference import Profile
from gpushare.data import default_model

ROOT = Path(__file__).resolve().parents[2]
LOOK_SECONDS = 1.0
SIGNATURE_SECONDS = 5.0  # seconds of a signature that are enough to begin with
_LOG_TAIL = 100_000
_TAIL = 600  # characters of what a job said that failed


class Zygote:
    """The process that forks jobs (zygote.py)."""

    def __init__(self, kind: str, work: Path) -> None:
        folders = [str(ROOT), *(str(ROOT / part) for part in ("src", "operator", "deviceplugin"))]
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        self._log = (work / "zygote.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.sharing.zygote", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *inherited]), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        if self._events.get(timeout=180)["event"] != "ready":
            raise RuntimeError(f"the jobs' first process did not come up: {work / 'zygote.log'}")

    def start(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str], groups: Sequence[Path], out: Path
    ):
        """Fork a job."""
        order = {
            "id": name,
            "arguments": list(arguments),
            "env": dict(env),
            "cgroups": [str(group) for group in groups],
            "out": str(out),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def news(self) -> list[dict[str, Any]]:
        """Return what was said since the last call.

        Raises:
            RuntimeError: the process is gone.
        """
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        if any(each["event"] == "gone" for each in found):
            raise RuntimeError("the jobs' first process is gone")
        return found

    def close(self) -> None:
        """End it, and with it every job."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"event": "gone"})


class LocalWitness:
    """Witness that asks this machine's agent, and the decider in place of the extender."""

    def __init__(self, world: GpuShareWorld, decider: Decider, began_wall: float) -> None:
        self.gpu_model = world.gpu.model
        self._world, self._decider, self._began_wall = world, decider, began_wall

    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.time() - self._began_wall

    def metrics(self) -> str:
        """Return the agent's metrics."""
        return self._world.metrics()

    def profiles(self) -> Mapping[str, Profile]:
        """Return what the decisions are made by."""
        return self._decider.profiles()


class LocalLauncher:
    """Starts jobs in one of the three worlds of worlds.py.

    Args:
        work: for logs and sockets, so keep its path short; it is removed at the end.
        logs: file that gets the end of every log.
        known: signatures of programs, as GpuShares have them.
    """

    kind = "processes"
    alone = FIFO

    def __init__(
        self, work: Path, gpu: GpuInfo, known: Mapping[str, Any], *, twin: bool, logs: Path | None = None
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._work, self._gpu, self._twin, self._known, self._logs = work, gpu, twin, known, logs
        self._zygote = Zygote("twin" if twin else "gpu", work)
        self._world: LocalWorld | None = None
        self._decider: Decider | None = None
        self._policy: SharingPolicy = OURS
        self._waiting: list[Order] = []
        self._running: dict[str, tuple[Order, int | None, Path]] = {}
        self._runs = 0
        self._began_wall = self._began = 0.0
        self._next_look = 0.0
        self._changed = True

    def begin(self, policy: SharingPolicy, orders: Sequence[Order]) -> None:
        """Start the policy's world."""
        jobs = [order.job for order in orders]
        self._policy, self._waiting, self._running = policy, [], {}
        self._runs += 1
        self._world = world_of(policy, self._work, self._gpu, jobs, self._known, twin=self._twin)
        self._decider = Decider(self._gpu, self._known, default_model()) if policy is OURS else None
        self._began_wall, self._began = time.time(), time.monotonic()

    def submit(self, order: Order) -> None:
        """Let a job wait."""
        self._waiting.append(order)
        self._changed = True

    def poll(self) -> dict[int, Ended]:
        """Reap, start who may start, and look at those that run."""
        assert self._world is not None
        ended = {}
        for news in self._zygote.news():
            if news["event"] == "exited" and news["id"] in self._running:
                order, cap, log = self._running.pop(news["id"])
                self._world.ended(order.job)
                if self._decider is not None:
                    self._decider.release(order.job)
                ended[order.job.number] = self._ended(int(news["status"]), cap, log)
                self._changed = True
        if self._changed:
            self._changed = False
            self._start()
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._world.look([order.job for order, _, _ in self._running.values()])
            if self._decider is not None and isinstance(self._world, GpuShareWorld):
                self._decider.learn(self._world.copied())
            self._stop_the_known()
        return ended

    def is_ready(self, number: int) -> bool:
        """Return whether a job is built and warm, or has ended."""
        if any(order.job.number == number for order in self._waiting):
            return False
        logs = [log for order, _, log in self._running.values() if order.job.number == number]
        return all(log.exists() and story(log.read_text().splitlines(), 0.0).ready is not None for log in logs)

    def stop(self, number: int) -> None:
        """Ask a job to end soon."""
        for order, _, log in self._running.values():
            if order.job.number == number:
                log.with_suffix(".stop").touch()

    def signatures(self) -> dict[str, Any]:
        """Return what the agent published."""
        return self._world.signatures() if self._world is not None else {}

    def learn(self, signatures: Mapping[str, Any]) -> None:
        """Use these signatures from the next `begin` on."""
        self._known = {**self._known, **signatures}

    def witness(self) -> LocalWitness | None:
        """Return the witness of decisions and inference under gpushare."""
        if self._decider is None or not isinstance(self._world, GpuShareWorld):
            return None
        return LocalWitness(self._world, self._decider, self._began_wall)

    def unfinished(self) -> dict[int, str]:
        """Return who waits, and who runs."""
        waiting = {order.job.number: "waits" for order in self._waiting}
        return waiting | {order.job.number: "runs" for order, _, _ in self._running.values()}

    def refusals(self) -> Sequence[Mapping[str, Any]]:
        """Return none: there is no scheduler."""
        return ()

    def faults(self) -> Sequence[Mapping[str, Any]]:
        """Return none: faults need pods (command.py refuses them here)."""
        return ()

    def end(self) -> None:
        """End who still runs, by a new first process, and the world."""
        if self._running:
            self._zygote.close()
            self._zygote = Zygote("twin" if self._twin else "gpu", self._work)
            self._running = {}
        if self._world is not None:
            self._world.close()
            self._world = None

    def close(self) -> None:
        """End everything."""
        try:
            self._zygote.close()
        finally:
            if self._world is not None:
                self._world.close()
            self._keep_logs()
            shutil.rmtree(self._work, ignore_errors=True)

    def _stop_the_known(self) -> None:
        assert self._world is not None
        known = self._world.signatures()
        for order, _, log in self._running.values():
            seen = known.get(order.job.program, {}).get("windowSeconds") or 0.0
            if order.until_known and seen >= SIGNATURE_SECONDS:
                log.with_suffix(".stop").touch()

    def _keep_logs(self) -> None:
        if self._logs is None:
            return
        with self._logs.open("a") as file:
            for path in sorted(self._work.rglob("*.log")):
                text = path.read_text(errors="replace")[-_LOG_TAIL:]
                file.write(f"==== {path.relative_to(self._work)}\n{text}\n")

    def _start(self) -> None:
        assert self._world is not None
        by_number = {order.job.number: order for order in self._waiting}
        jobs = [order.job for order in self._waiting]
        if self._decider is not None:
            chosen: list[tuple[TraceJob, int | None]] = list(
                self._decider.start(jobs, time.monotonic() - self._began)
            )
        else:
            running = [order.job for order, _, _ in self._running.values()]
            chosen = [(job, self._policy.cap(job)) for job in may_start(self._policy, jobs, running)]
        for job, cap in chosen:
            order = by_number[job.number]
            self._waiting.remove(order)
            name = f"{self._runs}-{job.name}"
            log = self._work / f"{name}.jsonl"
            stop = log.with_suffix(".stop")
            for left in (log, stop):
                left.unlink(missing_ok=True)
            self._world.admit(job, cap)
            arguments = [*order.arguments(), "--log", str(log), "--stop", str(stop), *self._world.arguments()]
            environment = self._world.environment(job, cap)
            self._running[name] = order, cap, log
            out = self._work / f"{name}.out"
            out.unlink(missing_ok=True)
            self._zygote.start(name, arguments, environment, self._world.cgroups(job), out)

    def _ended(self, status: int, cap: int | None, log: Path) -> Ended:
        lines = log.read_text().splitlines() if log.exists() else []
        out = log.with_suffix(".out")
        tail = out.read_text(errors="replace")[-_TAIL:] if status and out.exists() else ""
        log.unlink(missing_ok=True)
        out.unlink(missing_ok=True)
        return Ended(status, cap, story(lines, self._began_wall), tail)
