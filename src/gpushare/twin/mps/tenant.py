"""Tenant for machines without a GPU: it does what a CUDA program does short of computing, and logs its rate.

    python -m gpushare.twin.mps.tenant --workload resnet50-train [--memory-mib N] [--processes 2]
                                       [--silent | --control-command | --fault-after SECONDS]

One line a second: `pid=... workload=... iterations/s=... progress=... sms=... memory_limit_mib=...`.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Final, NoReturn

from gpushare.twin.contention import WORKLOADS, SimulatedWorkload
from gpushare.twin.mps.client import (
    CONTROL_TYPE,
    CREDENTIALS,
    MAX_PACKET,
    CudaError,
    NoMpsError,
    TwinContext,
    connect,
    control_path,
)
from gpushare.twin.mps.state import OUTSIDE_COMM, REFUSAL

_PR_SET_NAME: Final = 15
# Without a tick for this long the daemon is busy or stopped; say so rather than print an old rate.
_TICK_TIMEOUT_SECONDS: Final = 5.0
# What making a context outside MPS takes; the twin looks four times a second whom it has to refuse. An agent that
# looks at the right moments may end a process before it is over.
_CONTEXT_SECONDS: Final = 0.6
CREATING_OUTSIDE: Final = "creating a context outside MPS"  # in the log before a driver can list the process
_UNAVAILABLE: Final = "CUDA_ERROR_DEVICE_UNAVAILABLE: CUDA-capable device(s) is/are busy or unavailable"


def say(text: str) -> None:
    """Print one line of the log without buffering."""
    sys.stdout.write(f"pid={os.getpid()} {text}\n")
    sys.stdout.flush()


def run(workload: SimulatedWorkload, memory_mib: int, fault_after_seconds: float | None) -> int:
    """Run as one process of a tenant; returns the exit status a CUDA program would have."""
    started = time.monotonic()
    say(f"workload={workload.name} connecting to {control_path(os.environ)}")
    try:
        context = TwinContext(os.environ, workload)
    except NoMpsError as error:
        return run_without_mps(workload, str(error))
    except CudaError as error:
        say(f"error: {error}")
        return 1
    got = context.attached
    limits = f"sms={got.sm_count} memory_limit_mib={got.limit_mib}"
    say(
        f"workload={workload.name} connected after {time.monotonic() - started:.3f} s host_pid={got.pid} "
        f"gpu={got.gpu_uuid} {limits}"
    )
    try:
        try:
            context.allocate(memory_mib)
        except CudaError as error:
            say(f"error: {error}")
            return 1
        while True:
            if fault_after_seconds is not None and time.monotonic() - started > fault_after_seconds:
                say("fault: accessing memory that is not there")
                context.fault()
            try:
                tick = context.tick(_TICK_TIMEOUT_SECONDS)
            except TimeoutError:
                say(f"workload={workload.name} iterations/s=0.00 progress=0.000 {limits} stalled")
                continue
            say(
                f"workload={workload.name} iterations/s={tick['iterations_per_s']:.2f} "
                f"progress={tick['progress']:.3f} {limits} memory_mib={memory_mib}"
            )
    except CudaError as error:
        say(f"error: {error}")
        return 1
    finally:
        context.close()


def run_without_mps(workload: SimulatedWorkload, why: str) -> int:
    """Go on silently uncapped, as CUDA does without a daemon (docs/facts.md 6), but let the log say so."""
    signal.signal(REFUSAL, _be_refused)
    say(f"workload={workload.name} {CREATING_OUTSIDE} ({why})")
    # A driver knows which processes use a GPU; the twin knows them by this name (gpushare.twin.mps.state).
    ctypes.CDLL(None).prctl(_PR_SET_NAME, OUTSIDE_COMM.encode(), 0, 0, 0)
    try:
        time.sleep(_CONTEXT_SECONDS)
        while True:
            say(
                f"workload={workload.name} iterations/s={workload.iterations_per_s:.2f} progress=1.000 sms=all "
                f"memory_limit_mib=none running without MPS, uncapped ({why})"
            )
            time.sleep(1.0)
    except CudaError as error:
        say(f"error: {error}")
        return 1


def _be_refused(*_: object) -> NoReturn:
    raise CudaError(_UNAVAILABLE)


def stay_silent() -> NoReturn:
    """Connect and never say a word."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(control_path(os.environ)))
    while True:
        say("silent: connected, saying nothing")
        time.sleep(1.0)


def send_control_commands() -> NoReturn:
    """Try to talk to the daemon as its administrator, again and again."""
    while True:
        answer = "connection refused"
        with contextlib.suppress(OSError, NoMpsError), connect(control_path(os.environ), 15.0) as connection:
            connection.send(CREDENTIALS)
            connection.send(CONTROL_TYPE)
            connection.send(b"set_default_active_thread_percentage 100")
            answer = connection.recv(MAX_PACKET).decode(errors="replace").strip() or "closed without an answer"
        say(f"control command: {answer}")
        time.sleep(1.0)


def _in_children(count: int, body: Callable[[], int]) -> int:
    """Run `body` in `count` processes at once; ends them all on SIGTERM; the worst exit status."""
    children = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os._exit(_quietly(body))
        children.append(pid)

    def forward(*_: object) -> None:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _quietly(body: Callable[[], int]) -> int:
    try:
        return body()
    except KeyboardInterrupt:
        return 0


def _of_the_table(name: str) -> SimulatedWorkload:
    from gpushare.twin.table import workload_named  # noqa: PLC0415 - most tenants need no NumPy, the slowest import

    return workload_named(name)


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and be that tenant."""
    parser = argparse.ArgumentParser(prog="gpushare-tenant", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--workload",
        metavar="NAME",
        default="resnet50-train",
        help=f"{', '.join(sorted(WORKLOADS))}, or a program of the measured table (docs/measurements/table.md)",
    )
    parser.add_argument("--memory-mib", type=int, help="device memory to take; default: the workload's own")
    parser.add_argument("--processes", type=int, default=1, help="so many processes at once")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--silent", action="store_true", help="connect and say nothing")
    kind.add_argument("--control-command", action="store_true", help="send control commands")
    kind.add_argument("--fault-after", type=float, metavar="SECONDS", help="access illegal memory then")
    options = parser.parse_args(arguments)
    if not 1 <= options.processes <= 64:
        parser.error(f"--processes {options.processes}: allowed are 1 to 64")
    try:
        workload = WORKLOADS.get(options.workload) or _of_the_table(options.workload)
    except KeyError as error:
        parser.error(f"--workload: {error.args[0]}")
    memory_mib = workload.memory_mib if options.memory_mib is None else options.memory_mib
    if memory_mib < 0:
        parser.error(f"--memory-mib {memory_mib}: allowed are 0 and more")

    def body() -> int:
        if options.silent:
            stay_silent()
        if options.control_command:
            send_control_commands()
        return run(workload, memory_mib, options.fault_after)

    if options.processes == 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return _quietly(body)
    return _in_children(options.processes, body)


if __name__ == "__main__":
    sys.exit(main())
