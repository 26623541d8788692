"""SOCK_SEQPACKET connections with file descriptors in asyncio, and the words of MPS's handshake (facts.md 12)."""

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

HELLO: Final = b"OUTBHELL\0"  # each word ends with a zero byte: recorded on driver 580, tests/gpu/handshake.py
CREDENTIALS: Final = b"OUTBCRED\0"
COMPUTE_TYPE: Final = bytes.fromhex("02000000")
CONTROL_TYPE: Final = bytes.fromhex("04000000")
MAX_PACKET: Final = 65536
MAX_DESCRIPTORS: Final = 8


class Channel:
    """One connected SOCK_SEQPACKET socket; one task reads, one writes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._waits: set[asyncio.Future[None]] = set()

    @classmethod
    def connect(cls, path: Path) -> "Channel":
        """Connect to a listening socket.

        Raises:
            OSError: nobody listens, or its backlog is full.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return cls(connection)

    async def receive(self) -> tuple[bytes, list[int]]:
        """The next packet and its descriptors, which are the caller's to close; empty at the end.

        Raises:
            OSError: the connection broke.
        """
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(MAX_PACKET, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS))
            except BlockingIOError:
                await self._ready(asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)
                continue
            descriptors = array.array("i")
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(payload[: len(payload) // 4 * 4])
            return data, list(descriptors)

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one packet; the descriptors stay the caller's.

        Raises:
            OSError: the connection broke.
        """
        rights = array.array("i", descriptors).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        while True:
            try:
                self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                await self._ready(asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)
            else:
                return

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        descriptor = self.socket.fileno()
        if descriptor < 0:
            raise ConnectionResetError("closed")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.add(future)
        add(descriptor, lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            self._waits.discard(future)
            # After close() the number may already be another's: a child's pipe, whose end would never be seen.
            if self.socket.fileno() == descriptor:
                remove(descriptor)

    def close(self) -> None:
        """Close; whoever waits on it gets ConnectionResetError."""
        for future in list(self._waits):
            if not future.done():
                future.set_exception(ConnectionResetError("closed"))
        if (descriptor := self.socket.fileno()) >= 0:
            with contextlib.suppress(RuntimeError):
                loop = asyncio.get_running_loop()
                loop.remove_reader(descriptor)
                loop.remove_writer(descriptor)
            self.socket.close()


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came with a packet."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
