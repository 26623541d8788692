"""Start jobs by forking, so that each begins with its libraries loaded: `bench.sharing.zygote gpu|twin`.

Orders come on standard input, one JSON object a line: `id`, `arguments`, `env`, `cgroups` and `out`. Answers go to
standard output: `ready`, `started` with the pid, `exited` with the status. It ends with its input, and with it
every job. PyTorch is imported before the fork without initialising CUDA: a job's environment is read after it.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.02


def main(kind: str) -> int:
    """Serve orders until the end of the input."""
    body = _body(kind)
    children: dict[int, str] = {}
    buffered = b""
    _say("ready")
    while True:
        readable, _, _ = select.select([0], [], [], LOOK_SECONDS)
        if readable:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                children[_fork(order, body)] = order["id"]
        _reap(children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while children and time.monotonic() < deadline:
        _reap(children)
        time.sleep(LOOK_SECONDS)
    return 0


def _body(kind: str) -> Callable[[list[str]], int]:
    if kind == "twin":
        from bench.sharing import twinjob

        twinjob.known_truth()
        return twinjob.main
    import torch  # noqa: F401 - loaded once, for every job

    from bench.sharing import gpujob
    from gpushare.research.calibration import table_suite  # noqa: F401

    return gpujob.main


def _fork(order: dict[str, Any], body: Callable[[list[str]], int]) -> int:
    pid = os.fork()
    if pid:
        _say("started", id=order["id"], pid=pid)
        return pid
    status = 1
    try:
        os.setsid()
        for group in order["cgroups"]:
            with open(f"{group}/cgroup.procs", "w") as file:  # noqa: PTH123
                file.write(str(os.getpid()))
        out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(order["env"])
        status = body(order["arguments"])
    except BaseException:  # noqa: BLE001 - a job's error is its own, and in its output
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _reap(children: dict[int, str]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _say("exited", id=children.pop(pid), status=os.waitstatus_to_exitcode(status))


def _say(event: str, **values: Any) -> None:
    os.write(1, json.dumps({"event": event, **values}).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
