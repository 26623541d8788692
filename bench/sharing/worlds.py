"""The layer between processes of this machine and its GPU: none, an MPS daemon, or gpushare's node."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from bench.sharing.policies import SharingPolicy, World
from bench.sharing.trace import MEMORY_MIB, TraceJob
from gpushare.core.api import GpuShareSpec, GpuShareStatus, PodPlacement, WorkloadSignature, from_json, to_json
from gpushare.core.control import choose_signature
from gpushare.core.gpu import GpuInfo
from gpushare.mps import commands
from gpushare.mps.control import REAL_EXECUTABLE, TWIN_EXECUTABLE, ControlProgram, SyncMpsControl
from gpushare.mps.layout import GpuDirectory, decisions_reader
from gpushare_deviceplugin.allocation import device_ids

NODE = "bench"
_LOG_TAIL = 30_000
_TESTS = Path(__file__).resolve().parents[2] / "tests" / "gpu"


class LocalWorld(Protocol):
    """One of the three."""

    def admit(self, job: TraceJob, cap: int | None) -> None:
        """Prepare for a job that is about to start."""
        ...

    def environment(self, job: TraceJob, cap: int | None) -> dict[str, str]:
        """Return what its process needs to know."""
        ...

    def cgroups(self, job: TraceJob) -> Sequence[Path]:
        """Return where its process belongs."""
        ...

    def arguments(self) -> Sequence[str]:
        """Return what its command line gets in addition."""
        ...

    def look(self, running: Sequence[TraceJob]) -> None:
        """Record what can be observed of the running jobs."""
        ...

    def ended(self, job: TraceJob) -> None:
        """Record that a job is gone."""
        ...

    def signatures(self) -> dict[str, Any]:
        """Return what was learnt of programs, by name."""
        ...

    def close(self) -> None:
        """End what was started for it."""
        ...


class PlainWorld:
    """World without a layer: the driver makes processes take turns."""

    def __init__(self, work: Path, gpu: GpuInfo, *, twin: bool) -> None:
        self.gpu = gpu
        self._turns = work / "turns" if twin else None
        if self._turns is not None:
            shutil.rmtree(self._turns, ignore_errors=True)
            self._turns.mkdir(parents=True)

    def admit(self, job: TraceJob, cap: int | None) -> None:
        """Do nothing: this world has no admission."""

    def environment(self, job: TraceJob, cap: int | None) -> dict[str, str]:
        """Return the GPU, and a folder without an MPS daemon."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu.uuid, "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/no-mps"}

    def cgroups(self, job: TraceJob) -> Sequence[Path]:
        """Return none."""
        return ()

    def arguments(self) -> Sequence[str]:
        """Return where simulated jobs take turns."""
        return () if self._turns is None else ("--turns", str(self._turns))

    def look(self, running: Sequence[TraceJob]) -> None:
        """Do nothing: there is nothing to watch."""

    def ended(self, job: TraceJob) -> None:
        """Do nothing: this world keeps no jobs."""

    def signatures(self) -> dict[str, Any]:
        """Return none."""
        return {}

    def close(self) -> None:
        """Do nothing: nothing was started."""


class MpsWorld(PlainWorld):
    """One MPS daemon, given the two commands that NVIDIA's device plugin gives its own."""

    def __init__(self, work: Path, gpu: GpuInfo, policy: SharingPolicy, *, twin: bool) -> None:
        super().__init__(work, gpu, twin=False)
        place = GpuDirectory.of(work / "mps", gpu.uuid)
        place.create()
        extra = {"GPUSHARE_TWIN_GPU": json.dumps(asdict(gpu))} if twin else {}
        self._control = SyncMpsControl(
            ControlProgram.of(place, TWIN_EXECUTABLE if twin else REAL_EXECUTABLE, extra)
        )
        self._pipe = place.pipe
        try:
            self._control.start()
            if policy.percentage is not None:
                limit = gpu.memory_mib * policy.percentage // 100
                self._control.run(commands.set_default_device_pinned_mem_limit(0, limit))
                self._control.run(commands.set_default_active_thread_percentage(policy.percentage))
            self._control.run(commands.start_server(os.getuid()))
        except BaseException:
            self.close()
            raise

    def environment(self, job: TraceJob, cap: int | None) -> dict[str, str]:
        """Return the daemon's folder, and the job's own cap where the policy has one."""
        own = {} if cap is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(cap)}
        return {"CUDA_VISIBLE_DEVICES": self.gpu.uuid, "CUDA_MPS_PIPE_DIRECTORY": str(self._pipe), **own}

    def close(self) -> None:
        """End the daemon."""
        self._control.stop(10.0)


class GpuShareWorld:
    """The MPS host (gate, throttle, freezer) and the node agent as processes, as the chart runs them.

    API server and kubelet are the ones of tests/gpu/agent_bench.py: they hold pods and GpuShares and nothing
    more. There is no operator: what the agent publishes is copied into the GpuShares here, by the operator's own
    function, and no job is retracted.

    Args:
        known: signatures of programs, as GpuShares have them.
    """

    def __init__(
        self, work: Path, gpu: GpuInfo, jobs: Sequence[TraceJob], known: Mapping[str, Any], *, twin: bool
    ):
        if str(_TESTS) not in sys.path:
            sys.path.append(str(_TESTS))
        # Imported here: only this world needs grpcio and aiohttp.
        import agent_bench
        import gate_bench
        import loop_suite

        self.gpu, self._agent_bench, self._gate_bench, self._loop_suite = gpu, agent_bench, gate_bench, loop_suite
        self._work = work
        self._seen: dict[str, Any] = {}
        self._kept = {program: from_json(WorkloadSignature, each) for program, each in known.items()}
        self._copied: dict[str, Any] = {}
        self._jobs = tuple(jobs)
        self._allocated: dict[int, list[str]] = {}
        self._free = list(device_ids(gpu.uuid))
        shutil.rmtree(work / "host", ignore_errors=True)
        self._bench = gate_bench.Bench(work / "host", twin=twin, program=[], gpu_uuid=None if twin else gpu.uuid)
        self.agent: Any = None
        try:
            self._bench.start_host()
            self._bench.until_active()
            self.gpu_directory = self._bench.gpu
            simulated = "H200:1" if twin else ""
            agent = agent_bench.NodeAgent(work / "agent", self._bench.base, simulated=simulated, node=NODE)
            self.agent = self._bench.agent = agent
            agent.share(*(self._gpushare(program) for program in sorted({job.program for job in jobs})))
            agent.start()
            self._bench.until(self._bench.agent_says_healthy, 60, "a healthy GPU on the GpuNode")
        except BaseException:
            self._bench.close()
            raise

    def admit(self, job: TraceJob, cap: int | None) -> None:
        """Let the pod be bound with its decision, and wait until the agent has written it for the gate."""
        pod = self._agent_bench.pod_of(
            job.name,
            self._bench.gpu.uuid,
            uid=self.uid(job),
            threads=cap if cap is not None else 100,
            memory_mib=MEMORY_MIB,
            share=job.share_percent,
            node=NODE,
            CLASS=job.job_class.value,
            WORKLOAD=job.program,
            FRACTION=f"{job.share_percent / 100:g}",
        )
        ids, self._free = self._free[: job.share_percent], self._free[job.share_percent :]
        self._allocated[job.number] = ids
        self.agent.admit(pod, ids)
        decided = decisions_reader(self._bench.gpu)
        self._agent_bench.wait_until(
            lambda: self.uid(job) in decided.read().pods, 30, f"the agent's decision for {job.name}"
        )

    def environment(self, job: TraceJob, cap: int | None) -> dict[str, str]:
        """Return the gate's folder."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu.uuid, "CUDA_MPS_PIPE_DIRECTORY": str(self._bench.gpu.tenant)}

    def cgroups(self, job: TraceJob) -> Sequence[Path]:
        """Return the pod's, in every hierarchy that gate and freezer look at."""
        return self._loop_suite.groups(self.uid(job))

    def arguments(self) -> Sequence[str]:
        """Return none."""
        return ()

    def look(self, running: Sequence[TraceJob]) -> None:
        """Note the signatures that the agent has published, and copy them into the programs' GpuShares."""
        status = self.agent.gpu(self._bench.gpu.uuid)
        programs = {self.uid(job): job.program for job in running}
        for tenant in status.tenants if status is not None else ():
            if tenant.profile is not None and tenant.pod_uid in programs:
                program = programs[tenant.pod_uid]
                self._seen[program] = to_json(tenant.profile)
                self._copy(program, tenant.profile)

    def copied(self) -> dict[str, Any]:
        """Return the profiles that have changed in GpuShares since the last call, by program."""
        found, self._copied = self._copied, {}
        return found

    def _copy(self, program: str, published: WorkloadSignature) -> None:
        kept = self._kept.get(program)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found = choose_signature(kept, [published], GpuShareSpec(), is_one_kind=True, now=now)
        if found is None or found == kept:
            return
        self._kept[program] = found
        self._copied[program] = to_json(found)
        self.agent.share(self._gpushare(program))

    def ended(self, job: TraceJob) -> None:
        """Let the pod be gone."""
        self._free += self._allocated.pop(job.number, [])
        self.agent.remove(job.name)

    def signatures(self) -> dict[str, Any]:
        """Return the last that was published of each program."""
        return dict(self._seen)

    def metrics(self) -> str:
        """Return the agent's metrics."""
        return str(self.agent.metrics())

    def events(self) -> list[tuple[str, str]]:
        """Return reason and pod of every event that the agent wrote."""
        return self.agent.events()

    def close(self) -> None:
        """End agent, host and daemon; keep the end of their logs for a person."""
        self._bench.close()
        with (self._work / "gpushare.log").open("a") as file:
            for path in (self._bench.base / "host.log", self._work / "agent" / "agent.log"):
                with contextlib.suppress(OSError):
                    file.write(f"== {path.name}\n{path.read_text(errors='replace')[-_LOG_TAIL:]}\n")
        shutil.rmtree(self._work / "agent", ignore_errors=True)

    def uid(self, job: TraceJob) -> str:
        """Return a job's pod's uid."""
        return str(self._gate_bench.pod_uid(job.number))

    def _gpushare(self, program: str) -> dict[str, Any]:
        placed = tuple(
            PodPlacement(pod_uid=self.uid(job), pod=job.name, node=NODE)
            for job in self._jobs
            if job.program == program
        )
        return {
            "metadata": {"namespace": "shop", "name": program, "resourceVersion": "1"},
            "spec": {},
            "status": to_json(GpuShareStatus(profile=self._kept.get(program), placements=placed)),
        }


def world_of(
    policy: SharingPolicy,
    work: Path,
    gpu: GpuInfo,
    jobs: Sequence[TraceJob],
    known: Mapping[str, Any],
    *,
    twin: bool,
) -> LocalWorld:
    """Start what a policy needs."""
    if policy.world is World.GPUSHARE:
        return GpuShareWorld(work, gpu, jobs, known, twin=twin)
    if policy.world is World.MPS:
        return MpsWorld(work, gpu, policy, twin=twin)
    return PlainWorld(work, gpu, twin=twin)
