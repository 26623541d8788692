"""HTTP/2 (RFC 9113) over a unix socket, as much of it as gRPC's unary calls and answers in a stream need.

A connection is read by a thread of its own. Everything that waits, waits for one condition that the connections of
a process share, so a waiter learns of whatever it may have to act on.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Final

from gpushare.front.hpack import HeaderDecoder, HeaderError, Headers, encode

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES: Final = 16384  # the least that every peer takes, and the most that we take
WINDOW_BYTES: Final = 65535
MAX_STREAMS: Final = 256  # kubelet has one call open, and its watch
MAX_MESSAGE_BYTES: Final = 4 * 2**20  # gRPC's own limit; a list of 16 GPUs has 0.1 MiB
MAX_BLOCK_BYTES: Final = 64 * 2**10
SEND_SECONDS: Final = 20.0  # for a peer that does not read; then the connection is given up
_HEAD: Final = struct.Struct(">HBBBL")  # length (2 and 1 bytes), type, flags, stream


class FrameType(IntEnum):
    """Types of frames; others are ignored, as the protocol wants."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class FrameFlag(IntFlag):
    """Flags of frames. The acknowledgement of SETTINGS and PING has the bit of END_STREAM."""

    END_STREAM = 1
    END_HEADERS = 4
    PADDED = 8
    PRIORITY = 32


class ResetCode(IntEnum):
    """Why a stream is reset."""

    NO_ERROR = 0
    REFUSED_STREAM = 7
    CANCEL = 8
    ENHANCE_YOUR_CALM = 11


INITIAL_WINDOW_SIZE: Final = 4
MAX_CONCURRENT_STREAMS: Final = 3


class ConnectionLostError(Exception):
    """The peer is gone, or ended the stream before its answer was whole; nothing is known of what it did."""


class _ProtocolError(Exception):
    """The peer breaks the protocol."""


@dataclass(slots=True, eq=False)
class Stream:
    """One call. Its fields change under the connection's condition.

    Attributes:
        window: how many bytes the peer takes now.
        blocks: the header blocks that came: headers, then trailers.
        data: what came and was not taken yet.
        is_ended: the peer sends nothing more.
        is_reset: the peer wants nothing more.
    """

    number: int
    window: int
    blocks: list[Headers] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    is_ended: bool = False
    is_reset: bool = False


class Http2Connection:
    """One end of a connection.

    Args:
        changed: notified at whatever comes.
        on_stream: called in the reading thread for each stream that the peer opens; None at a client's end.
    """

    def __init__(
        self,
        peer: socket.socket,
        changed: threading.Condition,
        on_stream: Callable[["Http2Connection", Stream], None] | None = None,
    ) -> None:
        self.changed = changed
        self.is_lost = False
        self._is_going_away = False
        self._socket, self._on_stream = peer, on_stream
        self._sending = threading.Lock()
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._latest = 0
        self._window = WINDOW_BYTES
        self._peer_window = WINDOW_BYTES
        self._headers = HeaderDecoder()
        # Only sending has a limit of time: SO_RCVTIMEO stays unset, since a watch is silent for hours.
        seconds = struct.pack("ll", int(SEND_SECONDS), 0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def start(self) -> None:
        """Begin the connection and read it until it ends.

        Raises:
            ConnectionLostError: it has ended already.
        """
        settings = struct.pack(">HL", MAX_CONCURRENT_STREAMS, MAX_STREAMS) if self._on_stream else b""
        begin = b"" if self._on_stream else PREFACE
        self._send(begin + _frame(FrameType.SETTINGS, 0, 0, settings))
        threading.Thread(target=self._read, name="connection", daemon=True).start()

    def close(self) -> None:
        """End it; all that waits for it is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def open(self, headers: Headers) -> Stream:
        """Begin a call as the client.

        Raises:
            ConnectionLostError: the peer takes none any more.
        """
        with self._sending:  # streams have to begin in the order of their numbers
            with self.changed:
                if self.is_lost or self._is_going_away:
                    raise ConnectionLostError("the connection has ended")
                stream = self._streams[self._next] = Stream(self._next, self._peer_window)
                self._next += 2
            self._write(_frame(FrameType.HEADERS, FrameFlag.END_HEADERS, stream.number, encode(headers)))
        return stream

    def send_headers(self, stream: Stream, headers: Headers, *, end: bool = False) -> None:
        """Send headers or, with `end`, trailers."""
        flags = FrameFlag.END_HEADERS | (FrameFlag.END_STREAM if end else 0)
        self._send(_frame(FrameType.HEADERS, flags, stream.number, encode(headers)))

    def send_data(self, stream: Stream, data: bytes, *, end: bool = False) -> None:
        """Send data as fast as the peer takes it.

        Raises:
            ConnectionLostError: it takes no more, or none for a long time.
        """
        at = 0
        while True:
            with self.changed:
                is_free = at == len(data) or self.changed.wait_for(
                    lambda: self._is_over(stream) or min(self._window, stream.window) > 0, SEND_SECONDS
                )
                if not is_free or self._is_over(stream):
                    raise ConnectionLostError("the other side takes no more")
                size = max(0, min(len(data) - at, FRAME_BYTES, self._window, stream.window))
                self._window -= size
                stream.window -= size
            is_last = at + size == len(data)
            flags = FrameFlag.END_STREAM if end and is_last else 0
            self._send(_frame(FrameType.DATA, flags, stream.number, data[at : at + size]))
            at += size
            if is_last:
                return

    def reset(self, stream: Stream, code: ResetCode) -> None:
        """End a call at once."""
        self.forget(stream)
        with contextlib.suppress(ConnectionLostError):
            self._reset(stream.number, code)

    def forget(self, stream: Stream) -> None:
        """Drop a call that is over; what still comes of it is ignored."""
        with self.changed:
            self._streams.pop(stream.number, None)

    def is_open(self, stream: Stream) -> bool:
        """Return whether the peer still waits for an answer."""
        return not self._is_over(stream)

    def _is_over(self, stream: Stream) -> bool:
        return self.is_lost or stream.is_reset

    # sending ----------------------------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except OSError as error:  # a frame may be half written: nothing can follow it
            self.close()
            raise ConnectionLostError(f"the connection has ended: {error}") from None

    def _reset(self, number: int, code: ResetCode) -> None:
        self._send(_frame(FrameType.RST_STREAM, 0, number, struct.pack(">L", code)))

    # reading ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as file:
                if self._on_stream and file.read(len(PREFACE)) != PREFACE:
                    raise _ProtocolError
                while head := file.read(_HEAD.size):
                    high, low, kind, flags, number = _HEAD.unpack(head)
                    length = high << 8 | low
                    if length > FRAME_BYTES:
                        raise _ProtocolError
                    body = file.read(length)
                    if len(body) < length:
                        break
                    if kind == FrameType.HEADERS:
                        body = _unpadded(body, flags)
                        while not flags & FrameFlag.END_HEADERS:
                            high, low, kind, more, _ = _HEAD.unpack(file.read(_HEAD.size))
                            body += file.read(high << 8 | low)
                            if kind != FrameType.CONTINUATION or len(body) > MAX_BLOCK_BYTES:
                                raise _ProtocolError
                            flags |= more & FrameFlag.END_HEADERS
                        kind = FrameType.HEADERS
                    self._take(kind, flags, number & 0x7FFFFFFF, body)
        except (OSError, ConnectionLostError, HeaderError, _ProtocolError, struct.error, IndexError):
            pass
        finally:
            self.close()
            self._socket.close()
            with self.changed:
                self.is_lost = True
                self.changed.notify_all()

    def _take(self, kind: int, flags: int, number: int, body: bytes) -> None:
        if kind == FrameType.DATA:
            self._take_data(flags, number, body)
        elif kind == FrameType.HEADERS:
            self._take_headers(flags, number, self._headers.decode(body))
        elif kind == FrameType.SETTINGS and not flags & FrameFlag.END_STREAM:
            self._take_settings(body)
            self._send(_frame(FrameType.SETTINGS, FrameFlag.END_STREAM, 0, b""))
        elif kind == FrameType.PING and not flags & FrameFlag.END_STREAM:
            self._send(_frame(FrameType.PING, FrameFlag.END_STREAM, 0, body))
        elif kind == FrameType.PUSH_PROMISE:
            raise _ProtocolError
        elif kind in (FrameType.RST_STREAM, FrameType.GOAWAY, FrameType.WINDOW_UPDATE):
            with self.changed:
                stream = self._streams.get(number)
                if kind == FrameType.GOAWAY:
                    self._is_going_away = True
                elif kind == FrameType.WINDOW_UPDATE:
                    more = struct.unpack(">L", body)[0] & 0x7FFFFFFF
                    if number == 0:
                        self._window += more
                    elif stream is not None:
                        stream.window += more
                elif stream is not None:
                    stream.is_reset = True
                self.changed.notify_all()

    def _take_data(self, flags: int, number: int, body: bytes) -> None:
        stream = self._streams.get(number)
        if body:  # all of it counts, padding too
            update = _frame(FrameType.WINDOW_UPDATE, 0, 0, struct.pack(">L", len(body)))
            if stream is not None and not flags & FrameFlag.END_STREAM:
                update += _frame(FrameType.WINDOW_UPDATE, 0, number, struct.pack(">L", len(body)))
            self._send(update)
        if stream is None:
            return
        with self.changed:
            stream.data += _unpadded(body, flags & FrameFlag.PADDED)
            stream.is_ended |= bool(flags & FrameFlag.END_STREAM)
            is_too_much = len(stream.data) > MAX_MESSAGE_BYTES
            stream.is_reset |= is_too_much
            self.changed.notify_all()
        if is_too_much:
            self._reset(number, ResetCode.ENHANCE_YOUR_CALM)

    def _take_headers(self, flags: int, number: int, headers: Headers) -> None:
        with self.changed:
            stream = self._streams.get(number)
            is_new = stream is None and self._on_stream is not None and number > self._latest and number % 2
            is_refused = is_new and len(self._streams) >= MAX_STREAMS
            if is_new:
                self._latest = number
                if not is_refused:
                    stream = self._streams[number] = Stream(number, self._peer_window)
            if stream is not None:
                stream.blocks.append(headers)
                stream.is_ended |= bool(flags & FrameFlag.END_STREAM)
                self.changed.notify_all()
        if is_refused:
            self._reset(number, ResetCode.REFUSED_STREAM)
        elif is_new and stream is not None and self._on_stream is not None:
            self._on_stream(self, stream)

    def _take_settings(self, body: bytes) -> None:
        for name, value in struct.iter_unpack(">HL", body):
            if name == INITIAL_WINDOW_SIZE:
                with self.changed:
                    for stream in self._streams.values():
                        stream.window += value - self._peer_window
                    self._peer_window = value
                    self.changed.notify_all()


def _frame(kind: FrameType, flags: int, number: int, body: bytes) -> bytes:
    return _HEAD.pack(len(body) >> 8, len(body) & 0xFF, kind, flags, number) + body


def _unpadded(body: bytes, flags: int) -> bytes:
    """Return a frame's content without padding and priority."""
    padding = 0
    if flags & FrameFlag.PADDED:
        padding, body = body[0], body[1:]
    if flags & FrameFlag.PRIORITY:
        body = body[5:]
    if padding > len(body):
        raise _ProtocolError
    return body[: len(body) - padding]
