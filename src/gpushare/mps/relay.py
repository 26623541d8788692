"""Relay of one client's connection to the daemon; only messages of the protocol pass.

Recorded on driver 580 (tests/data/mps/handshake-driver-580.txt): the daemon greets, the client sends its
credentials and its type, the daemon answers with one descriptor, the client sends four zero bytes and closes; or a
CUDA error in four bytes, if the server does not take it (docs/facts.md 12), which the daemon need not know. The
daemon runs as root and serves one connection at a time, so each message is read whole, compared, and written by us
again.
"""

import asyncio
import contextlib
import enum
import errno
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpushare.mps.errors import MpsError
from gpushare.mps.handover import DAEMON, HEARD_SECONDS, Copies, Handover
from gpushare.mps.packets import (
    ACKNOWLEDGED,
    COMPUTE_TYPE,
    CREDENTIALS,
    DESCRIPTOR,
    ERROR_BYTES,
    GREATEST_ERROR,
    HELLO,
    MAX_DESCRIPTORS,
    Channel,
    Packet,
    close_all,
)
from gpushare.mps.store import PASSING_ERRORS

ANSWER_SECONDS: Final = 12.0  # the daemon itself drops a silent connection after 10 s (docs/facts.md 14)
# A client answers the server's descriptor at once; a client that stalls blocks the daemon.
ACKNOWLEDGE_SECONDS: Final = 2.0
_LEAST_STARVED_SECONDS: Final = 0.05  # less waiting for a CPU does not explain a client's silence
LATE_SECONDS: Final = 120.0  # longest wait for a daemon's late answer

logger = logging.getLogger(__name__)
_taking_back: set[asyncio.Task[None]] = set()  # asyncio itself keeps no reference to tasks


class Passed(enum.Enum):
    """Outcome of a connection that was passed on."""

    SERVED = enum.auto()  # it has the server's descriptor, and confirmed it
    LEFT = enum.auto()  # it closed, or sent no message in time
    BROKE_PROTOCOL = enum.auto()  # it sent something unknown after its answer


@dataclass(frozen=True, slots=True)
class ServerRefusal:
    """Outcome of a connection that was passed on: by the client's answer, the server did not take it."""

    cuda_error: int


class NotDeliveredError(MpsError):
    """The kernel could not deliver the descriptor to the client now: hold the connection and retry."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the kernel does not carry the descriptor now: {error}", retryable=True)


async def relay(
    client: Channel,
    daemon: Path,
    patience_seconds: float = ACKNOWLEDGE_SECONDS,
    keep: Callable[[int], Awaitable[Handover | None]] | None = None,
    starved_seconds: Callable[[], float] = lambda: 0.0,
    *,
    copies: Copies | None = None,
) -> Passed | ServerRefusal:
    """Connect a client to the daemon. If this raises, the client has received nothing and can be held.

    Args:
        patience_seconds: how long the client may take for its message.
        keep: called with the server's descriptor before the client gets it; returns the copies to keep.
        starved_seconds: time for which the client had no CPU so far; it may take so much longer.
        copies: keeps one of the connection to the daemon until `keep` has the daemon's answer.

    Raises:
        MpsError: the daemon went away, did not answer in time, or answered something else.
        NotDeliveredError: the answer could not be handed to the client.
    """
    try:
        upstream = Channel.connect(daemon)
    except OSError as error:
        raise MpsError(f"cannot connect to the daemon: {error}", retryable=True) from None
    number = copies.add(DAEMON, [upstream.socket.fileno()]) if copies is not None else None
    try:
        answer = await _ask(upstream, copies)
        handover: Handover | None = None
        try:
            handover = await keep(answer.descriptors[0]) if keep is not None else None
            if copies is not None:
                copies.remove(number)  # the daemon notices when a client's connection closes
            await _deliver(client, answer)
        except OSError as error:
            if handover is not None:
                handover.speak()  # nobody else has a copy
            if error.errno in PASSING_ERRORS:
                raise NotDeliveredError(error) from None
            return Passed.LEFT
        finally:
            close_all(answer.descriptors)
        return await _acknowledge(client, upstream, patience_seconds, starved_seconds)
    finally:
        if copies is not None:
            copies.remove(number)
        upstream.close()


async def _ask(upstream: Channel, copies: Copies | None) -> Packet:
    """Return the daemon's answer to a compute client: one descriptor, which the caller closes."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            hello = await upstream.receive()
            if not hello.says(HELLO):
                raise MpsError(f"the daemon greets with {hello.data[:12].hex()!r}", retryable=True)
            await upstream.send(CREDENTIALS)
            await upstream.send(COMPUTE_TYPE)
            answer = await upstream.receive(MAX_DESCRIPTORS)
    except TimeoutError:
        take_back(Channel(upstream.socket.dup()), copies)
        raise MpsError("the daemon did not answer a client", retryable=True) from None
    except OSError as error:
        raise MpsError(f"the daemon broke off: {error}", retryable=True) from None
    if not answer.says(DESCRIPTOR, descriptors=1):
        close_all(answer.descriptors)
        what = f"answers {answer.data[:12].hex()!r}" if answer.data else "closed without an answer"
        raise MpsError(f"the daemon {what}", retryable=True)
    return answer


def take_back(late: Channel, copies: Copies | None = None) -> None:
    """Send the first message for a client whose answer came too late, as it is held again and the server waits.

    Args:
        late: the connection to the daemon; it is closed.
        copies: keeps one of it until then, for the next gate.
    """
    number = copies.add(DAEMON, [late.socket.fileno()]) if copies is not None else None

    async def take() -> None:
        descriptors: tuple[int, ...] = ()
        try:
            async with asyncio.timeout(LATE_SECONDS):
                descriptors = (await late.receive(MAX_DESCRIPTORS)).descriptors
            for handover in [await Handover.of(each, copies) for each in descriptors]:
                if handover is not None:
                    handover.speak()
                    await asyncio.sleep(HEARD_SECONDS)
                    handover.close()
        except (TimeoutError, OSError):
            logger.error("the daemon did not answer a client within %g s", LATE_SECONDS)
        finally:
            close_all(descriptors)
            late.close()
        if copies is not None:  # not if it is cancelled: the next gate goes on
            copies.remove(number)

    task = asyncio.get_running_loop().create_task(take())
    _taking_back.add(task)
    task.add_done_callback(_taking_back.discard)


async def _deliver(client: Channel, answer: Packet) -> None:
    try:
        async with asyncio.timeout(ACKNOWLEDGE_SECONDS):
            await client.send(DESCRIPTOR, answer.descriptors)
    except TimeoutError:
        raise BlockingIOError(errno.EAGAIN, "the client reads nothing") from None


async def _acknowledge(
    client: Channel, upstream: Channel, patience_seconds: float, starved_seconds: Callable[[], float]
) -> Passed | ServerRefusal:
    """Pass the client's one message on; anything else is dropped."""
    already = starved_seconds()
    reading = asyncio.ensure_future(client.receive())
    try:
        waits, added = patience_seconds, 0.0
        while not (await asyncio.wait({reading}, timeout=waits))[0]:
            waits = starved_seconds() - already - added
            if waits < _LEAST_STARVED_SECONDS:
                return Passed.LEFT
            added += waits
        word = reading.result()
    except OSError:
        return Passed.LEFT
    finally:
        reading.cancel()
    if not word.says(ACKNOWLEDGED):
        error = int.from_bytes(word.data, sys.byteorder)
        if word.is_whole and len(word.data) == ERROR_BYTES and error <= GREATEST_ERROR:
            return ServerRefusal(error)
        if word.data:
            logger.info("a client answered the server's descriptor with %s", word.data[:12].hex())
        return Passed.BROKE_PROTOCOL if word.data or not word.is_whole else Passed.LEFT
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(ACKNOWLEDGE_SECONDS):
            await upstream.send(ACKNOWLEDGED)
    return Passed.SERVED
