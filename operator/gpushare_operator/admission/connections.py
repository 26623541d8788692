"""The admission server's connections: bounded, and those that never had a review answered are the first to go.

The API server keeps a few connections open and asks on them. Anyone in the cluster can open thousands and say
nothing, before the handshake or after it; each costs a descriptor and its buffers (docs/adr/0187).
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 128  # accepted in one round of the event loop; with one in each, newcomers wait long in a flood
_NO_DESCRIPTOR_SECONDS: Final = 0.1  # between two tries to accept while the process has no descriptor left


class _Connection(asyncio.Protocol):
    """One connection, from its acceptance on; what is said on it goes to the protocol that serves it."""

    def __init__(self, accepted: socket.socket, serving: asyncio.Protocol, connections: "Connections") -> None:
        self.socket, self.handshake = accepted, None  # type: tuple[socket.socket, asyncio.Task[None] | None]
        self.transport: asyncio.BaseTransport | None = None
        self.had_a_review = False
        self._serving, self._connections = serving, connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._connections.is_made(self, transport)
        self._serving.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.drop(self)
        self._serving.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._serving.data_received(data)

    def eof_received(self) -> bool | None:
        return self._serving.eof_received()

    def pause_writing(self) -> None:
        self._serving.pause_writing()

    def resume_writing(self) -> None:
        self._serving.resume_writing()

    def close(self) -> None:
        """Close it at once, in whatever state it is."""
        if self.handshake is not None:
            self.handshake.cancel()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()


class Connections:
    """Accepts connections, and keeps count of them.

    Args:
        most: open at once; for one more, one is closed: of those that never had a review answered, else of those
            that had one before, else of those whose review is here in whole and under way; in each case the one
            that is so for longest. A request that has only begun counts for nothing.

    Attributes:
        closed: how many were closed for others.
    """

    def __init__(self, most: int) -> None:
        self.closed = 0
        self._most = most
        self._silent: dict[_Connection, None] = {}
        self._idle: dict[_Connection, None] = {}
        self._busy: dict[_Connection, None] = {}
        self._of_transport: dict[asyncio.BaseTransport, _Connection] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._idle) + len(self._busy)

    async def accept(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        handshake_seconds: float,
    ) -> None:
        """Accept connections until cancelled, then close `listening`, which must not block."""
        loop, number = asyncio.get_running_loop(), 0
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except OSError as error:
                    _log.warning("no connection can be accepted: %s", error)
                    self.close_one()
                    await asyncio.sleep(_NO_DESCRIPTOR_SECONDS)
                    continue
                connection = _Connection(accepted, make_protocol(), self)
                while len(self) >= self._most:
                    self.close_one()
                self._silent[connection] = None
                connection.handshake = loop.create_task(self._open(connection, tls, handshake_seconds))
                number += 1
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)  # a flood leaves the loop to others
        finally:
            listening.close()
            for connection in (*self._silent, *self._idle, *self._busy):
                if connection.transport is None:
                    connection.close()

    async def _open(self, connection: _Connection, tls: ssl.SSLContext, handshake_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection, connection.socket, ssl=tls, ssl_handshake_timeout=handshake_seconds
            )
        except OSError:  # ssl.SSLError and TimeoutError are among them
            self.drop(connection)
        except asyncio.CancelledError:
            self.drop(connection)
            raise
        finally:
            connection.handshake = None

    def close_one(self) -> None:
        """Close the connection that is missed least."""
        among = self._silent or self._idle or self._busy
        if among:
            connection = next(iter(among))
            self.drop(connection)
            self.closed += 1
            connection.close()

    def is_made(self, connection: _Connection, transport: asyncio.BaseTransport) -> None:
        """Record that its handshake is done."""
        self._of_transport[transport] = connection

    def drop(self, connection: _Connection) -> None:
        """Forget a connection."""
        for each in (self._silent, self._idle, self._busy):
            each.pop(connection, None)
        if connection.transport is not None:
            self._of_transport.pop(connection.transport, None)

    def asks(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that a review was read whole."""
        connection = self._of_transport.get(transport) if transport is not None else None
        if connection is not None:
            self._move(connection, self._busy)

    def is_answered(self, transport: asyncio.BaseTransport | None, *, reviewed: bool) -> None:
        """Record that what was read is done with; `reviewed`: it was a review, and was answered as one."""
        connection = self._of_transport.get(transport) if transport is not None else None
        if connection is not None:
            connection.had_a_review |= reviewed
            self._move(connection, self._idle if connection.had_a_review else self._silent)

    def _move(self, connection: _Connection, to: dict[_Connection, None]) -> None:
        for each in (self._silent, self._idle, self._busy):
            each.pop(connection, None)
        to[connection] = None
