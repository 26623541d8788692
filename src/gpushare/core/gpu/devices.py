"""Values measured on a GPU, and the `Devices` Protocol that reads them.

`Devices` has a real implementation (NVML and GPM, or dcgm-exporter) and a simulated one in `gpushare.twin`;
`MpsControl` is in `gpushare.mps`. Both implementations of each must pass the same contract test.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpushare.core.gpu.pipes import Counters


class Health(StrEnum):
    """Health of a GPU: whether it may take new tenants."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class ComputeMode(StrEnum):
    """Number of processes that may have a context on a GPU; EXCLUSIVE_PROCESS: one, the MPS server."""

    DEFAULT = "Default"
    EXCLUSIVE_PROCESS = "ExclusiveProcess"
    PROHIBITED = "Prohibited"


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU of a node.

    Attributes:
        memory_mib: total device memory.
        sm_count: number of streaming multiprocessors.
    """

    uuid: str
    index: int
    model: str
    memory_mib: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """Health of a GPU, with a reason for people such as "XID 79: GPU has fallen off the bus"."""

    health: Health
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One sampling window of one GPU.

    Attributes:
        counters: ratios over the window; fields that the source cannot measure are None.
        window_seconds: length of the window.
        memory_used_mib: device memory in use at its end.
        gpu_utilization_ratio: NVML's utilisation, 0 to 1; None if unknown.
        sm_clock_mhz: mean SM clock over the window; None if unknown.
        reach_seconds: how long before its end the window may have begun, at most, if its source measures at times
            of its own (docs/adr/0225); None: it began at the previous reading.
    """

    counters: Counters
    window_seconds: float
    memory_used_mib: int
    gpu_utilization_ratio: float | None
    sm_clock_mhz: float | None = None
    reach_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU.

    Attributes:
        memory_used_mib: its device memory; None if the driver does not tell.
        is_mps_client: False if it runs outside MPS (facts.md 19).
        is_named_server: it is no client and has the name of the MPS server, which other programs may have too.
        is_graphics: it uses Vulkan, OpenGL or the like and no CUDA, so it does not go through MPS.
    """

    pid: int
    memory_used_mib: int | None
    is_mps_client: bool
    is_named_server: bool = False
    is_graphics: bool = False


class DevicesError(Exception):
    """The devices cannot answer now; `retryable` says whether asking again can help."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Devices(Protocol):
    """The GPUs of this node. No call blocks: each returns what is known now or raises DevicesError."""

    def list(self) -> tuple[GpuInfo, ...]:
        """Return the node's GPUs by index."""
        ...

    def left_out(self) -> Mapping[int, str]:
        """Return why a GPU that the driver counts cannot be read, by index; `list` lacks these GPUs."""
        ...

    def health(self, uuid: str) -> GpuHealth:
        """Return a GPU's health; one that vanished is Unhealthy, it alone, with a reason and no exception."""
        ...

    def sample(self, uuid: str) -> GpuSample | None:
        """Return the counters since the previous call for this GPU; None until two readings 100 ms apart exist."""
        ...

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Return the processes with a context on the GPU, its MPS server included."""
        ...

    def compute_mode(self, uuid: str) -> ComputeMode:
        """Return the GPU's compute mode."""
        ...

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """Set the compute mode for contexts made from now on; needs administrator rights."""
        ...

    def driver_version(self) -> str | None:
        """Return the driver's version; None without a driver."""
        ...

    def close(self) -> None:
        """Release the driver's resources."""
        ...
