"""Choose the next review: the smallest, since a review's cost grows with its size."""

import asyncio
import heapq
from typing import Final

MOST_WAITING: Final = 512  # of 64 KiB at most each, and a few larger ones


class TooManyError(Exception):
    """The review is given up: too many others wait, or it waited too long."""


class SmallestFirst:
    """Queue that lets one review proceed between two rounds of the event loop, the smallest first.

    So a flood of large reviews, which cost milliseconds each, delays an ordinary one by one of them at most. The
    loop reads and answers in between. When too many wait, the largest is given up.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = 0
        self._is_scheduled = False

    async def turn(self, size: int) -> None:
        """Wait until a review of this size may proceed; the caller must then finish it without awaiting.

        Raises:
            TooManyError: smaller ones fill the queue.
        """
        if len(self._waiting) >= self._most:
            self._give_up_one(size)
        loop = asyncio.get_running_loop()
        self._number += 1
        entry = (size, self._number, loop.create_future())
        heapq.heappush(self._waiting, entry)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next)
        await entry[2]

    def _give_up_one(self, size: int) -> None:
        self._waiting = [each for each in self._waiting if not each[2].done()]
        heapq.heapify(self._waiting)
        if len(self._waiting) < self._most:
            return
        largest = max(self._waiting, default=None)
        if largest is None or largest[0] <= size:
            raise TooManyError
        largest[2].set_exception(TooManyError())

    def _next(self) -> None:
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                break
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._next)
