"""The thawer: thaws the pods that a throttle left frozen when it ended, where its host does not.

    python -m gpushare.mps.thawer --directory /run/gpushare --cgroup-root /host/sys/fs/cgroup

It is a container of its own beside the MPS host's, so it survives that one's end (docs/adr/0229). While a throttle
lives (gpushare.mps.alive) it waits in the kernel; what is frozen is then the affair of throttle and host. Once the
throttle has ended, the host thaws within milliseconds. The thawer does at once where the host has ended too, and
after HOST_SECONDS where it lives but stands still. On SIGTERM it stays until both have ended, as the whole pod may
be ending and the host be killed.

It is a process in every GPU node's memory, so it imports little, and it changes nothing but cgroups: the record of
the frozen pods stays for the next host, which clears it.
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpushare.mps.alive import is_sign_given, sign_of, throttle_sign_of
from gpushare.mps.freezer import CGROUP_ROOT, CgroupFreezer, Freezer
from gpushare.mps.frozen import recorded, thaw_marked
from gpushare.runtime.logs import log_level_of, set_up_logging
from gpushare.runtime.options import options_of

logger = logging.getLogger("gpushare.mps.thawer")

LOOK_SECONDS: Final = 0.1  # while nobody else is there to thaw, or a cgroup refuses
WAIT_SECONDS: Final = 600.0  # while a throttle lives; its end ends the wait
HOST_SECONDS: Final = 1.5  # from a throttle's end, for the host to thaw; below the 2 s that are promised


class Thawer:
    """Thaws each pod on record once, while no throttle lives; whoever freezes it later is somebody else."""

    def __init__(self, base: Path | str, freezer: Freezer) -> None:
        self._base, self._freezer = base, freezer
        self._done: set[tuple[str, int]] = set()  # uid, and when the throttle put it on record
        self._refused: set[str] = set()

    def thaw(self) -> bool:
        """Thaw who has not been thawed yet; return False if a cgroup refused, so try again."""
        done: set[tuple[str, int]] = set()
        refused: set[str] = set()
        for mark in recorded(self._base):
            uid = mark.name
            try:
                freeze = uid, mark.stat().st_mtime_ns
                if freeze not in self._done and thaw_marked(mark, self._freezer):
                    logger.warning(
                        "thawed pod %s: the throttle ended and left it frozen, and its host did not thaw", uid
                    )
                done.add(freeze)
            except FileNotFoundError:
                pass  # the pod is gone, or the next host has thawed it
            except (OSError, ValueError) as error:
                refused.add(uid)
                if uid not in self._refused:
                    logger.error("cannot thaw pod %s, trying again: %s", uid, error)
        self._done, self._refused = done, refused
        return not refused


def run(
    thawer: Thawer,
    throttle_lives: Callable[[float], bool],
    host_lives: Callable[[float], bool],
    is_ending: Callable[[], bool],
    pause: Callable[[], None],
) -> None:
    """Thaw whenever nobody else does it, until the end.

    Args:
        throttle_lives: returns whether a throttle lives; while one does, after so many seconds.
        host_lives: the same of throttle and host.
        is_ending: returns whether this process was told to end.
        pause: waits between two looks while nobody lives.
    """
    seconds = HOST_SECONDS
    while True:
        if throttle_lives(WAIT_SECONDS):
            continue
        is_hosted = host_lives(seconds)
        if is_hosted and throttle_lives(0.0):
            continue
        # A throttle that starts just now may lose a freeze by this, and goes on as after a thaw by its host.
        has_thawed = thawer.thaw()
        seconds = HOST_SECONDS if has_thawed else LOOK_SECONDS
        if is_hosted:
            continue
        if has_thawed and is_ending():
            return
        pause()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="gpushare-mps-thawer", description=__doc__, allow_abbrev=False)
    add = options_of(parser, None)
    add("directory", None, "where the MPS host's directories of GPUs are", required=True)
    add("cgroup-root", CGROUP_ROOT, "where the node's cgroups are, writable; as the MPS host sees them", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the thawer; entry point of the process."""
    options = parse(arguments)
    set_up_logging(log_level_of())
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    run(
        Thawer(options.directory, CgroupFreezer(options.cgroup_root)),
        lambda seconds: is_sign_given(throttle_sign_of(options.directory), seconds),
        lambda seconds: is_sign_given(sign_of(options.directory), seconds),
        lambda: bool(told),
        lambda: time.sleep(LOOK_SECONDS),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
