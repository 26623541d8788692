"""Notice the end of a process at once."""

import asyncio
import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def wakes(pid: int, event: asyncio.Event) -> Iterator[None]:
    """Set the event as soon as the process ends."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        yield
        return
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(descriptor)
        event.set()

    loop.add_reader(descriptor, ended)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
