"""A long-running process stays small: when it collects, and that freed memory goes back to the system."""

import asyncio
import gc
import os
import subprocess
import sys
import weakref

import pytest

from gpushare.runtime.heap import COLLECTING_RATIO, LOOK_SECONDS, PATIENCE_SECONDS, HeapKeeper, glibc, keep_small


class Machine:
    """A collector that takes as long as the test says, on a clock of its own."""

    def __init__(self, takes_seconds: float) -> None:
        self.takes_seconds = takes_seconds
        self.spent, self.trims, self.is_quiet = 0.0, 0, True
        self.collected_at: list[float] = []
        self.now = 0.0

    def collect(self) -> None:
        self.collected_at.append(self.now)
        self.spent += self.takes_seconds

    def trim(self) -> None:
        self.trims += 1

    def keeper(self) -> HeapKeeper:
        return HeapKeeper(lambda: self.is_quiet, collect=self.collect, trim=self.trim, clock=lambda: self.spent)

    def run(self, keeper: HeapKeeper, minutes: int) -> None:
        for _ in range(minutes):
            keeper.look(self.now)
            self.now += LOOK_SECONDS


def test_a_short_collection_comes_every_minute_and_memory_is_given_back_each_time() -> None:
    machine = Machine(takes_seconds=0.001)
    machine.run(machine.keeper(), minutes=10)
    assert len(machine.collected_at) == machine.trims == 10


@pytest.mark.parametrize("takes_seconds", [0.02, 0.05, 0.3])
def test_long_collections_take_no_more_than_their_part_of_the_time(takes_seconds: float) -> None:
    machine = Machine(takes_seconds)
    machine.run(machine.keeper(), minutes=24 * 60)
    gaps = [
        later - earlier for earlier, later in zip(machine.collected_at, machine.collected_at[1:], strict=False)
    ]
    assert len(gaps) > 10
    assert min(gaps) >= takes_seconds / COLLECTING_RATIO
    assert max(gaps) <= takes_seconds / COLLECTING_RATIO + LOOK_SECONDS
    assert machine.trims == 24 * 60


def test_while_others_wait_for_the_process_it_collects_only_when_its_patience_ends() -> None:
    machine = Machine(takes_seconds=0.001)
    keeper = machine.keeper()
    machine.run(keeper, minutes=1)
    machine.is_quiet = False
    machine.run(keeper, minutes=5)
    assert machine.collected_at == [0.0]
    machine.is_quiet = True
    machine.run(keeper, minutes=1)
    assert machine.collected_at == [0.0, 6 * LOOK_SECONDS]
    machine.is_quiet = False
    machine.run(keeper, minutes=60)
    gaps = [
        later - earlier for earlier, later in zip(machine.collected_at[1:], machine.collected_at[2:], strict=False)
    ]
    assert 3 <= len(gaps) <= 6
    assert all(PATIENCE_SECONDS <= gap <= PATIENCE_SECONDS + 2 * LOOK_SECONDS for gap in gaps)


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_a_cycle_goes_though_the_collector_does_not_run_by_itself() -> None:
    was_on = gc.isenabled()
    gc.disable()
    try:
        gone = weakref.ref(Node())
        assert gone() is not None
        HeapKeeper().look(1.0)
        assert gone() is None
    finally:
        if was_on:
            gc.enable()


async def test_keeping_small_goes_on_until_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    real, offset = loop.time, [0.0]
    monkeypatch.setattr(loop, "time", lambda: real() + offset[0])
    was_on = gc.isenabled()
    gc.disable()
    task = asyncio.create_task(keep_small())
    try:
        for _ in range(3):
            await asyncio.sleep(0)
            gone = weakref.ref(Node())
            assert gone() is not None
            while gone() is not None:
                assert offset[0] < 100 * PATIENCE_SECONDS, "never collected"
                offset[0] += LOOK_SECONDS
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    finally:
        task.cancel()
        gc.unfreeze()
        if was_on:
            gc.enable()


HOLES = """
import re, sys
from pathlib import Path
from gpushare.runtime.heap import trim

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

blocks = [bytearray(8000) for _ in range(8000)]
kept = blocks[-1]  # the heap's top: malloc gives back only what is above it
full = resident_mib()
del blocks
freed = resident_mib()
trim()
print(full - freed, freed - resident_mib())
"""


@pytest.mark.skipif(glibc() is None, reason="this libc gives memory back, or not, as it likes")
def test_freed_memory_goes_back_to_the_system() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        [sys.executable, "-c", HOLES], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    by_itself, by_trim = map(float, done.stdout.split())
    assert by_itself < 10, "otherwise this test shows nothing"
    assert by_trim > 40
