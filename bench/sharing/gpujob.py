"""One job on a GPU: `python -m bench.sharing.gpujob PROGRAM COUNT --log FILE`; needs PyTorch.

With --rate the count is of requests, which arrive at that rate and are answered one after the other; with
--seconds it ends then at the latest. PROGRAM may be two with a plus between them: the first answers requests in a
stream of high priority, the second works in one of low priority of the same process (streams.py).
"""

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.sharing.work import JobLog, serve, turn

WARM_SECONDS = 0.5
_FIRST_STEPS = 3


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line of a job, real or simulated."""
    parser = argparse.ArgumentParser(prog="bench.sharing.gpujob", description=__doc__)
    parser.add_argument("program")
    parser.add_argument("count", type=int)
    parser.add_argument("--log", type=Path, help="default: standard output")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", type=Path, help="it ends once this file is there")
    parser.add_argument("--turns", type=Path, help="of a simulated job without MPS: where all of them say so")
    parser.add_argument("--turn", type=Path, help="new folder of all jobs of which one works at a time")
    parser.add_argument("--of", type=int, default=1, help="number of those jobs")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run one job."""
    read = parse(arguments)
    log = JobLog(read.log.open("a") if read.log else sys.stdout, stop=read.stop)
    log.say("start", wall=round(time.time(), 4), pid=os.getpid(), program=read.program)
    # Imported here: only GPU machines have PyTorch, and a zygote has it loaded.
    import torch

    from gpushare.research.calibration.table_suite import TABLE
    from gpushare.research.calibration.workload import Stage

    torch.set_num_threads(1)
    if "+" in read.program:
        from bench.sharing import streams

        return streams.run(read, log)
    with turn(read.turn, read.of, log) if read.turn else contextlib.nullcontext():
        return _run(torch, TABLE[read.program], Stage(), read, log)


def _run(torch: Any, workload: Any, stage: Any, read: argparse.Namespace, log: JobLog) -> int:
    step = workload.build(stage)
    _warm(torch, step)
    properties = torch.cuda.get_device_properties(0)
    log.say("ready", sms=properties.multi_processor_count, memory_mib=torch.cuda.max_memory_reserved() >> 20)
    until = log.monotonic() + read.seconds
    if read.rate:

        def answer() -> None:
            step()
            torch.cuda.synchronize()

        done: int = serve(answer, read.count, read.rate, log, seed=read.seed, until=until)
    else:
        done = _work(torch, step, workload.in_flight, read.count, log, until)
    log.say("end", count=done)
    return 0


def _work(torch: Any, step: Callable[[], Any], in_flight: int, count: int, log: JobLog, until: float) -> int:
    """Run a number of iterations as fast as possible; `in_flight` may queue behind the one being waited for."""
    began = log.monotonic()
    pending: deque[Any] = deque()
    done = asked = 0
    while done < count:
        if asked < count:
            step()
            asked += 1
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
        if len(pending) > in_flight or asked == count:
            pending.popleft().synchronize()
            done += 1
            log.progress(done, log.monotonic() - began)
            if log.is_over(until):
                break
    torch.cuda.synchronize()
    log.progress(done, log.monotonic() - began, now=True)
    return done


def _warm(torch: Any, step: Callable[[], Any]) -> None:
    enough = time.monotonic() + WARM_SECONDS
    count = 0
    while count <= _FIRST_STEPS or time.monotonic() < enough:
        step()
        torch.cuda.synchronize()
        count += 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
