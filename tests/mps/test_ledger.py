import dataclasses
import json
import os
import subprocess
import time

import pytest

from gpushare.mps.contexts import ContextLog
from gpushare.mps.grants import grant_percentage, to_end
from gpushare.mps.identity import seconds_alive, start_ticks_of
from gpushare.mps.ledger import Admission, ClientLedger
from gpushare.mps.logs import trim
from gpushare.mps.status import ClientStatus, GateState, GateStatus, MismatchKind

ME = os.getpid()
GONE = 2**22 + 7


class Memory:
    def __init__(self) -> None:
        self.used: dict[int, int | None] | None = {}

    def used_mib(self):
        return self.used


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def ledger(memory, clock):
    ledger = ClientLedger(memory, identify=lambda pid: "pod" if pid < 1000 else None, clock=lambda: clock[0])
    ledger.note_clients(())
    return ledger


def admission(pid=ME, pod_uid="pod", granted=4096, at=100.0):
    return Admission(pid, start_ticks_of(pid), pod_uid, 25, granted, 8192, at)


def test_who_had_its_turn_is_a_client_with_its_ceilings(ledger, memory):
    ledger.admit(admission())
    ledger.note_clients((ME,), ME)
    ledger.end_turn(ME, is_client=True)
    memory.used = {ME: 300}
    ledger.observe_memory(101.0)
    (client,) = ledger.clients()
    assert (client.pod_uid, client.thread_percentage, client.memory_limit_mib, client.memory_used_mib) == (
        "pod",
        25,
        4096,
        300,
    )
    assert ledger.strangers() == ()
    assert ledger.is_client(ME)


def test_a_client_without_a_turn_is_a_stranger_once(ledger):
    for _ in range(3):
        ledger.note_clients((7,))
    assert [m.kind for m in ledger.mismatches] == [MismatchKind.STALE_CEILING]
    ledger.note_clients((7, 5000))
    assert [m.kind for m in ledger.strangers()] == [MismatchKind.STALE_CEILING, MismatchKind.UNKNOWN_CLIENT]
    ledger.note_clients(())
    assert ledger.strangers() == ()


def test_a_late_client_is_welcome_until_the_next_turn_changes_the_ceilings(ledger):
    ledger.admit(admission())
    ledger.end_turn(ME, is_client=False)
    ledger.note_clients((ME,))
    assert ledger.strangers() == ()
    ledger.note_clients(())
    ledger.forget_clients()
    ledger.admit(admission())
    ledger.end_turn(ME, is_client=False)
    ledger.admit(admission(pid=GONE, pod_uid="other"))
    ledger.note_clients((ME,))
    assert [m.pid for m in ledger.strangers()] == [ME]


def test_a_new_gate_takes_over_what_still_runs(memory, clock):
    ledger = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: clock[0])
    running = ClientStatus(ME, "pod", 25, 4096, 300, None, start_ticks_of(ME))
    ended = ClientStatus(GONE, "pod", 25, 1, 1, None, 1)
    status = GateStatus("GPU-1", GateState.ACTIVE, 1.0, clients=(running, ended))
    ledger.restore(status)
    ledger.note_clients((ME, 12))
    assert ledger.strangers() == ()
    assert {c.pid: c.thread_percentage for c in ledger.clients()} == {ME: 25, 12: None}
    assert [p.used_mib for p in ledger.siblings("pod", 12)] == [300]


def test_a_new_gate_keeps_the_limit_of_a_pod_whose_processes_each_have_a_part_of_it(memory, clock):
    """Before: the largest part counted as the pod's limit, and its newest process was ended for exceeding it."""
    first = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: clock[0])
    older = os.getppid()
    first.admit(admission(pid=older, granted=6144))
    first.admit(admission(granted=5192, at=101.0))
    memory.used = {older: 3000, ME: 4000}
    first.note_clients((older, ME))
    first.observe_memory(102.0)
    assert [(limit, to_end(limit, processes)) for _, limit, processes in first.pods()] == [(8192, ())]
    status = GateStatus("GPU-1", GateState.ACTIVE, 1.0, clients=first.clients())
    second = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: clock[0])
    second.restore(GateStatus.from_json(json.loads(json.dumps(status.to_json()))))
    second.note_clients((older, ME))
    second.observe_memory(103.0)
    assert [(limit, to_end(limit, processes)) for _, limit, processes in second.pods()] == [(8192, ())]
    assert [client.pod_limit_mib for client in second.clients()] == [8192, 8192], "its successor knows too"


@pytest.mark.parametrize("jump_seconds", [-86_400.0, -1.5, 0.0, 2.0, 86_400.0])
def test_a_wall_clock_that_jumps_while_no_gate_runs_makes_no_client_the_newest_nor_older_than_its_process(
    memory, clock, monkeypatch, jump_seconds
):
    """Before: set back, all clients were equally old, and the one with the highest pid was ended as the newest."""
    newer, older = sorted((ME, os.getppid()))
    unix = [1_795_900_000.0]
    monkeypatch.setattr(time, "time", lambda: unix[0])
    first = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: clock[0])
    first.admit(admission(pid=older))
    first.admit(admission(pid=newer, at=100.5))
    first.note_clients((older, newer))
    clock[0] = 101.0
    status = GateStatus("GPU-1", GateState.ACTIVE, unix[0], clients=first.clients())
    clock[0], unix[0] = 102.0, unix[0] + 1.0 + jump_seconds
    second = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: clock[0])
    second.restore(status)
    memory.used = {newer: 5000, older: 5000}
    second.note_clients((older, newer))
    second.observe_memory(102.0)
    [(_, limit, processes)] = second.pods()
    assert to_end(limit, processes) == (newer,)
    granted = {each.pid: each.granted_at for each in processes}
    assert granted[newer] - granted[older] == pytest.approx(0.5)
    ages = {pid: 102.0 - at for pid, at in granted.items()}
    assert all(0.0 <= age <= seconds_alive(start_ticks_of(pid) or 0) for pid, age in ages.items())
    assert ages[older] == pytest.approx(2.0) or jump_seconds, "else they are as old as they are"


def test_a_status_that_does_not_tell_the_pods_limit_ends_no_process_by_a_part_of_it(memory, clock):
    ledger = ClientLedger(memory, identify=lambda _pid: "pod", clock=lambda: clock[0])
    written = [ClientStatus(pid, "pod", 25, 4096, 4000, None, start_ticks_of(pid)) for pid in (os.getppid(), ME)]
    ledger.restore(GateStatus("GPU-1", GateState.ACTIVE, 1.0, clients=tuple(written)))
    ledger.note_clients((os.getppid(), ME))
    assert ledger.pods() == ()
    ledger.admit(admission())
    assert [limit for _, limit, _ in ledger.pods()] == [8192]


def test_a_list_that_was_asked_for_before_a_client_was_seen_does_not_take_it_away(ledger, clock):
    """Before: gate and keeper ask at once; with the older list read last, the next process had the cap too."""
    ledger.admit(admission())
    clock[0] = 100.2
    ledger.note_clients((ME,), ME, asked_at=100.1)
    ledger.end_turn(ME, is_client=True)
    ledger.note_clients((), asked_at=100.0)
    assert ledger.is_client(ME)
    assert grant_percentage(25, 1, ledger.percentages("pod", GONE)) is None
    assert [each.until for each in ledger.connected(100.0, 101.0)] == [None]
    clock[0] = 101.0
    ledger.note_clients((), asked_at=100.9)
    assert not ledger.is_client(ME)


def test_a_list_that_was_asked_for_before_a_client_left_does_not_make_it_a_stranger(ledger, clock):
    """Before: an event said that a process of no pod had connected past the gate."""
    left = subprocess.Popen(["sleep", "60"])
    ledger.admit(admission(pid=left.pid))
    ledger.note_clients((left.pid,), left.pid, asked_at=100.0)
    ledger.end_turn(left.pid, is_client=True)
    left.kill()
    left.wait()
    clock[0] = 101.0
    ledger.note_clients((), asked_at=100.8)
    ledger.note_clients((left.pid,), asked_at=100.7)
    assert (ledger.strangers(), ledger.mismatches, ledger.client_count) == ((), (), 0)


@pytest.mark.parametrize("is_trimmed", [True, False])
def test_the_contexts_of_a_client_count_after_the_log_was_trimmed_and_the_gate_restarted(
    memory, clock, tmp_path, is_trimmed
):
    """Before: they were forgotten, and a pod of cap 40 that had all of it in two contexts was given another 20."""
    path = tmp_path / "server.log"
    line = "[2026-11-23 23:11:44.341 Server   524] Client {PID: %d, Context ID: %d} connected\n"

    def gate() -> ClientLedger:
        return ClientLedger(memory, identify=lambda _: "pod", clock=lambda: clock[0], contexts=ContextLog(path))

    first = gate()
    first.note_clients(())
    path.write_text("".join(line % (ME, number) for number in range(3)))
    for _ in range(2):
        first.admit(dataclasses.replace(admission(), thread_percentage=20))
        first.note_clients((ME,), ME)
        first.end_turn(ME, is_client=True)
    status = GateStatus("GPU-1", GateState.ACTIVE, 1.0, clients=first.clients())
    if is_trimmed:
        trim([path], limit_bytes=0)
        assert path.read_text() == ""
    second = gate()
    second.restore(GateStatus.from_json(json.loads(json.dumps(status.to_json()))))
    second.note_clients((ME,))
    assert second.percentages("pod", ME) == (20, 20)
    assert grant_percentage(40, 2, second.percentages("pod", ME)) is None
    assert second.clients()[0].grants == (20, 20), "its successor knows too"


def test_a_status_of_a_version_that_counts_no_contexts_is_read(memory, clock):
    data = GateStatus("GPU-1", GateState.ACTIVE, 1.0, clients=(ClientStatus(ME, "pod"),)).to_json()
    data = json.loads(json.dumps(data))
    for name in ("contexts", "grants"):
        del data["clients"][0][name]
    (client,) = GateStatus.from_json(data).clients
    assert (client.contexts, client.grants) == (0, ())


def test_memory_that_changes_is_not_settled_and_unread_memory_counts_as_granted(ledger, memory):
    ledger.admit(admission())
    memory.used = {ME: 500}
    ledger.observe_memory(105.0)
    (process,) = ledger.siblings("pod", 1)
    assert (process.used_mib, process.changed_at) == (500, 105.0)
    memory.used = None
    ledger.observe_memory(106.0)
    (process,) = ledger.siblings("pod", 1)
    assert process.counted_mib(8192) == 4096
    memory.used = {ME: None}
    ledger.observe_memory(107.0)
    (process,) = ledger.siblings("pod", 1)
    assert (process.used_mib, process.counted_mib(8192)) == (None, 4096)
    memory.used = {}  # listed no more: it holds no context
    ledger.observe_memory(108.0)
    (process,) = ledger.siblings("pod", 1)
    assert process.counted_mib(8192) == 0
    assert ledger.siblings("other", 1) == ()


def test_processes_that_are_gone_hold_nothing(ledger):
    ledger.admit(admission(pid=GONE))
    ledger.note_clients(())
    assert ledger.siblings("pod", 1) == ()


def test_a_pods_limit_is_the_highest_its_live_processes_were_let_in_under(ledger):
    ledger.admit(admission())
    ledger.note_clients((ME,), ME)
    ((uid, limit, processes),) = ledger.pods()
    assert (uid, limit, [p.pid for p in processes]) == ("pod", 8192, [ME])
    ledger.forget_clients()
    assert ledger.pods() == ()
    assert ledger.client_count == 0


def test_who_was_connected_when_something_began_is_known_after_they_have_left(ledger, clock):
    ledger.admit(admission(pid=GONE, pod_uid="first", at=100.0))
    clock[0] = 100.4
    ledger.note_clients((GONE,), GONE)
    ledger.end_turn(GONE, is_client=True)
    clock[0] = 101.0
    ledger.note_clients(())
    clock[0] = 101.5
    ledger.admit(admission(pid=GONE + 1, pod_uid="second", at=101.5))
    ledger.note_handed(GONE + 1)
    ledger.admit(admission(pid=GONE + 2, pod_uid="third", at=101.5))

    def pods(earliest, latest):
        return [each.pod_uid for each in ledger.connected(earliest, latest)]

    assert pods(99.0, 99.9) == []
    assert pods(100.7, 100.7) == ["first"]
    assert pods(101.2, 101.2) == []
    assert pods(100.7, 102.0) == ["first", "second"]
    ledger.end_turn(GONE + 1, is_client=False)
    assert pods(101.5, 101.5) == ["second"], "the server had it: it may have been connected between two looks"
    assert pods(101.6, 102.0) == []
    ledger.forget_departed(101.2)
    assert pods(100.0, 102.0) == ["second"]


def test_a_process_with_the_pid_of_a_client_that_ended_is_another(ledger, clock):
    """Before: until the next list it was taken for the client, and a fault was told to that one's pod."""
    for ticks, pod in ((1, "first"), (2, "second")):
        ledger.admit(Admission(GONE, ticks, pod, 25, 4096, 8192, clock[0]))
        ledger.note_handed(GONE)
        if pod == "first":
            ledger.note_clients((GONE,), GONE)
            ledger.end_turn(GONE, is_client=True)
        clock[0] += 0.2
    assert [(each.pod_uid, each.until) for each in ledger.connected(100.0, 101.0)] == [
        ("first", 100.2),
        ("second", None),
    ]


def test_a_client_that_the_server_ended_was_connected_until_then_though_no_list_shows_it_yet(ledger, clock):
    """Before: its end, seen a second later, was taken for a kill in the fault meanwhile, and nobody was blamed."""
    ledger.note_clients((7, 8))
    clock[0] = 100.5
    ledger.note_terminated(7)

    def pids(moment):
        return [each.pid for each in ledger.connected(moment, moment)]

    for _ in range(2):
        assert pids(100.2) == [7, 8]
        assert pids(100.5) == [7, 8], "its termination may have caused it"
        assert pids(100.7) == [8]
        clock[0] = 101.0
        ledger.note_clients((8,))
    clock[0] = 102.0
    ledger.note_clients((7, 8))
    assert sorted(pids(102.0)) == [7, 8], "another process with its pid"


def test_a_server_that_ended_had_clients(ledger, clock):
    ledger.note_clients((7,))
    clock[0] = 102.0
    ledger.forget_clients()
    assert [(each.pid, each.pod_uid, each.until) for each in ledger.connected(101.0, 101.0)] == [(7, "pod", 102.0)]


def test_what_a_pods_other_clients_run_under_counts_while_they_are_clients(ledger):
    ledger.admit(admission())
    assert ledger.percentages("pod", 7) == (), "not a client yet"
    ledger.note_clients((ME,), ME)
    ledger.end_turn(ME, is_client=True)
    assert ledger.percentages("pod", 7) == (25,)
    assert ledger.percentages("pod", ME) == ()
    assert ledger.percentages("another", 7) == ()
    ledger.admit(dataclasses.replace(admission(), pid=GONE))
    ledger.note_clients((ME, GONE), GONE)
    assert ledger.percentages("pod", 7) == (25,), "who has ended just now takes nothing from the next"
    ledger.note_clients(())  # it lives on without the GPU
    assert ledger.has_admission(ME)
    assert ledger.percentages("pod", 7) == ()


def test_a_client_whose_main_thread_has_ended_keeps_its_part_of_the_pods_cap(ledger, headless):
    ledger.admit(admission(pid=headless.pid))
    ledger.note_clients((headless.pid,), headless.pid)
    ledger.end_turn(headless.pid, is_client=True)
    assert ledger.percentages("pod", ME) == (25,)


@pytest.mark.parametrize("is_client", [True, False])
def test_a_later_process_with_an_admitted_ones_pid_is_a_stranger(ledger, is_client):
    """Before: under the former one's name, so no part of the pod's cap counted as its own."""
    former = admission()
    ledger.admit(dataclasses.replace(former, start_ticks=former.start_ticks - 1))
    ledger.end_turn(ME, is_client=is_client)
    ledger.note_clients((ME,))
    assert [m.pid for m in ledger.strangers()] == [ME]
    (client,) = ledger.clients()
    assert (client.thread_percentage, client.start_ticks) == (None, former.start_ticks)


def test_a_client_of_unknown_start_gets_the_one_that_it_has(ledger):
    ledger.admit(dataclasses.replace(admission(), start_ticks=None))
    ledger.end_turn(ME, is_client=True)
    ledger.note_clients((ME,))
    assert [client.start_ticks for client in ledger.clients()] == [start_ticks_of(ME)]
