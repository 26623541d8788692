"""The real implementation: NVML for list, memory, health and processes; GPM or dcgm-exporter for the pipes."""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import pynvml

from gpushare.core.gpu import (
    ComputeMode,
    Counters,
    DevicesError,
    GpuHealth,
    GpuInfo,
    GpuProcess,
    GpuSample,
    Health,
    Standstill,
    check_driver,
)
from gpushare.devices.clock import ClockPolling, SmClock
from gpushare.devices.dcgm import DcgmReadings, DcgmScrape
from gpushare.devices.driver import driver_errors, explain
from gpushare.devices.gpm import MIN_WINDOW_SECONDS, GpmSampler, GpmWindow
from gpushare.devices.listing import read_gpus
from gpushare.devices.search import GpuSearch
from gpushare.devices.xid import XidWatch

_log = logging.getLogger(__name__)

_MIB: Final = 2**20
SEARCH_SECONDS: Final = 60.0
GRAPHICS_SECONDS: Final = 1.5  # between two lists of the processes that draw: in every second round of a second
MIG_SECONDS: Final = 10.0  # between two questions: a change needs a reset of the GPU, and an answer takes 0.5 ms
_SERVER_NAME: Final = "nvidia-cuda-mps-server"
_COMPUTE_MODES: Final = {
    ComputeMode.DEFAULT: pynvml.NVML_COMPUTEMODE_DEFAULT,
    ComputeMode.EXCLUSIVE_PROCESS: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    ComputeMode.PROHIBITED: pynvml.NVML_COMPUTEMODE_PROHIBITED,
}


class NvmlDevices:
    """The GPUs that the driver of this node lists; made by `open`.

    Args:
        clock: monotonic seconds.
        polls_clock: whether to read SM clocks between samples, in a thread that ends with `close`.
        search: looks for GPUs that are missing.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        dcgm: DcgmScrape | None = None,
        *,
        polls_clock: bool = False,
        search: GpuSearch | None = None,
    ) -> None:
        self._clock = clock
        self._dcgm = dcgm
        self._handles: dict[str, Any] = {}
        self._infos: tuple[GpuInfo, ...] = ()
        self._gpm: dict[str, GpmSampler | None] = {}
        self._sampled_at: dict[str, float] = {}
        self._readings: dict[str, DcgmReadings] = {}
        self._clocks: dict[str, SmClock] = {}
        self._stills: dict[str, Standstill] = {}
        self._logged: set[str] = set()
        self._splits: dict[str, tuple[float, bool]] = {}  # whether MIG is on, and when the driver said so
        self._graphics: dict[str, tuple[float, Sequence[Any]]] = {}  # who draws, and when they were listed
        self._lost: set[str] = set()  # GPUs that did not answer last
        self._known: set[str] = set()  # GPUs that were listed at any time
        self._left_out: dict[int, str] = {}  # why a GPU could not be read, by index
        self._search = search or GpuSearch()
        self._searched_at: float | None = None  # when a missing GPU was looked for, or first missed
        self._polls_clock = polls_clock
        self._polling: ClockPolling | None = None
        self._enumerate()
        self._xid = XidWatch(self._handles, clock)

    @classmethod
    def open(
        cls,
        clock: Callable[[], float],
        dcgm_url: str = "",
        *,
        polls_clock: bool = False,
        search: GpuSearch | None = None,
    ) -> "NvmlDevices":
        """Load the driver's library and read its GPUs.

        Raises:
            DevicesError: no driver, no permission, no GPU: asking again can help; or the driver is too old.
        """
        with driver_errors("NVML cannot be used"):
            pynvml.nvmlInit()
        try:
            with driver_errors("NVML cannot list GPUs"):
                dcgm = DcgmScrape(dcgm_url, clock) if dcgm_url else None
                return cls(clock, dcgm, polls_clock=polls_clock, search=search)
        except DevicesError:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            raise

    def _enumerate(self) -> None:
        check_driver(self.driver_version())
        found, self._left_out = read_gpus()
        self._infos = tuple(info for info, _ in found)
        self._handles |= {info.uuid: handle for info, handle in found}
        self._known |= self._handles.keys()

    def list(self) -> tuple[GpuInfo, ...]:
        """Return the GPUs that could be read when the driver was opened.

        While one of the node's is lost or left out, a process of its own looks every minute whether it answers.
        Once it does, the driver is opened again: a reset invalidates old handles (docs/adr/0212).

        Raises:
            DevicesError: the driver cannot be opened any more.
        """
        answering = self._search.found()
        if answering is not None and answering - (self._handles.keys() - self._lost):
            self._reopen()
        now = self._clock()
        if not (self._lost or self._left_out or self._known - self._handles.keys()):
            self._searched_at = None
        elif self._searched_at is None:
            self._searched_at = now
        elif now - self._searched_at >= SEARCH_SECONDS:
            self._searched_at = now
            self._search.start()
        return self._infos

    def left_out(self) -> dict[int, str]:
        """Return why a GPU that was counted when the driver was opened could not be read, by index."""
        return self._left_out

    def _reopen(self) -> None:
        for uuid in self._handles:
            self._xid.collect(uuid)  # closing frees what is unread
        known = self._xid.last
        missing = self._lost | (self._known - self._handles.keys())
        self.close()
        with driver_errors("NVML cannot be used"):
            pynvml.nvmlInit()
            self._handles.clear()
            self._lost.clear()
            self._sampled_at.clear()
            self._readings.clear()
            self._splits.clear()
            self._graphics.clear()
            self._enumerate()
        self._xid = XidWatch(self._handles, self._clock, known)
        for uuid in missing & self._handles.keys():
            self._xid.found_again(uuid, self._handles[uuid])

    def driver_version(self) -> str | None:
        """Return the driver's version; None if it does not answer."""
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            return None

    def health(self, uuid: str) -> GpuHealth:
        """Return Healthy while the device answers, has had no critical XID, and is not split by MIG.

        MIG mode is known within MIG_SECONDS, and at once when the device answers for the first time or again.
        """
        handle = self._handles.get(uuid)
        if handle is None:
            return GpuHealth(Health.UNHEALTHY, "the GPU is not on this node")
        try:
            pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            self._xid.collect(uuid)
            self._lost.add(uuid)
            self._splits.pop(uuid, None)
            return GpuHealth(Health.UNHEALTHY, f"the driver lost the GPU: {explain(error)}")
        self._lost.discard(uuid)
        if self._is_split(uuid, handle):
            return GpuHealth(Health.UNHEALTHY, "MIG mode is on; gpushare shares whole GPUs only")
        return self._xid.health(uuid, handle)

    def _is_split(self, uuid: str, handle: Any) -> bool:
        now = self._clock()
        asked_at, is_split = self._splits.get(uuid, (-math.inf, False))
        if now - asked_at >= MIG_SECONDS:
            is_split = _is_in_mig_mode(handle)
            self._splits[uuid] = now, is_split
        return is_split

    def sample(self, uuid: str) -> GpuSample | None:
        """Return the counters since the previous call; None at first, or if called within 100 ms.

        Raises:
            DevicesError: the driver does not answer, or its counters stand still.
        """
        handle = self._handle(uuid)
        read = self._counters(uuid, handle)
        if read is None:
            self._clock_of(uuid, handle)  # the clock's window starts with the counters' first one
            return None
        counters, window_seconds, reach_seconds = read
        with driver_errors(f"GPU {uuid} cannot be sampled"):
            used_mib = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) // _MIB
        utilization, mean_mhz = _utilization(handle), self._clock_of(uuid, handle).mean_mhz()
        if self._gpm[uuid] is not None:  # dcgm-exporter repeats figures between its own readings
            self._stills[uuid] = self._stills.get(uuid, Standstill()).after(counters, utilization)
            if problem := self._stills[uuid].problem:
                raise DevicesError(problem, retryable=True)
        return GpuSample(counters, window_seconds, used_mib, utilization, mean_mhz, reach_seconds)

    def _clock_of(self, uuid: str, handle: Any) -> SmClock:
        if uuid not in self._clocks:
            self._clocks[uuid] = SmClock(handle, self._clock)
        if self._polls_clock and self._polling is None:
            self._polling = ClockPolling(self._clocks)
        return self._clocks[uuid]

    def _handle(self, uuid: str) -> Any:
        try:
            return self._handles[uuid]
        except KeyError:
            raise DevicesError(f"GPU {uuid} is not on this node", retryable=False) from None

    def _counters(self, uuid: str, handle: Any) -> tuple[Counters, float, float | None] | None:
        """Return the counters, and their window's seconds and reach (as in GpuSample)."""
        if uuid not in self._gpm:
            self._gpm[uuid] = self._open_sampler(uuid, handle)
        gpm = self._gpm[uuid]
        if gpm is not None:
            sample = gpm.sample()
            return None if sample is None else (*sample, None)
        now = self._clock()
        before = self._sampled_at.get(uuid)
        if before is not None and now - before < MIN_WINDOW_SECONDS:
            return None
        self._sampled_at[uuid] = now
        if before is None:
            return None
        counters = self._dcgm.read([uuid]).get(uuid) if self._dcgm is not None else None
        if self._dcgm is None or counters is None:
            return Counters(), now - before, None
        readings = self._readings.setdefault(uuid, DcgmReadings(self._clock))
        window = readings.window(counters, self._dcgm.reach_intervals())
        return None if window is None else (counters, window, readings.reach_seconds)

    def _open_sampler(self, uuid: str, handle: Any) -> GpmSampler | None:
        try:
            if _has_gpm(handle):
                return GpmSampler(GpmWindow(uuid, handle), self._clock)
        except (pynvml.NVMLError, DevicesError) as error:
            words = explain(error) if isinstance(error, pynvml.NVMLError) else error
            self._log_once(f"GPM cannot be used: {words}")
            return None
        self._log_once(
            "this GPU has no GPM" + ("" if self._dcgm else "; set dcgm-exporter's address for its pipes")
        )
        return None

    def gpm_window(self, uuid: str) -> GpmWindow:
        """Return a window of counters that the caller starts, ends and closes.

        Raises:
            DevicesError: there is no such GPU, or it has no GPM.
        """
        handle = self._handle(uuid)
        with driver_errors(f"counters of GPU {uuid} cannot be read"):
            if not _has_gpm(handle):
                raise DevicesError(f"GPU {uuid} has no GPM (Hopper and later have)", retryable=False)
        return GpmWindow(uuid, handle)

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Return the processes with a context; one that is not an MPS client runs outside MPS (facts.md 19).

        Those that only draw are up to GRAPHICS_SECONDS old.
        """
        handle = self._handle(uuid)
        with driver_errors(f"processes of GPU {uuid} cannot be read"):
            # By their versions: the plain names hide from callers that a driver lacks them.
            clients = {p.pid: p for p in pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)}
            everyone = {p.pid: p for p in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)}
            drawing = {p.pid: p for p in self._drawing(uuid, handle)}
        outside = [p for p in everyone.values() if p.pid not in clients]
        graphics = [p for p in drawing.values() if p.pid not in clients and p.pid not in everyone]
        return (
            *(GpuProcess(p.pid, _mib(p.usedGpuMemory), is_mps_client=True) for p in clients.values()),
            *(GpuProcess(p.pid, _mib(p.usedGpuMemory), False, _is_named_server(p.pid)) for p in outside),
            *(GpuProcess(p.pid, _mib(p.usedGpuMemory), is_mps_client=False, is_graphics=True) for p in graphics),
        )

    def _drawing(self, uuid: str, handle: Any) -> Sequence[Any]:
        now = self._clock()
        listed_at, drawing = self._graphics.get(uuid, (-math.inf, ()))
        if now - listed_at >= GRAPHICS_SECONDS:
            drawing = _graphics_processes(handle)
            self._graphics[uuid] = now, drawing
        return drawing

    def compute_mode(self, uuid: str) -> ComputeMode:
        """Return the GPU's compute mode.

        The mode for threads, which no driver since CUDA 8 sets, is an error.
        """
        handle = self._handle(uuid)
        with driver_errors(f"the compute mode of GPU {uuid} cannot be read"):
            number = pynvml.nvmlDeviceGetComputeMode(handle)
        found = next((mode for mode, known in _COMPUTE_MODES.items() if known == number), None)
        if found is None:
            raise DevicesError(f"GPU {uuid} is in compute mode {number}, which is not known", retryable=True)
        return found

    def set_compute_mode(self, uuid: str, mode: ComputeMode) -> None:
        """Set the compute mode; needs CAP_SYS_ADMIN. It lasts until the driver is unloaded."""
        handle = self._handle(uuid)
        with driver_errors(f"GPU {uuid} cannot be set to compute mode {mode.value}"):
            pynvml.nvmlDeviceSetComputeMode(handle, _COMPUTE_MODES[mode])

    def close(self) -> None:
        """Free GPM's samples and the driver; a lost GPU may refuse."""
        self._search.close()
        if self._polling is not None:
            self._polling.close()
            self._polling = None
        self._clocks.clear()
        for gpm in self._gpm.values():
            if gpm is not None:
                gpm.close()
        self._gpm.clear()
        self._xid.close()
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _log_once(self, words: str) -> None:
        if words not in self._logged:
            self._logged.add(words)
            _log.warning("%s", words)


def _has_gpm(handle: Any) -> bool:
    return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)


def _is_in_mig_mode(handle: Any) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # GPUs without MIG
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _graphics_processes(handle: Any) -> Sequence[Any]:
    try:
        return list(pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle))
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        return ()


def _is_named_server(pid: int) -> bool:
    try:
        return _SERVER_NAME in pynvml.nvmlSystemGetProcessName(pid)
    except pynvml.NVMLError:  # the process ended meanwhile
        return False
    except UnicodeDecodeError:  # tenants choose their programs' names
        return False


def _utilization(handle: Any) -> float | None:
    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        return None


def _mib(used_bytes: int | None) -> int | None:
    return None if used_bytes is None else used_bytes // _MIB
