"""Values of an event loop's state for another thread, computed in the loop's own thread.

The tasks of a loop change its state in their own steps only. What runs between two of these sees it whole, and no
dict changes while it is iterated over.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Final, Generic, TypeVar

T = TypeVar("T")

WAIT_SECONDS: Final = 5.0
"""How long a call waits for the loop: half of what Prometheus waits for a scrape by default."""


class LoopStuckError(Exception):
    """The event loop did not come to compute a value in time, or computes none any more."""


class ComputedOnLoop(Generic[T]):
    """Function for one other thread; the event loop in which it was made computes its values.

    Args:
        compute: called between two steps of the loop's tasks.
        wait_seconds: how long a call waits for the loop.
    """

    def __init__(self, compute: Callable[[], T], wait_seconds: float = WAIT_SECONDS) -> None:
        self._compute = compute
        self._wait_seconds = wait_seconds
        self._loop = asyncio.get_running_loop()
        self._asked: Future[T] | None = None
        self._is_closed = False

    def __call__(self) -> T:
        """Return the present value.

        Raises:
            LoopStuckError: the loop is stuck or ends. Calls do not wait while it still has a former one to answer.
        """
        if self._asked is not None and not self._asked.done():
            raise LoopStuckError("the event loop is still stuck")
        self._asked = asked = Future[T]()
        if self._is_closed:  # looked at after that: what was asked before, `close` cancels
            asked.cancel()
        else:
            self._loop.call_soon_threadsafe(self._answer, asked)
        try:
            return asked.result(self._wait_seconds)
        except CancelledError:
            raise LoopStuckError("the event loop is ending") from None
        except TimeoutError:
            if asked.done():  # it is what computing raised
                raise
            raise LoopStuckError(f"the event loop has been stuck for {self._wait_seconds:g} s") from None

    def close(self) -> None:
        """Compute no more values, and release who waits for one; call it before the loop waits for that thread."""
        self._is_closed = True
        if self._asked is not None:
            self._asked.cancel()

    def _answer(self, asked: Future[T]) -> None:
        if not asked.set_running_or_notify_cancel():
            return
        try:
            asked.set_result(self._compute())
        except Exception as error:  # noqa: BLE001 - the caller's
            asked.set_exception(error)
