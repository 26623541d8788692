"""Read the driver while a run is measured: the device's counters over its window, and memory by process."""

import contextlib
import time
from pathlib import Path
from typing import Protocol

from gpushare.core.gpu.devices import DevicesError
from gpushare.devices.dcgm import DcgmScrape
from gpushare.devices.nvml import NvmlDevices
from gpushare.devices.shareable import why_not_shareable


def take_gpu(index: int = 0, proc: Path = Path("/proc")) -> None:
    """See that a GPU can be measured: that the driver is new enough, and that nobody else uses it.

    Raises:
        RuntimeError: it cannot; one sentence.
    """
    try:
        devices = NvmlDevices.open(time.monotonic)
        try:
            words = why_not_shareable(devices, index, proc)
        finally:
            devices.close()
    except DevicesError as error:
        raise RuntimeError(str(error)) from None
    if words is not None:
        raise RuntimeError(words)


class RunCounters(Protocol):
    """Reader of counters over each run: from the driver (`DriverCounters`), or none (`NoCounters`)."""

    def about(self) -> dict[str, str]:
        """Return the header's facts: GPU model and driver."""
        ...

    def start(self) -> None:
        """Begin the window."""
        ...

    def stop(self) -> dict[str, float]:
        """End the window and read its counters; none where there are none."""
        ...

    def memory_by_pid(self) -> dict[int, int]:
        """Return MiB in use by process."""
        ...


class DriverCounters:
    """Counters of one GPU between `start` and `stop`; ratios from 0 to 1.

    Raises:
        RuntimeError: no driver, no GPU, or no GPM on this GPU.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            self._devices = NvmlDevices.open(time.monotonic)
            gpus = {gpu.index: gpu for gpu in self._devices.list()}
            if index not in gpus:
                raise RuntimeError(f"the driver lists no GPU {index}")
            self._gpu = gpus[index]
            self._window = self._devices.gpm_window(self._gpu.uuid)
            self._is_begun = False
        except DevicesError as error:
            raise RuntimeError(str(error)) from None

    def about(self) -> dict[str, str]:
        """Return facts for the header: GPU model and driver."""
        return {"gpu_model": self._gpu.model, "driver": self._devices.driver_version() or "unknown"}

    def start(self) -> None:
        """Begin the window."""
        self._is_begun = False
        with contextlib.suppress(DevicesError):
            self._window.mark()
            self._is_begun = True

    def stop(self) -> dict[str, float]:
        """End the window and read its counters; none where the driver gives none."""
        if not self._is_begun:
            return {}
        try:
            self._window.mark()
            return {name: round(ratio, 4) for name, ratio in self._window.counters().as_dict().items()}
        except DevicesError:
            return {}

    def memory_by_pid(self) -> dict[int, int]:
        """Return MiB in use by process, MPS clients included; processes with unknown memory are absent."""
        return _memory_by_pid(self._devices, self._gpu.uuid)


def _memory_by_pid(devices: NvmlDevices, uuid: str) -> dict[int, int]:
    try:
        processes = devices.processes(uuid)
    except DevicesError:
        return {}
    tenants = (each for each in processes if not (each.is_named_server or each.is_graphics))
    return {each.pid: each.memory_used_mib for each in tenants if each.memory_used_mib is not None}


class DcgmCounters:
    """Counters of one GPU as dcgm-exporter showed them last, for GPUs before Hopper; ratios from 0 to 1.

    A window must be longer than two of the exporter's intervals, so that its last reading lies within it.

    Raises:
        RuntimeError: no driver, no GPU, or no figures of profiling on the exporter's page.
    """

    def __init__(self, url: str, index: int = 0) -> None:
        try:
            self._devices = NvmlDevices.open(time.monotonic)
            gpus = {gpu.index: gpu for gpu in self._devices.list()}
            if index not in gpus:
                raise RuntimeError(f"the driver lists no GPU {index}")
            self._gpu = gpus[index]
            self._scrape = DcgmScrape(url)
            first = self._scrape.read([self._gpu.uuid]).get(self._gpu.uuid)
        except (DevicesError, ValueError) as error:
            raise RuntimeError(str(error)) from None
        if first is None or first.sm_util is None:
            raise RuntimeError(
                f"dcgm-exporter shows no DCGM_FI_PROF_SM_ACTIVE of GPU {self._gpu.uuid}: its list of fields must "
                "name it (docs/guide/other-gpus.md)"
            )

    def about(self) -> dict[str, str]:
        """Return facts for the header: GPU model and driver."""
        return {"gpu_model": self._gpu.model, "driver": self._devices.driver_version() or "unknown"}

    def start(self) -> None:
        """Do nothing, as the exporter reads all the time."""

    def stop(self) -> dict[str, float]:
        """Read the last figures; none where the exporter gives none now."""
        try:
            counters = self._scrape.read([self._gpu.uuid]).get(self._gpu.uuid)
        except DevicesError:
            return {}
        return {} if counters is None else {name: round(ratio, 4) for name, ratio in counters.as_dict().items()}

    def memory_by_pid(self) -> dict[int, int]:
        """Return MiB in use by process, as the driver reports it."""
        return _memory_by_pid(self._devices, self._gpu.uuid)


class NoCounters:
    """Substitute for a GPU in a dry run, without counters."""

    def about(self) -> dict[str, str]:
        """Return a header that says that this is a dry run."""
        return {"gpu_model": "none (dry run)", "driver": "none"}

    def start(self) -> None:
        """Do nothing, as there is nothing to read."""

    def stop(self) -> dict[str, float]:
        """Return no counters."""
        return {}

    def memory_by_pid(self) -> dict[int, int]:
        """Return no processes."""
        return {}
