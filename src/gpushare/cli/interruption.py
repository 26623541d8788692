"""Ctrl-c while other processes work for this one."""

import signal
from multiprocessing import active_children
from types import TracebackType
from typing import Self


class PendingInterrupt:
    """Within it ctrl-c ends the processes that this one started, and is raised where `check` asks for it.

    Python raises KeyboardInterrupt between any two steps. Within `threading.Condition.wait`, on which a future's
    result waits, that can leave a lock released twice, and the user is told of a RuntimeError.
    """

    def __init__(self) -> None:
        self._came = False
        self._replaces = False

    def __enter__(self) -> Self:
        # Another handler, or none as in a shell's background job, is somebody's choice.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, lambda *_: self._end())
            self._replaces = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._replaces:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None or issubclass(kind, Exception):
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if ctrl-c came."""
        if self._came:
            raise KeyboardInterrupt

    def _end(self) -> None:
        self._came = True
        end_children()


def end_children() -> None:
    """End the processes that this one started by `multiprocessing`."""
    for child in active_children():
        child.terminate()
