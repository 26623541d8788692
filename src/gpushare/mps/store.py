"""Store of connections that outlive their gate: the host keeps a copy of each until the gate is done with it.

When a gate is killed, the kernel would close its connections, and a CUDA process whose connection closes runs on
uncapped (docs/facts.md 15). So the gate sends a copy of every accepted socket to its parent over a socket pair and
reports what becomes of it; its successor gets back those that still wait.

The kernel may refuse to pass a descriptor, because too many are in flight (a tenant can cause that) or a process
has no free number. Neither is fatal: the message is sent again until it is accepted.
"""

import array
import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

logger = logging.getLogger(__name__)

_MAX_PACKET: Final = 256
_ANCILLARY: Final = socket.CMSG_SPACE(4)
# The kernel cannot pass a descriptor now; send it again later. Any other error means that the other side is gone.
PASSING_ERRORS: Final = frozenset(
    {errno.EAGAIN, errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EINTR}
)
AGAIN_SECONDS: Final = 0.05
BEHIND_SECONDS: Final = 5.0  # if the host accepts nothing for this long, a gate that is killed loses connections
RESTORE_SECONDS: Final = 30.0


@dataclass(slots=True)
class Kept:
    """A connection in the store; `spoken` once it asked to become a client."""

    descriptor: int
    greeted: bool = False
    spoken: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """A connection that waited at the previous gate."""

    number: int
    connection: socket.socket
    greeted: bool
    spoken: bool


def _send(channel: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    rights = array.array("i", [descriptor]).tobytes() if descriptor is not None else b""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    channel.sendmsg([json.dumps(message).encode()], ancillary, socket.MSG_NOSIGNAL)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    data, ancillary, _, _ = channel.recvmsg(_MAX_PACKET, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) // 4 * 4])
    message: dict[str, Any] = json.loads(data)
    return message, descriptors[0] if descriptors else None


class ConnectionStore:
    """The host's side for one GPU: a thread receives the present gate's messages."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def attach(self) -> socket.socket:
        """Return a socket for a new gate, which first gets the waiting connections; the caller closes its copy.

        Raises:
            OSError: the node has no descriptor or no thread left; try again later.
        """
        if self._thread is not None:
            self._thread.join()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        thread = threading.Thread(target=self._follow, args=(ours,), name="store", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            ours.close()
            theirs.close()
            raise BlockingIOError(errno.EAGAIN, str(error)) from None
        self._thread = thread
        return theirs

    def _follow(self, channel: socket.socket) -> None:
        with channel, contextlib.suppress(OSError, ValueError):
            for number, kept in list(self._kept.items()):
                self._give_back(channel, number, kept)
            _send(channel, {"id": -1})
            while (received := _receive(channel)) is not None:
                self._note(channel, *received)

    @staticmethod
    def _give_back(channel: socket.socket, number: int, kept: Kept) -> None:
        message = {"id": number, "greeted": kept.greeted, "spoken": kept.spoken}
        while True:
            try:
                return _send(channel, message, kept.descriptor)
            except OSError as error:
                if error.errno not in PASSING_ERRORS:
                    raise
            time.sleep(AGAIN_SECONDS)

    def _note(self, channel: socket.socket, message: dict[str, Any], descriptor: int | None) -> None:
        number = message.get("id")
        if not isinstance(number, int):
            return
        match message.get("what"):
            case "keep" if descriptor is None:
                # No descriptor number was free for it, so the gate must send it again.
                with contextlib.suppress(BlockingIOError):
                    channel.sendmsg([json.dumps({"id": number}).encode()], (), socket.MSG_DONTWAIT)
            case "keep" | "mark":
                kept = self._kept.get(number)
                if descriptor is not None:
                    if kept is not None:
                        os.close(kept.descriptor)
                    kept = self._kept[number] = Kept(descriptor)
                if kept is not None:
                    kept.greeted, kept.spoken = bool(message.get("greeted")), bool(message.get("spoken"))
            case "drop":
                if (gone := self._kept.pop(number, None)) is not None:
                    os.close(gone.descriptor)


@dataclass(slots=True)
class _Handed:
    """State of an open connection as the host must know it; `known` once the host has its copy."""

    connection: socket.socket
    greeted: bool = False
    spoken: bool = False
    known: bool = False


class StoreClient:
    """The gate's side; without a channel (a gate on its own) nothing is kept. No method waits for the host."""

    def __init__(self, channel: socket.socket | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        if channel is not None:
            channel.setblocking(False)
        # Microseconds since boot: beyond every number of the gates before, whose connections may come back late.
        self._next = time.monotonic_ns() // 1000
        self._open: dict[int, _Handed] = {}
        self._unsaid: dict[int, None] = {}  # numbers with news for the host, oldest first
        self._behind_since: float | None = None

    def restore(self) -> list[Restored]:
        """Return connections from the previous gate. Blocks, so call it once, first, in a thread."""
        restored: list[Restored] = []
        channel = self._channel
        if channel is None:
            return restored
        channel.settimeout(RESTORE_SECONDS)
        try:
            while (received := _receive(channel)) is not None:
                if int(received[0]["id"]) < 0:
                    break
                restored += self._take_back(*received)
        except OSError as error:
            logger.error("the host did not give back all connections that waited, others may follow: %s", error)
        channel.setblocking(False)
        return restored

    def _take_back(self, message: dict[str, Any], descriptor: int | None) -> tuple[Restored, ...]:
        """Return the connection that the host gives back, or none without a descriptor."""
        if descriptor is None:
            logger.error("no descriptor is free for a waiting connection: it stays with the host")
            return ()
        number, connection = int(message["id"]), socket.socket(fileno=descriptor)
        greeted, spoken = bool(message["greeted"]), bool(message["spoken"])
        self._open[number] = _Handed(connection, greeted, spoken, known=True)
        return (Restored(number, connection, greeted, spoken),)

    def keep(self, connection: socket.socket) -> int:
        """Send a copy to the host; return the number that identifies it."""
        self._next += 1
        if self._channel is not None:
            self._open[self._next] = _Handed(connection)
            self._say(self._next)
        return self._next

    def greeted(self, number: int) -> None:
        """Record that the connection got the gate's greeting."""
        if handed := self._open.get(number):
            handed.greeted = True
            self._say(number)

    def spoken(self, number: int) -> None:
        """Record that the connection asked to become a client and waits for a turn."""
        if handed := self._open.get(number):
            handed.greeted = handed.spoken = True
            self._say(number)

    def drop(self, number: int) -> None:
        """Drop the copy: the connection is finished, or is about to get its answer, and now ends with the gate."""
        handed = self._open.pop(number, None)
        if handed is None:
            return
        if handed.known:
            self._say(number)
        else:
            self._unsaid.pop(number, None)

    def flush(self) -> list[Restored]:
        """Send what the host could not accept before, and what it asks for again; call it regularly.

        Returns:
            Connections from the previous gate that came after `restore` had given up waiting.
        """
        late: list[Restored] = []
        if self._channel is None:
            return late
        try:
            while (received := _receive(self._channel)) is not None:
                number = int(received[0]["id"])
                if "greeted" in received[0]:
                    late += self._take_back(*received)
                elif handed := self._open.get(number):
                    handed.known = False
                    self._unsaid[number] = None
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError) as error:
            self._give_up(error)
        self._flush()
        return late

    def behind_seconds(self) -> float:
        """Return how long the host has not accepted messages; 0 if it does."""
        return 0.0 if self._behind_since is None else self._clock() - self._behind_since

    def _say(self, number: int) -> None:
        self._unsaid[number] = None
        self._flush()

    def _flush(self) -> None:
        while self._unsaid and self._channel is not None:
            number = next(iter(self._unsaid))
            try:
                self._tell(self._channel, number)
            except OSError as error:
                if error.errno not in PASSING_ERRORS:
                    self._give_up(error)
                elif self._behind_since is None:
                    self._behind_since = self._clock()
                    logger.warning("the host cannot take a connection now, retrying: %s", error)
                return
            del self._unsaid[number]
        self._behind_since = None

    def _tell(self, channel: socket.socket, number: int) -> None:
        handed = self._open.get(number)
        if handed is None:
            _send(channel, {"id": number, "what": "drop"})
            return
        what, descriptor = ("mark", None) if handed.known else ("keep", handed.connection.fileno())
        _send(
            channel, {"id": number, "what": what, "greeted": handed.greeted, "spoken": handed.spoken}, descriptor
        )
        handed.known = True

    def _give_up(self, error: Exception) -> None:
        # The host is gone, and this process soon will be too.
        logger.error("cannot hand a connection to the host: %s", error)
        self._channel = None
        self._unsaid.clear()
        self._open.clear()
