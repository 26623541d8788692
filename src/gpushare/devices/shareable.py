"""Whether a program of ours may take a GPU of this machine for itself and share it, or why not."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from gpushare.core.gpu import ComputeMode, GpuHealth, GpuInfo, GpuProcess, Health

MINIMUM_DRIVER: Final = 525
"""The first series of CUDA 12; its NVML has the counters (GPM) that are read of Hopper. Tried was 580 alone."""
_MPS_PROGRAMS: Final = "nvidia-cuda-mps"  # all that the kernel keeps of the daemon's and the server's names


class SharedDevices(Protocol):
    """What is asked of `NvmlDevices`."""

    def driver_version(self) -> str | None:
        """The driver's version."""
        ...

    def list(self) -> Sequence[GpuInfo]:
        """The GPUs that the driver lists."""
        ...

    def health(self, uuid: str) -> GpuHealth:
        """A GPU's health."""
        ...

    def compute_mode(self, uuid: str) -> ComputeMode:
        """A GPU's compute mode."""
        ...

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        """A GPU's processes."""
        ...


def is_too_old(driver: str | None) -> bool:
    """Return whether a driver's version is below the least that gpushare asks for; an unknown one is not."""
    series = re.match(r"\d+", driver or "")
    return series is not None and int(series[0]) < MINIMUM_DRIVER


def mps_pids(proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the pids of MPS daemons and servers that this process can see."""
    found = []
    for comm in proc.glob("[0-9]*/comm"):
        try:
            name = comm.read_text()
        except (OSError, UnicodeDecodeError):  # it ended meanwhile, or is named by somebody who has fun
            continue
        if name.startswith(_MPS_PROGRAMS):
            found.append(int(comm.parent.name))
    return tuple(sorted(found))


def why_not_shareable(devices: SharedDevices, index: int = 0, proc: Path = Path("/proc")) -> str | None:
    """Return in a sentence why this machine's GPU cannot be taken; None: it can. Nothing is changed.

    Raises:
        DevicesError: the driver does not answer.
    """
    driver = devices.driver_version()
    if is_too_old(driver):
        return f"the driver is {driver}, and gpushare needs {MINIMUM_DRIVER} or later"
    gpu = next((each for each in devices.list() if each.index == index), None)
    if gpu is None:
        return f"the driver lists no GPU {index}"
    health = devices.health(gpu.uuid)
    if health.health is not Health.HEALTHY:
        return f"GPU {gpu.uuid} cannot be shared: {health.reason}"
    mode = devices.compute_mode(gpu.uuid)
    if mode is not ComputeMode.DEFAULT:
        return (
            f"GPU {gpu.uuid} is in compute mode {mode.value}, in which nothing can share it: "
            f"nvidia-smi -i {index} -c DEFAULT changes that"
        )
    if daemons := mps_pids(proc):
        pids = ", ".join(map(str, daemons[:5]))
        return f"MPS is run by somebody else on this machine (pid {pids}): end it first"
    if processes := devices.processes(gpu.uuid):
        pids = ", ".join(str(each.pid) for each in processes[:5])
        return f"GPU {gpu.uuid} is in use by {len(processes)} processes (pid {pids}): end them first"
    return None
