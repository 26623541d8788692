"""The bench of gate_suite.py: a host process, tenants in namespaces and cgroups, and what they say."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpushare.core.api import JobClass, clients_of
from gpushare.mps.control import REAL_EXECUTABLE, TWIN_EXECUTABLE, ControlProgram, SyncMpsControl
from gpushare.mps.identity import pod_uid_of
from gpushare.mps.layout import (
    Decisions,
    GpuDirectory,
    PodDecision,
    decisions_reader,
    gpu_directories,
    status_reader,
    write_decisions,
)
from gpushare.mps.memory import NvmlMemory
from gpushare.mps.status import GateState, GateStatus
from gpushare.twin.mps.memory import TwinMemory

if TYPE_CHECKING:
    from agent_bench import NodeAgent

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
MOUNT = Path("/run/gpushare-tenant")
AGENTS_SHARE = 34  # percent that the node agent is told of each pod: 16 MPS clients belong to it


def python_path() -> str:
    """Our sources, then what was inherited: without a network, packages lie in a folder of their own."""
    return os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])


def pod_uid(number: int) -> str:
    return str(uuid.UUID(int=0xB0D00000000000000000000000000000 + number))


def pod_name(uid: str) -> str:
    return f"p{uid[-8:]}"


class Tenant:
    """One tenant process and the JSON lines that it prints."""

    def __init__(self, process: subprocess.Popen[str], pod: str | None) -> None:
        self.process, self.pod = process, pod
        self.events: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self._news = threading.Condition()
        self.started = time.time()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                try:
                    event = json.loads(line)
                    self.events.append(event)
                except ValueError:
                    self.noise.append(line.rstrip()[:300])
                self._news.notify_all()
        self.process.wait()
        with self._news:
            self._news.notify_all()

    def find(self, name: str) -> dict[str, Any] | None:
        return next((e for e in self.events if e["event"] == name), None)

    def last(self, name: str) -> dict[str, Any] | None:
        return next((e for e in reversed(self.events) if e["event"] == name), None)

    def wait(self, name: str, timeout: float) -> dict[str, Any]:
        """The first event of that name; RuntimeError with what it said instead."""
        deadline = time.time() + timeout
        with self._news:
            while (event := self.find(name)) is None:
                left = deadline - time.time()
                ended = self.process.poll() is not None and left < timeout - 1
                if left <= 0 or ended:
                    state = f"exit status {self.process.poll()}: {self.events[-3:]} {self.noise[-3:]}"
                    raise RuntimeError(f"no {name} of {self.pod} within {timeout} s, {state}")
                self._news.wait(min(left, 0.5))
            return event

    def end(self, timeout: float = 5.0) -> int | None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout / 2)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout / 2)
        return None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


class Bench:
    """One GPU with its host process under test."""

    def __init__(self, base: Path, *, twin: bool, program: list[str], gpu_uuid: str | None) -> None:
        self.base, self.twin, self.program, self.gpu_uuid = base, twin, program, gpu_uuid
        self.tenants: list[Tenant] = []
        self.decisions: dict[str, PodDecision] = {}
        self.host: subprocess.Popen[bytes] | None = None
        self.agent: NodeAgent | None = None
        self.cgroup_root = self._cgroup_root()
        self.gpu: GpuDirectory

    @staticmethod
    def _cgroup_root() -> Path:
        top = Path("/sys/fs/cgroup")
        root = top if (top / "cgroup.procs").exists() else top / "pids"
        # Not at the top: a kubelet on the same machine ends what it does not know below its own kubepods.
        path = root / "gpushare-suite" / "kubepods" / "besteffort"
        path.mkdir(parents=True, exist_ok=True)
        return path

    # Host

    def start_host(self) -> None:
        self.base.mkdir(parents=True, exist_ok=True)
        MOUNT.mkdir(parents=True, exist_ok=True)
        extra = ["--simulated", "H200:1", "--node-name", "bench"] if self.twin else ["--gpu", str(self.gpu_uuid)]
        log = (self.base / "host.log").open("ab")
        self.host = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpushare.mps.host",
                "--directory",
                str(self.base),
                "--listen",
                "127.0.0.1",
                "--port",
                "19433",
                *extra,
            ],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.until(lambda: bool(gpu_directories(self.base)), 20, "a GPU directory")
        self.gpu = gpu_directories(self.base)[0]
        self._reader = status_reader(self.gpu)

    def status(self) -> GateStatus:
        status = self._reader.read()
        if status is None:
            raise RuntimeError("no status yet")
        return status

    def state(self) -> GateState | None:
        status = self._reader.read()
        return status.state if status and time.time() - status.written_at < 5 else None

    def control(self) -> SyncMpsControl:
        return SyncMpsControl(ControlProgram.of(self.gpu, TWIN_EXECUTABLE if self.twin else REAL_EXECUTABLE))

    def until(self, condition: Callable[[], bool], timeout: float, what: str) -> float:
        """Wait; returns seconds waited."""
        start = time.time()
        while not condition():
            if time.time() - start > timeout:
                raise RuntimeError(f"{what}: not within {timeout} s; {self.describe()}")
            time.sleep(0.02)
        return round(time.time() - start, 3)

    def describe(self) -> str:
        with contextlib.suppress(Exception):
            s = self.status()
            waiting = [(h.pod_uid and h.pod_uid[-4:], str(h.reason)) for h in s.waiting_connections]
            return f"state {s.state} {s.detail} clients {len(s.clients)} held {waiting[:6]} turns {s.turns}"
        return "no status"

    def until_active(self, timeout: float = 60) -> float:
        return self.until(lambda: self.state() is GateState.ACTIVE, timeout, "ACTIVE")

    # Tenants

    def decide(
        self,
        number: int,
        percentage: int,
        memory_mib: int,
        job_class: JobClass = JobClass.THROUGHPUT,
        processes: int = 1,
    ) -> str:
        uid = pod_uid(number)
        is_new = uid not in self.decisions
        self.decisions[uid] = PodDecision(percentage, memory_mib, job_class, processes=processes)
        if self.agent is None:
            write_decisions(self.gpu, Decisions(dict(self.decisions)))
            return uid
        from agent_bench import ids_of, pod_of  # grpcio and aiohttp, only with --agent

        pod = pod_of(
            pod_name(uid),
            self.gpu.uuid,
            uid=uid,
            threads=percentage,
            memory_mib=memory_mib,
            share=AGENTS_SHARE,
            node=self.agent.node,
            CLASS=job_class.value,
            PROCESSES=str(processes),
        )
        if is_new:
            self.agent.admit(pod, ids_of(self.gpu.uuid, number, AGENTS_SHARE))
        else:
            self.agent.put(pod)
        expected = replace(self.decisions[uid], clients=clients_of(AGENTS_SHARE))
        self.until(lambda: self._decided().get(uid) == expected, 30, f"the agent's decision for {uid}")
        return uid

    def forget_decisions(self) -> None:
        uids, self.decisions = list(self.decisions), {}
        if self.agent is None:
            write_decisions(self.gpu, Decisions())
            return
        for uid in uids:
            self.agent.remove(pod_name(uid))
        self.until(lambda: not self._decided(), 30, "the agent's decisions gone")

    def start_agent(self, work: Path) -> None:
        """From now on decisions come from pods, by a node agent beside the host."""
        from agent_bench import NodeAgent

        simulated = "H200:1" if self.twin else ""
        self.agent = NodeAgent(work, self.base, simulated=simulated, node="bench")
        self.agent.start()
        self.until(self.agent_says_healthy, 60, "a healthy GPU on the GpuNode")

    def agent_says_healthy(self) -> bool:
        """Whether the GpuNode's last word on the GPU is Healthy."""
        return self.agent is not None and self.agent.health(self.gpu.uuid) == "Healthy"

    def decisions_file(self) -> bytes:
        """The decisions as they are on disk."""
        return self.gpu.decisions.read_bytes()

    def _decided(self) -> Mapping[str, PodDecision]:
        return decisions_reader(self.gpu).read().pods

    def spawn(
        self,
        pod: str | None,
        mode: str,
        seconds: float,
        mib: int = 0,
        *,
        uid: int = 0,
        env: Mapping[str, str] | None = None,
        direct: bool = False,
        program: Sequence[str] = (),
    ) -> Tenant:
        """A tenant in pid, ipc and mount namespaces of its own, its pod's cgroup, and any uid."""
        values = {"CUDA_MPS_PIPE_DIRECTORY": str(self.gpu.pipe if direct else MOUNT), **(env or {})}
        if not self.twin:
            values["CUDA_VISIBLE_DEVICES"] = self.gpu.uuid
        assigned = " ".join(f"{name}='{value}'" for name, value in values.items())
        enter = ""
        if pod is not None:
            group = self.cgroup_root / f"pod{pod}" / "c1"
            group.mkdir(parents=True, exist_ok=True)
            enter = f"echo $$ > {group}/cgroup.procs; "
        if self.twin:
            uid = 0  # the interpreter need not be open to other users; the real tenant's program is
        user = f"setpriv --reuid {uid} --regid {uid} --clear-groups " if uid else ""
        command = " ".join([*(program or self.program), mode, str(seconds), str(mib)])
        mounts = "mount -t tmpfs t /dev/shm && "
        if not direct:
            mounts += f"mount --bind {self.gpu.tenant} {MOUNT} && mount -o remount,ro,bind {MOUNT} && "
        inner = f"{mounts}exec {user}env {assigned} {command}"
        script = f'{enter}exec unshare -f -p -i -m --mount-proc --kill-child sh -c "{inner}"'
        process = subprocess.Popen(
            ["sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        tenant = Tenant(process, pod)
        self.tenants.append(tenant)
        return tenant

    def client_pids(self, pod: str) -> list[int]:
        return [client.pid for client in self.status().clients if client.pod_uid == pod]

    def clear(self) -> None:
        """End every tenant and wait until MPS forgot them."""
        for tenant in self.tenants:
            if tenant.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tenant.process.pid, signal.SIGKILL)
        for tenant in self.tenants:
            tenant.end()
        self.tenants.clear()
        self.forget_decisions()
        self.until_active()
        self.until(lambda: not self.status().clients and self.status().connections == 0, 30, "no clients left")

    def close(self) -> None:
        for tenant in self.tenants:
            tenant.end()
        if self.agent is not None:
            self.agent.close()
        if self.host is not None:
            self.host.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.host.wait(15)
            if self.host.poll() is None:
                self.host.kill()
        with contextlib.suppress(Exception):
            self.control().stop(3)
        for path in sorted(self.cgroup_root.glob("pod*/c1")):
            with contextlib.suppress(OSError):
                path.rmdir()
                path.parent.rmdir()

    def save_logs(self, out: Path) -> None:
        if self.agent is not None:
            (out / "agent.log").write_text(self.agent.log(400_000))
        with contextlib.suppress(OSError):
            (out / "host.log").write_text((self.base / "host.log").read_text(errors="replace")[-400_000:])
        for name in ("control.log", "server.log"):
            with contextlib.suppress(OSError):
                (out / name).write_text((self.gpu.log / name).read_text(errors="replace")[-400_000:])


def compile_tenant(base: Path) -> list[str]:
    base.mkdir(parents=True, exist_ok=True)
    program = base / "gate_tenant"
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    subprocess.run(
        [nvcc, "-O2", "-arch=native", "-o", str(program), str(HERE / "gate_tenant.cu"), "-lcuda"],
        check=True,
        timeout=180,
    )
    base.chmod(0o755)
    program.chmod(0o755)
    return [str(program)]


def used_mib_by_pod(bench: Bench) -> dict[str, int]:
    """Device memory of each pod's processes now, as the gate's own reader sees it but read afresh.

    Raises:
        RuntimeError: it cannot be told, so no check may take it for none.
    """
    reader = TwinMemory(bench.gpu) if bench.twin else NvmlMemory(bench.gpu.uuid)
    total: dict[str, int] = {}
    used = reader.used_mib()
    if used is None:
        raise RuntimeError("nobody tells the processes' memory now")
    for pid, mib in used.items():
        if mib is None:
            raise RuntimeError(f"NVML does not tell the memory of process {pid}")
        pod = pod_uid_of(pid) or "none"
        total[pod] = total.get(pod, 0) + mib
    return total
