"""Read the driver's list of GPUs.

    python -m gpushare.devices.listing

prints the UUIDs of those that can be read, one a line, for `GpuSearch`.
"""

import logging
import signal
import sys
from typing import Any, Final

import pynvml

from gpushare.core.gpu import GpuInfo
from gpushare.devices.driver import explain

_log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 60  # the start of a GPU that is broken may take its time; the kernel ends us then
_MIB: Final = 2**20
# CUDA cores of one SM by compute capability (CUDA programming guide, table of arithmetic throughput).
_CORES_PER_SM: Final = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_CORES_PER_SM_LATER: Final = 128


def read_gpus() -> tuple[list[tuple[GpuInfo, Any]], dict[int, str]]:
    """Return the GPUs that can be read, each with its handle, and by index why others cannot.

    Raises:
        pynvml.NVMLError: the driver does not count any.
    """
    found: list[tuple[GpuInfo, Any]] = []
    left_out: dict[int, str] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            cores = pynvml.nvmlDeviceGetNumGpuCores(handle)
            info = GpuInfo(
                uuid=uuid,
                index=index,
                model=pynvml.nvmlDeviceGetName(handle),
                memory_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // _MIB,
                sm_count=int(cores) // _CORES_PER_SM.get(capability, _CORES_PER_SM_LATER),
            )
        except pynvml.NVMLError as error:  # the other GPUs are listed nevertheless
            left_out[index] = explain(error)
            _log.error("GPU %d cannot be read and is left out: %s", index, left_out[index])
            continue
        found.append((info, handle))
    return found, left_out


def main() -> None:
    """Print the UUIDs of the GPUs that can be read."""
    pynvml.nvmlInit()
    found, _ = read_gpus()
    sys.stdout.write("".join(f"{info.uuid}\n" for info, _ in found))


if __name__ == "__main__":
    signal.alarm(ANSWER_SECONDS)
    main()
