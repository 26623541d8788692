"""The real side: NVML for list, memory, health and processes; GPM or dcgm-exporter for the pipes."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from gpushare.core.gpu.devices import DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample, Health
from gpushare.core.gpu.pipes import Counters
from gpushare.devices import nvml_library
from gpushare.devices.dcgm import DcgmScrape
from gpushare.devices.gpm import MIN_WINDOW_SECONDS, GpmSampler
from gpushare.devices.xid import XidWatch

_log = logging.getLogger(__name__)

_MIB: Final = 2**20
REOPEN_SECONDS: Final = 60.0
_SERVER_NAME: Final = "nvidia-cuda-mps-server"
# CUDA cores of one SM by compute capability (CUDA programming guide, table of arithmetic throughput).
_CORES_PER_SM: Final = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_SM_LATER: Final = 128


class NvmlDevices:
    """The GPUs that the driver of this node lists.

    Args:
        nvml: `gpushare.devices.nvml_library` (or pynvml), initialised; clock: monotonic seconds.
    """

    def __init__(self, nvml: Any, clock: Callable[[], float], dcgm: DcgmScrape | None = None) -> None:
        self._nvml = nvml
        self._clock = clock
        self._dcgm = dcgm
        self._handles: dict[str, Any] = {}
        self._infos: tuple[GpuInfo, ...] = ()
        self._gpm: dict[str, GpmSampler | None] = {}
        self._sampled_at: dict[str, float] = {}
        self._said: set[str] = set()
        self._lost_at: float | None = None
        self._enumerate()
        self._xid = XidWatch(nvml, self._handles, clock)

    @classmethod
    def open(cls, clock: Callable[[], float], dcgm_url: str = "") -> "NvmlDevices":
        """Load the driver's library and look at its GPUs.

        Raises:
            DevicesError: no driver, no permission, no GPU; asking again can help.
        """
        try:
            nvml_library.nvmlInit()
        except nvml_library.NVMLError as error:
            raise DevicesError(f"NVML cannot be used: {error}", retryable=True) from error
        try:
            return cls(nvml_library, clock, DcgmScrape(dcgm_url) if dcgm_url else None)
        except nvml_library.NVMLError as error:
            nvml_library.nvmlShutdown()
            raise DevicesError(f"NVML cannot list GPUs: {error}", retryable=True) from error

    def _enumerate(self) -> None:
        nvml = self._nvml
        infos = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
                cores = nvml.nvmlDeviceGetNumGpuCores(handle)
                info = GpuInfo(
                    uuid=uuid,
                    index=index,
                    model=_text(nvml.nvmlDeviceGetName(handle)),
                    memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // _MIB,
                    sm_count=int(cores) // _CORES_PER_SM.get(capability, _CORES_PER_SM_LATER),
                )
            except nvml.NVMLError as error:  # the others are listed all the same
                _log.error("GPU %d cannot be read and is left out: %s", index, error)
                continue
            infos.append(info)
            self._handles[uuid] = handle
        self._infos = tuple(infos)

    def list(self) -> tuple[GpuInfo, ...]:
        """The GPUs that could be read when the driver was opened.

        While one of them is lost, the driver is opened anew every minute: after a reset, old handles stay dead.

        Raises:
            DevicesError: the driver cannot be opened any more.
        """
        if self._lost_at is not None and self._clock() - self._lost_at >= REOPEN_SECONDS:
            self._reopen()
        return self._infos

    def _reopen(self) -> None:
        self._lost_at = None
        known = self._xid.last
        try:
            self.close()
            self._nvml.nvmlInit()
            self._handles.clear()
            self._sampled_at.clear()
            self._enumerate()
            self._xid = XidWatch(self._nvml, self._handles, self._clock, known)
        except self._nvml.NVMLError as error:
            raise DevicesError(f"NVML cannot be used: {error}", retryable=True) from error

    def driver_version(self) -> str | None:
        """The driver's version."""
        try:
            return _text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None

    def health(self, uuid: str) -> GpuHealth:
        """Healthy while the device answers, has no critical XID behind it, and is not split by MIG."""
        handle = self._handles.get(uuid)
        if handle is None:
            return GpuHealth(Health.UNHEALTHY, "the GPU is not on this node")
        try:
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
            if self._is_split(handle):
                return GpuHealth(Health.UNHEALTHY, "MIG mode is on; gpushare shares whole GPUs only")
        except self._nvml.NVMLError as error:
            if self._lost_at is None:
                self._lost_at = self._clock()
            return GpuHealth(Health.UNHEALTHY, f"the driver lost the GPU: {error}")
        return self._xid.health(uuid, handle)

    def _is_split(self, handle: Any) -> bool:
        try:
            current, _pending = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError:  # GPUs without MIG
            return False
        return bool(current == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def sample(self, uuid: str) -> GpuSample | None:
        """Counters since the call before; None at first, or when called within 100 ms."""
        handle = self._handles.get(uuid)
        if handle is None:
            raise DevicesError(f"GPU {uuid} is not on this node", retryable=False)
        nvml = self._nvml
        try:
            read = self._counters(uuid, handle)
            if read is None:
                return None
            counters, window_seconds = read
            used_mib = int(nvml.nvmlDeviceGetMemoryInfo(handle).used) // _MIB
        except nvml.NVMLError as error:
            raise DevicesError(f"GPU {uuid} cannot be sampled: {error}", retryable=True) from error
        return GpuSample(counters, window_seconds, used_mib, self._utilization(handle))

    def _utilization(self, handle: Any) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except self._nvml.NVMLError:
            return None

    def _counters(self, uuid: str, handle: Any) -> tuple[Counters, float] | None:
        if uuid not in self._gpm:
            self._gpm[uuid] = self._open_gpm(handle)
        gpm = self._gpm[uuid]
        if gpm is not None:
            return gpm.sample()
        now = self._clock()
        before = self._sampled_at.get(uuid)
        if before is not None and now - before < MIN_WINDOW_SECONDS:
            return None
        self._sampled_at[uuid] = now
        if before is None:
            return None
        if self._dcgm is None:
            return Counters(), now - before
        return self._dcgm.read([uuid]).get(uuid, Counters()), now - before

    def _open_gpm(self, handle: Any) -> GpmSampler | None:
        nvml = self._nvml
        try:
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                return GpmSampler(nvml, handle, self._clock)
        except nvml.NVMLError as error:
            self._say(f"GPM cannot be used: {error}")
            return None
        self._say("this GPU has no GPM" + ("" if self._dcgm else "; set dcgm-exporter's address for its pipes"))
        return None

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Processes with a context; a compute process that is no MPS client runs outside MPS (facts.md 19)."""
        nvml = self._nvml
        handle = self._handles.get(uuid)
        if handle is None:
            raise DevicesError(f"GPU {uuid} is not on this node", retryable=False)
        try:
            clients = {p.pid: p for p in nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)}
            others = [p for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid not in clients]
        except nvml.NVMLError as error:
            raise DevicesError(f"processes of GPU {uuid} cannot be read: {error}", retryable=True) from error
        outside = [p for p in others if not self._is_server(p.pid)]
        return (
            *(GpuProcess(p.pid, _mib(p.usedGpuMemory), is_mps_client=True) for p in clients.values()),
            *(GpuProcess(p.pid, _mib(p.usedGpuMemory), is_mps_client=False) for p in outside),
        )

    def _is_server(self, pid: int) -> bool:
        try:
            return _SERVER_NAME in _text(self._nvml.nvmlSystemGetProcessName(pid))
        except self._nvml.NVMLError:  # it ended meanwhile
            return True

    def close(self) -> None:
        """Free GPM's buffers and let go of the driver."""
        for gpm in self._gpm.values():
            if gpm is not None:
                with contextlib.suppress(self._nvml.NVMLError):  # of a lost GPU
                    gpm.close()
        self._gpm.clear()
        self._xid.close()
        self._nvml.nvmlShutdown()

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            _log.warning("%s", words)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _mib(used_bytes: int | None) -> int | None:
    return None if used_bytes is None else int(used_bytes) // _MIB
