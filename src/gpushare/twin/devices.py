"""The simulated side: reads the state file of each GPU's twin instead of NVML and GPM."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gpushare.core.gpu import (
    ComputeMode,
    Counters,
    DevicesError,
    GpuHealth,
    GpuInfo,
    GpuProcess,
    GpuSample,
    Health,
    check_driver,
)
from gpushare.mps.layout import Fresh, GpuDirectory
from gpushare.twin.gpus import SM_CLOCKS
from gpushare.twin.mps.state import MODE_FILE, TwinState, state_path, state_reader

MIN_WINDOW_SECONDS: Final = 0.1  # GPM's own minimum (docs/facts.md 21)
_LOST: Final = "GPU is lost"  # as NVML says it
_UNREADABLE: Final = "Insufficient Permissions"  # as NVML says it
_DRIVER: Final = "580.159.04"  # with which the twin's behaviour was measured (docs/facts.md)
STALE_SECONDS: Final = 5.0  # a twin writes every second or faster; an old file is no measurement


def lost_mark(directory: Path, uuid: str) -> Path:
    """Return the file with which whoever plays the hardware lets a GPU fall off the bus, for as long as it exists.

    Args:
        directory: the node's gpushare directory.
    """
    return GpuDirectory.of(directory, uuid).path / "twin-lost"


def unreadable_mark(directory: Path, uuid: str) -> Path:
    """Return the file with which whoever plays the hardware makes a GPU unreadable, for as long as it exists.

    The driver counts such a GPU.

    Args:
        directory: the node's gpushare directory.
    """
    return GpuDirectory.of(directory, uuid).path / "twin-unreadable"


def driver_file(directory: Path) -> Path:
    """Return the file with which whoever plays the hardware gives the node a driver of another version.

    Args:
        directory: the node's gpushare directory.
    """
    return directory / "twin-driver"


class SimulatedDevices:
    """Devices of a node without real GPUs.

    Args:
        gpus: from `gpushare.twin.gpus.parse_simulated`.
        directory: the node's gpushare directory, where the twins write.
        clock: monotonic seconds.

    Raises:
        DevicesError: the driver is too old.
    """

    def __init__(self, gpus: tuple[GpuInfo, ...], directory: Path, clock: Callable[[], float]) -> None:
        played = driver_file(directory)
        self._driver = played.read_text().strip() if played.exists() else _DRIVER
        check_driver(self._driver)
        self._gpus = gpus
        self._directory = directory
        self._clock = clock
        self._readers: dict[str, Fresh[TwinState]] = {
            gpu.uuid: Fresh(state_reader(GpuDirectory.of(directory, gpu.uuid)), clock, STALE_SECONDS)
            for gpu in gpus
        }
        self._sampled_at: dict[str, float] = {}
        self._clocks = {gpu.uuid: SM_CLOCKS.get(gpu.model) for gpu in gpus}
        self._counted: dict[str, tuple[int, Mapping[str, float]]] = {}

    def list(self) -> tuple[GpuInfo, ...]:
        """Return the simulated GPUs that can be read."""
        left_out = self.left_out()
        return tuple(gpu for gpu in self._gpus if gpu.index not in left_out)

    def left_out(self) -> dict[int, str]:
        """Return those that cannot be read."""
        return {
            gpu.index: _UNREADABLE for gpu in self._gpus if unreadable_mark(self._directory, gpu.uuid).exists()
        }

    def driver_version(self) -> str | None:
        """Return the version of the driver that is played."""
        return self._driver

    def health(self, uuid: str) -> GpuHealth:
        """Return Healthy unless the GPU fell off the bus; the gate reports the faults of its MPS server."""
        if uuid not in self._readers:
            return GpuHealth(Health.UNHEALTHY, "the GPU is not on this node")
        if self._is_lost(uuid):
            return GpuHealth(Health.UNHEALTHY, f"the driver lost the GPU: {_LOST}")
        return GpuHealth(Health.HEALTHY)

    def sample(self, uuid: str) -> GpuSample | None:
        """Return the twin's counters, averaged since the last call; None at first, as with real counters."""
        state = self._state(uuid)
        now = self._clock()
        before = self._sampled_at.get(uuid)
        if before is not None and now - before < MIN_WINDOW_SECONDS:
            return None
        self._sampled_at[uuid] = now
        old = self._counted.pop(uuid, None)
        if state is None:
            return None
        counted = state.counted_until(now)
        if counted is not None:
            self._counted[uuid] = (state.daemon_pid, counted)
        if before is None:
            return None
        counters = state.counters
        if counted is not None and old is not None and old[0] == state.daemon_pid:
            counters = _mean(old[1], counted, now - before)
        busy, clock = counters.graphics_util, self._clocks[uuid]
        return GpuSample(counters, now - before, state.memory_used_mib, busy, clock)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Return the twin's clients, and the processes that run outside MPS."""
        state = self._state(uuid)
        if state is None:
            return ()
        return tuple(GpuProcess(c.pid, c.memory_used_mib, c.is_mps_client) for c in state.clients)

    def compute_mode(self, uuid: str) -> ComputeMode:
        """Return the mode that any process set last, as it belongs to the GPU."""
        try:
            return ComputeMode(self._mode_file(uuid).read_text())
        except FileNotFoundError:
            return ComputeMode.DEFAULT

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """Record the mode. While it is exclusive, the twin refuses further processes outside MPS."""
        file = self._mode_file(uuid)
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_name(f".{file.name}.new")
        whole.write_text(mode.value)
        whole.replace(file)  # who reads meanwhile finds the old mode or the new one, never a part

    def _mode_file(self, uuid: str) -> Path:
        self._check(uuid)
        return state_path(GpuDirectory.of(self._directory, uuid)).with_name(MODE_FILE)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _state(self, uuid: str) -> TwinState | None:
        self._check(uuid)
        return self._readers[uuid].read()

    def _is_lost(self, uuid: str) -> bool:
        is_lost = lost_mark(self._directory, uuid).exists()
        if is_lost:  # no window spans the gap
            self._sampled_at.pop(uuid, None)
            self._counted.pop(uuid, None)
        return is_lost

    def _check(self, uuid: str) -> None:
        """Raise DevicesError where a driver would not answer for a GPU."""
        if uuid not in self._readers:
            raise DevicesError(f"GPU {uuid} is not on this node", retryable=False)
        if self._is_lost(uuid):
            raise DevicesError(f"GPU {uuid} does not answer: {_LOST}", retryable=True)


def _mean(old: Mapping[str, float], new: Mapping[str, float], seconds: float) -> Counters:
    """Return the mean between two sums, bounded: looks at the state file are late by moments."""
    return Counters(
        **{name: min(1.0, max(0.0, (value - old.get(name, 0.0)) / seconds)) for name, value in new.items()}
    )
