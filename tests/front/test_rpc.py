"""Our gRPC against the gRPC project's own, each as the server and as the client."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpushare.front import http2
from gpushare.front.http2 import ConnectionLostError, Http2Connection
from gpushare.front.rpc import CallError, Door, MethodHandler, StatusCode, call, connect, subscribe

SOON = 60.0
LARGE = bytes(range(256)) * 8 * 1024  # 2 MiB: beyond every window
SENTENCE = "100% of „gpu“ is taken\nby others"
RAW = {"request_serializer": bytes, "response_deserializer": bytes}


def echo(request: bytes, _: Callable[[], bool]) -> Iterator[bytes]:
    yield request


def count(request: bytes, _: Callable[[], bool]) -> Iterator[bytes]:
    for number in range(int(request)):
        yield b"%d" % number * 1000


def refuse(_: bytes, __: Callable[[], bool]) -> Iterator[bytes]:
    raise CallError(9, SENTENCE)
    yield b""


def fail(_: bytes, __: Callable[[], bool]) -> Iterator[bytes]:
    yield b"%d" % (1 // 0)


HANDLERS: dict[str, MethodHandler] = {
    "/t.T/Echo": echo,
    "/t.T/Count": count,
    "/t.T/Refuse": refuse,
    "/t.T/Fail": fail,
}


@pytest.fixture
def door(short_path: Path) -> Iterator[Path]:
    """Ours as the server."""
    made = Door(short_path / "ours", HANDLERS, threading.Condition())
    made.open()
    yield short_path / "ours"
    made.close()


@pytest.fixture
async def their_server(short_path: Path) -> AsyncIterator[grpc.aio.Server]:
    """gRPC's own as the server."""

    class Methods(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            async def one(request: bytes, context: Any) -> bytes:
                if details.method == "/t.T/Refuse":
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, SENTENCE)
                if details.method == "/t.T/Hang":
                    await asyncio.Event().wait()
                return request

            async def many(request: bytes, _: Any) -> AsyncIterator[bytes]:
                for number in range(int(request)):
                    yield b"%d" % number * 1000

            if details.method == "/t.T/Count":
                return grpc.unary_stream_rpc_method_handler(many)
            return grpc.unary_unary_rpc_method_handler(one)

    server = grpc.aio.server(handlers=[Methods()])
    server.add_insecure_port(f"unix:{short_path}/theirs")
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
def theirs(their_server: grpc.aio.Server, short_path: Path) -> Path:
    """Its socket."""
    return short_path / "theirs"


async def aside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run what blocks in a thread, while gRPC's server lives on this one's loop."""
    return await asyncio.wait_for(asyncio.to_thread(function, *arguments), SOON)


def test_their_client_is_answered(door: Path) -> None:
    with grpc.insecure_channel(f"unix:{door}") as channel:
        ask = channel.unary_unary("/t.T/Echo", **RAW)
        assert ask(b"", timeout=SOON) == b""
        assert ask(LARGE, timeout=SOON) == LARGE
        pending = [ask.future(b"%d" % n * n, timeout=SOON) for n in range(100)]
        assert [each.result() for each in pending] == [b"%d" % n * n for n in range(100)]
        numbers = list(channel.unary_stream("/t.T/Count", **RAW)(b"200", timeout=SOON))
        assert numbers == [b"%d" % n * 1000 for n in range(200)]
        assert list(channel.unary_stream("/t.T/Count", **RAW)(b"0", timeout=SOON)) == []


@pytest.mark.parametrize(
    ("method", "code", "text"),
    [
        ("/t.T/Refuse", grpc.StatusCode.FAILED_PRECONDITION, SENTENCE),
        ("/t.T/Fail", grpc.StatusCode.INTERNAL, "ZeroDivisionError: integer division or modulo by zero"),
        ("/t.T/Nothing", grpc.StatusCode.UNIMPLEMENTED, "no method /t.T/Nothing"),
    ],
)
def test_their_client_gets_the_error_with_its_text(
    door: Path, method: str, code: grpc.StatusCode, text: str
) -> None:
    with grpc.insecure_channel(f"unix:{door}") as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(method, **RAW)(b"", timeout=SOON)
        assert (error.value.code(), error.value.details()) == (code, text)


async def test_their_server_is_asked(theirs: Path) -> None:
    connection = await aside(connect, theirs, threading.Condition())
    for request in (b"", LARGE, b"again"):
        assert await aside(call, connection, "/t.T/Echo", request, SOON) == request
    numbers = await aside(lambda: list(subscribe(connection, "/t.T/Count", b"200")))
    assert numbers == [b"%d" % n * 1000 for n in range(200)]
    with pytest.raises(CallError, match="is taken\nby others") as error:
        await aside(call, connection, "/t.T/Refuse", b"", SOON)
    assert (error.value.code, error.value.reason) == (9, SENTENCE)
    with pytest.raises(TimeoutError):
        await aside(call, connection, "/t.T/Hang", b"", 0.05)
    assert await aside(call, connection, "/t.T/Echo", b"still there", SOON) == b"still there"
    connection.close()
    with pytest.raises(ConnectionLostError):
        await aside(call, connection, "/t.T/Echo", b"", SOON)


def test_both_are_ours(door: Path) -> None:
    connection = connect(door, threading.Condition())
    assert call(connection, "/t.T/Echo", LARGE, SOON) == LARGE
    with pytest.raises(CallError) as error:
        call(connection, "/t.T/Nothing", b"", SOON)
    assert error.value.code == StatusCode.UNIMPLEMENTED
    connection.close()


def test_who_speaks_no_http2_is_left(door: Path) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(SOON)
        peer.connect(str(door))
        peer.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        while peer.recv(4096):
            pass
    with grpc.insecure_channel(f"unix:{door}") as channel:
        assert channel.unary_unary("/t.T/Echo", **RAW)(b"a", timeout=SOON) == b"a"


def test_a_call_learns_that_the_other_side_went_away() -> None:
    ours, other = socket.socketpair()
    changed = threading.Condition()
    connection = Http2Connection(ours, changed)
    connection.start()
    threading.Timer(0.05, other.close).start()
    with pytest.raises(ConnectionLostError):
        call(connection, "/t.T/Echo", b"", SOON)
    assert connection.is_lost


def test_a_door_that_was_removed_is_made_again(short_path: Path) -> None:
    door = Door(short_path / "ours", HANDLERS, threading.Condition())
    for _ in range(2):
        door.open()
        assert door.is_there
        with grpc.insecure_channel(f"unix:{short_path}/ours") as channel:
            assert channel.unary_unary("/t.T/Echo", **RAW)(b"a", timeout=SOON) == b"a"
        (short_path / "ours").unlink()
        assert not door.is_there
    door.close()


def test_a_closed_door_stays_closed(short_path: Path) -> None:
    """The look at kubelet may be about to open it when the front is stopped."""
    door = Door(short_path / "ours", HANDLERS, threading.Condition())
    door.open()
    door.close()
    door.open()
    assert not door.is_there
    assert not (short_path / "ours").exists()


def test_a_folder_that_is_gone_leaves_the_door_as_it_was(short_path: Path) -> None:
    folder = short_path / "gone"
    door = Door(folder / "ours", HANDLERS, threading.Condition())
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            door.open()
    door.close()
    assert not door.is_there


async def test_a_message_beyond_the_limit_is_not_kept(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "MAX_MESSAGE_BYTES", 2**20)
    connection = await aside(connect, theirs, threading.Condition())
    with pytest.raises(ConnectionLostError):
        await aside(call, connection, "/t.T/Echo", LARGE, SOON)
    assert await aside(call, connection, "/t.T/Echo", b"still there", SOON) == b"still there"
    connection.close()


async def test_a_server_that_goes_away_ends_its_calls_and_takes_no_more(
    their_server: grpc.aio.Server, theirs: Path
) -> None:
    connection = await aside(connect, theirs, threading.Condition())
    calls = [aside(call, connection, "/t.T/Hang", b"", SOON) for _ in range(3)]
    ended = asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(0.2)
    await their_server.stop(0)
    for error in await ended:
        assert isinstance(error, ConnectionLostError | CallError)
    with pytest.raises(ConnectionLostError):
        await aside(call, connection, "/t.T/Echo", b"", SOON)
