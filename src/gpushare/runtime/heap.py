"""Keeps the memory of a long-running process small: collects cyclic garbage, and returns freed memory.

Reference counting does not free cycles; if the collector runs rarely (as in the extender), they accumulate. And
freed memory that malloc keeps counts as ours until it is returned.
"""

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable
from typing import Final

FIRST_LOOK_SECONDS: Final = 20.0  # until first lists and first connections are done
LOOK_SECONDS: Final = 60.0
COLLECTING_RATIO: Final = 1e-4
"""Part of the time that collections may take: after one that took 40 ms the next comes after 400 s."""
PATIENCE_SECONDS: Final = 600.0  # after this it collects, however busy the process is


def glibc() -> ctypes.CDLL | None:
    """Return glibc; None on a libc without these two calls (musl)."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None


def trim() -> None:
    """Return freed memory to the system; takes 0.1 to 2 ms."""
    libc = glibc()
    if libc is not None:
        libc.malloc_trim(0)


class HeapKeeper:
    """Schedule of garbage collections; call `look` once a minute.

    Args:
        is_quiet: returns whether a pause would disturb nobody now (for its length see
            docs/measurements/extender.md).
        collect: runs the garbage collector.
        trim: returns freed memory to the system.
        clock: this thread's CPU time in seconds.
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
        """Collect if it is time and the process is quiet; return freed memory in any case.

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
    """Exclude what was loaded so far from garbage collection, and keep the heap small until cancelled."""
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
