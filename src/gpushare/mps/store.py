"""Connections outlive the gate that accepted them: the host keeps a copy of each until the gate is done with it.

When a gate is killed, the kernel would close the connections that it holds, and a CUDA process whose connection
closes runs on uncapped (docs/facts.md 15). So the gate hands a copy of every accepted socket to its parent over a
socket pair, says what has become of it, and a gate's successor gets back those that still wait.
"""

import array
import contextlib
import json
import logging
import os
import socket
import threading
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

_MAX_PACKET: Final = 256
_ANCILLARY: Final = socket.CMSG_SPACE(4)


@dataclass(slots=True)
class Kept:
    """A connection in the store; `spoken` once it asked for a client's place."""

    descriptor: int
    spoken: bool = False


def _send(channel: socket.socket, message: dict[str, object], descriptor: int | None = None) -> None:
    rights = array.array("i", [descriptor]).tobytes() if descriptor is not None else b""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    channel.sendmsg([json.dumps(message).encode()], ancillary, socket.MSG_NOSIGNAL)


def _receive(channel: socket.socket) -> tuple[dict[str, object], int | None] | None:
    data, ancillary, _, _ = channel.recvmsg(_MAX_PACKET, _ANCILLARY)
    if not data:
        return None
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) // 4 * 4])
    message: dict[str, object] = json.loads(data)
    return message, descriptors[0] if descriptors else None


class ConnectionStore:
    """The host's side, for one GPU: a thread takes in what the present gate says."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._next = 0
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def attach(self) -> socket.socket:
        """A socket for a new gate, which first gives back what still waits; the caller closes its copy."""
        if self._thread is not None:
            self._thread.join()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waiting, self._kept = self._kept, {}
        self._thread = threading.Thread(target=self._follow, args=(ours, waiting), name="store", daemon=True)
        self._thread.start()
        return theirs

    def _follow(self, channel: socket.socket, waiting: dict[int, Kept]) -> None:
        with channel, contextlib.suppress(OSError, ValueError):
            for number, kept in waiting.items():
                self._kept[number] = kept
                _send(channel, {"id": number, "spoken": kept.spoken}, kept.descriptor)
            _send(channel, {"id": -1})
            while (received := _receive(channel)) is not None:
                self._note(*received)
        waiting.clear()

    def _note(self, message: dict[str, object], descriptor: int | None) -> None:
        number = message["id"]
        if not isinstance(number, int):
            return
        if descriptor is not None:
            self._kept[number] = Kept(descriptor)
        elif message.get("spoken"):
            if kept := self._kept.get(number):
                kept.spoken = True
        elif (gone := self._kept.pop(number, None)) is not None:
            os.close(gone.descriptor)


class StoreClient:
    """The gate's side; without a channel (a gate on its own) nothing is kept."""

    def __init__(self, channel: socket.socket | None = None) -> None:
        self._channel = channel
        self._next = 0

    def restore(self) -> list[tuple[int, socket.socket, bool]]:
        """What waited at the gate before this one: number, socket, whether it had spoken. Call once, first."""
        restored: list[tuple[int, socket.socket, bool]] = []
        while self._channel is not None and (received := _receive(self._channel)) is not None:
            message, descriptor = received
            if descriptor is None:
                break
            number = int(str(message["id"]))
            self._next = max(self._next, number + 1)
            restored.append((number, socket.socket(fileno=descriptor), bool(message["spoken"])))
        return restored

    def keep(self, connection: socket.socket) -> int:
        """Hand a copy to the host; the number to name it by."""
        self._next += 1
        self._say({"id": self._next}, connection.fileno())
        return self._next

    def spoken(self, number: int) -> None:
        """It asked for a client's place and waits for a turn."""
        self._say({"id": number, "spoken": True})

    def drop(self, number: int) -> None:
        """It is done with, or its answer is about to be passed on: from now on it ends with the gate."""
        self._say({"id": number})

    def _say(self, message: dict[str, object], descriptor: int | None = None) -> None:
        if self._channel is None:
            return
        try:
            _send(self._channel, message, descriptor)
        except OSError as error:
            # The host is gone, and we soon with it.
            logger.error("cannot hand a connection to the host: %s", error)
            self._channel = None
