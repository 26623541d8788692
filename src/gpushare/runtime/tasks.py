"""Tasks that run for as long as their process does: one that ends by itself is a failure, not an end.

An `asyncio.TaskGroup` takes a child that returns, or that something other than the group cancels, for one that is
done, and its other children go on without it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

LOOK_SECONDS: Final = 0.1
"""Time between two looks at the event loop: a stall counts less what was left of this wait when it began."""


class TaskEndedError(Exception):
    """A task that should run for as long as its process has ended by itself."""


def is_asked_to_end(error: BaseException) -> bool:
    """Return whether this is a cancellation that the running task was asked for, such as at its process's end.

    False for one that comes from something that the task awaited, which is a failure of that.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def end_if_asked() -> None:
    """End the running task if it has been asked to, though what it awaited last went on as if it had not.

    Libraries lose a cancellation that comes in the turn of the event loop in which what they wait for comes too:
    `wait_for` of Python 3.11 does (its bug tracker, gh-86296), and with it the stop of a gRPC server. A loop that
    awaits such a thing calls this after it; else it goes on for ever, and so does whoever waits for its end.

    Raises:
        asyncio.CancelledError: the task has been asked to end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def without_end(name: str, work: Coroutine[Any, Any, object]) -> NoReturn:
    """Run work that only a cancellation of this task may end.

    Args:
        name: what the error names.

    Raises:
        TaskEndedError: the work returned, or was cancelled by something that it awaited.
    """
    try:
        await work
    except asyncio.CancelledError as error:
        if is_asked_to_end(error):
            raise
        raise TaskEndedError(f"{name} was cancelled, though nobody ended it") from error
    raise TaskEndedError(f"{name} has ended, though it runs for as long as its process")


async def watch_lag(observe: Callable[[float], None]) -> NoReturn:
    """Tell how late the running event loop is until cancelled: for how long a step of some task stalls all others.

    Args:
        observe: called with the seconds by which each wait of `LOOK_SECONDS` ended late.
    """
    clock = asyncio.get_running_loop().time
    while True:
        due_at = clock() + LOOK_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
        observe(max(0.0, clock() - due_at))
