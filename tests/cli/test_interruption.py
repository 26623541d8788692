"""Ctrl-c while other processes work for this one is raised where it harms nothing."""

import multiprocessing
import signal
import time
from collections.abc import Iterator

import pytest

from gpushare.cli.interruption import PendingInterrupt


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Python's own handlers, whatever pytest's worker and the tests before have left; a child inherits them."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    terminate = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)


@pytest.fixture
def child() -> Iterator[multiprocessing.Process]:
    process = multiprocessing.Process(target=time.sleep, args=(600,))
    process.start()
    yield process
    process.kill()
    process.join()


def test_it_ends_the_children_and_is_raised_where_asked(child: multiprocessing.Process) -> None:
    interruption = PendingInterrupt()
    interruption.__enter__()
    interruption.check()
    signal.raise_signal(signal.SIGINT)  # nothing is raised between two steps
    child.join(20)
    assert not child.is_alive()
    with pytest.raises(KeyboardInterrupt):
        interruption.check()
    interruption.__exit__(KeyboardInterrupt, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_broke_because_of_it_is_no_defect() -> None:
    def broken() -> None:
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("cannot release un-acquired lock")

    with pytest.raises(KeyboardInterrupt), PendingInterrupt():
        broken()


def test_it_is_raised_at_the_end_if_nobody_asked() -> None:
    with pytest.raises(KeyboardInterrupt), PendingInterrupt():
        signal.raise_signal(signal.SIGINT)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError), PendingInterrupt():
        raise RuntimeError


def test_a_job_in_the_background_stays_deaf(child: multiprocessing.Process) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with PendingInterrupt() as interruption:
        signal.raise_signal(signal.SIGINT)
        interruption.check()
    assert child.is_alive()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
