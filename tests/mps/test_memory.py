"""Where the gate reads what each process holds: what NVML does not tell is unknown, never none."""

import logging
import time

import pynvml
import pytest
from fakenvml import MIB, UNKNOWN, UUID, installed

from gpushare.core.gpu import DevicesError
from gpushare.devices.nvml import NvmlDevices
from gpushare.mps.grants import EXHAUSTED_MIB, grant_mib
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.ledger import Admission, ClientLedger
from gpushare.mps.memory import NvmlMemory

SELF_PID = 11  # of the fake's client


@pytest.fixture
def driver(monkeypatch):
    with installed(monkeypatch) as fake:
        yield fake


@pytest.fixture
def memory():
    return NvmlMemory(UUID)


def test_clients_with_their_memory_and_none_where_it_is_not_told(driver, memory):
    driver.clients = [(11, 500 * MIB), (12, UNKNOWN), (13, 0)]
    assert memory.used_mib() == {11: 500, 12: None, 13: 0}
    assert driver.opened == 1
    driver.clients = []
    assert memory.used_mib() == {}
    assert driver.opened == 1


def test_what_is_not_told_is_logged_once_until_it_is_over(driver, memory, caplog):
    driver.clients = [(11, UNKNOWN)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            memory.used_mib()
        assert len(caplog.records) == 1
        assert "NVML does not tell the memory of every client" in caplog.text
        driver.clients = [(11, MIB)]
        memory.used_mib()
        driver.clients = [(11, UNKNOWN)]
        memory.used_mib()
    assert len(caplog.records) == 2


def test_a_lost_gpu_tells_nothing_and_nvml_is_opened_anew(driver, memory, caplog):
    driver.is_lost = True
    assert memory.used_mib() is None
    assert memory.used_mib() is None
    assert driver.opened == 0  # a reset GPU is not found by an NVML that was open before
    assert [record.message for record in caplog.records] == [
        f"cannot read processes' memory of {UUID}, their grants count in full: GPU is lost"
    ]
    driver.is_lost = False
    assert memory.used_mib() == {11: 500}
    assert driver.opened == 1


def test_an_old_driver_is_one_sentence(driver, memory, caplog):
    driver.missing = {"nvmlDeviceGetMPSComputeRunningProcesses_v3"}
    assert memory.used_mib() is None
    assert "this driver is too old: its NVML does not list MPS clients" in caplog.text


def test_no_driver_is_one_sentence(monkeypatch, memory, caplog):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    assert memory.used_mib() is None
    assert memory.used_mib() is None
    assert len(caplog.records) == 1
    assert "NVML Shared Library Not Found" in caplog.text


def test_a_client_of_unknown_memory_leaves_its_pod_what_it_was_not_granted(driver, memory):
    """From the driver's word to the grant: the second process of a pod gets no memory that the first may hold."""
    ledger = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: 100.0)
    ledger.note_clients(())
    ledger.admit(Admission(SELF_PID, start_ticks_of(SELF_PID), "pod", 25, 6000, 8192, 100.0))
    ledger.note_clients((SELF_PID,), SELF_PID)

    def next_grant(used_bytes):
        driver.clients = [(SELF_PID, used_bytes)]
        ledger.observe_memory(101.0)
        return grant_mib(8192, ledger.siblings("pod", 1), 200.0)

    assert next_grant(500 * MIB) == 7692
    assert next_grant(UNKNOWN) == 2192
    assert next_grant(0) == 8192
    assert [client.memory_used_mib for client in ledger.clients()] == [0]
    next_grant(UNKNOWN)
    assert [client.memory_used_mib for client in ledger.clients()] == [None]


def test_a_client_of_unknown_memory_and_grant_leaves_its_pod_nothing(driver, memory):
    ledger = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: 100.0)
    ledger.note_clients((SELF_PID,))  # connected through a gate that left no word of it
    driver.clients = [(SELF_PID, UNKNOWN)]
    ledger.observe_memory(101.0)
    assert grant_mib(8192, ledger.siblings("pod", 1), 200.0) == EXHAUSTED_MIB


@pytest.mark.gpu
def test_real():
    try:
        devices = NvmlDevices.open(time.monotonic)
    except DevicesError as error:
        pytest.skip(str(error))
    for gpu in devices.list():
        used = NvmlMemory(gpu.uuid).used_mib()
        assert used is not None
        assert all(mib is None or 0 <= mib <= gpu.memory_mib for mib in used.values())
        assert set(used) == {process.pid for process in devices.processes(gpu.uuid) if process.is_mps_client}
    assert NvmlMemory("GPU-00000000-0000-0000-0000-000000000000").used_mib() is None
    devices.close()
