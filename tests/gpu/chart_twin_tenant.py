"""What cuda_tenant.py does, on the twin, in gpushare's own image: so that chart_suite.py can be tried without a
GPU."""

import argparse
import ctypes
import json
import os
import sys
import threading
import time

from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import CudaError, NoMpsError, TwinContext
from gpushare.twin.mps.state import OUTSIDE_COMM

PR_SET_NAME = 15
SWELL_AFTER_SECONDS, STEP_MIB, MOST_HOST_MIB = 1.5, 16, 4096


def say(event: str, **more: object) -> None:
    print(json.dumps({"t": round(time.time(), 3), "pid": os.getpid(), "event": event, **more}), flush=True)


def limits() -> dict[str, str]:
    """What this container is told of its limits (docs/adr/0250)."""
    return {
        key: value for key, value in os.environ.items() if key.startswith(("GPUSHARE_MEMORY", "GPUSHARE_THREAD"))
    }


def outside(seconds: float) -> None:
    """Run without MPS, as CUDA does; the twin's driver knows such processes by this name."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, OUTSIDE_COMM.encode(), 0, 0, 0)
    say("context", start_s=0.0, sms=132, free_mib=143000, total_mib=143771, gpus=[])
    say("kernel")
    end = time.time() + seconds
    while time.time() < end:
        time.sleep(0.5)
        say("rate", per_s=1.0, total=1)
    say("end")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("run", "fill", "long", "fault", "swell"))
    parser.add_argument("seconds", type=float)
    parser.add_argument("mib", type=int, nargs="?", default=0)
    parser.add_argument("--env", action="append", default=[])
    options = parser.parse_args()
    say("start", uid=os.getuid())
    os.environ.update(setting.split("=", 1) for setting in options.env)
    began = time.time()
    try:
        context = TwinContext(os.environ, WORKLOADS["montecarlo-fp32"])
    except NoMpsError:
        outside(options.seconds)
        return
    except CudaError as error:
        say("error", what="context", error=str(error), code=2)
        sys.exit(1)
    got = context.attached
    seconds = round(time.time() - began, 3)
    memory = got.limit_mib
    say(
        "context",
        start_s=seconds,
        sms=got.sm_count,
        free_mib=memory - 125,
        total_mib=memory,
        told=limits(),
        gpus=[got.gpu_uuid],
    )
    try:
        run(context, options)
    except (CudaError, TimeoutError) as error:
        say("error", what="run", error=str(error), code=700)
        sys.exit(1)
    say("end")


def run(context: TwinContext, options: argparse.Namespace) -> None:
    if options.mode == "fill":
        filled = 0
        try:
            while True:
                context.allocate(64)
                filled += 64
        except CudaError:
            say("filled", mib=filled)
    elif options.mib:
        context.allocate(options.mib)
        say("alloc", mib=options.mib, ok=True)
    if options.mode == "long":  # one kernel: the program says nothing and does nothing else until it is over
        say("long")
        over = time.time() + options.seconds
        while time.time() < over:
            context.tick(30.0)
    begin, total, is_swelling = time.time(), 0, False
    while time.time() - begin < options.seconds:
        tick = context.tick(30.0)
        total += 1
        if total == 1:
            say("kernel")
        if options.mode == "fault" and time.time() - begin > options.seconds / 3:
            say("faulting")
            context.fault()
        if options.mode == "swell" and time.time() - begin > SWELL_AFTER_SECONDS and not is_swelling:
            say("swelling")
            is_swelling = True
            threading.Thread(target=swell, daemon=True).start()
        say("rate", per_s=tick["iterations_per_s"], total=total)


def swell(most_mib: int = MOST_HOST_MIB) -> None:
    """Take host memory and touch it until the kernel ends this process, or there is so much of it."""
    taken = []
    while len(taken) * STEP_MIB < most_mib:
        taken.append(b"x" * (STEP_MIB << 20))
        time.sleep(0.01)


if __name__ == "__main__":
    main()
