"""State file by which the twin of one GPU reports counters, processes and memory to the simulated Devices."""

import dataclasses
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpushare.core.gpu import Counters
from gpushare.mps.layout import GpuDirectory, LastGood

# A process that uses the twin's GPU without MPS takes this name, by which the twin finds it (see the tenant).
OUTSIDE_COMM: Final = "gpu-no-mps"
REFUSAL: Final = signal.SIGUSR1  # by which such a process learns that it gets no context
MODE_FILE: Final = "twin-compute-mode"  # beside the state file


@dataclass(frozen=True, slots=True)
class TwinClient:
    """A process on the simulated GPU; `is_mps_client` is False for one outside MPS.

    Attributes:
        progress: relative to alone uncapped, ratio; iterations_per_s: the rate that follows.
    """

    pid: int
    workload: str
    is_mps_client: bool
    thread_percentage: int
    sm_count: int
    memory_limit_mib: int
    memory_used_mib: int
    progress: float
    iterations_per_s: float


@dataclass(frozen=True, slots=True)
class TwinState:
    """One simulated GPU now.

    Attributes:
        written_at: Unix time; a file older than some seconds means that the daemon is not running.
        server_state: as get_server_status prints it (ACTIVE, FAULT), "" without a server.
        counters: the device's ratios under its present tenants.
        counted: each counter added up since the daemon started, in seconds; counted_at: until when, in seconds of
            CLOCK_MONOTONIC. From then on `counters` holds.
    """

    gpu_uuid: str
    model: str
    memory_mib: int
    sm_count: int
    written_at: float
    daemon_pid: int
    server_pid: int | None
    server_state: str
    counters: Counters
    memory_used_mib: int
    clients: tuple[TwinClient, ...] = ()
    counted: Mapping[str, float] = field(default_factory=dict)
    counted_at: float | None = None

    def counted_until(self, now: float) -> Mapping[str, float] | None:
        """Return each counter added up until now, seconds; None where the twin's state does not say."""
        if self.counted_at is None:
            return None
        more = max(0.0, now - self.counted_at)
        return {
            name: self.counted.get(name, 0.0) + value * more for name, value in self.counters.as_dict().items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the file's JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "TwinState":
        """Read the file's object.

        Raises:
            ValueError, KeyError, TypeError: not a twin's state.
        """
        if not isinstance(data, dict):
            raise TypeError("not an object")
        return cls(
            **{
                **data,
                "counters": Counters(**data["counters"]),
                "clients": tuple(TwinClient(**client) for client in data["clients"]),
            }
        )


def state_path(gpu: GpuDirectory) -> Path:
    """Return the file to which a GPU's twin writes its state."""
    return gpu.twin_state


def state_reader(gpu: GpuDirectory) -> LastGood[TwinState | None]:
    """Return the reader of a GPU's twin; its value is None until the daemon has written once."""
    return LastGood[TwinState | None](state_path(gpu), TwinState.from_json, None)
