"""Bound the admission server's connections; those that never had a review answered are closed first.

The API server keeps a few connections open and sends its reviews on them. Anyone in the cluster can open thousands
and send nothing, before the handshake or after it; each costs a descriptor and its buffers (docs/adr/0187).
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final

from gpushare.runtime.tasks import without_end
from gpushare_operator.admission.sources import BySource

_log = logging.getLogger(__name__)
_AT_ONCE: Final = 32  # accepted in one round of the event loop; with one in each, newcomers wait long in a flood
HANDSHAKES_AT_ONCE: Final = 4  # begun in one round: 6 ms; with one, newcomers wait for one hostile review each
# Part of all connections beyond which a source makes room first. One that keeps a review under way on each of very
# many has no silent and no idle ones, and those of the API server would be closed for it.
MOST_OF_A_SOURCE: Final = 1 / 8
_NO_DESCRIPTOR_SECONDS: Final = 0.1  # between two tries to accept while the process has no descriptor left


class _AcceptedConnection(asyncio.Protocol):
    """One connection from its acceptance; its data goes to the protocol that serves it."""

    def __init__(self, accepted: socket.socket, source: str, connections: "Connections") -> None:
        self.socket, self.source = accepted, source
        self.patience: asyncio.TimerHandle | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.handshake_begun = 0.0
        self.transport: asyncio.BaseTransport | None = None
        self.had_a_review = False
        self._connections = connections
        self._serving = asyncio.Protocol()

    def serve_by(self, serving: asyncio.Protocol) -> "_AcceptedConnection":
        """Pass its data to a protocol from now on."""
        self._serving = serving
        return self

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
        elif self.transport is None:
            asyncio.get_running_loop().remove_reader(self.socket)
            self.socket.close()
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()


class Connections:
    """Open connections: they are accepted, do their handshakes in turn, and are counted.

    A handshake costs 1.5 ms of CPU time, so each round of the event loop begins at most four, taking source
    addresses in turn, and only once the client has sent something. Unfinished handshakes are bounded too, since
    the client decides when each of them costs that time.

    Args:
        most: connections open at once. For one more, one is closed: first one that never had a review answered, of
            the source with the most of these; else one that had; else one whose complete review is in progress. In
            each case it is the one in that state for longest. An incomplete request does not count as a review. A
            source that has more than an eighth of `most` makes room first, in the same order.
        handshakes: in progress at once; for one more, one that takes longer than usual is closed.
        usual_seconds: normal duration of a handshake.

    Attributes:
        closed: number of connections closed to make room.
    """

    def __init__(self, most: int, handshakes: int, usual_seconds: float) -> None:
        self.closed = 0
        self._most, self._most_handshakes, self._usual_seconds = most, handshakes, usual_seconds
        self._silent: BySource[_AcceptedConnection] = BySource()
        self._idle: BySource[_AcceptedConnection] = BySource()
        self._busy: BySource[_AcceptedConnection] = BySource()
        self._speaking: BySource[_AcceptedConnection] = BySource()  # of the silent: their handshake can begin
        self._shaking: BySource[_AcceptedConnection] = BySource()  # of the silent: it has begun
        self._spoke, self._shaken = asyncio.Event(), asyncio.Event()
        self._of_transport: dict[asyncio.BaseTransport, _AcceptedConnection] = {}

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
        open_one = partial(self._open, make_protocol=make_protocol, tls=tls, seconds=handshake_seconds)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(without_end("handshakes", self._shake_hands(open_one)))
                while True:
                    try:
                        accepted, address = await loop.sock_accept(listening)
                    except OSError as error:
                        _log.warning("no connection can be accepted: %s", error)
                        self.close_one()
                        await asyncio.sleep(_NO_DESCRIPTOR_SECONDS)
                        continue
                    while len(self) >= self._most:
                        self.close_one()
                    connection = _AcceptedConnection(accepted, str(address[0]), self)
                    self._silent.add(connection.source, connection)
                    connection.patience = loop.call_later(handshake_seconds, self._close, connection)
                    loop.add_reader(accepted, self._speaks, connection)
                    number += 1
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)  # during a flood, let other tasks run
        finally:
            listening.close()
            for connection in (*self._silent, *self._idle, *self._busy):
                if connection.transport is None:
                    self._close(connection)

    def _speaks(self, connection: _AcceptedConnection) -> None:
        """Queue its handshake, now that the other side has begun it or has left."""
        asyncio.get_running_loop().remove_reader(connection.socket)
        if connection.patience is not None:
            connection.patience.cancel()  # the client is not to blame for waiting for its turn
        self._speaking.add(connection.source, connection)
        self._spoke.set()

    async def _shake_hands(self, open_one: Callable[[_AcceptedConnection], Coroutine[None, None, None]]) -> None:
        """Begin a few handshakes in each round of the loop, and none while too many are under way."""
        loop, number = asyncio.get_running_loop(), 0
        while True:
            await self._spoke.wait()
            await self._make_room()
            if self._speaking:
                connection = self._speaking.take()
                self._shaking.add(connection.source, connection)
                connection.handshake_begun = loop.time()
                connection.handshake = loop.create_task(open_one(connection))
                number += 1
                if number % HANDSHAKES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            else:
                self._spoke.clear()

    async def _make_room(self) -> None:
        """Wait until a handshake ends; one that takes longer than usual is closed."""
        loop = asyncio.get_running_loop()
        while len(self._shaking) >= self._most_handshakes:
            oldest = self._shaking.oldest_of_most()
            left = oldest.handshake_begun + self._usual_seconds - loop.time()
            if left <= 0:
                self.closed += 1
                self._close(oldest)
                continue
            self._shaken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._shaken.wait()

    async def _open(
        self,
        connection: _AcceptedConnection,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        seconds: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection.serve_by(make_protocol()),
                connection.socket,
                ssl=tls,
                ssl_handshake_timeout=seconds,
            )
        except OSError:  # ssl.SSLError and TimeoutError are among them
            self.drop(connection)
        except asyncio.CancelledError:
            self.drop(connection)
            raise
        finally:
            connection.handshake = None
            self._shaking.discard(connection.source, connection)
            self._shaken.set()

    def close_one(self) -> None:
        """Close the connection whose loss matters least (see `most`)."""
        if len(self):
            self.closed += 1
            self._close(self._least())

    def _least(self) -> _AcceptedConnection:
        kinds = (self._silent, self._idle, self._busy)
        for among in (kinds[:1], kinds):
            of_source = sum((each.counts() for each in among), Counter[str]())
            for source, count in of_source.most_common(1):
                if count > self._most * MOST_OF_A_SOURCE:
                    return next(found for each in among if (found := each.oldest_of(source)) is not None)
        return next(each.oldest_of_most() for each in kinds if len(each))

    def _close(self, connection: _AcceptedConnection) -> None:
        self.drop(connection)
        connection.close()

    def is_made(self, connection: _AcceptedConnection, transport: asyncio.BaseTransport) -> None:
        """Record that its handshake is done."""
        self._of_transport[transport] = connection

    def drop(self, connection: _AcceptedConnection) -> None:
        """Forget a connection."""
        self._take(connection)
        for each in (self._speaking, self._shaking):
            each.discard(connection.source, connection)
        if connection.patience is not None:
            connection.patience.cancel()
        if connection.transport is not None:
            self._of_transport.pop(connection.transport, None)

    def asks(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that a review was read completely."""
        connection = self._of_transport.get(transport) if transport is not None else None
        if connection is not None:
            self._take(connection)
            self._busy.add(connection.source, connection)

    def is_answered(self, transport: asyncio.BaseTransport | None, *, reviewed: bool) -> None:
        """Record that a request was answered; `reviewed`: it was a review, and was answered as one."""
        connection = self._of_transport.get(transport) if transport is not None else None
        if connection is not None:
            connection.had_a_review |= reviewed
            self._take(connection)
            if connection.had_a_review:
                self._idle.add(connection.source, connection)
            else:
                self._silent.add(connection.source, connection)

    def _take(self, connection: _AcceptedConnection) -> None:
        for each in (self._silent, self._idle, self._busy):
            each.discard(connection.source, connection)
