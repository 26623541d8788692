"""Progress as the agent infers it, against what programs measure of themselves: alone, pairs, triples and fours.

Every program has a process for each cap, started once and idle until its set's turn. Alone and uncapped first, so
that the agent learns its signature as it would of any pod; then in random sets. What the agent says is read off
its metrics at the end of each set. `Law` takes the GPU's place on a machine without one.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agent_bench import NodeAgent, StandInGate, ids_of, pod_of, wait_until

from gpushare.core.gpu import Counters, Devices
from gpushare.core.interference import Profile
from gpushare.data import default_model
from gpushare.twin.contention import WORKLOADS, cap_progress

PROGRAM_FILE = Path(__file__).with_name("programs.py")
CAPS = (100, 50, 25)
CAPS_BY_SIZE: Mapping[int, tuple[int, ...]] = {2: (100, 50), 3: (50, 25), 4: (25, 50)}
BARS: Mapping[int, float] = {2: 0.05, 3: 0.08, 4: 0.10}  # mean absolute errors
# The agent takes 5 s of samples for a signature, not counting the last 2.5 s, and needs two rounds to begin.
SOLO_SECONDS = 12.0
GPU = "NVIDIA H200"
PROGRESS = "gpushare_pod_progress_ratio"
Tenant = tuple[str, int]  # program and cap


@dataclass
class Measured:
    """One set that ran: who, the programs' own rates, what the agent said; `device` as we sampled it beside."""

    tenants: list[Tenant]
    rates: list[float]
    inferred: list[float | None]
    device: dict[str, float] = field(default_factory=dict)


class Side(Protocol):
    """Where the programs run."""

    names: Sequence[str]
    broken: Sequence[str]

    def run(self, tenants: Sequence[Tenant], seconds: float) -> Callable[[], list[float]]:
        """Let them run from now on; the call waits for the end and gives their rates per second."""
        ...

    def pid(self, tenant: Tenant) -> int:
        """The process that a tenant is."""
        ...

    def shown(self, tenants: Sequence[Tenant]) -> Counters | None:
        """The simulated GPU's counters while they run; None for a real one."""
        ...

    def close(self) -> None:
        """End every program."""
        ...


class Processes:
    """Real programs under a plain MPS daemon."""

    def __init__(self, names: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.names = names
        self._running: dict[Tenant, subprocess.Popen[str]] = {}
        with log.open("a") as output:
            for name in names:
                for cap in CAPS:
                    self._running[name, cap] = subprocess.Popen(
                        [sys.executable, str(PROGRAM_FILE), name, "--serve"],
                        text=True,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=output,
                        env={**env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(cap), "OMP_NUM_THREADS": "1"},
                    )
        try:
            self.broken = sorted({name for name, cap in self._running if self._read((name, cap)) != "ready"})
        except BaseException:
            self.close()
            raise
        self.names = [name for name in names if name not in self.broken]

    def run(self, tenants: Sequence[Tenant], seconds: float) -> Callable[[], list[float]]:
        for tenant in tenants:
            stdin = self._running[tenant].stdin
            assert stdin is not None
            stdin.write(f"{seconds}\n")
            stdin.flush()

        def rates() -> list[float]:
            counts = [self._read(tenant).split() for tenant in tenants]
            return [int(count) / float(took) for count, took in counts]

        return rates

    def pid(self, tenant: Tenant) -> int:
        return self._running[tenant].pid

    def shown(self, tenants: Sequence[Tenant]) -> Counters | None:
        return None

    def close(self) -> None:
        """End all."""
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait(20)

    def _read(self, tenant: Tenant) -> str:
        stdout = self._running[tenant].stdout
        assert stdout is not None
        return stdout.readline().strip()


class Law:
    """A GPU that does what the shipped model says: a harness without a mistake finds next to no error."""

    names = tuple(sorted(WORKLOADS))
    broken: Sequence[str] = ()

    def run(self, tenants: Sequence[Tenant], seconds: float) -> Callable[[], list[float]]:
        until = time.monotonic() + seconds

        def rates() -> list[float]:
            time.sleep(max(0.0, until - time.monotonic()))
            return [
                p * WORKLOADS[name].iterations_per_s
                for (name, _), p in zip(tenants, self._progress(tenants), strict=True)
            ]

        return rates

    def pid(self, tenant: Tenant) -> int:
        return 10_000 + 1_000 * CAPS.index(tenant[1]) + self.names.index(tenant[0])

    def shown(self, tenants: Sequence[Tenant]) -> Counters | None:
        total: dict[str, float] = {}
        for (name, _), progress in zip(tenants, self._progress(tenants), strict=True):
            for counter, value in WORKLOADS[name].solo.as_dict().items():
                total[counter] = min(1.0, total.get(counter, 0.0) + value * progress)
        return Counters(**total)

    def close(self) -> None:
        """Nothing runs."""

    @staticmethod
    def _progress(tenants: Sequence[Tenant]) -> tuple[float, ...]:
        if len(tenants) == 1:
            return (cap_progress(WORKLOADS[tenants[0][0]].solo, tenants[0][1]),)
        profiles = [
            (Profile(WORKLOADS[name].solo, WORKLOADS[name].iterations_per_s), cap) for name, cap in tenants
        ]
        return tuple(forecast.progress for forecast in default_model().for_gpu(GPU).predict(profiles))


def choose(names: Sequence[str], sets: Mapping[int, int], seed: int) -> list[list[Tenant]]:
    """Random sets of different programs, by size; caps at random among those of their size."""
    rng = random.Random(seed)
    chosen: list[list[Tenant]] = []
    for size, count in sets.items():
        for _ in range(count):
            members = rng.sample(list(names), size)
            chosen.append([(name, rng.choice(CAPS_BY_SIZE[size])) for name in members])
    rng.shuffle(chosen)  # so that a run cut short has some of each size
    return chosen


def measure(
    side: Side, agent: NodeAgent, gate: StandInGate, tenants: list[Tenant], seconds: float, devices: Devices | None
) -> Measured:
    """Run one set and read what the agent says just before its end."""
    uuid = gate.uuid
    shown = side.shown(tenants)
    gate.show([(side.pid(t), f"uid-{t[0]}", t[1]) for t in tenants], shown)
    rates = side.run(tenants, seconds)
    time.sleep(0.4 * seconds)
    if devices is not None:
        devices.sample(uuid)
    time.sleep(0.55 * seconds)
    sample = devices.sample(uuid) if devices is not None else None
    figures = agent.figures(PROGRESS)
    found = Measured(tenants, rates(), [figures.get(pod_name(name)) for name, _ in tenants])
    counters = sample.counters if sample is not None else shown
    found.device = counters.as_dict() if counters is not None else {}
    return found


def known(agent: NodeAgent, uuid: str) -> list[str]:
    """The tenants of a GPU that the GpuNode lists."""
    gpu = agent.gpu(uuid)
    return [tenant.pod_uid for tenant in gpu.tenants] if gpu is not None else []


def pod_name(program: str) -> str:
    """A program's pod."""
    return program.replace("_", "-")


def run_progress(
    side: Side,
    agent: NodeAgent,
    gate: StandInGate,
    *,
    sets: Mapping[int, int],
    set_seconds: float,
    seed: int,
    devices: Devices | None,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All solos and sets; `keep` is given the result so far after each."""
    for number, name in enumerate(side.names):
        pod = pod_of(pod_name(name), gate.uuid, uid=f"uid-{name}", threads=100, WORKLOAD=name)
        agent.put(pod, ids_of(gate.uuid, number))
    wait_until(lambda: len(known(agent, gate.uuid)) == len(side.names), 30, "every pod a tenant on the GpuNode")
    result: dict[str, Any] = {
        "programs": list(side.names),
        "seed": seed,
        "set_seconds": set_seconds,
        "solo": {},
        "sets": [],
    }
    for name in side.names:
        alone = measure(side, agent, gate, [(name, 100)], SOLO_SECONDS, devices)
        result["solo"][name] = {
            "iterations_per_s": alone.rates[0],
            "said": alone.inferred[0],
            "device": alone.device,
        }
        keep(result)
    for tenants in choose(side.names, sets, seed):
        found = measure(side, agent, gate, tenants, set_seconds, devices)
        progress = [
            rate / result["solo"][name]["iterations_per_s"]
            for (name, _), rate in zip(tenants, found.rates, strict=True)
        ]
        result["sets"].append(
            {
                "tenants": tenants,
                "iterations_per_s": found.rates,
                "measured": progress,
                "inferred": found.inferred,
                "device": found.device,
            }
        )
        result["scores"] = scores(result["sets"])
        keep(result)
    return result


def scores(sets: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean absolute error and its kin by number of tenants."""
    found: dict[str, dict[str, Any]] = {}
    for size in sorted({len(each["tenants"]) for each in sets}):
        pairs = [
            (inferred, truth)
            for each in sets
            if len(each["tenants"]) == size
            for inferred, truth in zip(each["inferred"], each["measured"], strict=True)
        ]
        errors = sorted(abs(inferred - truth) for inferred, truth in pairs if inferred is not None)
        found[str(size)] = {"n": len(errors), "unknown": len(pairs) - len(errors), "bar": BARS.get(size)}
        if errors:
            found[str(size)] |= {
                "mae": statistics.fmean(errors),
                "median": statistics.median(errors),
                "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
            }
    return found


def dataset_lines(result: Mapping[str, Any], driver: str) -> list[str]:
    """The same runs as a colocation dataset v1 (docs/design.md 4), for `gpushare model attribute`."""
    head = {
        "schema": "gpushare.io/colocation/v1",
        "gpu_model": "NVIDIA H200",
        "driver": driver,
        "mechanism": "mps",
    }
    runs = [
        ([(name, 100)], [solo["iterations_per_s"]], solo["device"], SOLO_SECONDS)
        for name, solo in result["solo"].items()
    ]
    runs += [(s["tenants"], s["iterations_per_s"], s["device"], result["set_seconds"]) for s in result["sets"]]
    lines = [json.dumps(head)]
    for tenants, rates, device, seconds in runs:
        if device:
            who = [{"workload": name, "thread_percentage": cap} for name, cap in tenants]
            line = {
                "tenants": who,
                "iterations_per_s": rates,
                "device": device,
                "window_s": 0.55 * seconds,
                "memory_mib": [None] * len(who),
            }
            lines.append(json.dumps(line))
    return lines
