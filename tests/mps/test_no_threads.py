"""A node without a free thread, which a tenant can cause by forking up to the limit of processes."""

import threading

import pytest

from gpushare.mps.ending import Termination
from gpushare.mps.errors import MpsError
from gpushare.mps.host import KeeperProcess, StopSignal, keep_all, start_patiently
from gpushare.mps.layout import GpuDirectory
from gpushare.mps.patience import HangingError, PatientCaller
from gpushare.mps.ptrace import HeldThreads
from gpushare.mps.store import ConnectionStore
from gpushare.mps.terminating import Terminator
from gpushare.runtime.http import HttpAnswer, MetricsServer

from .conftest import until

GONE = 2**22 + 7  # a pid of no process


@pytest.fixture
def no_thread(monkeypatch):
    """Let the next threads of each name fail to start, as CPython reports it."""
    real, left = threading.Thread.start, {}

    def start(thread):
        if left.get(thread.name, 0) > 0:
            left[thread.name] -= 1
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return left


def test_the_host_survives_and_starts_the_keeper_at_its_next_look(short_path, no_thread, caplog):
    """Before: the host ended, and with it every daemon and every tenant of the node."""
    keeper = KeeperProcess(GpuDirectory.of(short_path, "GPU-1"), ["--help"])
    no_thread["store"] = 2
    try:
        for _ in range(2):
            keep_all([keeper], 1.0)
            assert not keeper.is_running
        assert "cannot start the keeper of GPU-1: [Errno 11] can't start new thread" in caplog.text
        keep_all([keeper], 1.0)
        assert keeper.restarts == 0
        assert keeper.pid is not None
    finally:
        keeper.stop()


def test_what_a_keeper_raises_that_is_no_oserror_does_not_end_the_host(caplog):
    class Fails:
        gpu = GpuDirectory.of("/nowhere", "GPU-1")

        def keep(self, _now):
            raise RuntimeError("can't start new thread")

    keep_all([Fails()], 1.0)
    assert "cannot start the keeper of GPU-1" in caplog.text


def test_a_store_without_a_thread_leaves_nothing_open_and_works_afterwards(no_thread):
    store = ConnectionStore()
    store.attach().close()
    no_thread["store"] = 1
    with pytest.raises(BlockingIOError, match="can't start new thread"):
        store.attach()
    store.attach().close()


def test_the_hosts_own_threads_start_as_soon_as_one_is_free(no_thread, monkeypatch):
    monkeypatch.setattr("gpushare.mps.host.DRIVER_BACKOFF", type("At", (), {"seconds": lambda *_: 0.0})())
    server = MetricsServer({"/healthz": lambda: HttpAnswer(b"")}, 0, "127.0.0.1")
    no_thread["metrics"] = 2
    start_patiently("the metrics", server.start, StopSignal())
    assert no_thread["metrics"] == 0
    server.start()  # as for the first of two ports when the second could not start
    server.close()


async def test_a_call_that_needs_a_thread_fails_and_the_next_one_does_not(no_thread):
    """Before: the error ended the keeper's tasks, and its successor's."""
    caller = PatientCaller()
    no_thread["patient"] = 1
    with pytest.raises(HangingError, match="no thread is free"):
        await caller.call(lambda: 7, 120)
    assert caller.hangs_seconds == 0
    assert await caller.call(lambda: 7, 120) == 7


def test_a_termination_waits_for_a_thread(no_thread):
    terminate = Terminator(lambda _pid, _seconds: None)
    no_thread["terminator"] = 1
    assert terminate(GONE, 1) is Termination.IN_PROGRESS
    until(lambda: terminate(GONE, 1) is Termination.FAILED, "it is gone, as the thread sees now")


def test_threads_are_not_held_for_a_request_that_cannot_be_made(no_thread):
    no_thread["terminate_client"] = 1
    with pytest.raises(MpsError, match="no thread is free for terminate_client"):
        Terminator(lambda _pid, _seconds: None)._ask_while_held(HeldThreads(GONE))
