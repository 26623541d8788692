"""What gate_tenant.cu does, on the twin: so that gate_suite.py can be tried on a machine without a GPU."""

import json
import os
import sys
import time

from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import CudaError, NoMpsError, TwinContext


def say(**event: object) -> None:
    print(json.dumps({"t": round(time.time(), 3), "pid": os.getpid(), **event}), flush=True)


def allocate(context: TwinContext, mib: int) -> bool:
    try:
        context.allocate(mib)
    except CudaError as error:
        if "OUT_OF_MEMORY" not in str(error):
            raise
        say(event="alloc", mib=mib, ok=False, error=str(error))
        return False
    say(event="alloc", mib=mib, ok=True, error="")
    return True


def contexts(wanted: int, mib: int) -> list[TwinContext]:
    """Make further contexts in this process; 0 is CUDA's success, 2 its out of memory."""
    made = []
    for number in range(1, wanted + 1):
        made.append(TwinContext(os.environ, WORKLOADS["montecarlo-fp32"]))
        allocated = 0 if allocate(made[-1], mib) else 2
        sms = made[-1].attached.sm_count
        say(event="further", number=number, made=0, affinity_sms=sms, allocated=allocated)
    say(event="contexts")
    return made


def main() -> int:
    mode, seconds, mib = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    started = time.time()
    say(event="start", uid=os.getuid())
    try:
        context = TwinContext(os.environ, WORKLOADS["montecarlo-fp32"])
    except NoMpsError:
        say(
            event="context",
            start_s=time.time() - started,
            sms=132,
            affinity_sms=-1,
            free_mib=143000,
            total_mib=143771,
        )
        time.sleep(seconds)
        say(event="end")
        return 0
    except CudaError as error:
        say(event="error", what="context", error=str(error), code=2)
        return 1
    got = context.attached
    say(
        event="context",
        start_s=round(time.time() - started, 3),
        sms=got.sm_count,
        affinity_sms=-1,
        free_mib=got.limit_mib - 125,
        total_mib=got.limit_mib,
    )
    try:
        if mode == "fill":
            total = 0
            try:
                while True:
                    context.allocate(64)
                    total += 64
            except CudaError:
                say(event="filled", mib=total)
        elif mib and mode != "late":
            allocate(context, mib)
        if mode == "contexts":
            created = contexts(2, mib)
            time.sleep(seconds)
            return len(created) - 2
        start, done = time.time(), False
        while time.time() - start < seconds:
            if mode == "long":
                say(event="long")
            tick = context.tick(5.0)
            say(event="rate", per_s=tick["iterations_per_s"])
            if not done and time.time() - start > seconds / 3:
                done = True
                if mode == "late":
                    allocate(context, mib)
                if mode == "fault":
                    say(event="faulting")
                    context.fault()
    except (CudaError, TimeoutError) as error:
        say(event="error", what="run", error=str(error), code=700)
        return 1
    say(event="end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
