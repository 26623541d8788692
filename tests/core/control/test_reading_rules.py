"""Whose turn it is to be read in place, and how soon again after readings that failed. Time is an argument."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpushare.core.control import PastReadings, ReadingTenant, next_reading, next_turn

HOUR_SECONDS = 3600.0
READING_SECONDS = 1.2
LOOK_SECONDS = 0.5
FAR_BELOW_A_HUNDREDTH = 0.004

KNOWN = ReadingTenant("known", has_signature=True)
DOUBTED = ReadingTenant("doubted", has_signature=True, is_doubted=True)
UNKNOWN = ReadingTenant("unknown", has_signature=False)


class Readings:
    """A GPU's readings as the agent takes them, each of which ends at once; `failing` ones give nothing."""

    def __init__(self, *tenants: ReadingTenant, failing: Sequence[str] = ()) -> None:
        self.record, self.now = PastReadings(), 0.0
        self.tenants = {each.uid: each for each in tenants}
        self.failing = set(failing)
        self.taken: list[tuple[float, str]] = []

    def look(self) -> ReadingTenant | None:
        """Look once, and take the reading whose turn it is."""
        present = list(self.tenants.values())
        self.record.look(list(self.tenants), self.tenants, self.now)
        read = next_reading(self.record, present, self.now, longest_stop=READING_SECONDS, is_broken=False)
        if read is None:
            return None
        stopped = tuple(uid for uid in self.tenants if uid != read.uid)
        self.taken.append((self.now, read.uid))
        self.now += READING_SECONDS
        self.record.ended(read.uid, READING_SECONDS, stopped, self.now)
        if read.uid not in self.failing:
            self.record.succeeded(read.uid)
        return read

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.look()
            self.now += LOOK_SECONDS

    def run_by_turns(self, seconds: float) -> None:
        """Look only when `next_turn` says so, as the simulator does."""
        until = self.now + seconds
        while self.now < until:
            if self.look() is None:
                self.now = next_turn(self.record, list(self.tenants.values()), self.now, is_broken=False)

    def stopped_ratio(self, uid: str, seconds: float) -> float:
        """Return the part of the time for which a pod was stopped."""
        return sum(READING_SECONDS for _, read in self.taken if read != uid) / seconds


def named(tenant: ReadingTenant, count: int) -> list[ReadingTenant]:
    return [replace(tenant, uid=f"{tenant.uid}-{at}") for at in range(count)]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("by_turns", [False, True])
def test_readings_of_doubted_workloads_that_always_fail_cost_far_less_than_a_hundredth_of_an_hour(
    count: int, by_turns: bool
) -> None:
    """Before, they cost each neighbour 9.8% of its time, for as long as both ran."""
    doubted = named(DOUBTED, count)
    readings = Readings(KNOWN, *doubted, failing=[each.uid for each in doubted])
    for _ in range(2):
        readings.taken.clear()
        (readings.run_by_turns if by_turns else readings.run)(HOUR_SECONDS)
        assert {uid for _, uid in readings.taken} <= {each.uid for each in doubted}
        assert readings.taken, "it is tried again"
        for uid in readings.tenants:
            assert readings.stopped_ratio(uid, HOUR_SECONDS) <= FAR_BELOW_A_HUNDREDTH


def test_a_reading_that_succeeds_ends_the_back_off() -> None:
    readings = Readings(KNOWN, DOUBTED, failing=["doubted"])
    readings.run(HOUR_SECONDS)
    readings.failing.clear()
    before = len(readings.taken)
    while len(readings.taken) == before:
        readings.look()
        readings.now += LOOK_SECONDS
    readings.run(10.0)
    assert len(readings.taken) >= before + 3, "the ones that are still wanted come one after another"
    readings.failing = {"doubted"}
    before = len(readings.taken)
    readings.run(60.0)
    assert len(readings.taken) >= before + 2, "and what fails then begins with the shortest wait"


def test_a_workload_that_is_doubted_anew_is_read_at_once() -> None:
    readings = Readings(KNOWN, DOUBTED, failing=["doubted"])
    readings.run(HOUR_SECONDS)
    readings.tenants["doubted"] = replace(DOUBTED, is_doubted=False)
    readings.run(60.0)
    readings.tenants["doubted"] = DOUBTED
    before = len(readings.taken)
    readings.run(5.0)
    assert len(readings.taken) > before


def test_a_workload_whose_own_readings_have_not_failed_does_not_wait_for_another_ones() -> None:
    readings = Readings(KNOWN, DOUBTED, failing=["doubted"])
    readings.run(HOUR_SECONDS)
    readings.tenants["other"] = replace(DOUBTED, uid="other")
    before = len(readings.taken)
    readings.run(10.0)
    assert [uid for _, uid in readings.taken[before:]].count("other") >= 2


def test_first_readings_of_an_unknown_workload_do_not_wait_for_failed_ones() -> None:
    alone = Readings(KNOWN, UNKNOWN, failing=["unknown"])
    alone.run(60.0)
    beside = Readings(KNOWN, DOUBTED, failing=["doubted", "unknown"])
    beside.run(HOUR_SECONDS)
    began, before = beside.now, len(beside.taken)
    beside.tenants["unknown"] = UNKNOWN
    beside.run(60.0)
    first = [at for at, _ in alone.taken]
    assert len([at for at in first if at <= 30.0]) >= 4
    found = [at - began for at, uid in beside.taken[before:] if uid == "unknown"]
    assert found == pytest.approx(first, abs=2 * LOOK_SECONDS)


def test_a_doubted_workload_that_lost_its_profile_is_read_as_an_unknown_one() -> None:
    lost = replace(UNKNOWN, is_doubted=True)
    readings, usual = (Readings(KNOWN, each, failing=["unknown"]) for each in (lost, UNKNOWN))
    for each in (readings, usual):
        each.run(60.0)
    assert readings.taken == usual.taken


def test_an_agent_that_starts_again_reads_a_doubted_workload_at_once_and_backs_off_again() -> None:
    """Neither doubts nor failures outlive it; its watch for drift doubts anew after half a minute at the least."""
    readings = Readings(KNOWN, DOUBTED, failing=["doubted"])
    readings.run(HOUR_SECONDS)
    readings.record = PastReadings()
    readings.tenants["doubted"] = replace(DOUBTED, is_doubted=False)
    before = len(readings.taken)
    readings.run(HOUR_SECONDS)
    assert len(readings.taken) == before
    readings.tenants["doubted"] = DOUBTED
    readings.run(5.0)
    assert len(readings.taken) == before + 1
    readings.taken.clear()
    readings.run(HOUR_SECONDS)
    assert 0.0 < readings.stopped_ratio("known", HOUR_SECONDS) <= FAR_BELOW_A_HUNDREDTH
