"""A node without a cluster: real agent, MPS host, gate, throttle and freezer; tenants of the twin in cgroups."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tests.deviceplugin.fakes import FakeKubelet, NodeApi, raw_pod
from tests.mps.cgroups import RealPods

from gpushare.core.api import GpuShareStatus, PodPlacement, TenantStatus, WorkloadSignature, names, to_json
from gpushare.kube import GPUSHARES
from gpushare.mps.control import TWIN_EXECUTABLE, ControlProgram, SyncMpsControl
from gpushare.mps.freezer import CGROUP_ROOT
from gpushare.mps.identity import PROC
from gpushare.mps.layout import GpuDirectory, status_reader
from gpushare.mps.starvation import run_delays
from gpushare.mps.status import GateState
from gpushare.runtime.logs import LOG_LEVEL
from gpushare.twin.gpus import parse_simulated
from gpushare.twin.table import workload_named
from gpushare_deviceplugin.allocation import device_ids

NODE = "n1"
GPU = parse_simulated("H200:1", NODE)[0]
PATIENCE = 120.0
POLL_SECONDS = 0.05
TICK = re.compile(r"progress=([0-9.]+)")


async def until(what: str, true: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait for other processes, which nothing but files tells of."""
    deadline = time.monotonic() + patience
    while not true():
        assert time.monotonic() < deadline, f"not within {patience} s: {what}"
        await asyncio.sleep(POLL_SECONDS)


@dataclass
class LivePod:
    """One pod of the node; its process is a tenant of the twin in a cgroup as kubelet makes them."""

    name: str
    workload: str
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    process: "subprocess.Popen[bytes] | None" = None
    log: Path = Path()
    ticks: list[tuple[float, float]] = field(default_factory=list)
    _read: int = 0

    def look(self) -> list[tuple[float, float]]:
        """Every tick so far: when it was read, and the true progress over the second before."""
        text = self.log.read_text() if self.log.exists() else ""
        lines = text.splitlines(keepends=True)
        for line in lines[self._read :]:
            if not line.endswith("\n"):
                break
            self._read += 1
            is_tick = not line.rstrip().endswith("stalled")  # which the tenant says where the server sent none
            if is_tick and (found := TICK.search(line)):
                self.ticks.append((time.monotonic(), float(found[1])))
        return self.ticks


class LiveNode:
    """The node; close it."""

    def __init__(self, root: Path, api: NodeApi, url: str, kubelet: FakeKubelet) -> None:
        self.root, self.api, self.kubelet = root, api, kubelet
        self.directory = root / "run"
        self.gpu = GpuDirectory.of(self.directory, GPU.uuid)
        self.cgroups = RealPods("v1" if (CGROUP_ROOT / "freezer" / "tasks").exists() else "v2")
        self.pods: dict[str, LivePod] = {}
        self._shares: dict[str, dict[str, Any]] = {}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        (root / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
        self._environment = {**os.environ, "KUBECONFIG": str(root / "kubeconfig"), "PYTHONPATH": path}
        self._environment[LOG_LEVEL] = "DEBUG"  # each step of the agent's loop in its log
        self._environment.pop("KUBERNETES_SERVICE_HOST", None)
        self._ids = list(device_ids(GPU.uuid))
        self.agent: subprocess.Popen[bytes] | None = None
        self._host: subprocess.Popen[bytes] | None = None
        self.log = root / "agent.log"

    def share(self, workload: str, max_slowdown: float, *, is_known: bool) -> None:
        """Make a GpuShare for the pods of a workload; before the agent starts."""
        kept = WorkloadSignature(GPU.model, workload_named(workload).solo.as_dict(), window_seconds=60.0)
        self._shares[workload] = {
            "metadata": {"namespace": "shop", "name": workload, "resourceVersion": "1"},
            "spec": {"maxSlowdown": max_slowdown},
            "status": to_json(GpuShareStatus(profile=kept if is_known else None)),
        }

    def pod(self, name: str, workload: str, percent: int, threads: int) -> LivePod:
        """Let a pod be bound to the node, and known to its workload's GpuShare; before the agent starts."""
        pod = self.pods[name] = LivePod(name, workload, log=self.root / f"{name}.log")
        obj = raw_pod(name, GPU.uuid, str(threads), "Running", percent)
        obj["metadata"]["uid"] = pod.uid
        obj["metadata"]["annotations"][names.WORKLOAD] = workload
        self.api.put(obj)
        taken, self._ids = self._ids[:percent], self._ids[percent:]
        self.kubelet.allocated[f"shop/{name}"] = taken
        placement = to_json(PodPlacement(pod_uid=pod.uid, pod=name, node=NODE))
        self._shares[workload]["status"].setdefault("placements", []).append(placement)
        self.api.store.put(GPUSHARES, self._shares[workload])
        return pod

    async def start(self) -> None:
        """Start the MPS host, then the agent, and wait until the GPU serves."""
        arguments = ("--directory", str(self.directory), "--simulated", "H200:1", "--node-name", NODE)
        self._host = self._run("gpushare.mps.host", self.root / "host.log", *arguments, "--port", "0")
        self.start_agent()
        reader = status_reader(self.gpu)

        def serves() -> bool:
            status = reader.read()
            return status is not None and status.state is GateState.ACTIVE and not status.throttle.problem

        await until("the gate at work, and a throttle", serves)
        await until("a GpuNode", lambda: self.api.statuses)

    def start_agent(self) -> None:
        """Start an agent, the first or another."""
        arguments = ("--directory", str(self.directory), "--simulated", "H200:1", "--node-name", NODE)
        kubelet = ("--kubelet-directory", str(self.kubelet.directory), "--metrics-port", "0")
        self.agent = self._run("gpushare_deviceplugin", self.log, *arguments, *kubelet)

    def _run(self, module: str, path: Path, *arguments: str) -> "subprocess.Popen[bytes]":
        with path.open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", module, *arguments], env=self._environment, stderr=log)

    def begin(self, pod: LivePod) -> None:
        """Start the pod's program, in its cgroup before it runs anything."""
        container = self.cgroups.make(self.cgroups.add(pod.uid) / "container")
        enter = f'echo $$ > {container}/cgroup.procs && exec "$@"'
        tenant = [
            sys.executable,
            "-m",
            "gpushare.twin.mps.tenant",
            "--workload",
            pod.workload,
            "--memory-mib",
            "900",
        ]
        environment: Mapping[str, str] = {**self._environment, "CUDA_MPS_PIPE_DIRECTORY": str(self.gpu.tenant)}
        with pod.log.open("ab") as log:
            pod.process = subprocess.Popen(["sh", "-c", enter, "sh", *tenant], env=environment, stdout=log)

    def steps(self) -> str:
        """What the agent's loop acted by, a line for each step."""
        return "\n".join(line for line in self.log.read_text().splitlines() if "step on GPU" in line)

    def tenant(self, pod: LivePod) -> TenantStatus | None:
        """What the GpuNode says of a pod."""
        gpus = self.api.statuses[-1].gpus if self.api.statuses else ()
        return next((t for gpu in gpus for t in gpu.tenants if t.pod_uid == pod.uid), None)

    def events(self, reason: str) -> list[str]:
        """Notes of the events with this reason."""
        return [event["note"] for event in self.api.events if event["reason"] == reason]

    def run_delays(self) -> dict[str, float]:
        """For how long each thread of the node's processes, this one's among them, has waited for a CPU so far."""
        mark, delays = str(self.directory).encode(), run_delays(os.getpid())
        for process in PROC.glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                    delays |= run_delays(int(process.name))
        return delays

    def close(self) -> None:
        """End every process, the MPS daemon that outlives its host too, and remove the cgroups."""
        self.api.away = True
        for pod in self.pods.values():
            _end(pod.process, signal.SIGKILL)
        _end(self.agent, signal.SIGTERM)
        _end(self._host, signal.SIGTERM)
        SyncMpsControl(ControlProgram.of(self.gpu, TWIN_EXECUTABLE)).stop(5.0)
        self.cgroups.close()


def _end(process: "subprocess.Popen[bytes] | None", number: int) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        if process.poll() is None:
            process.kill()
            process.wait(30)


MODELLED = ("dlrm-infer", "gemm-fp16")
"""The former makes 0.15 of its progress beside the other, by the shipped model."""
MEASURED = ("lattice-boltzmann-fp32-1536", "cg-fp64-poisson-224")
"""The former makes 0.28 of its progress beside the other, as the table has it."""


def bad_pair(node: LiveNode, *, is_known: bool, programs: tuple[str, str] = MODELLED) -> tuple[LivePod, LivePod]:
    """Make a pod that is promised far more than it makes beside another, and the other one.

    The other one runs uncapped, and may be stopped for nearly all of the time.
    """
    victim, bad = programs
    node.share(victim, 1.5, is_known=is_known)
    node.share(bad, 10.0, is_known=is_known)
    return node.pod("victim", victim, 40, 40), node.pod("bad", bad, 40, 100)


def kept_after(pod: LivePod, promise: float, since: float) -> float | None:
    """Seconds from the first tick below the promise to the first of three whose mean is not; None: not yet.

    One second's progress says where in the cycle it began: a neighbour that runs 36% of the time runs 25% of one
    second and 50% of the next.
    """
    ticks = [(at, progress) for at, progress in pod.look() if at >= since]
    broken = next((place for place, (_, progress) in enumerate(ticks) if progress < promise), None)
    if broken is None:
        return None
    for place in range(broken, len(ticks) - 2):
        if sum(progress for _, progress in ticks[place : place + 3]) >= 3 * promise:
            return ticks[place][0] - ticks[broken][0]
    return None
