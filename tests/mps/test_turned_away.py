"""Who hears that the MPS server did not take a process, and who hears of a fault instead."""

import os

import pytest

from gpushare.mps.identity import start_ticks_of
from gpushare.mps.ledger import Admission, ClientLedger
from gpushare.mps.turned_away import KEPT_TURNED_AWAY, TURNED_AWAY_SECONDS, TurnedAwayRecord

NEVER = float("-inf")
UNIX_NOW = 1.8e9
PID = 2**22 + 9  # of no process
TOO_MANY = 808  # CUDA's error of a process that comes when the server has as many clients as it takes


class Gate:
    """A ledger, its clock, and the record of who was turned away."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ledger = ClientLedger(None, clock=lambda: self.now, identify=lambda _: None)
        self.ledger.note_clients(())
        self.record = TurnedAwayRecord(self.ledger)

    def turn_away(self, pid: int, pod: str | None, *, ends_turn: bool = True) -> None:
        self.ledger.admit(Admission(pid, start_ticks_of(pid), pod, 20, 4096, 4096, self.now))
        self.ledger.note_turned_away(pid, TOO_MANY)
        if ends_turn:
            self.ledger.end_turn(pid, is_client=False)

    def told(self, faulted_at: float = NEVER, fault_pods: tuple[str, ...] = ()) -> list[tuple[int, str, int]]:
        """Who was told in all, after another look at the server's log."""
        self.record.settle(self.now, UNIX_NOW, faulted_at, fault_pods)
        return [(each.pid, each.pod_uid, each.cuda_error) for each in self.record.latest]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.mark.parametrize("ends_turn", [False, True])
def test_a_pod_is_told_once_and_when_no_fault_can_be_the_reason_any_more(gate, ends_turn):
    gate.now += 1
    gate.turn_away(PID, "a", ends_turn=ends_turn)
    gate.now += TURNED_AWAY_SECONDS - 0.1
    assert gate.told() == []
    gate.now += 0.1
    for _ in range(3):
        assert gate.told() == [(PID, "a", TOO_MANY)]
        gate.now += 1
    assert [each.at for each in gate.record.latest] == [UNIX_NOW - TURNED_AWAY_SECONDS]


def test_a_process_of_no_known_pod_is_told_nobody(gate):
    gate.now += 1
    gate.turn_away(PID, None)
    gate.now += 10
    assert gate.told() == []


@pytest.mark.parametrize("seconds", [-TURNED_AWAY_SECONDS, 0.0, 1.0])
def test_whoever_hears_of_a_fault_is_not_told_this_too(gate, seconds):
    gate.now += 10
    gate.turn_away(PID, "a")
    gate.turn_away(PID + 1, "b")
    faulted_at = gate.now + seconds
    gate.now += TURNED_AWAY_SECONDS
    assert gate.told(faulted_at, ("a",)) == [(PID + 1, "b", TOO_MANY)], "that pod is in no fault's record"


def test_long_after_a_fault_it_is_no_reason(gate):
    faulted_at = gate.now
    gate.now += TURNED_AWAY_SECONDS + 0.1
    gate.turn_away(PID, "a")
    gate.now += TURNED_AWAY_SECONDS
    assert gate.told(faulted_at, ("a",)) == [(PID, "a", TOO_MANY)]


def test_a_process_that_came_again_and_works_is_not_told(gate):
    pid = os.getppid()
    gate.now += 1
    gate.turn_away(pid, "a")
    gate.ledger.admit(Admission(pid, start_ticks_of(pid), "a", 20, 4096, 4096, gate.now))
    gate.ledger.note_clients((pid,), pid)
    gate.ledger.end_turn(pid, is_client=True)
    gate.now += 10
    assert gate.told() == []


def test_the_record_is_bounded_and_has_the_latest(gate):
    for number in range(2 * KEPT_TURNED_AWAY):
        gate.now += 1
        gate.turn_away(PID + number, "a")
    gate.now += TURNED_AWAY_SECONDS
    latest = [PID + KEPT_TURNED_AWAY + number for number in range(KEPT_TURNED_AWAY)]
    assert [pid for pid, _, _ in gate.told()] == latest
