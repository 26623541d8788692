"""The parsers against what nvidia-cuda-mps-control of driver 580.159.04 printed on an H200 (data/)."""

import json
import time
from pathlib import Path

import pytest

from gpushare.mps import CommandRefusedError, DaemonDownError, commands
from gpushare.mps.control import _joined
from gpushare.mps.errors import NotSentError
from gpushare.mps.faultlog import Fault, FaultLog

DATA = Path(__file__).parent / "data"
ANSWERS = json.loads((DATA / "mps-control-580.json").read_text())["answers"]


def test_lists_and_percentages():
    assert commands.server_list().parse(ANSWERS["get_server_list"]) == (458,)
    assert commands.client_list(458).parse(ANSWERS["get_client_list 458"]) == (509,)
    assert commands.get_active_thread_percentage(458).parse(ANSWERS["get_active_thread_percentage 458"]) == 40
    assert commands.get_device_pinned_mem_limit(458, 0).parse(ANSWERS["get_device_pinned_mem_limit 458 0"]) == "4G"


def test_ps():
    (entry,) = commands.ps().parse(ANSWERS["ps"])
    assert (entry.pid, entry.client_id, entry.server_pid) == (509, 3, 458)
    assert entry.device == "GPU-d59aca56-c294-9a7e"
    assert entry.command == ["4026532267", "/run/gpushare/gate_tenant"][1]


def test_a_servers_state_and_an_ended_client():
    assert commands.server_status(768).parse(ANSWERS["get_server_status 768"]) is commands.ServerState.ACTIVE
    commands.terminate_client(768, 845).parse(ANSWERS["terminate_client 768 845"])


def test_changes_are_confirmed():
    commands.set_active_thread_percentage(458, 50).parse(ANSWERS["set_active_thread_percentage 458 50"])
    commands.set_device_pinned_mem_limit(458, 0, 4096).parse(ANSWERS["set_device_pinned_mem_limit 458 0 4096M"])
    commands.set_default_client_priority(1).parse(ANSWERS["set_default_client_priority 1"])
    both = [commands.set_active_thread_percentage(458, 20), commands.set_device_pinned_mem_limit(458, 0, 1024)]
    _joined(both).parse(ANSWERS["set_active_thread_percentage 458 20\nset_device_pinned_mem_limit 458 0 1024M"])


def test_a_change_that_the_daemon_silently_did_not_make_is_refused():
    with pytest.raises(CommandRefusedError, match=r"asked for 90%, in force is 20\.0"):
        commands.set_active_thread_percentage(458, 90).parse(ANSWERS["set_active_thread_percentage 458 200"])


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (commands.set_active_thread_percentage(999999, 20), "set_active_thread_percentage 999999 20"),
        (commands.client_list(999999), "get_client_list 999999"),
        (commands.terminate_client(458, 999999), "terminate_client 458 999999"),
        (commands.server_list(), "bogus_command"),
    ],
)
def test_what_is_not_there_is_refused(command, answer):
    with pytest.raises(CommandRefusedError):
        command.parse(ANSWERS[answer])


def test_no_daemon_and_a_busy_daemon_are_told_apart_and_both_worth_a_retry():
    with pytest.raises(DaemonDownError):
        commands.server_list().parse(ANSWERS["(no daemon) get_server_list"])
    with pytest.raises(NotSentError) as busy:
        commands.server_status(458).parse(ANSWERS["get_server_status 458"])
    assert busy.value.retryable


def test_the_servers_log_tells_of_a_fault_and_whom_it_reached(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("[2026-11-21 12:12:05.379 Server   458] Server has started\n")
    faults = FaultLog(log)
    assert faults.read() is None
    with log.open("a") as file:
        file.write((DATA / "server-fault-580.log").read_text())
    fault = faults.read()
    assert fault is not None
    assert "handling a fatal GPU error" in fault.line
    assert fault.pids == (3410, 3411, 3409)
    assert faults.read() is None
    log.write_text("rotated\n")
    assert faults.read() is None
    assert FaultLog(tmp_path / "missing").read() is None


@pytest.mark.parametrize(
    ("recorded", "reached", "began_it"),
    [
        ("server-fault-of-the-last-580.log", (3680, 3796, 3688, 3678), 3796),
        ("server-fault-after-kill-580.log", (4382, 4381, 4383), 4445),
    ],
)
def test_the_server_blames_a_bystander_first_so_no_one_is_blamed(tmp_path, recorded, reached, began_it):
    """An illegal access of the client that came last; a client killed with -9 in the middle of a kernel."""
    log = tmp_path / "server.log"
    log.write_text("")
    faults = FaultLog(log)
    log.write_text((DATA / recorded).read_text())
    fault = faults.read()
    assert fault is not None
    assert fault.pids == reached
    assert reached[0] != began_it
    assert "PID" not in fault.line


def test_a_report_that_the_server_is_still_writing_is_completed(tmp_path):
    """Read in the middle of a pid, of the list, of the whole report: half a list would blame one process."""
    text = (DATA / "server-fault-580.log").read_text()
    log = tmp_path / "server.log"
    listed = text.index("] 3410\n")
    for cut in (text.index("handling a fatal"), listed, listed + 4, text.index("] 3411\n") + 3):
        log.write_text("")
        faults = FaultLog(log)
        log.write_text(text[:cut])
        first = faults.read()
        log.write_text(text)
        assert faults.complete() == Fault(
            "[2026-11-21 12:12:07.226 Server   458] Server is handling a fatal GPU error.",
            (3410, 3411, 3409),
            time.mktime((2026, 11, 21, 12, 12, 7, 0, 0, -1)) + 0.226,  # the server stamps local time
        )
        assert first is None or first.pids in {(), (3410,)}
        assert faults.read() is None


def test_when_a_fault_began_is_what_its_line_says_unless_the_clocks_disagree():
    fault = Fault("", (), 1000.0)
    assert fault.span(now=52.0, unix_now=1001.5, read_before=50.0) == pytest.approx((50.5, 50.5), abs=0.02)
    for unix_now in (900.0, 4600.0, 1005.0):
        assert fault.span(now=52.0, unix_now=unix_now, read_before=50.0) == (50.0, 52.0)
    assert Fault("").span(now=52.0, unix_now=1001.5, read_before=50.0) == (50.0, 52.0)
