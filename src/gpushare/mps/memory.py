"""Device memory of each process on a GPU, for the rule that all processes of a pod share one limit."""

import contextlib
import logging
from collections.abc import Mapping
from typing import Protocol

logger = logging.getLogger(__name__)
_MIB = 2**20


class MemoryReader(Protocol):
    """Device memory by pid, MiB; None if it cannot be read (then grants count in full)."""

    def used_mib(self) -> Mapping[int, int | None] | None:
        """Read the present memory; None for a process with unknown memory, no entry for one that uses none."""
        ...


class NvmlMemory:
    """Device memory from NVML, which lists MPS clients with their memory (docs/facts.md 19).

    It reopens NVML after a failure. This is the only use of pynvml outside gpushare.devices, which is in a layer
    above this package (docs/adr/0101).
    """

    def __init__(self, gpu_uuid: str) -> None:
        self._uuid = gpu_uuid
        self._is_open = False
        self._problem = ""

    def used_mib(self) -> Mapping[int, int | None] | None:
        """Read the present memory; return None if NVML does not answer. Log each problem once until it ends."""
        import pynvml  # noqa: PLC0415 - a twin's keeper has no use for it

        try:
            if not self._is_open:
                pynvml.nvmlInit()
                self._is_open = True
            handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            processes = pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)
        except pynvml.NVMLError_FunctionNotFound:
            self._tell("this driver is too old: its NVML does not list MPS clients")
            return None
        except pynvml.NVMLError as error:
            if self._is_open:  # after a reset of the GPU, NVML must be opened again to find it
                self._is_open = False
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
            self._tell(str(error))
            return None
        used = {process.pid: _mib(process.usedGpuMemory) for process in processes}
        self._tell("NVML does not tell the memory of every client" if None in used.values() else "")
        return used

    def _tell(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.warning(
                "cannot read processes' memory of %s, their grants count in full: %s", self._uuid, problem
            )
        self._problem = problem


def _mib(used_bytes: int | None) -> int | None:
    return None if used_bytes is None else used_bytes // _MIB
