"""Whether a program of ours may take a GPU of this machine and share it, or why not."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from gpushare.core.gpu import ComputeMode, GpuHealth, GpuInfo, GpuProcess, Health

MINIMUM_DRIVER: Final = 525
"""The first series of CUDA 12, whose NVML has the counters (GPM) that are read on Hopper. Only 580 was tested."""
_MPS_PROGRAMS: Final = "nvidia-cuda-mps"  # the kernel truncates the daemon's and the server's names to this


class SharedDevices(Protocol):
    """The part of `NvmlDevices` that is used here."""

    def driver_version(self) -> str | None:
        """Return the driver's version."""
        ...

    def list(self) -> Sequence[GpuInfo]:
        """Return the GPUs that the driver lists."""
        ...

    def health(self, uuid: str) -> GpuHealth:
        """Return a GPU's health."""
        ...

    def compute_mode(self, uuid: str) -> ComputeMode:
        """Return a GPU's compute mode."""
        ...

    def processes(self, uuid: str) -> Sequence[GpuProcess]:
        """Return a GPU's processes."""
        ...


def is_too_old(driver: str | None) -> bool:
    """Return whether a driver's version is below the minimum for gpushare; an unknown version is not."""
    series = re.match(r"\d+", driver or "")
    return series is not None and int(series[0]) < MINIMUM_DRIVER


def mps_pids(proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the pids of MPS daemons and servers that this process can see."""
    found = []
    for comm in proc.glob("[0-9]*/comm"):
        try:
            name = comm.read_text()
        except (OSError, UnicodeDecodeError):  # it ended meanwhile, or has a strange name
            continue
        if name.startswith(_MPS_PROGRAMS):
            found.append(int(comm.parent.name))
    return tuple(sorted(found))


def why_not_shareable(devices: SharedDevices, index: int = 0, proc: Path = Path("/proc")) -> str | None:
    """Return a sentence on why this machine's GPU cannot be taken; None if it can. Nothing is changed.

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
