"""Our part of NVML's binding against the whole one, and its calls over a library that the test plays."""

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpushare.devices import nvml_library as ours
from gpushare.devices.gpm import METRICS, counters_of
from gpushare.devices.nvml import NvmlDevices

STRUCTURES = [
    "c_nvmlMemory_t", "c_nvmlUtilization_t", "c_nvmlProcessInfo_v2_t", "c_nvmlEventData_t", "c_nvmlFieldValue_t",
    "c_metricInfo_t", "c_nvmlGpmMetric_t", "c_nvmlGpmMetricsGet_t", "c_nvmlGpmSupport_t",
]  # fmt: skip
SOURCES = Path(ours.__file__).parent


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_lie_in_memory_as_pynvmls_do(name: str) -> None:
    mine, theirs = getattr(ours, name), getattr(pynvml, name)
    assert ctypes.sizeof(mine) == ctypes.sizeof(theirs)
    offsets = {field[0]: (getattr(mine, field[0]).offset, getattr(mine, field[0]).size) for field in mine._fields_}
    assert offsets == {f: (getattr(theirs, f).offset, getattr(theirs, f).size) for f in offsets}
    assert len(mine._fields_) == len(theirs._fields_)


def test_constants_are_pynvmls() -> None:
    names = [name for name in vars(ours) if re.match(r"NVML_|nvmlEventType", name)]
    assert len(names) >= 9
    assert {n: getattr(ours, n) for n in names} == {n: getattr(pynvml, n) for n in names}


def test_everything_that_the_devices_ask_for_is_there() -> None:
    text = "".join((SOURCES / f"{name}.py").read_text() for name in ("nvml", "gpm", "xid"))
    asked = set(re.findall(r"\b(?:nvml|_nvml|nvml_library)\.(\w*(?:nvml|NVML)\w+)", text))
    assert len(asked) > 20
    assert sorted(name for name in asked if not hasattr(ours, name)) == []


class Library:
    """libnvidia-ml as the calls see it: one GPU with a 64-bit handle, one client of 500 MiB, one stray."""

    HANDLE = 0x7F00_1234_5678

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetNumGpuCores":
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, *arguments)

    def answer(self, name: str, *arguments: Any) -> Any:
        values = [a._obj if hasattr(a, "_obj") else a for a in arguments]
        if name == "nvmlDeviceGetCount_v2":
            values[0].value = 1
        elif name == "nvmlDeviceGetHandleByIndex_v2":
            values[1].value = self.HANDLE
        elif name in ("nvmlDeviceGetUUID", "nvmlDeviceGetName"):
            assert isinstance(values[0], ctypes.c_void_p)
            assert values[0].value == self.HANDLE
            values[1].value = b"GPU-a" if name.endswith("UUID") else b"NVIDIA H200"
        elif name == "nvmlDeviceGetMPSComputeRunningProcesses_v3":
            if values[2] is None:
                values[1].value = 1
                return ours.NVML_ERROR_INSUFFICIENT_SIZE
            values[2][0].pid, values[2][0].usedGpuMemory = 11, 500 * 2**20
            values[1].value = 1
        elif name == "nvmlDeviceGetComputeRunningProcesses_v3":
            if values[2] is None:
                values[1].value = 2
                return ours.NVML_ERROR_INSUFFICIENT_SIZE
            assert len(values[2]) == 9  # room for those that come meanwhile
            for row, pid in enumerate((11, 12)):
                values[2][row].pid, values[2][row].usedGpuMemory = pid, 2**64 - 1
            values[1].value = 2
        elif name == "nvmlEventSetWait_v2":
            values[1].device, values[1].eventData = self.HANDLE, 79
        elif name == "nvmlErrorString":
            return b"Insufficient Permissions"
        elif name == "nvmlDeviceGetMigMode":
            return 4
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    played = Library()
    monkeypatch.setitem(ours._loaded, "nvml", played)
    return played


def test_calls(library: Library) -> None:
    assert ours.nvmlDeviceGetCount() == 1
    handle = ours.nvmlDeviceGetHandleByIndex(0)
    assert (ours.nvmlDeviceGetUUID(handle), ours.nvmlDeviceGetName(handle)) == ("GPU-a", "NVIDIA H200")
    assert [(p.pid, p.usedGpuMemory) for p in ours.nvmlDeviceGetMPSComputeRunningProcesses(handle)] == [
        (11, 500 * 2**20)
    ]
    assert [(p.pid, p.usedGpuMemory) for p in ours.nvmlDeviceGetComputeRunningProcesses(handle)] == [
        (11, None), (12, None),
    ]  # fmt: skip
    event = ours.nvmlEventSetWait(ours.nvmlEventSetCreate(), 0)
    assert (event.eventData, ours.nvmlDeviceGetUUID(event.device)) == (79, "GPU-a")  # the whole 64 bits of it


def test_errors_have_nvmls_words_and_an_old_driver_is_one(library: Library) -> None:
    handle = ours.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(ours.NVMLError, match="Insufficient Permissions"):
        ours.nvmlDeviceGetMigMode(handle)
    with pytest.raises(ours.NVMLError) as old:
        ours.nvmlDeviceGetNumGpuCores(handle)
    assert old.value.value == ours.NVML_ERROR_FUNCTION_NOT_FOUND


def test_no_driver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ours._loaded, "nvml", raising=False)

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ours.ctypes, "CDLL", missing)
    with pytest.raises(
        Exception, match=r"NVML cannot be used: the driver's library libnvidia-ml.so.1 is not here"
    ):
        NvmlDevices.open(lambda: 0.0)


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "nvml" / "gpm-h200-580.json").read_text())


@pytest.mark.parametrize("reading", RECORDED["readings"], ids=lambda r: r["program"])
def test_what_an_h200_said(reading: dict[str, Any]) -> None:
    counters = counters_of({name: (code, value) for name, (code, value) in reading["gpm"].items()})
    assert set(counters.as_dict()) == set(METRICS)
    pipes = counters.pipes()
    busiest = max(pipes, key=lambda pipe: pipes[pipe])
    assert busiest == {"fp64_product": "fp64", "fp16_product": "fp16", "memory_stream": "dram"}[reading["program"]]
    assert pipes[busiest] > 0.85
    assert pipes[busiest] <= 1.0
    assert reading["utilization_percent"] == 100  # NVML cannot tell these three apart
    assert all(used > 0 for _, used in reading["processes"])
