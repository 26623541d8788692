"""Values measured on a GPU, and the `Devices` Protocol that reads them.

`Devices` has a real side (NVML and GPM, or dcgm-exporter) and a simulated one in `gpushare.twin`;
`MpsControl` is in `gpushare.mps`. Both sides of each are held to one contract test.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpushare.core.gpu.pipes import Counters


class Health(StrEnum):
    """Whether a GPU may take new tenants."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class ComputeMode(StrEnum):
    """How many processes may have a context on a GPU. Under EXCLUSIVE_PROCESS that one is the MPS server."""

    DEFAULT = "Default"
    EXCLUSIVE_PROCESS = "ExclusiveProcess"
    PROHIBITED = "Prohibited"


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU of a node.

    Attributes:
        memory_mib: total device memory; sm_count: streaming multiprocessors.
    """

    uuid: str
    index: int
    model: str
    memory_mib: int
    sm_count: int


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """Health with the reason a person reads, such as "XID 79: GPU has fallen off the bus"."""

    health: Health
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One sampling window of one GPU.

    Attributes:
        counters: ratios over the window; fields None where the source cannot measure them.
        window_seconds: length of the window.
        memory_used_mib: device memory in use at its end.
        gpu_utilization_ratio: what NVML calls utilisation, 0 to 1; None where absent.
        sm_clock_mhz: mean SM clock over the window; None where absent.
    """

    counters: Counters
    window_seconds: float
    memory_used_mib: int
    gpu_utilization_ratio: float | None
    sm_clock_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU; `is_mps_client` False for one that runs outside MPS (facts.md 19).

    `memory_used_mib` is None where the driver does not tell. `is_named_server`: it is no client and has the
    name of the MPS server, which any other program may have too. `is_graphics`: it uses Vulkan, OpenGL or the like
    and no CUDA, so it does not go through MPS.
    """

    pid: int
    memory_used_mib: int | None
    is_mps_client: bool
    is_named_server: bool = False
    is_graphics: bool = False


class DevicesError(Exception):
    """The device side cannot answer now; `retryable` says whether asking again can help."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Devices(Protocol):
    """The GPUs of this node. No call blocks: each returns what is known now or raises DevicesError."""

    def list(self) -> tuple[GpuInfo, ...]:
        """The node's GPUs by index."""
        ...

    def health(self, uuid: str) -> GpuHealth:
        """Current health; a GPU that vanished is Unhealthy with its reason, never an exception."""
        ...

    def sample(self, uuid: str) -> GpuSample | None:
        """Counters since the previous call for this GPU; None until two readings at least 100 ms apart exist."""
        ...

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Processes with a context on the GPU, the MPS server among them where it has one."""
        ...

    def compute_mode(self, uuid: str) -> ComputeMode:
        """The GPU's compute mode."""
        ...

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """Set it for contexts that are made from now on; asks for the rights of an administrator."""
        ...

    def driver_version(self) -> str | None:
        """The driver's version; None where there is none."""
        ...

    def close(self) -> None:
        """Release what the driver holds for us."""
        ...
