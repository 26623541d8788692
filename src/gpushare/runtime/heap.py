"""Keep a process that runs for months as small as it began: collect cyclic garbage, give freed memory back.

Cycles are what reference counting leaves behind: where the collector runs seldom (the extender), they would pile
up. And what malloc holds of freed memory counts as ours until it is given back.
"""

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable
from typing import Final

FIRST_LOOK_SECONDS: Final = 20.0  # first lists, first connections
LOOK_SECONDS: Final = 60.0
COLLECTING_RATIO: Final = 1e-4
"""Part of the time that collections may take: one that took 40 ms comes again after 400 s."""
PATIENCE_SECONDS: Final = 600.0  # then it collects, however busy the process is


def glibc() -> ctypes.CDLL | None:
    """Return glibc; None on a libc without these two calls (musl)."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None


def trim() -> None:
    """Give freed memory back to the system; 0.1 to 2 ms."""
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)


class HeapKeeper:
    """Decides when to collect; `look` once a minute.

    Args:
        is_quiet: whether a pause would disturb nobody now (how long: docs/measurements/extender.md).
        collect, trim, clock: the real ones; `clock` in seconds of this thread's processor time.
    """

    def __init__(
        self,
        is_quiet: Callable[[], bool] = lambda: True,
        *,
        collect: Callable[[], object] = gc.collect,
        trim: Callable[[], object] = trim,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._is_quiet, self._collect, self._trim, self._clock = is_quiet, collect, trim, clock
        self._due_at = 0.0

    def look(self, now: float) -> None:
        """Collect if it is time and the process is quiet; give freed memory back in any case.

        Args:
            now: monotonic seconds.
        """
        if now >= self._due_at and (self._is_quiet() or now >= self._due_at + PATIENCE_SECONDS):
            started = self._clock()
            self._collect()
            took = self._clock() - started
            self._due_at = now + took / COLLECTING_RATIO
        self._trim()


async def keep_small(is_quiet: Callable[[], bool] = lambda: True) -> None:
    """Freeze what was loaded so far, so that the collector skips it, and keep the heap small until cancelled."""
    gc.collect()
    gc.freeze()
    keeper = HeapKeeper(is_quiet)
    clock = asyncio.get_running_loop().time
    keeper.look(clock())
    delay = FIRST_LOOK_SECONDS
    while True:
        await asyncio.sleep(delay)
        keeper.look(clock())
        delay = LOOK_SECONDS
