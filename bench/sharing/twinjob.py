"""One job of the dry run: a tenant of the twin, with the profile that the table has of its program.

The same command line and log as a job on a GPU. Under MPS its progress is the twin's; without it jobs take turns
as the job simulator has it (`gpushare.sim.truth.taking_turns`), and know of each other by files in one directory.
"""

import contextlib
import os
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from bench.sharing.gpujob import parse
from bench.sharing.trace import known_truth
from bench.sharing.work import JobLog, turn
from gpushare.sim.truth import taking_turns
from gpushare.twin.contention import SimulatedWorkload
from gpushare.twin.mps.client import TwinContext

TICK_SECONDS = 0.25
CONTEXT_MIB = 500
_GONE_SECONDS = 3.0


def main(arguments: list[str]) -> int:
    """Run one job."""
    read = parse(arguments)
    log = JobLog(read.log.open("a") if read.log else sys.stdout, stop=read.stop)
    log.say("start", wall=round(time.time(), 4), pid=os.getpid(), program=read.program)
    with turn(read.turn, read.of, log) if read.turn else contextlib.nullcontext():
        return _run(read, log)


def _run(read: Namespace, log: JobLog) -> int:
    program, _, beside = read.program.partition("+")
    alone = known_truth().rate_alone(program)
    log.say("ready", sms=0, memory_mib=known_truth().memory_mib(program))
    rates = _under_mps(program, alone) if read.turns is None else _taking_turns(program, alone, read.turns)
    began = last = log.monotonic()
    done = busy = 0.0
    for rate in rates:
        now = log.monotonic()
        worked = (now - last) * rate
        last = now
        if read.rate:  # an even stream, answered at once where the rate allows: enough to try the machinery
            before, done = done, min(done + worked, (now - began) * read.rate, float(read.count))
            each = 1.0 / max(rate, 1e-6)
            busy += (done - before) * each
            for _ in range(int(done) - int(before)):
                log.request(each, each)
        else:
            done, busy = min(done + worked, float(read.count)), now - began
        over = done >= read.count or log.is_over(began + read.seconds)
        log.progress(done, busy, now=over)
        if over:
            break
    # The effect of two streams of one process on each other is unknown: both run as alone, to test the machinery.
    extra = {"beside_rate": known_truth().rate_alone(beside)} if beside else {}
    log.say("end", count=int(done), **extra)
    return 0


def _under_mps(program: str, alone: float) -> Iterator[float]:
    """Yield iterations/s over the time since the last one."""
    counters = known_truth().profiles[program].counters
    context = TwinContext(os.environ, SimulatedWorkload(program, counters, alone, CONTEXT_MIB))
    context.allocate(CONTEXT_MIB)
    try:
        while True:
            yield float(context.tick(10.0)["iterations_per_s"])
    finally:
        context.close()


def _taking_turns(program: str, alone: float, directory: Path) -> Iterator[float]:
    directory.mkdir(parents=True, exist_ok=True)
    mine = directory / f"{socket.gethostname()}-{os.getpid()}"  # a pod's pids are its own
    try:
        while True:
            mine.write_text(program)
            time.sleep(TICK_SECONDS)
            others = [name for path in directory.iterdir() if path != mine and (name := _program_of(path))]
            busy = [known_truth().busy_ratio(name) for name in (program, *others)]
            yield alone * taking_turns(busy)[0]
    finally:
        mine.unlink(missing_ok=True)


def _program_of(path: Path) -> str:
    """Return what another job wrote; empty where it has gone, or is just writing."""
    try:
        return path.read_text() if time.time() - path.stat().st_mtime < _GONE_SECONDS else ""
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
