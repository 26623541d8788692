"""The throttle's process: freezes and thaws pods' cgroups as the agent asks, and thaws them all when it ends.

It is started by the MPS host (gpushare.mps.thawing). Its standard input is a pipe whose other end only the host
has open; when it closes, the host is gone, and every pod is thawed. On its standard output it sends heartbeats to
the host.
"""

import argparse
import contextlib
import logging
import math
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Final

from gpushare.core.api import HOST_DIRECTORY
from gpushare.mps.alive import give_sign, sign_of, throttle_sign_of
from gpushare.mps.asks import boottime
from gpushare.mps.freezer import CGROUP_ROOT, CgroupFreezer
from gpushare.mps.frozen import thaw_recorded
from gpushare.mps.silence import heartbeat
from gpushare.mps.throttle import Throttle
from gpushare.runtime.logs import log_level_of, set_up_logging
from gpushare.runtime.options import options_of

logger = logging.getLogger(__name__)

THAW_TRIES: Final = 100
THAW_AGAIN_SECONDS: Final = 0.02


def run(throttle: Throttle, parent: int, pulse: int) -> None:
    """Throttle until the parent's pipe closes; however this ends, every pod is thawed.

    Args:
        parent: descriptor of the pipe from the host.
        pulse: descriptor of the pipe to the host.
    """
    os.set_blocking(pulse, False)
    try:
        _say(pulse, boottime())  # so that a first look that freezes a pod and hangs is not taken for a slow start
        while True:
            now = boottime()
            due = throttle.look(now)
            # not the present time, as pods due meanwhile are not thawed yet
            _say(pulse, now, throttle.frozen_since)
            readable, _, _ = select.select([parent], [], [], max(0.0, due - boottime()))
            if readable and not os.read(parent, 64):
                return
    except BrokenPipeError:
        return
    finally:
        for _ in range(THAW_TRIES):
            if throttle.thaw_all():
                break
            time.sleep(THAW_AGAIN_SECONDS)


def _say(pulse: int, now: float, frozen_since: float = math.inf) -> None:
    """Tell the host that everything was in order at this time, and since when a pod has been frozen."""
    with contextlib.suppress(BlockingIOError):  # the host is stopped or very busy; continue
        os.write(pulse, heartbeat(now, frozen_since))


def _end(*_: object) -> None:
    sys.exit(0)


def main(arguments: list[str] | None = None) -> int:
    """Run the throttle; entry point of the child process."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = options_of(parser, None)
    add("directory", HOST_DIRECTORY, "where the host's directories of GPUs are")
    add("cgroup-root", CGROUP_ROOT, "where the node's cgroups are, writable", type=Path)
    options = parser.parse_args(arguments)
    set_up_logging(log_level_of())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    for sign in (sign_of(options.directory), throttle_sign_of(options.directory)):
        give_sign(sign)  # for as long as we live; before we freeze a pod
    freezer = CgroupFreezer(options.cgroup_root)
    thaw_recorded(options.directory, freezer)
    run(Throttle(options.directory, freezer), sys.stdin.fileno(), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
