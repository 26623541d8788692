"""Whether a program of ours may take a GPU of this machine and share it, or why not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from gpushare.core.gpu import ComputeMode, GpuHealth, GpuInfo, GpuProcess, Health

_MPS_PROGRAMS: Final = "nvidia-cuda-mps"  # the kernel truncates the daemon's and the server's names to this


class SharedDevices(Protocol):
    """The part of `NvmlDevices` that is used here."""

    def list(self) -> Sequence[GpuInfo]:
        """Return the GPUs that the driver lists."""
        ...

    def left_out(self) -> Mapping[int, str]:
        """Return why a GPU cannot be read, by index."""
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
    gpu = next((each for each in devices.list() if each.index == index), None)
    if gpu is None:
        unread = devices.left_out().get(index)
        return f"GPU {index} cannot be read: {unread}" if unread else f"the driver lists no GPU {index}"
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
        if len(processes) == 1:
            return f"GPU {gpu.uuid} is in use by 1 process (pid {pids}): end it first"
        return f"GPU {gpu.uuid} is in use by {len(processes)} processes (pid {pids}): end them first"
    return None
