"""A time limit for each step of a suite: GPU time is scarce, and one step that hangs must not cost the others."""

import contextlib
import signal
from collections.abc import Iterator


class OutOfTimeError(Exception):
    """A step took longer than it may."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the main thread when the body takes longer; what it waits for is interrupted."""

    def over(*_: object) -> None:
        raise OutOfTimeError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
