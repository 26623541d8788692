"""A front on a node without a free thread or process, which a tenant can cause by forking up to the limit."""

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.front.test_rpc import HANDLERS, RAW, SOON

from gpushare.core.backoff import Backoff
from gpushare.front import __main__ as front
from gpushare.front.http2 import ConnectionLostError
from gpushare.front.rpc import CallError, Door, call, connect


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Let the next threads of each name fail to start, as CPython reports it."""
    real = threading.Thread.start
    left: dict[str, int] = {}

    def start(thread: threading.Thread) -> None:
        if left.get(thread.name, 0) > 0:
            left[thread.name] -= 1
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return left


@pytest.fixture
def door(short_path: Path) -> Iterator[Door]:
    made = Door(short_path / "ours", HANDLERS, threading.Condition())
    yield made
    made.close()


def test_a_door_that_cannot_be_served_is_not_there_and_opens_later(
    door: Door, short_path: Path, no_thread: dict[str, int]
) -> None:
    """Before: it was there and never answered, so kubelet had a plugin that it could not reach."""
    no_thread["door"] = 1
    with pytest.raises(OSError, match="can't start new thread"):
        door.open()
    assert not door.is_there
    assert not (short_path / "ours").exists()
    door.open()
    with grpc.insecure_channel(f"unix:{short_path}/ours") as channel:
        assert channel.unary_unary("/t.T/Echo", **RAW)(b"a", timeout=SOON) == b"a"


def test_a_door_serves_who_comes_after_a_connection_without_a_thread(
    door: Door, short_path: Path, no_thread: dict[str, int]
) -> None:
    """Before: the door's own thread ended with it, and nobody was answered any more."""
    door.open()
    no_thread["connection"] = 1
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(SOON)
        peer.connect(str(short_path / "ours"))
        while peer.recv(4096):
            pass
    assert no_thread["connection"] == 0
    with grpc.insecure_channel(f"unix:{short_path}/ours") as channel:
        assert channel.unary_unary("/t.T/Echo", **RAW)(b"a", timeout=SOON) == b"a"


def test_who_connects_without_a_thread_is_told_so(short_path: Path, no_thread: dict[str, int]) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "theirs"))
        listener.listen()
        no_thread["connection"] = 1
        with pytest.raises(ConnectionLostError, match="no thread is free"):
            connect(short_path / "theirs", threading.Condition())


def test_a_call_without_a_thread_is_refused_and_the_connection_stays(
    door: Door, short_path: Path, no_thread: dict[str, int]
) -> None:
    """Before: the connection ended, and with it kubelet's watch of our devices."""
    door.open()
    connection = connect(short_path / "ours", threading.Condition())
    no_thread["call"] = 1
    with pytest.raises((ConnectionLostError, CallError)):
        call(connection, "/t.T/Echo", b"a", SOON)
    assert (connection.is_lost, door.calls) == (False, 0)
    assert call(connection, "/t.T/Echo", b"b", SOON) == b"b"
    connection.close()


class Place:
    is_held = True


class FewProcesses:
    """An agent that cannot be started for two times, then ends."""

    is_running = False
    started_at = 0.0

    def __init__(self) -> None:
        self.tries = 0

    def start(self) -> None:
        self.tries += 1
        if self.tries <= 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.is_running = True

    def send(self, number: int) -> None:
        raise AssertionError(f"signal {number}")

    def reap(self) -> int | None:
        if not self.is_running:
            return None
        Place.is_held, self.is_running = False, False
        return 7


def test_an_agent_that_cannot_be_started_is_tried_again_while_there_is_a_list(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before: the front ended, and kubelet's list with it."""
    monkeypatch.setattr(Place, "is_held", True)
    monkeypatch.setattr(front, "BACKOFF", Backoff(first_seconds=0.01, longest_seconds=0.01))
    monkeypatch.setattr(front, "LOOK_SECONDS", 0.01)
    agent = FewProcesses()
    assert front._supervise(agent, Place()) == 7  # type: ignore[arg-type]
    assert agent.tries == 3
    assert caplog.text.count("the agent cannot be started") == 2


def test_an_agent_that_cannot_be_started_ends_the_front_where_there_is_nothing_to_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Place, "is_held", False)
    with pytest.raises(BlockingIOError):
        front._supervise(FewProcesses(), Place())  # type: ignore[arg-type]
