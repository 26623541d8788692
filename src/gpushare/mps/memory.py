"""Device memory of each process on a GPU, for the rule that a pod's processes share one limit."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)
_MIB = 2**20


class MemoryReader(Protocol):
    """Device memory by pid, MiB; None when nobody can tell now (then grants count in full)."""

    def used_mib(self) -> Mapping[int, int] | None:
        """Read it now; a process that is not in it holds none."""
        ...


class NvmlMemory:
    """From NVML, which lists MPS clients with their memory (docs/facts.md 19); tries again after a failure."""

    def __init__(self, gpu_uuid: str) -> None:
        self._uuid = gpu_uuid
        self._nvml: Any = None
        self._complained = False

    def used_mib(self) -> Mapping[int, int] | None:
        """Read it now; None without a driver, with one warning."""
        try:
            if self._nvml is None:
                import pynvml  # noqa: PLC0415 (nodes without the library keep the hard rule)

                pynvml.nvmlInit()
                self._nvml = pynvml
            handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            processes = self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        except Exception as error:  # noqa: BLE001 (NVML raises classes made at run time; none may stop the gate)
            if not self._complained:
                logger.warning("cannot read processes' memory of %s from NVML, grants count in full: %s",
                               self._uuid, error)  # fmt: skip
            self._complained = True
            self._nvml = None
            return None
        self._complained = False
        return {process.pid: (process.usedGpuMemory or 0) // _MIB for process in processes}
