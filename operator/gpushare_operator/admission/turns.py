"""Choose the next request: by turns of the source addresses, and of one source the smallest."""

import asyncio
import heapq
from dataclasses import dataclass, field
from typing import Final

MOST_WAITING: Final = 512  # of 64 KiB at most each, and a few larger ones
# What a request costs besides its body, as bytes of a body. An ordinary pod's review takes 0.2 ms, and bodies of
# 55 KB with many variables or annotations 1.0 to 1.5 ms (ADR 0205).
COST_BYTES: Final = 8192


class TooManyError(Exception):
    """The request is given up: too many others wait, or it waited too long."""


@dataclass(slots=True)
class _WaitingSource:
    """Waiting requests of one source, as a heap, and what it had been served before them, in bytes."""

    served_bytes: int
    requests: list[tuple[int, int, asyncio.Future[None]]] = field(default_factory=list)

    @property
    def next_bytes(self) -> int:
        """Return what it will have been served after its next request."""
        return self.served_bytes + COST_BYTES + self.requests[0][0]


class ReviewTurns:
    """Queue that lets one request proceed between two rounds of the event loop.

    Sources have turns by what they cost, in bytes of bodies and `COST_BYTES` for each request: next is the source
    that will have been served least (self-clocked fair queueing). One that begins to wait has no credit: it counts
    as served like the present one. So whatever one pod sends, the API server's reviews wait for about as much work
    of that pod as they are themselves. Of one source the smallest request is next, since its cost grows with its
    size. The loop reads and answers in between.

    When too many wait, the largest of the source with the most is given up.
    """

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._waiting: dict[str, _WaitingSource] = {}
        self._count = 0  # also counts those that were given up since `_drop_given_up`
        self._served_bytes = 0  # of the source that was served last, or more
        self._number = 0
        self._is_scheduled = False

    async def turn(self, source: str, size: int) -> None:
        """Wait until a request of this size may proceed; the caller must then finish it without awaiting.

        Raises:
            TooManyError: the queue is full, and no source has more in it, or this one only smaller ones.
        """
        if self._count >= self._most:
            self._give_up_one(source, size)
        loop = asyncio.get_running_loop()
        self._number += 1
        entry = (size, self._number, loop.create_future())
        if source not in self._waiting:
            self._waiting[source] = _WaitingSource(self._served_bytes)
        heapq.heappush(self._waiting[source].requests, entry)
        self._count += 1
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next)
        await entry[2]

    def _give_up_one(self, source: str, size: int) -> None:
        self._drop_given_up()
        if self._count < self._most:
            return
        own = self._waiting[source].requests if source in self._waiting else []
        most = max((each.requests for each in self._waiting.values()), key=len, default=own)
        if len(most) > len(own) + 1:
            largest = max(most)
        elif not own or (largest := max(own))[0] <= size:
            raise TooManyError
        largest[2].set_exception(TooManyError())

    def _drop_given_up(self) -> None:
        for source, each in list(self._waiting.items()):
            each.requests = [request for request in each.requests if not request[2].done()]
            heapq.heapify(each.requests)
            if not each.requests:
                del self._waiting[source]
        self._count = sum(len(each.requests) for each in self._waiting.values())

    def _next(self) -> None:
        while self._waiting:
            source = min(self._waiting, key=lambda each: self._waiting[each].next_bytes)
            own = self._waiting[source]
            served = own.next_bytes
            _, _, future = heapq.heappop(own.requests)
            self._count -= 1
            if not own.requests:
                del self._waiting[source]
            if not future.done():
                own.served_bytes = served
                self._served_bytes = max(self._served_bytes, served)
                future.set_result(None)
                break
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._next)
