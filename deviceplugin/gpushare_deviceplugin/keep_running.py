"""Keep a part of the agent running: one that fails is counted, logged and started again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

from gpushare.runtime.tasks import is_asked_to_end

_log = logging.getLogger(__name__)
_Name = TypeVar("_Name", bound=str)
RESTART_SECONDS: Final = 5.0


async def keep_running(
    name: _Name,
    run: Callable[[], Coroutine[Any, Any, None]],
    count_error: Callable[[_Name], object],
    *,
    pause_seconds: float = RESTART_SECONDS,
) -> NoReturn:
    """Run a part until cancelled; after a failure, or a return, start it again when the pause is over.

    A cancellation that comes from something that the part awaited is a failure too.

    Args:
        count_error: called with the name for each failure.
    """
    while True:
        try:
            await run()
        except (Exception, asyncio.CancelledError) as error:
            if is_asked_to_end(error):
                raise
            count_error(name)
            _log.exception("part %s failed, starting it again", name)
        await asyncio.sleep(pause_seconds)
