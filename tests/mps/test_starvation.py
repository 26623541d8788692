"""Real processes on one CPU: which of them could have run and did not."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpushare.mps.starvation import run_delays, starved_seconds

from .conftest import state_of, until

SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = "import time; print(flush=True); time.sleep(1000)"


@pytest.fixture
def on_one_cpu() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    cpu = {min(os.sched_getaffinity(0))}
    made: dict[str, subprocess.Popen[bytes]] = {}
    for name, program in (("spins", SPIN), ("spins too", SPIN), ("sleeps", SLEEP)):
        made[name] = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        os.sched_setaffinity(made[name].pid, cpu)
    yield made
    for each in made.values():
        each.kill()
        each.communicate()


def test_who_could_run_and_had_no_cpu_was_starved(on_one_cpu: dict[str, subprocess.Popen[bytes]]) -> None:
    for each in on_one_cpu.values():
        assert each.stdout is not None
        assert each.stdout.readline() == b"\n", "it has started"
    until(lambda: state_of(on_one_cpu["sleeps"].pid) == "S", "it sleeps")
    before = {name: run_delays(each.pid) for name, each in on_one_cpu.items()}
    time.sleep(2.0)
    starved = {name: starved_seconds(before[name], run_delays(each.pid)) for name, each in on_one_cpu.items()}
    assert starved["spins"] > 0.3
    assert starved["spins too"] > 0.3
    assert starved["sleeps"] < 0.1


def test_a_process_that_is_gone_was_not() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert run_delays(gone.pid) == {}
    assert starved_seconds({"1": 3.0}, {}) == 0.0


def test_a_thread_that_began_meanwhile_counts_from_zero() -> None:
    assert starved_seconds({"1": 3.0}, {"1": 3.5, "2": 2.0}) == 2.0
