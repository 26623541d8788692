"""The daemon's logs never fill the node's memory, and a fault in them is still found."""

import pytest

from gpushare.mps import logs
from gpushare.mps.faultlog import FaultLog

FAULT = "[2026-11-21 Server 7] Server is handling a fatal GPU error.\n"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("first\n" + "a line of no news\n" * 4000 + "last\n")
    return path


def test_a_short_log_is_left_alone(log):
    before = log.read_bytes()
    logs.trim([log, log.with_name("absent.log")], limit_bytes=2**20)
    assert log.read_bytes() == before


def test_a_long_one_is_emptied_in_place_and_its_end_kept(log, monkeypatch):
    monkeypatch.setattr(logs, "KEPT_BYTES", 1000)
    with log.open("r+") as daemon:  # as one that does not append: it goes on at its old offset
        daemon.seek(0, 2)
        logs.trim([log], limit_bytes=4096)
        assert log.stat().st_size == 0
        kept = log.with_name("server.log.1").read_text()
        assert len(kept) == 1000
        assert kept.endswith("last\n")
        daemon.write("more\n")
    assert log.read_bytes().lstrip(b"\0") == b"more\n"
    assert log.stat().st_size > 4096
    logs.trim([log], limit_bytes=8192)  # long, but only a block of it is there
    assert log.read_bytes().endswith(b"more\n")


def test_a_fault_after_that_is_still_seen(log):
    faults = FaultLog(log)
    logs.trim([log], limit_bytes=4096)
    with log.open("a") as daemon:
        daemon.write(FAULT)
    fault = faults.read()
    assert fault is not None
    assert "fatal GPU error" in fault.line


def test_a_fault_that_the_gate_has_seen_is_still_read_once(log):
    faults = FaultLog(log)
    assert not faults.has_fault()
    for line in (FAULT, "[2026-11-26 13:30:25.731 Server  2480] sticky error set: 1 client\n"):
        with log.open("a") as daemon:
            daemon.write(line)
        assert faults.has_fault()
    fault = faults.read()
    assert fault is not None
    assert "fatal GPU error" in fault.line
    assert not faults.has_fault()
    assert faults.read() is None
    with log.open("a") as daemon:
        daemon.write(FAULT)
    assert faults.has_fault()
    faults.skip()
    assert not faults.has_fault()


def test_a_disk_without_room_for_the_end_does_not_stop_it(log, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    logs.trim([log], limit_bytes=4096)
    assert log.stat().st_size == 0
