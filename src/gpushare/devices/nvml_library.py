"""The few calls of NVML that the agent makes, by ctypes.

The names, arguments and results are those of pynvml (nvidia-ml-py), of which this is a part: the whole of it
takes 15 MB resident, a fifth of what the agent may use, for some 400 calls that nobody makes. A test holds
structures and constants to pynvml's.
"""

import ctypes
from ctypes import Structure, Union, byref, c_char_p, c_double, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any, Final

NVML_SUCCESS: Final = 0
NVML_ERROR_INSUFFICIENT_SIZE: Final = 7
NVML_ERROR_LIBRARY_NOT_FOUND: Final = 12
NVML_ERROR_FUNCTION_NOT_FOUND: Final = 13
NVML_DEVICE_MIG_ENABLE: Final = 1
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: Final = 230
NVML_GPU_RECOVERY_ACTION_NONE: Final = 0
NVML_GPM_METRICS_GET_VERSION: Final = 1
NVML_GPM_SUPPORT_VERSION: Final = 1
NVML_GPM_METRIC_MAX: Final = 477
nvmlEventTypeXidCriticalError: Final = 8
_NOT_AVAILABLE: Final = 2**64 - 1
_TEXT_BYTES: Final = 96
_PROCESS_NAME_BYTES: Final = 1024


class NVMLError(Exception):
    """A call failed; `value` is NVML's return code."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(_words(value))


class c_nvmlMemory_t(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class c_nvmlUtilization_t(Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class c_nvmlProcessInfo_v2_t(Structure):
    _fields_ = [
        ("pid", c_uint), ("usedGpuMemory", c_ulonglong), ("gpuInstanceId", c_uint), ("computeInstanceId", c_uint),
    ]  # fmt: skip


class c_nvmlEventData_t(Structure):
    _fields_ = [
        ("device", c_void_p), ("eventType", c_ulonglong), ("eventData", c_ulonglong), ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    ]  # fmt: skip


class c_nvmlValue_t(Union):
    _fields_ = [("dVal", c_double), ("uiVal", c_uint), ("ullVal", c_ulonglong)]


class c_nvmlFieldValue_t(Structure):
    _fields_ = [
        ("fieldId", ctypes.c_uint32), ("scopeId", ctypes.c_uint32), ("timestamp", ctypes.c_int64),
        ("latencyUsec", ctypes.c_int64), ("valueType", c_uint), ("nvmlReturn", c_uint), ("value", c_nvmlValue_t),
    ]  # fmt: skip


class c_metricInfo_t(Structure):
    _fields_ = [("shortName", c_char_p), ("longName", c_char_p), ("unit", c_char_p)]


class c_nvmlGpmMetric_t(Structure):
    _fields_ = [
        ("metricId", c_uint), ("nvmlReturn", c_uint), ("value", c_double), ("metricInfo", c_metricInfo_t),
    ]  # fmt: skip


class c_nvmlGpmMetricsGet_t(Structure):
    _fields_ = [
        ("version", c_uint), ("numMetrics", c_uint), ("sample1", c_void_p), ("sample2", c_void_p),
        ("metrics", c_nvmlGpmMetric_t * NVML_GPM_METRIC_MAX),
    ]  # fmt: skip


class c_nvmlGpmSupport_t(Structure):
    _fields_ = [("version", c_uint), ("isSupportedDevice", c_uint)]


_loaded: dict[str, Any] = {}


def _library() -> Any:
    """The driver's library, loaded once."""
    if "nvml" not in _loaded:
        try:
            _loaded["nvml"] = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND) from error
    return _loaded["nvml"]


def _words(value: int) -> str:
    if value == NVML_ERROR_LIBRARY_NOT_FOUND:
        return "the driver's library libnvidia-ml.so.1 is not here"
    try:
        function = _library().nvmlErrorString
        function.restype = c_char_p
        return str(function(c_int(value)).decode())
    except (NVMLError, AttributeError):
        return f"NVML error {value}"


def _code(name: str, *arguments: Any) -> int:
    try:
        function = getattr(_library(), name)
    except AttributeError as error:
        raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND) from error
    return int(function(*arguments))


def _call(name: str, *arguments: Any) -> None:
    code = _code(name, *arguments)
    if code != NVML_SUCCESS:
        raise NVMLError(code)


def _pointer(value: Any) -> c_void_p:
    """A handle as a pointer; one read out of a structure is a plain number, which ctypes would cut to 32 bits."""
    return value if isinstance(value, c_void_p) else c_void_p(value)


def _text(name: str, length: int, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(length)
    _call(name, *arguments, buffer, c_uint(length))
    return buffer.value.decode(errors="replace")


def nvmlInit() -> None:
    _call("nvmlInitWithFlags", c_uint(0))


def nvmlShutdown() -> None:
    _call("nvmlShutdown")


def nvmlSystemGetDriverVersion() -> str:
    return _text("nvmlSystemGetDriverVersion", _TEXT_BYTES)


def nvmlSystemGetProcessName(pid: int) -> str:
    return _text("nvmlSystemGetProcessName", _PROCESS_NAME_BYTES, c_uint(pid))


def nvmlDeviceGetCount() -> int:
    count = c_uint()
    _call("nvmlDeviceGetCount_v2", byref(count))
    return count.value


def nvmlDeviceGetHandleByIndex(index: int) -> c_void_p:
    device = c_void_p()
    _call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device))
    return device


def nvmlDeviceGetUUID(device: Any) -> str:
    return _text("nvmlDeviceGetUUID", _TEXT_BYTES, _pointer(device))


def nvmlDeviceGetName(device: Any) -> str:
    return _text("nvmlDeviceGetName", _TEXT_BYTES, _pointer(device))


def nvmlDeviceGetCudaComputeCapability(device: Any) -> tuple[int, int]:
    major, minor = c_int(), c_int()
    _call("nvmlDeviceGetCudaComputeCapability", _pointer(device), byref(major), byref(minor))
    return major.value, minor.value


def nvmlDeviceGetNumGpuCores(device: Any) -> int:
    cores = c_uint()
    _call("nvmlDeviceGetNumGpuCores", _pointer(device), byref(cores))
    return cores.value


def nvmlDeviceGetMemoryInfo(device: Any) -> c_nvmlMemory_t:
    memory = c_nvmlMemory_t()
    _call("nvmlDeviceGetMemoryInfo", _pointer(device), byref(memory))
    return memory


def nvmlDeviceGetMigMode(device: Any) -> tuple[int, int]:
    current, pending = c_uint(), c_uint()
    _call("nvmlDeviceGetMigMode", _pointer(device), byref(current), byref(pending))
    return current.value, pending.value


def nvmlDeviceGetUtilizationRates(device: Any) -> c_nvmlUtilization_t:
    rates = c_nvmlUtilization_t()
    _call("nvmlDeviceGetUtilizationRates", _pointer(device), byref(rates))
    return rates


class Process:
    """A process on a GPU; `usedGpuMemory` in bytes, None where the driver does not know."""

    __slots__ = ("pid", "usedGpuMemory")

    def __init__(self, raw: c_nvmlProcessInfo_v2_t) -> None:
        self.pid = int(raw.pid)
        self.usedGpuMemory = None if raw.usedGpuMemory == _NOT_AVAILABLE else int(raw.usedGpuMemory)


def _processes(name: str, device: Any) -> list[Process]:
    count = c_uint(0)
    code = _code(name, _pointer(device), byref(count), None)
    if code == NVML_SUCCESS:
        return []
    if code != NVML_ERROR_INSUFFICIENT_SIZE:
        raise NVMLError(code)
    count.value = count.value * 2 + 5  # more may have come meanwhile
    listed = (c_nvmlProcessInfo_v2_t * count.value)()
    _call(name, _pointer(device), byref(count), listed)
    return [Process(listed[i]) for i in range(count.value)]


def nvmlDeviceGetComputeRunningProcesses(device: Any) -> list[Process]:
    return _processes("nvmlDeviceGetComputeRunningProcesses_v3", device)


def nvmlDeviceGetMPSComputeRunningProcesses(device: Any) -> list[Process]:
    return _processes("nvmlDeviceGetMPSComputeRunningProcesses_v3", device)


def nvmlDeviceGetFieldValues(device: Any, fields: list[int]) -> Any:
    values = (c_nvmlFieldValue_t * len(fields))()
    for value, field in zip(values, fields, strict=True):
        value.fieldId = field
    _call("nvmlDeviceGetFieldValues", _pointer(device), c_int(len(fields)), byref(values))
    return values


def nvmlEventSetCreate() -> c_void_p:
    events = c_void_p()
    _call("nvmlEventSetCreate", byref(events))
    return events


def nvmlDeviceRegisterEvents(device: Any, kinds: int, events: c_void_p) -> None:
    _call("nvmlDeviceRegisterEvents", _pointer(device), c_ulonglong(kinds), events)


def nvmlEventSetWait(events: c_void_p, timeout_ms: int) -> c_nvmlEventData_t:
    data = c_nvmlEventData_t()
    _call("nvmlEventSetWait_v2", events, byref(data), c_uint(timeout_ms))
    return data


def nvmlEventSetFree(events: c_void_p) -> None:
    _call("nvmlEventSetFree", events)


def nvmlGpmQueryDeviceSupport(device: Any) -> c_nvmlGpmSupport_t:
    support = c_nvmlGpmSupport_t(version=NVML_GPM_SUPPORT_VERSION)
    _call("nvmlGpmQueryDeviceSupport", _pointer(device), byref(support))
    return support


def nvmlGpmSampleAlloc() -> c_void_p:
    sample = c_void_p()
    _call("nvmlGpmSampleAlloc", byref(sample))
    return sample


def nvmlGpmSampleFree(sample: c_void_p) -> None:
    _call("nvmlGpmSampleFree", sample)


def nvmlGpmSampleGet(device: Any, sample: c_void_p) -> None:
    _call("nvmlGpmSampleGet", _pointer(device), sample)


def nvmlGpmMetricsGet(query: c_nvmlGpmMetricsGet_t) -> None:
    _call("nvmlGpmMetricsGet", byref(query))
