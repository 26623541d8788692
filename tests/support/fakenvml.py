"""libnvidia-ml.so.1 as pynvml calls it: C functions over H200s, one unless a test adds some, to change or break.

pynvml itself runs: what it passes goes through ctypes to C functions with the types of nvml.h, and what they
answer is written to the addresses that it gave.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int, c_uint, c_ulonglong, c_void_p
from typing import Any

import pynvml
import pytest

UUID = "GPU-5f0e6a3c-0000-0000-0000-000000000001"
HANDLE = 0x7F00_1234_5678  # of more than 32 bits, as real ones
OTHER_UUID = "GPU-5f0e6a3c-0000-0000-0000-000000000002"
OTHER_HANDLE = 0x7F00_1235_5678
FIRST_EVENT_SET = 0x7F00_AAAA_0000
FIRST_SAMPLE = 0x7F00_BBBB_0000
MIB = 2**20
UNKNOWN = 2**64 - 1  # what NVML says of memory that it cannot tell

Function = Callable[..., int | None]
_FUNCTIONS: dict[str, tuple[Any, Function]] = {}


def c_function(*types: Any) -> Callable[[Function], Function]:
    """Declare a function of the library by its arguments' types; it returns NVML's code, None for success."""

    def declare(function: Function) -> Function:
        _FUNCTIONS[function.__name__] = ctypes.CFUNCTYPE(c_int, *types), function
        return function

    return declare


def put(kind: Any, address: int, value: Any) -> None:
    kind.from_address(address).value = value


def put_text(text: bytes, address: int, length: int) -> None:
    assert len(text) < length
    ctypes.memmove(address, text + b"\0", len(text) + 1)


class FakeNvml:
    """A node's H200s.

    Attributes:
        gpus: their UUIDs by handle; lost: those that fell off the bus; is_lost: whether all did.
        missing: functions that this driver does not have; codes: what a function returns instead of an answer.
        broken_gpus: how many further GPUs are counted that cannot be opened.
        clock_mhz: the SM clock now; clocks: of further GPUs by handle, which have nothing else; clock_reads: how
            often clocks were read.
        events: (handle, XID) of events that came; each goes to the event set of its GPU. event_device: what they
            give as their device, if not the GPU's handle. loses_waits: whether a wait fails for a set with a lost
            GPU.
        clients, processes, graphics: (pid, bytes) as the lists of MPS clients, of compute processes and of
            graphics name them.
        broken: what went wrong inside the fake; `installed` raises it.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.codes: dict[str, int] = {}
        self.gpus = {HANDLE: UUID}
        self.is_lost = False
        self.lost: set[int] = set()
        self.broken_gpus = 0
        self.mig = 0
        self.compute_mode = 0
        self.driver_version = b"580.159.04"
        self.has_gpm = True
        self.gpm: dict[int, tuple[int, float]] = {}
        self.clients: list[tuple[int, int]] = [(11, 500 * MIB)]
        self.processes: list[tuple[int, int]] = [(10, 30 * MIB), (11, 500 * MIB), (12, UNKNOWN)]
        self.graphics: list[tuple[int, int]] = []
        self.names = {10: b"/usr/bin/nvidia-cuda-mps-server"}
        self.events: list[tuple[int, int]] = []
        self.event_device: int | None = None
        self.loses_waits = False
        self.event_sets: dict[int, set[int]] = {}  # the GPUs that are registered in each
        self.recovery_action = 0
        self.clock_mhz = 1980
        self.clocks: dict[int, int] = {}
        self.clock_reads = 0
        self.opened = 0
        self.marks = 0
        self.samples: set[int] = set()
        self._sampled: dict[int, int] = {}  # the GPU that a sample was last taken of
        self.broken: list[BaseException] = []

    def _check(self, handle: int) -> int:
        assert handle in self.gpus
        return int(pynvml.NVML_ERROR_GPU_IS_LOST) if self.is_lost or handle in self.lost else 0

    @c_function(c_uint)
    def nvmlInitWithFlags(self, flags: int) -> None:
        self.opened += 1

    @c_function()
    def nvmlShutdown(self) -> int | None:
        if not self.opened:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        self.opened -= 1
        return None

    @c_function(c_void_p, c_uint)
    def nvmlSystemGetDriverVersion(self, text: int, length: int) -> None:
        put_text(self.driver_version, text, length)

    @c_function(c_uint, c_void_p, c_uint)
    def nvmlSystemGetProcessName(self, pid: int, text: int, length: int) -> None:
        put_text(self.names.get(pid, b"python"), text, length)

    @c_function(c_void_p)
    def nvmlDeviceGetCount_v2(self, count: int) -> None:
        put(c_uint, count, len(self.gpus) + self.broken_gpus)

    @c_function(c_uint, c_void_p)
    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: int) -> int | None:
        if index >= len(self.gpus):
            assert index < len(self.gpus) + self.broken_gpus
            return int(pynvml.NVML_ERROR_GPU_IS_LOST)
        put(c_void_p, handle, list(self.gpus)[index])
        return None

    @c_function(ctypes.c_char_p, c_void_p)
    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: int) -> int | None:
        found = next((each for each, name in self.gpus.items() if name.encode() == uuid), None)
        if found is None:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        put(c_void_p, handle, found)
        return self._check(found)

    @c_function(c_void_p, c_void_p, c_uint)
    def nvmlDeviceGetUUID(self, handle: int, text: int, length: int) -> int:
        put_text(self.gpus[handle].encode(), text, length)
        return self._check(handle)

    @c_function(c_void_p, c_void_p, c_uint)
    def nvmlDeviceGetName(self, handle: int, text: int, length: int) -> None:
        assert handle in self.gpus
        put_text(b"NVIDIA H200", text, length)

    @c_function(c_void_p, c_void_p, c_void_p)
    def nvmlDeviceGetCudaComputeCapability(self, handle: int, major: int, minor: int) -> None:
        put(c_int, major, 9)
        put(c_int, minor, 0)

    @c_function(c_void_p, c_void_p)
    def nvmlDeviceGetNumGpuCores(self, handle: int, cores: int) -> None:
        put(c_uint, cores, 16896)

    @c_function(c_void_p, c_void_p)
    def nvmlDeviceGetMemoryInfo(self, handle: int, memory: int) -> int:
        info = pynvml.c_nvmlMemory_t.from_address(memory)
        info.total, info.used = 143771 * MIB, 1234 * MIB
        return self._check(handle)

    @c_function(c_void_p, c_void_p, c_void_p)
    def nvmlDeviceGetMigMode(self, handle: int, current: int, pending: int) -> None:
        put(c_uint, current, self.mig)
        put(c_uint, pending, self.mig)

    @c_function(c_void_p, c_void_p)
    def nvmlDeviceGetComputeMode(self, handle: int, mode: int) -> int:
        put(c_uint, mode, self.compute_mode)
        return self._check(handle)

    @c_function(c_void_p, c_uint)
    def nvmlDeviceSetComputeMode(self, handle: int, mode: int) -> int:
        self.compute_mode = mode
        return self._check(handle)

    @c_function(c_void_p, c_void_p)
    def nvmlDeviceGetUtilizationRates(self, handle: int, rates: int) -> None:
        pynvml.c_nvmlUtilization_t.from_address(rates).gpu = 96

    @c_function(c_void_p, c_uint, c_void_p)
    def nvmlDeviceGetClockInfo(self, handle: int, kind: int, mhz: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        self.clock_reads += 1
        put(c_uint, mhz, self.clocks.get(handle, self.clock_mhz))
        return 0 if handle in self.clocks else self._check(handle)

    @c_function(c_void_p, c_int, c_void_p)
    def nvmlDeviceGetFieldValues(self, handle: int, count: int, values: int) -> int:
        assert count == 1
        value = pynvml.c_nvmlFieldValue_t.from_address(values)
        assert value.fieldId == pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        value.nvmlReturn, value.value.uiVal = 0, self.recovery_action
        return self._check(handle)

    def _list(self, handle: int, rows: list[tuple[int, int]], count: int, listed: int | None) -> int:
        room, needed = c_uint.from_address(count).value, len(rows)
        put(c_uint, count, needed)
        if room < needed:
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        kind = pynvml.c_nvmlProcessInfo_v3_t * needed
        for row, (pid, used) in zip(kind.from_address(listed or 0) if rows else (), rows, strict=True):
            row.pid, row.usedGpuMemory = pid, used
        return self._check(handle)

    @c_function(c_void_p, c_void_p, c_void_p)
    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: int, count: int, listed: int | None) -> int:
        return self._list(handle, self.clients, count, listed)

    @c_function(c_void_p, c_void_p, c_void_p)
    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: int, count: int, listed: int | None) -> int:
        return self._list(handle, self.processes, count, listed)

    @c_function(c_void_p, c_void_p, c_void_p)
    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: int, count: int, listed: int | None) -> int:
        return self._list(handle, self.graphics, count, listed)

    @c_function(c_void_p)
    def nvmlEventSetCreate(self, events: int) -> None:
        made = next(a for a in range(FIRST_EVENT_SET, FIRST_EVENT_SET + 4096, 64) if a not in self.event_sets)
        self.event_sets[made] = set()
        put(c_void_p, events, made)

    @c_function(c_void_p, c_ulonglong, c_void_p)
    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: int) -> int:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self.event_sets[events].add(handle)
        return self._check(handle)

    @c_function(c_void_p, c_void_p, c_uint)
    def nvmlEventSetWait_v2(self, events: int, data: int, timeout_ms: int) -> int | None:
        assert timeout_ms == 0, "the sampling loop must never wait"
        watched = self.event_sets[events]
        if self.loses_waits and watched & self.lost:
            return int(pynvml.NVML_ERROR_GPU_IS_LOST)
        at = next((number for number, (device, _) in enumerate(self.events) if device in watched), None)
        if at is None:
            return int(pynvml.NVML_ERROR_TIMEOUT)
        device, xid = self.events.pop(at)
        put(c_void_p, data, self.event_device or device)  # the structure's first field
        pynvml.c_nvmlEventData_t.from_address(data).eventData = xid
        return None

    @c_function(c_void_p)
    def nvmlEventSetFree(self, events: int) -> int:
        freed = self.event_sets.pop(events)
        self.events = [event for event in self.events if event[0] not in freed]
        return max(map(self._check, freed), default=0)

    @c_function(c_void_p, c_void_p)
    def nvmlGpmQueryDeviceSupport(self, handle: int, support: int) -> int:
        answer = pynvml.c_nvmlGpmSupport_t.from_address(support)
        assert answer.version == pynvml.NVML_GPM_SUPPORT_VERSION
        answer.isSupportedDevice = int(self.has_gpm)
        return self._check(handle)

    @c_function(c_void_p)
    def nvmlGpmSampleAlloc(self, sample: int) -> None:
        address = next(a for a in range(FIRST_SAMPLE, FIRST_SAMPLE + 4096, 64) if a not in self.samples)
        self.samples.add(address)
        put(c_void_p, sample, address)

    @c_function(c_void_p)
    def nvmlGpmSampleFree(self, sample: int) -> int:
        self.samples.remove(sample)
        return self._check(self._sampled.get(sample, HANDLE))

    @c_function(c_void_p, c_void_p)
    def nvmlGpmSampleGet(self, handle: int, sample: int) -> int:
        assert sample in self.samples
        self._sampled[sample] = handle
        self.marks += 1
        return self._check(handle)

    @c_function(c_void_p)
    def nvmlGpmMetricsGet(self, query: int) -> int:
        asked = pynvml.c_nvmlGpmMetricsGet_t.from_address(query)
        assert asked.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        samples = {ctypes.cast(each, c_void_p).value for each in (asked.sample1, asked.sample2)}
        assert len(samples) == 2
        assert samples <= self.samples
        for slot in range(asked.numMetrics):
            metric = asked.metrics[slot]
            is_moving = metric.metricId == pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
            metric.nvmlReturn, metric.value = self.gpm.get(
                metric.metricId, (0, 90.0 + self.marks % 9 if is_moving else 0.0)
            )
        return max(self._check(self._sampled[sample]) for sample in samples)


class Library:
    """What pynvml takes for the loaded library."""

    def __init__(self, fake: FakeNvml) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Any:
        fake = self._fake
        if name not in _FUNCTIONS or name in fake.missing:
            raise AttributeError(f"libnvidia-ml.so.1: undefined symbol: {name}")
        kind, function = _FUNCTIONS[name]

        def call(*arguments: Any) -> int:
            try:
                if name in fake.codes:
                    return fake.codes[name]
                return function(fake, *arguments) or 0
            except BaseException as error:  # noqa: BLE001 - ctypes would print it and go on
                fake.broken.append(error)
                return int(pynvml.NVML_ERROR_UNKNOWN)

        return kind(call)


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Let pynvml find this library; what went wrong inside it fails the test at the end."""
    fake = FakeNvml()
    with patch.context() as patched:
        patched.setattr(pynvml, "nvmlLib", Library(fake))
        patched.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        yield fake
    for error in fake.broken:
        raise error
