"""Parse tenants' pages in one thread, one after the other (docs/adr/0263)."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gpushare.core.control import SloReading

HUNG_SECONDS: Final = 60.0
"""A page costs about 0.2 s of CPU time at most, so a thread that takes so long for one does not come back."""


class HungPageError(Exception):
    """A page is not parsed after HUNG_SECONDS."""


class PageParser:
    """The thread, and who waits for it: whoever owes least has the next turn."""

    def __init__(self) -> None:
        self._thread = self._started()
        self._is_busy = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()

    async def parse(self, parse: Callable[[], SloReading], owed: float) -> tuple[SloReading, float]:
        """Return what a page says, and the CPU seconds that it cost; wait for one page at most if all owe more.

        Raises:
            HungPageError: the thread does not come back; the next page has a new one.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (owed, next(self._numbers), turn))
        self._give_turn()
        try:
            await turn
            async with asyncio.timeout(HUNG_SECONDS):
                return await loop.run_in_executor(self._thread, _timed, parse)
        except TimeoutError as error:
            self.close()
            self._thread = self._started()
            raise HungPageError(f"a page is not parsed after {HUNG_SECONDS:.0f} s") from error
        finally:
            if not turn.cancelled():
                self._is_busy = False
            self._give_turn()

    def _give_turn(self) -> None:
        """Give the turn to whoever owes least, unless somebody has it."""
        while self._waiting and not self._is_busy:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._is_busy = True

    def close(self) -> None:
        """Let the thread end once it has parsed its page."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _started() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="pages")


def _timed(parse: Callable[[], SloReading]) -> tuple[SloReading, float]:
    began = time.thread_time()
    reading = parse()
    return reading, time.thread_time() - began
