"""Copies of handovers in progress that outlive the gate, so that the next one can speak for their clients.

A gate that is killed in the middle of a handover takes its copies along (`gpushare.mps.handover`). If they are the
only ones, as the client has not received the server's socket yet, nobody can send the first message any more, and
the server waits for ever. So copies also wait, as messages that nobody has received, in a pair of sockets whose
ends the host keeps open and gives to each keeper of a GPU (docs/adr/0258).
"""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

from gpushare.mps.handover import DAEMON, HEARD_SECONDS, Handover, Recipient
from gpushare.mps.identity import is_alive
from gpushare.mps.packets import MAX_DESCRIPTORS, Channel, Packet, close_all, read_packet, send_packet
from gpushare.mps.relay import take_back

# From a keeper's start, for a client that lives and is slow: as long as others wait for a turn.
PATIENCE_SECONDS: Final = 3.0

logger = logging.getLogger(__name__)


class HandoverCopies:
    """One GPU's copies. Without sockets that are inherited they end with this process.

    Args:
        into: the end to send to; None: a new pair.
        out: the other end.
    """

    def __init__(self, into: socket.socket | None = None, out: socket.socket | None = None) -> None:
        if into is None or out is None:
            into, out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.into, self.out = into, out
        for end in (into, out):
            end.setblocking(False)
        self._numbers = itertools.count()
        self._kept: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._fails = False

    def add(self, label: bytes, descriptors: Sequence[int]) -> int | None:
        """Keep copies of descriptors, which must stay open until they are removed; return a number for that.

        None: the kernel carries no more now, as where a tenant fills what root may have in flight.
        """
        kept = label, tuple(descriptors[:MAX_DESCRIPTORS])
        if not self._send(*kept):
            return None
        number = next(self._numbers)
        self._kept[number] = kept
        return number

    def remove(self, number: int | None) -> None:
        """Drop what was added under a number; None drops nothing."""
        if number is None or number not in self._kept:
            return
        waiting = len(self._kept)
        del self._kept[number]
        # The others are sent again before the old messages go: at no moment do they depend on this process alone.
        self._kept = {each: kept for each, kept in self._kept.items() if self._send(*kept)}
        for packet in self._received(waiting):
            close_all(packet.descriptors)

    def left(self) -> list[Packet]:
        """Take what a former keeper left, the oldest first; the caller closes the descriptors."""
        return [packet for packet in self._received(None) if packet.descriptors]

    def _received(self, most: int | None) -> list[Packet]:
        found: list[Packet] = []
        with contextlib.suppress(OSError):
            while most is None or len(found) < most:
                packet = read_packet(self.out, MAX_DESCRIPTORS)
                if not packet.data:  # the other end is closed
                    break
                found.append(packet)
        return found

    def _send(self, label: bytes, descriptors: tuple[int, ...]) -> bool:
        try:
            send_packet(self.into, label, descriptors)
        except OSError as error:
            if not self._fails:
                logger.warning("handovers in progress would not outlive this gate: %s", error)
            self._fails = True
            return False
        self._fails = False
        return True


async def finish_handovers(
    copies: HandoverCopies,
    answered: asyncio.Event,
    has_heard: Callable[[int, int], bool | None] = lambda *_: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Send the first messages that the server waits for since the former gate was killed.

    A client that lives may send its own, so this waits for an answer of the server first. Then it speaks for one
    after the other, the last one first, but for no living client that has spoken: it would be cut off. The server
    may be silent for another reason, so this goes on until it answers or all have been spoken for.

    Args:
        copies: has what the former keeper left.
        answered: set once the server has answered this keeper.
        has_heard: whether the server's log shows a connection of a pid after a position in bytes; None if unknown.
    """
    handovers = []
    for each in copies.left():  # added again, as this gate may be killed too
        first = socket.socket(fileno=each.descriptors[0])
        if each.data == DAEMON:
            take_back(Channel(first), copies)
        else:
            handovers.append(Handover(first, each.descriptors[1:], copies, Recipient.from_bytes(each.data)))
    try:
        await _speak_for_the_mute(handovers, answered, has_heard, patience_seconds)
    except asyncio.CancelledError:
        for handover in handovers:
            handover.leave()
        raise
    for handover in handovers:
        handover.close()


async def _speak_for_the_mute(
    handovers: Sequence[Handover],
    answered: asyncio.Event,
    has_heard: Callable[[int, int], bool | None],
    patience_seconds: float,
) -> None:
    while not all(each.has_spoken for each in handovers):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_seconds):
                await answered.wait()
        if answered.is_set():
            return
        mute = next((each for each in reversed(handovers) if _is_mute(each, has_heard)), None)
        if mute is not None:
            logger.warning("a client of the former gate says nothing to the MPS server: said in its place")
            mute.speak()
        patience_seconds = HEARD_SECONDS
    if handovers:
        await asyncio.sleep(HEARD_SECONDS)


def _is_mute(handover: Handover, has_heard: Callable[[int, int], bool | None]) -> bool:
    """Return whether the client has not sent its first message, as `Turn.mute` does for a gate's own handovers."""
    if handover.has_spoken or handover.is_unread:
        return False
    client = handover.recipient
    if client is None or not is_alive(client.pid, client.start_ticks):
        return True
    return has_heard(client.pid, client.log_bytes) is False
