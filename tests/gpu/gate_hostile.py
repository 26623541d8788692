"""Steps of gate_suite.py: a hostile pod before the gate, as docs/security.md names them, on silicon.

What attacks is the program that tests/e2e runs in pods (tests/support/hostileclient.py).
"""

import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from gate_bench import Bench, Tenant
from gate_checks import START, must

from gpushare.core.api import JobClass
from gpushare.mps.status import GateState, HoldReason

ATTACK = [sys.executable, str(Path(__file__).parents[1] / "support" / "hostileclient.py")]
MOST_OF_ONE_POD = 16  # MPS clients, as the chart has it
LATER_BAR_SECONDS = 1.0  # that a neighbour's start may take longer beside a flood
LOOK_SECONDS = 0.05
OLDEST_SECONDS = 3.0  # a status is written each second
WASTED_BAR_SECONDS = 4.0  # a pod may waste 3 s while others wait (gpushare.mps.turns), and the start itself
WAITED_BAR_SECONDS = 12.0  # for a turn, beside one that never speaks: a turn's time-out of 8 s and what follows


def one_pods_clients(b: Bench) -> dict[str, Any]:
    """A pod of 17 processes has 16 clients, the 17th waits, and two newcomers start as ever."""
    usual = _start(b, 600)
    greedy = b.decide(601, 100, 32768, JobClass.LATENCY, processes=MOST_OF_ONE_POD + 1)
    began = time.time()
    many = [b.spawn(greedy, "run", 600, 16) for _ in range(MOST_OF_ONE_POD + 1)]
    b.until(lambda: _in(many) == MOST_OF_ONE_POD, 4 * START, "16 of its processes in")
    all_in = round(time.time() - began, 2)
    b.until(
        lambda: (
            [h.reason for h in b.status().waiting_connections if h.pod_uid == greedy] == [HoldReason.POD_CLIENTS]
        ),
        START,
        "the 17th held, and told why",
    )
    starts = [_start(b, 602 + number) for number in range(2)]
    time.sleep(1)
    must(_in(many) == MOST_OF_ONE_POD, f"{_in(many)} clients of one pod")
    return {"16_in_s": all_in, "usual_start_s": usual, "newcomers_start_s": starts}


def flooded(b: Bench) -> dict[str, Any]:
    """Ten processes of one pod connect in a loop; neighbours start within a second of usual."""
    usual = [_start(b, 610 + number) for number in range(4)]
    flood = b.spawn(b.decide(620, 10, 1024), "flood", 10, program=ATTACK)
    b.until(lambda: any("begun" in line for line in flood.noise), START, "the flood")
    b.until(
        lambda: any(h.reason is HoldReason.RATE for h in b.status().waiting_connections), START, "the flood held"
    )
    with Watched(b) as watched:
        beside = [_start(b, 630 + number) for number in range(6)]
    must(watched.looks >= len(beside), f"only {watched.looks} looks at the gate")
    must(watched.states == {GateState.ACTIVE}, f"the gate was {watched.states} in {watched.looks} looks")
    must(watched.oldest_seconds <= OLDEST_SECONDS, f"no status for {watched.oldest_seconds:.1f} s")
    must(b.status().daemon_restarts == 0, "the daemon was restarted")
    later = statistics.median(beside) - statistics.median(usual)
    must(later <= LATER_BAR_SECONDS, f"neighbours start in {beside} s, usually in {usual} s")
    return {
        "usual_start_s": usual,
        "beside_start_s": beside,
        "looks": watched.looks,
        "oldest_status_s": round(watched.oldest_seconds, 2),
    }


class Watched:
    """While entered, the gate's states as its status tells them, and the age of the oldest status seen."""

    def __init__(self, b: Bench) -> None:
        self.states: set[GateState | None] = set()
        self.looks, self.oldest_seconds = 0, 0.0
        self._bench, self._end = b, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self.states.add(self._bench.state())
            self.oldest_seconds = max(self.oldest_seconds, time.time() - self._bench.status().written_at)
            self.looks += 1


def wasted(b: Bench) -> dict[str, Any]:
    """Four processes of one pod take turn after turn and exit before the time-out; newcomers go first."""
    usual = _start(b, 640)
    waste = b.spawn(b.decide(641, 10, 1024, processes=4), "waste", 4, program=ATTACK)
    b.until(lambda: any("has the turn" in line for line in waste.noise), START, "a wasted turn")
    waited = [_start(b, 650 + number) for number in range(5)]
    must(b.state() is GateState.ACTIVE, f"the gate is {b.state()}")
    must(max(waited) <= WASTED_BAR_SECONDS, f"newcomers start in {waited} s")
    return {"usual_start_s": usual, "beside_start_s": waited, "turns": str(b.status().turns)}


def mute(b: Bench) -> dict[str, Any]:
    """A pod takes the server's socket and never speaks there, in three ways; a tenant goes on, newcomers start."""
    uid = b.decide(660, 30, 4096)
    running = b.spawn(uid, "run", 120, 64)
    running.wait("context", START)
    usual = _start(b, 661)
    attack = b.spawn(b.decide(662, 10, 1024), "mute", 0, program=ATTACK)
    waited: list[float] = []
    for way in ("leaves", "leaves_with_the_pipes", "sits", "leaves", "sits"):
        seen = sum(way in line for line in attack.noise)
        b.until(lambda way=way, seen=seen: sum(way in line for line in attack.noise) > seen, START, f"it {way}")
        waited.append(_start(b, 670 + len(waited)))
    must(b.state() is GateState.ACTIVE, f"the gate is {b.state()}")
    must(b.status().daemon_restarts == b.status().server_restarts == 0, "daemon or server were restarted")
    must(running.is_running and running.find("error") is None, "the tenant did not go on")
    must(max(waited) < 2 * WAITED_BAR_SECONDS, f"newcomers start in {waited} s")
    return {
        "usual_start_s": usual,
        "beside_start_s": waited,
        "ways": [line.rpartition(" ")[2] for line in attack.noise],
        "turns": str(b.status().turns),
        "met": max(waited) <= WAITED_BAR_SECONDS,
    }


def _start(b: Bench, number: int) -> float:
    """Seconds that a newcomer's first context takes."""
    tenant = b.spawn(b.decide(number, 5, 1024), "run", 0.5, 16)
    return round(float(tenant.wait("context", START)["start_s"]), 3)


def _in(tenants: list[Tenant]) -> int:
    return sum(tenant.find("context") is not None for tenant in tenants)
