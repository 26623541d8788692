"""Waits of several tasks that end in one pass of the event loop: a wake-up may cost more than the work.

Linux lets timers be late for the same reason (timer slack). On a node with an H200 some eight wake-ups a second
were a quarter of the node agent's CPU time (docs/measurements/agent-h200.md).
"""

import asyncio
from typing import Final

LATE_RATIO: Final = 0.05
"""Part of a wait by which it may last longer, for a `wake` that comes at about its end."""
MOST_LATE_SECONDS: Final = 0.05


class JointWakeups:
    """Waits that end together with the rounds of one task, which calls `wake` after each of its rounds.

    A wait ends at the last `wake` before its time is over, so it may be shorter by up to the time between two
    calls; waits of about that time follow the rounds. If no call comes in time, a wait ends by itself, at most
    MOST_LATE_SECONDS late. All of it happens in one event loop.
    """

    def __init__(self) -> None:
        self._waits: dict[object, tuple[float, asyncio.Event]] = {}  # end of each one's time, and what ends it

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds, as described in the class."""
        await self.wait(asyncio.Event(), seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait until an event is set, and set it after so many seconds, as described in the class."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds
        timer = loop.call_at(ends_at + min(LATE_RATIO * seconds, MOST_LATE_SECONDS), event.set)
        wait = object()
        self._waits[wait] = ends_at, event
        try:
            await event.wait()
        finally:
            timer.cancel()
            del self._waits[wait]

    def wake(self, next_seconds: float) -> None:
        """End every wait that cannot go on until the next call.

        Args:
            next_seconds: time until the next call, as far as it is known.
        """
        next_at = asyncio.get_running_loop().time() + next_seconds
        for ends_at, event in self._waits.values():
            if ends_at < next_at:
                event.set()
