"""gRPC over HTTP/2; messages stay bytes, and their content is not parsed here."""

import contextlib
import errno
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final

from h2.errors import ErrorCodes

from gpushare.front.http2 import ConnectionLostError, Http2Connection, Stream

_log = logging.getLogger(__name__)
REQUEST_SECONDS: Final = 10.0  # time for a request to arrive completely
MAX_REASON_BYTES: Final = 4096
_PREFIX: Final = struct.Struct(">BL")  # (compressed flag, length)


class StatusCode(IntEnum):
    """The gRPC codes that we send ourselves."""

    OK = 0
    UNKNOWN = 2
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class CallError(Exception):
    """An answer of a call that is not OK: a gRPC code and a sentence."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


MethodHandler = Callable[[bytes, Callable[[], bool]], Iterator[bytes]]
"""Answers one call, in its own thread. Its arguments are the request, and a function that returns whether the
caller still waits."""


def connect(path: Path, changed: threading.Condition) -> Http2Connection:
    """Return a client connection to a unix socket.

    Raises:
        ConnectionLostError: nothing listens there, or the node has no thread left.
    """
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(str(path))
        connection = Http2Connection(peer, changed)
        connection.start()
    except OSError as error:
        peer.close()
        raise ConnectionLostError(f"{path.name}: {error.strerror or error}") from None
    except ConnectionLostError:
        peer.close()
        raise
    return connection


def call(connection: Http2Connection, path: str, request: bytes, seconds: float) -> bytes:
    """Return the answer of a unary call.

    Raises:
        CallError: the peer answered with an error.
        ConnectionLostError: the peer went away before it answered.
        TimeoutError: the peer did not answer in time.
    """
    answers = list(subscribe(connection, path, request, seconds))
    return answers[0] if answers else b""


def subscribe(
    connection: Http2Connection, path: str, request: bytes, seconds: float | None = None
) -> Iterator[bytes]:
    """Yield the answers of a call.

    Raises as `call`; TimeoutError only if there is a limit of seconds for each answer.
    """
    stream = connection.open(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"gpushare-front"),
        ]
    )
    try:
        connection.send_data(stream, _PREFIX.pack(0, len(request)) + request, end=True)
        while (message := _next_message(connection, stream, seconds)) is not None:
            yield message
        _check_status(stream)
    except (TimeoutError, GeneratorExit):
        connection.reset(stream, ErrorCodes.CANCEL)
        raise
    finally:
        connection.forget(stream)


def answer(connection: Http2Connection, stream: Stream, handlers: Mapping[str, MethodHandler]) -> None:
    """Answer a call that the peer has started."""
    path = next((value for name, value in stream.blocks[0] if name == b":path"), b"").decode(errors="replace")
    head = [(b":status", b"200"), (b"content-type", b"application/grpc")]
    code, reason = int(StatusCode.OK), ""
    try:
        try:
            request = _next_message(connection, stream, REQUEST_SECONDS)
            handler = handlers.get(path)
            if handler is None:
                raise CallError(StatusCode.UNIMPLEMENTED, f"no method {path[:200]}")
            for message in handler(request or b"", lambda: connection.is_open(stream)):
                if head:
                    connection.send_headers(stream, head)
                    head = []
                connection.send_data(stream, _PREFIX.pack(0, len(message)) + message)
        except CallError as error:
            code, reason = error.code, error.reason
        except (ConnectionLostError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer is to get one
            _log.exception("a call of %s failed", path)
            code, reason = int(StatusCode.INTERNAL), f"{type(error).__name__}: {error}"
        trailers = [(b"grpc-status", str(code).encode())]
        if reason:
            trailers.append((b"grpc-message", _escape(reason)))
        if connection.is_open(stream):
            connection.send_headers(stream, head + trailers, end=True)
    except (ConnectionLostError, TimeoutError):
        connection.reset(stream, ErrorCodes.CANCEL)
    finally:
        connection.forget(stream)


class Door:
    """A listening unix socket that answers callers until it is closed.

    Attributes:
        calls: number of calls being answered.
    """

    def __init__(self, path: Path, handlers: Mapping[str, MethodHandler], changed: threading.Condition) -> None:
        self._path, self._handlers, self._changed = path, handlers, changed
        self.calls = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None

    @property
    def is_there(self) -> bool:
        """Return whether the path still leads to this socket."""
        return self._identity is not None and identity(self._path) == self._identity

    def open(self) -> None:
        """Listen at the path, again if it was removed; do nothing once closed.

        Raises:
            OSError: the socket cannot be created, or the node has no thread left for it.
        """
        with self._lock:
            self._leave()
            if self._is_closed:
                return
            self._path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(str(self._path))
                listener.listen(64)
            except OSError:
                listener.close()
                raise
            self._listener, self._identity = listener, identity(self._path)
            try:
                threading.Thread(target=self._accept, args=(listener,), name="door", daemon=True).start()
            except RuntimeError as error:
                self._leave()  # a socket that nobody serves would keep callers waiting
                raise BlockingIOError(errno.EAGAIN, str(error)) from None

    def close(self) -> None:
        """Accept no more callers, for good; present callers stay."""
        with self._lock:
            self._is_closed = True
            self._leave()

    def _leave(self) -> None:
        if self._listener is None:
            return
        if self.is_there:
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # this ends accept() too
        self._listener.close()
        self._listener, self._identity = None, None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0 or listener is not self._listener:
                    return
                time.sleep(0.1)  # out of descriptors, so callers wait
                continue
            try:
                Http2Connection(peer, self._changed, self._on_stream).start()
            except (ConnectionLostError, OSError):
                peer.close()

    def _on_stream(self, connection: Http2Connection, stream: Stream) -> None:
        with self._changed:
            self.calls += 1
        try:
            threading.Thread(target=self._answer, args=(connection, stream), name="call", daemon=True).start()
        except RuntimeError as error:
            _log.error("a call is refused, as no thread is free for it: %s", error)
            self._end_call()
            connection.reset(stream, ErrorCodes.REFUSED_STREAM)

    def _answer(self, connection: Http2Connection, stream: Stream) -> None:
        try:
            answer(connection, stream, self._handlers)
        finally:
            self._end_call()

    def _end_call(self) -> None:
        with self._changed:
            self.calls -= 1
            self._changed.notify_all()


def identity(path: Path) -> tuple[int, int] | None:
    """Return a value that distinguishes a file from a later one of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _next_message(connection: Http2Connection, stream: Stream, seconds: float | None) -> bytes | None:
    """Return the next complete message; None after the peer's last one."""
    with connection.changed:

        def size() -> int | None:
            if len(stream.data) < _PREFIX.size:
                return None
            is_compressed, length = _PREFIX.unpack_from(stream.data)
            if is_compressed:
                raise CallError(StatusCode.UNIMPLEMENTED, "a compressed message")
            end = _PREFIX.size + int(length)
            return end if len(stream.data) >= end else None

        def is_settled() -> bool:
            return size() is not None or stream.is_ended or not connection.is_open(stream)

        if not connection.changed.wait_for(is_settled, seconds):
            raise TimeoutError
        end = size()
        if end is not None:
            message = bytes(stream.data[_PREFIX.size : end])
            del stream.data[:end]
            return message
        if not stream.is_ended:
            raise ConnectionLostError("the other side went away")
        return None


def _check_status(stream: Stream) -> None:
    trailers = dict(stream.blocks[-1]) if stream.blocks else {}
    try:
        code = int(trailers.get(b"grpc-status", b""))
    except ValueError:
        code = StatusCode.UNKNOWN
    if code != StatusCode.OK:
        raise CallError(code, _unescape(trailers.get(b"grpc-message", b"")))


def _escape(text: str) -> bytes:
    """Return a sentence as gRPC encodes it: visible ASCII, the rest as %XX."""
    raw = text.encode(errors="replace")[:MAX_REASON_BYTES]
    return b"".join(bytes([byte]) if 0x20 <= byte < 0x7F and byte != 0x25 else b"%%%02X" % byte for byte in raw)


def _unescape(raw: bytes) -> str:
    first, *rest = raw.split(b"%")
    found = bytearray(first)
    for part in rest:
        try:
            found += bytes.fromhex(part[:2].decode("ascii")) + part[2:]
        except ValueError:
            found += b"%" + part
    return found.decode(errors="replace")
