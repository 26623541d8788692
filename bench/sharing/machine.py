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

from gpushare.core.gpu import DevicesError, GpuInfo, GpuProcess
from gpushare.twin.gpus import parse_simulated

DEFAULT_COMPUTE_MODE = 0  # NVML's; the others let one process in, or none
ROOT = Path(__file__).resolve().parents[2]


class NotReadyError(Exception):
    """The benchmark cannot begin here; one sentence."""


@dataclass(frozen=True)
class Machine:
    """What a session ran on.

    Attributes:
        nvml_handle: of the GPU, for its energy; None of a simulated one.
    """

    gpu: GpuInfo
    driver: str
    nvml_handle: Any = None

    @property
    def is_simulated(self) -> bool:
        """Whether it is the twin's."""
        return self.driver == "simulated"

    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded; None where nobody tells."""
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
    """Return the first GPU, if nobody else uses it.

    Raises:
        NotReadyError: there is none, or it is not free.
    """
    import pynvml

    from gpushare.devices.nvml import NvmlDevices

    try:
        devices = NvmlDevices.open(time.monotonic)
        gpus = devices.list()
        gpu = gpus[0] if gpus else None
        processes = devices.processes(gpu.uuid) if gpu is not None else ()
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) if gpu is not None else None
        mode = pynvml.nvmlDeviceGetComputeMode(handle) if handle is not None else DEFAULT_COMPUTE_MODE
    except (DevicesError, pynvml.NVMLError) as error:
        raise NotReadyError(f"no GPU can be used: {error}") from error
    words = why_not(gpus, processes, mode)
    if words is not None:
        raise NotReadyError(words)
    assert gpu is not None
    return Machine(gpu, devices.driver_version() or "", handle)


def why_not(gpus: Sequence[GpuInfo], processes: Sequence[GpuProcess], compute_mode: int) -> str | None:
    """Return why the benchmark cannot begin on the first of these GPUs; None: it can."""
    if not gpus:
        return "no GPU is here that can be shared (GPUs in MIG mode cannot)"
    if compute_mode != DEFAULT_COMPUTE_MODE:
        return (
            f"GPU {gpus[0].uuid} is in an exclusive or prohibited compute mode, in which nothing can share it: "
            "nvidia-smi -c DEFAULT changes that"
        )
    if processes:
        pids = ", ".join(str(each.pid) for each in processes[:5])
        return f"GPU {gpus[0].uuid} is in use by {len(processes)} processes (pid {pids}): end them first"
    return None


def describe(machine: Machine) -> dict[str, Any]:
    """Return what a session's record says of where it ran."""
    commit = os.environ.get("COMMIT", "")  # where the sources came without git
    with contextlib.suppress(OSError):
        asked = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or commit
    return {
        "gpu": machine.gpu.model,
        "memory_mib": machine.gpu.memory_mib,
        "driver": machine.driver,
        "simulated": machine.is_simulated,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "commit": commit,
    }
