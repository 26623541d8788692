"""SOCK_SEQPACKET connections with descriptors in asyncio; the messages of MPS's handshake (docs/facts.md 12)."""

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HELLO: Final = b"OUTBHELL\0"  # each message ends with a zero byte; recorded on driver 580, tests/gpu/handshake.py
CREDENTIALS: Final = b"OUTBCRED\0"
DESCRIPTOR: Final = b"OUTBCUFD\0"  # sent with one descriptor: the server's socket
ACKNOWLEDGED: Final = bytes(4)  # the client's last message, no error; then it closes
ERROR_BYTES: Final = len(ACKNOWLEDGED)  # or a CUDA error, in the machine's byte order
GREATEST_ERROR: Final = 999  # CUDA_ERROR_UNKNOWN, the last one of cuda.h
COMPUTE_TYPE: Final = bytes.fromhex("02000000")
CONTROL_TYPE: Final = bytes.fromhex("04000000")
MAX_PACKET: Final = 64  # the longest message between a compute client and the daemon has 9 bytes
MAX_DESCRIPTORS: Final = 8


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet; an empty one without descriptors is the end of the connection.

    Attributes:
        descriptors: received descriptors, which the receiver must close.
        is_whole: False when bytes or descriptors did not fit and were dropped by the kernel.
    """

    data: bytes
    descriptors: tuple[int, ...] = ()
    is_whole: bool = True

    def says(self, word: bytes, descriptors: int = 0) -> bool:
        """Return whether the packet is exactly this message with this many descriptors."""
        return self.is_whole and self.data == word and len(self.descriptors) == descriptors


def read_packet(connection: socket.socket, max_descriptors: int = 0) -> Packet:
    """Read one packet; descriptors beyond `max_descriptors` never enter this process.

    Raises:
        BlockingIOError: nothing is there.
        OSError: the connection broke.
    """
    space = socket.CMSG_SPACE(4 * max_descriptors) if max_descriptors else 0
    data, ancillary, flags, _ = connection.recvmsg(MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) // 4 * 4])
    return Packet(data, tuple(descriptors), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def send_packet(connection: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one packet; the caller keeps the descriptors.

    Raises:
        OSError: the connection broke, or does not carry it now (BlockingIOError).
    """
    rights = array.array("i", descriptors).tobytes()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def is_listening(path: Path) -> bool:
    """Return whether a process accepts connections on a SOCK_SEQPACKET socket; costs it one empty connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # its backlog is full, so it listens
            return True
        except OSError:
            return False
    return True


class Channel:
    """A connected SOCK_SEQPACKET socket; one task reads, one writes."""

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

    async def receive(self, max_descriptors: int = 0) -> Packet:
        """Wait for the next packet; the caller closes its descriptors.

        Raises:
            OSError: the connection broke.
        """
        while True:
            try:
                return read_packet(self.socket, max_descriptors)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await self._ready(loop.add_reader, loop.remove_reader)

    async def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one packet; the caller keeps the descriptors.

        Raises:
            OSError: the connection broke.
        """
        while True:
            try:
                send_packet(self.socket, data, descriptors)
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
            # After close() the number may belong to another file, such as a child's pipe, whose end would then be
            # missed.
            if self.socket.fileno() == descriptor:
                remove(descriptor)

    def close(self) -> None:
        """Close; a waiting reader or writer gets ConnectionResetError."""
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
