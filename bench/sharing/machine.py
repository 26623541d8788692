"""The GPU of this machine: which it is, whether it is free for the benchmark, and what energy it has used."""

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.sharing.policies import SharingPolicy
from bench.sharing.trace import TraceJob, known_truth
from gpushare.core.gpu import DevicesError, GpuInfo
from gpushare.twin.gpus import parse_simulated

ROOT = Path(__file__).resolve().parents[2]
TABLE_GPU = "NVIDIA H200"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NotReadyError(Exception):
    """The benchmark cannot begin here; one sentence."""


@dataclass(frozen=True)
class Machine:
    """Machine of a session.

    Attributes:
        nvml_handle: of the GPU, for its energy; None of a simulated one.
    """

    gpu: GpuInfo
    driver: str
    nvml_handle: Any = None

    @property
    def is_simulated(self) -> bool:
        """Return whether it is the twin's."""
        return self.driver == "simulated"

    def energy_joules(self) -> float | None:
        """Return the energy since the driver was loaded; None if unknown."""
        if self.nvml_handle is None:
            return None
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self.nvml_handle)) / 1000.0
        return None


def simulated() -> Machine:
    """Return the twin's machine."""
    return Machine(parse_simulated("H200:1", "bench")[0], "simulated")


def of_a_node(gpu: GpuInfo, *, is_simulated: bool) -> Machine:
    """Return a cluster's GPU; its energy is told where it is this machine's too."""
    if is_simulated:
        return Machine(gpu, "simulated")
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return Machine(gpu, pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    return Machine(gpu, "", None)


def of_this_machine() -> Machine:
    """Return the first GPU, if no other process uses it.

    Raises:
        NotReadyError: there is none, or it is not free.
    """
    import pynvml

    from gpushare.devices.nvml import NvmlDevices
    from gpushare.devices.shareable import why_not_shareable

    try:
        devices = NvmlDevices.open(time.monotonic)
        words = why_not_shareable(devices)
        if words is not None:
            raise NotReadyError(words)
        gpu = next(each for each in devices.list() if each.index == 0)
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    except (DevicesError, pynvml.NVMLError) as error:
        raise NotReadyError(f"no GPU can be used: {error}") from error
    return Machine(gpu, devices.driver_version() or "", handle)


def why_no_room(gpu: GpuInfo, jobs: Sequence[TraceJob], policies: Sequence[SharingPolicy]) -> str | None:
    """Return why some job of a trace can never run on a GPU, by its memory on the H200; None: all can."""
    for policy in policies:
        room = gpu.memory_mib * (policy.percentage or 100) // 100
        for job in jobs:
            if (need := known_truth().memory_mib(job.program)) > room:
                return (
                    f"{job.name} ({job.program}) takes {need} MiB, and {policy.title} leaves it {room} MiB of "
                    f"{gpu.model}: too little room for this trace"
                )
    return None


def why_not_the_tables(gpu_model: str) -> str | None:
    """Return what of the jobs does not hold on a GPU that is not the table's; None: it is."""
    if gpu_model.startswith(TABLE_GPU):
        return None
    return (
        f"Promises, `auto` shares and needs of memory follow from the table of an {TABLE_GPU}, and this is an "
        f"{gpu_model}: `below promise` compares the policies here with each other, and with no run on an H200. "
        "Work, rates and signatures are measured here. Where the memory is slower, memory-bound programs lose "
        "less under a cap, and more beside each other."
    )


def describe(machine: Machine) -> dict[str, Any]:
    """Return what a session's record says of where it ran."""
    commit = os.environ.get("COMMIT", "")  # where the sources came without git
    boot = ""
    with contextlib.suppress(OSError):
        boot = BOOT_ID.read_text().strip()
    with contextlib.suppress(OSError):
        asked = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or commit
    return {
        "gpu": machine.gpu.model,
        "gpu_uuid": machine.gpu.uuid,
        "boot": boot,
        "memory_mib": machine.gpu.memory_mib,
        "driver": machine.driver,
        "simulated": machine.is_simulated,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "commit": commit,
    }
