"""Sends the first message for a client that got the server's socket and does not send it itself.

The MPS server sends four pipes and a zero byte, waits for the client's credentials, and serves nobody meanwhile.
If a client closes the socket or a pipe before, the server logs "User did not send valid credentials" and then
waits for ever: it accepts no client any more, the daemon answers no command, and only ending the server helps,
which ends every tenant (docs/facts.md 37, docs/adr/0188). So the gate keeps copies of the socket and the pipes
until the server has received the client's message, and sends it in its place if the client has died or takes too
long.
"""

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gpushare.mps.packets import CREDENTIALS, MAX_DESCRIPTORS, MAX_PACKET, close_all

# The server has sent its pipes when the daemon hands out its socket, or sends them within microseconds.
PIPES_SECONDS: Final = 0.05
HEARD_SECONDS: Final = 1.0  # after this a sent message has surely been received, and the copies may be closed
SERVER: Final = b"S"  # of further copies: the server's socket, then the pipes that waited in it; and for whom
DAEMON: Final = b"D"  # of those: a connection to the daemon that has not answered yet
_SO_PEEK_OFF: Final = 42  # Linux; Python's socket module does not define it
_LOOK: Final = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_SPACE: Final = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)  # credentials, and descriptors


@dataclass(frozen=True, slots=True)
class Recipient:
    """The process that a handover is for, and how far the server's log was written before it, in bytes."""

    pid: int
    start_ticks: int | None
    log_bytes: int

    def to_bytes(self) -> bytes:
        """Return the label of the handover's further copies."""
        return SERVER + f"{self.pid} {self.start_ticks or 0} {self.log_bytes}".encode()

    @classmethod
    def from_bytes(cls, label: bytes) -> "Recipient | None":
        """Read a label; None if it names nobody."""
        try:
            pid, start_ticks, log_bytes = (int(word) for word in label.removeprefix(SERVER).split())
        except ValueError:
            return None
        return cls(pid, start_ticks or None, log_bytes)


class Copies(Protocol):
    """Further copies, which outlive this process (`gpushare.mps.handover_copies`)."""

    def add(self, label: bytes, descriptors: Sequence[int]) -> int | None:
        """Keep copies of descriptors, which must stay open until they are removed; return a number for that."""
        ...

    def remove(self, number: int | None) -> None:
        """Drop what was added under a number; None drops nothing."""
        ...


class Handover:
    """Copies of what one client is handed. Close them once the server has received the client's message.

    Args:
        copies: keeps further ones until then.
        recipient: who is handed it; None if unknown.
    """

    def __init__(
        self,
        server: socket.socket,
        pipes: Sequence[int],
        copies: Copies | None = None,
        recipient: Recipient | None = None,
    ) -> None:
        self._server, self._pipes, self._copies, self.recipient = server, tuple(pipes), copies, recipient
        label = recipient.to_bytes() if recipient is not None else SERVER
        self._number = copies.add(label, (server.fileno(), *self._pipes)) if copies is not None else None
        self._has_spoken = False

    @classmethod
    async def of(
        cls, descriptor: int, copies: Copies | None = None, recipient: Recipient | None = None
    ) -> "Handover | None":
        """Copy the server's socket and the pipes that wait in it; return None if it is not a socket."""
        copy = os.dup(descriptor)
        try:
            server = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return None
        label = recipient.to_bytes() if recipient is not None else SERVER
        number = copies.add(label, (server.fileno(),)) if copies is not None else None
        try:
            return cls(server, await _pipes(server), copies, recipient)
        finally:
            if copies is not None:
                copies.remove(number)

    @property
    def has_spoken(self) -> bool:
        """Return whether the message was sent in the client's place."""
        return self._has_spoken

    @property
    def is_unread(self) -> bool:
        """Return whether a message was sent on it that the server has not read yet."""
        try:
            return int.from_bytes(fcntl.ioctl(self._server, termios.TIOCOUTQ, bytes(4)), sys.byteorder) > 0
        except (OSError, ValueError):  # closed
            return False

    def speak(self) -> None:
        """Send the client's first message and close its connection; to the server it looks as if it had left."""
        if self._has_spoken:
            return
        self._has_spoken = True
        with contextlib.suppress(OSError):
            self._server.send(CREDENTIALS, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Close the copies but those that outlive this process: they are for the next gate."""
        self._copies = None
        self.close()

    def close(self) -> None:
        """Close the copies."""
        if self._copies is not None:
            self._copies.remove(self._number)
        self._server.close()
        close_all(self._pipes)
        self._pipes = ()


async def _pipes(server: socket.socket) -> tuple[int, ...]:
    """Copy the descriptors of the waiting packets, which remain there for the client."""
    deadline = time.monotonic() + PIPES_SECONDS
    while True:
        descriptors, is_whole = _peek(server)
        if is_whole or time.monotonic() > deadline:
            return descriptors
        close_all(descriptors)
        await asyncio.sleep(0.001)


def _peek(server: socket.socket) -> tuple[tuple[int, ...], bool]:
    """Look at the waiting packets one after the other; it is complete if a packet without a descriptor follows."""
    found: list[int] = []
    try:
        server.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
        while True:
            _, ancillary, _, _ = server.recvmsg(MAX_PACKET, _SPACE, _LOOK)
            descriptors = array.array("i")
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(payload[: len(payload) // 4 * 4])
            if not descriptors:
                return tuple(found), True
            found += descriptors
    except OSError:  # no further packet, or the connection is broken
        return tuple(found), False
    finally:
        with contextlib.suppress(OSError):
            server.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, -1)  # shared with the client
