"""Calls into a driver that may hang, in a thread, one at a time, with a time limit; and a daemon's silence."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS: Final = 3.0  # the first call after a boot initialises the library


class HangingError(Exception):
    """A call has not returned in time, or the previous one still has not, or the node has no thread for it."""


class PatientCaller:
    """Caller of blocking functions for a loop; while one hangs, further calls fail at once, without a thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._since: float | None = None
        self._is_late = False

    @property
    def hangs_seconds(self) -> float:
        """Return how long the present call has been running if it is late, else 0."""
        since = self._since
        return self._clock() - since if self._is_late and since is not None else 0.0

    async def call(self, function: Callable[[], T], patience_seconds: float | None = None) -> T:
        """Call a function in a thread; the default time limit is `PATIENCE_SECONDS`.

        Raises:
            HangingError: it takes too long; it continues in its thread, and its result is dropped. Or no thread
                can be started for it.
        """
        async with self._lock:
            since = self._since
            if self._is_late and since is not None:
                raise HangingError(f"the call before hangs for {self._clock() - since:.0f} s")
            return await self._call(function, PATIENCE_SECONDS if patience_seconds is None else patience_seconds)

    async def _call(self, function: Callable[[], T], patience_seconds: float) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._since = self._clock()

        def finish(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)  # type: ignore[arg-type]  # a T where there is no error
            else:
                done.set_exception(error)

        def work() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 (handed to the caller)
                failure = error
            self._since, self._is_late = None, False
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, result, failure)

        try:
            threading.Thread(target=work, name="patient", daemon=True).start()
        except RuntimeError as error:
            self._since, self._is_late = None, False
            raise HangingError(f"no thread is free for it: {error}") from None
        try:
            async with asyncio.timeout(patience_seconds):
                return await done
        except TimeoutError:
            self._is_late = self._since is not None
            raise HangingError(f"no answer within {patience_seconds:g} s") from None


@dataclass(slots=True)
class DaemonSilence:
    """Measures how long the daemon has not answered."""

    since: float | None = None

    def lasts(self, now: float) -> float:
        """Return the seconds since the first missing answer."""
        if self.since is None:
            self.since = now
        return now - self.since
