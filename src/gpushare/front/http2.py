"""HTTP/2 over a unix socket, by the package h2: what gRPC's unary calls and streamed answers need.

Each connection is read by its own thread. All waiting uses one condition that the connections of a process share,
so a waiter is woken by any event that it may need. The condition and a connection's lock are never held together,
so that a peer that does not read blocks only its own connection.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

Headers = list[tuple[bytes, bytes]]

MAX_STREAMS: Final = 256  # kubelet has one call open, and its watch
MAX_MESSAGE_BYTES: Final = 4 * 2**20  # gRPC's own limit; a list of 16 GPUs has 0.1 MiB
MAX_HEADERS_BYTES: Final = 64 * 2**10
SEND_SECONDS: Final = 20.0  # a peer that reads nothing for this long loses its connection
_READ_BYTES: Final = 64 * 2**10


class ConnectionLostError(Exception):
    """The peer is gone, or ended the stream before its answer was complete; what it did is unknown."""


@dataclass(slots=True, eq=False)
class Stream:
    """One call. Its fields change under the connection's condition.

    Attributes:
        blocks: received header blocks: headers, then trailers.
        data: received data that was not taken yet.
        is_ended: the peer sends nothing more.
        is_reset: the peer wants nothing more.
    """

    number: int
    blocks: list[Headers] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    is_ended: bool = False
    is_reset: bool = False

    def take(self, event: Event) -> None:
        """Update the stream from an event."""
        if isinstance(event, ResponseReceived | TrailersReceived):
            self.blocks.append(event.headers)
        elif isinstance(event, DataReceived):
            self.data += event.data or b""
            self.is_reset |= len(self.data) > MAX_MESSAGE_BYTES
        elif isinstance(event, StreamEnded):
            self.is_ended = True
        elif isinstance(event, StreamReset):
            self.is_reset = True


class Http2Connection:
    """One end of a connection.

    Args:
        changed: condition that is notified at every event.
        on_stream: called in the reading thread for each stream that the peer opens; None for a client.
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
        self._window_updates = 0
        self._socket, self._on_stream = peer, on_stream
        self._streams: dict[int, Stream] = {}
        is_client = on_stream is None
        self._sending = threading.Lock()
        self._h2 = H2Connection(H2Configuration(client_side=is_client, header_encoding=None))
        self._h2.local_settings = Settings(
            client=is_client,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADERS_BYTES,
            },
        )
        # Only sending has a time limit; SO_RCVTIMEO stays unset, because a watch may be silent for hours.
        seconds = struct.pack("ll", int(SEND_SECONDS), 0)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def start(self) -> None:
        """Start the connection and its reading thread.

        Raises:
            ConnectionLostError: it has already ended, or the node has no thread left for it.
        """
        with self._sending:
            self._h2.initiate_connection()
            self._flush()
        try:
            threading.Thread(target=self._read, name="connection", daemon=True).start()
        except RuntimeError as error:
            raise ConnectionLostError(f"no thread is free for the connection: {error}") from None

    def close(self) -> None:
        """End the connection and wake everything that waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def open(self, headers: Headers) -> Stream:
        """Start a call as the client.

        Raises:
            ConnectionLostError: the peer accepts no more calls.
        """
        with self._sending:
            if self.is_lost or self._is_going_away:
                raise ConnectionLostError("the connection has ended")
            try:
                stream = Stream(self._h2.get_next_available_stream_id())
                self._h2.send_headers(stream.number, headers)
            except H2Error as error:
                raise ConnectionLostError(f"no further call on this connection: {error}") from None
            self._streams[stream.number] = stream  # registered before its answer can come
            self._flush()
        return stream

    def send_headers(self, stream: Stream, headers: Headers, *, end: bool = False) -> None:
        """Send headers or, with `end`, trailers.

        Raises:
            ConnectionLostError: the peer accepts no more data of this call.
        """
        with self._sending:
            try:
                self._h2.send_headers(stream.number, headers, end_stream=end)
            except H2Error as error:
                raise ConnectionLostError(f"the other side takes no more: {error}") from None
            self._flush()

    def send_data(self, stream: Stream, data: bytes, *, end: bool = False) -> None:
        """Send data as fast as the peer accepts it.

        Raises:
            ConnectionLostError: the peer accepts no more data, or none for a long time.
        """
        at = 0
        while True:
            updates = self._window_updates
            with self._sending:
                try:
                    window = self._h2.local_flow_control_window(stream.number)
                    size = max(0, min(len(data) - at, window, self._h2.max_outbound_frame_size))
                    is_last = at + size == len(data)
                    if size or is_last:
                        self._h2.send_data(stream.number, data[at : at + size], end_stream=end and is_last)
                except H2Error as error:
                    raise ConnectionLostError(f"the other side takes no more: {error}") from None
                self._flush()
            at += size
            if is_last:
                return
            if not size:
                self._wait_for_window(stream, updates)

    def reset(self, stream: Stream, code: ErrorCodes) -> None:
        """End a call at once."""
        self.forget(stream)
        with contextlib.suppress(ConnectionLostError, H2Error), self._sending:
            self._h2.reset_stream(stream.number, code)
            self._flush()

    def forget(self, stream: Stream) -> None:
        """Drop a call that is over; later data of it is ignored."""
        with self.changed:
            self._streams.pop(stream.number, None)

    def is_open(self, stream: Stream) -> bool:
        """Return whether the peer still waits for an answer."""
        return not (self.is_lost or stream.is_reset)

    def _wait_for_window(self, stream: Stream, updates: int) -> None:
        with self.changed:
            has_come = self.changed.wait_for(
                lambda: not self.is_open(stream) or self._window_updates != updates, SEND_SECONDS
            )
        if not has_come:
            raise ConnectionLostError("the other side takes no more")

    def _flush(self) -> None:
        """Write h2's output, under the lock, so that frames are sent in the order in which h2 made them."""
        try:
            self._socket.sendall(self._h2.data_to_send())
        except OSError as error:  # a frame may be half written, so nothing can follow it
            self.close()
            raise ConnectionLostError(f"the connection has ended: {error}") from None

    # reading ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while data := self._socket.recv(_READ_BYTES):
                with self._sending:
                    try:
                        events = self._h2.receive_data(data)
                        for event in events:
                            if isinstance(event, DataReceived) and event.flow_controlled_length:
                                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    finally:
                        self._flush()  # this also sends the end of a connection that broke the protocol
                for event in events:
                    self._take(event)
        except (OSError, ConnectionLostError, H2Error):
            pass
        finally:
            self.close()
            self._socket.close()
            with self.changed:
                self.is_lost = True
                self.changed.notify_all()

    def _take(self, event: Event) -> None:
        stream: Stream | None = None
        with self.changed:
            if isinstance(event, ConnectionTerminated):
                self._is_going_away = True
            elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
                self._window_updates += 1
            elif isinstance(event, RequestReceived):
                stream = self._streams[event.stream_id] = Stream(event.stream_id, [event.headers])
            elif isinstance(event, ResponseReceived | TrailersReceived | DataReceived | StreamEnded | StreamReset):
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    stream.take(event)
            self.changed.notify_all()
        if stream is None:
            return
        if isinstance(event, RequestReceived) and self._on_stream is not None:
            self._on_stream(self, stream)
        elif len(stream.data) > MAX_MESSAGE_BYTES:
            self.reset(stream, ErrorCodes.ENHANCE_YOUR_CALM)
