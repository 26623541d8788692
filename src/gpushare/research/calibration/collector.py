"""Run workers at the same time and write a colocation dataset v1, one flushed line per run."""

import gc
import json
import multiprocessing
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TextIO

from gpushare.research.calibration.counters import RunCounters
from gpushare.research.calibration.plan import CalibrationPhase, Cell
from gpushare.research.calibration.resume import cut_to_whole, earlier_runs, key_of
from gpushare.research.calibration.worker import serve
from gpushare.research.calibration.workload import Stage, Workload
from gpushare.research.dataset import Mechanism

SCHEMA = "gpushare.io/colocation/v1"
_READY_SECONDS = 90.0
_DRAIN_SECONDS = 15.0
_CPU_EVERY = 12  # runs between two measurements of the CPUs' speed
_CPU_SECONDS = 0.003
_LEAD_SECONDS = 0.01  # from the command to the first iteration, so that every worker gets it in time

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: warm-up, then the measured window, which is longer for sets of workloads."""

    warm_seconds: float = 0.12
    window_seconds: float = 0.42
    shared_seconds: float = 0.60


class WorkerPool(Protocol):
    """Live workers of one phase: processes of this machine (`Pool`), or simulated ones (`SimulatedPool`)."""

    def alive(self) -> Counter[Cell]:
        """Return how many workers of each cell are alive."""
        ...

    def read_memory(self, memory_by_pid: dict[int, int]) -> None:
        """Read memory by process from the driver."""
        ...

    def fire(
        self, cells: Sequence[Cell], timing: Timing, counters: RunCounters, log: Log
    ) -> dict[str, Any] | None:
        """Run the cells at the same time for one window; None when one did not answer, which is then dropped.

        Args:
            cells: no more of a kind than are alive; one that comes twice is run by two workers.
        """
        ...

    def close(self) -> None:
        """Let every worker end."""
        ...


PoolMaker = Callable[[Sequence[Cell], Log], WorkerPool]


def pools_of(
    suite: dict[str, Workload],
    stage: Stage,
    environment: dict[str, str] | None,
    *,
    probes: Collection[str] = (),
) -> PoolMaker:
    """Return what starts the workers of a phase; `environment` None: without MPS."""

    def make(cells: Sequence[Cell], log: Log) -> Pool:
        return Pool(suite, cells, stage, environment, log, probes=probes)

    return make


@dataclass(slots=True, eq=False)
class _Worker:
    cell: Cell
    process: Any
    link: Connection
    memory_mib: int | None = None

    @property
    def words(self) -> str:
        """Say which it is."""
        return f"{self.cell[0]} at {self.cell[1]}%"


class Pool:
    """Live workers of one phase."""

    def __init__(
        self,
        suite: dict[str, Workload],
        cells: Iterable[Cell],
        stage: Stage,
        environment: dict[str, str] | None,
        log: Log,
        *,
        probes: Collection[str] = (),
    ) -> None:
        self._probes = frozenset(probes)
        self._workers: dict[Cell, list[_Worker]] = defaultdict(list)
        self._fired = 0
        self._cpus: list[int] = []
        os.environ.update(environment or {})
        gc.collect()
        gc.freeze()  # a collection in a child would copy every page that it shares with this process
        fork = multiprocessing.get_context("fork")
        for name, percentage in cells:
            ours, theirs = fork.Pipe()
            process = fork.Process(
                target=serve,
                args=(suite[name], percentage, stage, theirs),
                daemon=True,
                kwargs={"mps": environment is not None},
            )
            process.start()
            theirs.close()
            self._workers[name, percentage].append(_Worker((name, percentage), process, ours))
        deadline = time.monotonic() + _READY_SECONDS
        whole = 0
        facts: list[tuple[_Worker, dict[str, int]]] = []
        for worker in self._all():
            answer = _receive(worker, deadline - time.monotonic())
            if answer is None or answer[0] != "ready":
                log(f"{worker.words} did not start: {answer[1] if answer else 'no answer in time'}")
                self._drop(worker)
                continue
            facts.append((worker, answer[1]))
            if worker.cell[1] == 100:  # only these tell how many SMs there are
                whole = max(whole, answer[1]["sm_count"])
        for worker, fact in facts:
            worker.memory_mib = fact["memory_mib"] or None
            if environment is not None and whole and worker.cell[1] < 100 and fact["sm_count"] >= whole:
                log(f"{worker.words} sees all {whole} SMs: it runs outside MPS")
                self._drop(worker)

    def alive(self) -> Counter[Cell]:
        """Return how many workers of each cell are alive."""
        return Counter({cell: len(workers) for cell, workers in self._workers.items()})

    def read_memory(self, memory_by_pid: dict[int, int]) -> None:
        """Read memory by process from the driver, which beats the program's own figure."""
        for worker in self._all():
            worker.memory_mib = memory_by_pid.get(worker.process.pid, worker.memory_mib)

    def fire(
        self, cells: Sequence[Cell], timing: Timing, counters: RunCounters, log: Log
    ) -> dict[str, Any] | None:
        """Run the cells at the same time for one window; None when one did not answer, which is then dropped."""
        if not self._fired % _CPU_EVERY:
            self._cpus = fastest_cpus()
        self._fired += 1
        began = time.monotonic() + _LEAD_SECONDS
        start = began + timing.warm_seconds
        is_set = len(cells) > 1 and not any(name in self._probes for name, _ in cells)
        window = timing.shared_seconds if is_set else timing.window_seconds
        end = start + window
        free = {cell: iter(self._workers[cell]) for cell in cells}
        workers = [next(free[cell]) for cell in cells]
        for place, worker in enumerate(workers):
            worker.link.send((self._cpus[place % len(self._cpus)], began, start, end))
        time.sleep(max(0.0, start - time.monotonic()))
        counters.start()
        time.sleep(max(0.0, end - time.monotonic()))
        device = counters.stop()
        answers = [_receive(worker, end + _DRAIN_SECONDS - time.monotonic()) for worker in workers]
        for worker, answer in zip(workers, answers, strict=True):
            if answer is None or answer[0] != "ran":
                log(f"{worker.words} left: {answer[1] if answer else 'no answer in time'}")
                self._drop(worker)
        if any(answer is None or answer[0] != "ran" for answer in answers):
            return None
        rates = [answer[1][0] for answer in answers if answer]
        return run_line(
            cells,
            rates,
            device=device,
            window_seconds=window,
            memory_mib=[worker.memory_mib for worker in workers],
            probes=self._probes,
        )

    def close(self) -> None:
        """Let every worker end by itself; a client killed while busy is undefined under MPS."""
        for worker in self._all():
            worker.link.send(None)
        for worker in self._all():
            worker.process.join(10)
            self._drop(worker)

    def _all(self) -> list[_Worker]:
        return [worker for workers in self._workers.values() for worker in workers]

    def _drop(self, worker: _Worker) -> None:
        """Drop a worker that cannot be used."""
        self._workers[worker.cell].remove(worker)
        worker.link.close()
        worker.process.kill()
        worker.process.join(5)


def _receive(worker: _Worker, seconds: float) -> tuple[str, Any] | None:
    try:
        return worker.link.recv() if worker.link.poll(max(0.0, seconds)) else None
    except (EOFError, ConnectionError):
        return "failed", "its process ended"


def fastest_cpus() -> list[int]:
    """Return this machine's CPUs, fastest first, by a few milliseconds of arithmetic on each.

    On a virtual machine some CPUs run at half speed for seconds (another guest uses the sibling thread); it
    would look like interference between tenants that share nothing.
    """
    everywhere = os.sched_getaffinity(0)
    speed: dict[int, int] = {}
    for cpu in everywhere:
        os.sched_setaffinity(0, {cpu})
        until = time.monotonic() + _CPU_SECONDS
        rounds = 0
        while time.monotonic() < until:
            rounds += 1
        speed[cpu] = rounds
    os.sched_setaffinity(0, everywhere)
    return sorted(speed, key=lambda cpu: -speed[cpu])


def run_line(
    cells: Sequence[Cell],
    rates: Sequence[float],
    *,
    device: dict[str, float],
    window_seconds: float,
    memory_mib: Iterable[int | None],
    probes: Collection[str] = (),
) -> dict[str, Any]:
    """Return one run as a line of the dataset."""
    return {
        "tenants": [
            {"workload": name, "thread_percentage": percentage} | ({"probe": True} if name in probes else {})
            for name, percentage in cells
        ],
        "iterations_per_s": [float(f"{rate:.6g}") for rate in rates],
        "device": device,
        "window_s": window_seconds,
        "memory_mib": list(memory_mib),
    }


def collect(
    phases: Sequence[CalibrationPhase],
    output: Path,
    *,
    pools: PoolMaker,
    mechanism: Mechanism,
    timing: Timing,
    budget_seconds: float,
    counters: RunCounters,
    progress: Callable[[int, int], None],
    log: Log,
    in_turn: bool = False,
) -> int:
    """Make the planned runs within the budget, resuming an existing dataset; return how many runs were written.

    Args:
        in_turn: a phase begins when the one before it is done, so the last phases are lacking where the budget
            ends; otherwise each phase gets its part of the time that is left.

    Raises:
        ResumeError: the output is another GPU's, or no dataset.
    """
    began = time.monotonic()
    earlier = earlier_runs(output)
    about = counters.about()
    earlier.check(about, mechanism.value)
    cut_to_whole(output, earlier)
    done = Counter(earlier.runs)
    total, written = sum(len(phase.runs) for phase in phases), 0
    seen = 0
    with output.open("a") as file:
        if earlier.dataset is None:
            _write(file, {"schema": SCHEMA, **about, "mechanism": mechanism.value})
        for number, phase in enumerate(phases):
            todo = []
            for run in phase.runs:
                seen += 1
                if done[key_of(run)]:
                    done[key_of(run)] -= 1
                else:
                    todo.append(run)
            if not todo or time.monotonic() - began > budget_seconds:
                continue
            asked = time.monotonic()
            phases_left = 1 if in_turn else len(phases) - number
            until = asked + (budget_seconds - (asked - began)) / phases_left
            pool = pools(phase.cells, log)
            took = time.monotonic() - asked
            log(f"{pool.alive().total()} of {len(phase.cells)} workers ready after {took:.1f} s")
            pool.read_memory(counters.memory_by_pid())
            for position, run in enumerate(todo):
                if time.monotonic() > until:
                    log(f"the phase's part of the budget is spent, {len(todo) - position} runs are left")
                    break
                if not Counter(run) <= pool.alive():
                    continue
                measured = pool.fire(run, timing, counters, log)
                if measured is not None:
                    _write(file, measured)
                    written += 1
                progress(seen - len(todo) + position + 1, total)
            pool.close()
    return written


def _write(file: TextIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value, separators=(",", ":")) + "\n")
    file.flush()
