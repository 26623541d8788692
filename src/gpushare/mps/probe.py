"""The self-test's probe on a real GPU: a CUDA program that uses only the driver API and prints one line of JSON.

usage: echo go | probe.py MIB      (MIB: an allocation that the ceiling must refuse)
"""

import ctypes
import json
import sys
from typing import Any

_SM_COUNT_ATTRIBUTE = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_MIB = 2**20


def _check(library: Any, status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'error').decode()} ({status})")


class _Affinity(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("sm_count", ctypes.c_uint), ("padding", ctypes.c_byte * 256))


def probe(asked_mib: int) -> dict[str, Any]:
    """Make a context, read its SMs and free memory, and try an allocation."""
    cuda = ctypes.CDLL("libcuda.so.1")
    version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    _check(cuda, cuda.cuInit(0), "cuInit")
    cuda.cuDriverGetVersion(ctypes.byref(version))
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(cuda, cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _check(cuda, cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    sm_count = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGetAttribute(ctypes.byref(sm_count), _SM_COUNT_ATTRIBUTE, device), "SM count")
    affinity, sms = _Affinity(), sm_count.value
    if hasattr(cuda, "cuCtxGetExecAffinity") and cuda.cuCtxGetExecAffinity(ctypes.byref(affinity), 0) == 0:
        sms = min(sms, affinity.sm_count)
    free, total, pointer = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
    _check(cuda, cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
    status = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(asked_mib * _MIB))
    if status == 0:
        cuda.cuMemFree_v2(pointer)
    try:
        with open("/proc/driver/nvidia/version") as file:  # noqa: PTH123 (run alone, kept to the bare modules)
            driver = next((word for word in file.readline().split() if word[:1].isdigit() and "." in word), "")
    except OSError:
        driver = ""
    return {
        "sms": sms,
        "attribute_sms": sm_count.value,
        "free_mib": free.value // _MIB,
        "asked_mib": asked_mib,
        "allocated": status == 0,
        "driver": driver or f"CUDA {version.value}",
    }


def main() -> None:
    """Wait to be told to start, so that the gate knows our pid first."""
    sys.stdin.readline()
    try:
        seen = probe(int(sys.argv[1]))
    except (OSError, RuntimeError, AttributeError) as error:
        seen = {"error": str(error)}
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
