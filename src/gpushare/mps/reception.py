"""Reception of one GPU's connections: accept each at once, greet it at its pod's rate, hold it until its turn.

A closed connection lets a CUDA process run uncapped (docs/facts.md 15), so a connection that comes too fast is
held without the greeting that its process waits for. One epoll instance watches all connections; none has its own
task.
"""

import asyncio
import contextlib
import logging
import math
import resource
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from gpushare.mps.identity import peer_of, peer_pid
from gpushare.mps.packets import COMPUTE_TYPE, CONTROL_TYPE, CREDENTIALS, HELLO, Channel, read_packet
from gpushare.mps.room import Connection, ConnectionPhase, OpenConnections
from gpushare.mps.status import RefuseReason
from gpushare.mps.store import StoreClient

logger = logging.getLogger(__name__)

ACCEPTS_A_ROUND: Final = 64  # connections accepted in a row before other tasks run
EVENTS_A_ROUND: Final = 64
# After a full round: a flood costs part of one core, its connections wait in the kernel.
PAUSE_SECONDS: Final = 0.002
RETRY_SECONDS: Final = 0.1  # after a failed accept, and between checks of pods that exceed their rate
IDENTITY_SECONDS: Final = 1.0  # how long a pid's pod is cached for its rate; for ceilings it is always read again
MAX_IDENTITIES: Final = 8192
MAX_IDLE_BUCKETS: Final = 64
# A process start takes three connections; a pod that starts 16 processes at once stays within the burst.
CONNECTIONS_PER_SECOND: Final = 50.0
BURST: Final = 100.0
TOLD_AGAIN_SECONDS: Final = 60.0  # between two log lines of one kind that a pod can cause at will
DESCRIPTORS_KEPT_FREE: Final = 256
MAX_OPEN_PER_GPU: Final = 16384
MAX_OPEN_PER_POD: Final = 4096


_HEARD: Final = frozenset(
    {ConnectionPhase.GREETED, ConnectionPhase.INTRODUCED, ConnectionPhase.RESUMED, ConnectionPhase.SERVED}
)
_EXPECTED: Final = {
    ConnectionPhase.GREETED: (CREDENTIALS,),
    ConnectionPhase.INTRODUCED: (COMPUTE_TYPE, CONTROL_TYPE),
    ConnectionPhase.RESUMED: (CREDENTIALS, COMPUTE_TYPE),
}


@dataclass(frozen=True, slots=True)
class PodLimits:
    """Limits for one pod at the gate.

    Attributes:
        per_second: rate of connections that are greeted.
        burst: connections that are greeted at once.
        per_pod: open connections of a pod; beyond, it loses silent ones (gpushare.mps.room).
        per_gpu: open connections of all pods; beyond, the pod with the most loses silent ones.
    """

    per_second: float = CONNECTIONS_PER_SECOND
    burst: float = BURST
    per_pod: int = MAX_OPEN_PER_POD
    per_gpu: int = MAX_OPEN_PER_GPU

    @classmethod
    def of_process(cls) -> "PodLimits":
        """Return limits that fit this process's limit of descriptors."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        per_gpu = min(MAX_OPEN_PER_GPU, max(64, soft - DESCRIPTORS_KEPT_FREE))
        return cls(per_pod=min(MAX_OPEN_PER_POD, max(16, per_gpu // 4)), per_gpu=per_gpu)


@dataclass(slots=True)
class TokenBucket:
    """A rate limit: `burst` at once, then `per_second`."""

    tokens: float
    at: float

    def refill(self, now: float, limits: PodLimits) -> float:
        """Return the number of tokens at this time."""
        self.tokens = min(limits.burst, self.tokens + max(0.0, now - self.at) * limits.per_second)
        self.at = now
        return self.tokens

    def take(self, now: float, limits: PodLimits) -> bool:
        """Take a token; return False if none is left."""
        if self.refill(now, limits) < 1.0:
            return False
        self.tokens -= 1.0
        return True


@dataclass(slots=True)
class _Complaint:
    """A log line that is written at most once a minute."""

    next_at: float = -math.inf

    def is_due(self, now: float) -> bool:
        """Return whether it may be written now; if so it counts as written."""
        if now < self.next_at:
            return False
        self.next_at = now + TOLD_AGAIN_SECONDS
        return True


class Reception:
    """All open connections of one GPU's gate.

    Args:
        is_own: returns whether a pid is one of our own processes, which have no rate limit.
        on_ready: called with a connection that asked to become a client.
        on_gone: called with each connection that ended.
    """

    def __init__(
        self,
        store: StoreClient,
        *,
        identify: Callable[[int], str | None],
        clock: Callable[[], float],
        is_own: Callable[[int], bool],
        on_ready: Callable[[Connection], None],
        on_gone: Callable[[Connection], None],
        limits: PodLimits | None = None,
    ) -> None:
        self._store, self._identify, self._clock, self._is_own = store, identify, clock, is_own
        self._on_ready, self._on_gone = on_ready, on_gone
        self.limits = limits or PodLimits.of_process()
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        self._open = OpenConnections()
        self._unread: dict[str | None, dict[Connection, None]] = {}  # oldest first
        self._buckets: dict[str | None, TokenBucket] = {}
        self._pods: dict[int, tuple[str | None, float]] = {}
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accept_timer: asyncio.TimerHandle | None = None
        self._greet_timer: asyncio.TimerHandle | None = None
        self._accept_failed, self._too_many = _Complaint(), _Complaint()
        self._unknown_words: dict[str | None, _Complaint] = {}  # by pod
        self.refused: dict[RefuseReason, int] = dict.fromkeys(RefuseReason, 0)
        self.accepted = 0

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def open(self, listener: socket.socket) -> None:
        """Start accepting and listening; the caller keeps the listener."""
        listener.setblocking(False)
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._hear)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting and listening; open connections stay open, for a successor or until the process ends."""
        for timer in (self._accept_timer, self._greet_timer):
            if timer is not None:
                timer.cancel()
        if self._loop is not None and self._listener is not None:
            self._loop.remove_reader(self._epoll.fileno())
            with contextlib.suppress(ValueError, OSError):
                self._loop.remove_reader(self._listener.fileno())
        self._listener = None
        self._epoll.close()

    def held_unread(self) -> Iterator[Connection]:
        """Yield the oldest connection of each process whose connections came too fast."""
        for waiting in self._unread.values():
            seen: set[int] = set()
            for connection in waiting:
                if connection.pid not in seen:
                    seen.add(connection.pid)
                    yield connection

    @property
    def unread_count(self) -> int:
        """Return the number of connections that wait to be greeted."""
        return sum(map(len, self._unread.values()))

    def odd(self) -> Iterator[Connection]:
        """Yield connections whose handshake this gate does not know."""
        return (c for c in self._by_descriptor.values() if c.phase is ConnectionPhase.ODD)

    def pods(self) -> frozenset[str | None]:
        """Return the pods with an open connection."""
        return self._open.pods()

    # A turn

    def take(self, connection: Connection) -> None:
        """Mark a connection as in its turn; from now on the caller is responsible for it."""
        self._to(connection, ConnectionPhase.PASSING)

    def put_back(self, connection: Connection) -> None:
        """Let a connection wait as before its turn."""
        if connection.phase is ConnectionPhase.PASSING:
            self._to(connection, ConnectionPhase.READY)

    def served(self, connection: Connection) -> None:
        """Record that a connection has its answer and will close."""
        if connection.phase is ConnectionPhase.PASSING:
            self._to(connection, ConnectionPhase.SERVED)

    def refuse(self, connection: Connection, reason: RefuseReason) -> None:
        """End a connection and count it as refused."""
        self.refused[reason] += 1
        self.forget(connection)

    def forget(self, connection: Connection) -> None:
        """End a connection."""
        if connection.phase is ConnectionPhase.GONE:
            return
        descriptor = connection.channel.socket.fileno()
        if connection.phase is not ConnectionPhase.PASSING:
            # close() is not enough: the host's copy keeps the socket, and with it the epoll registration, alive.
            self._epoll.unregister(descriptor)
        if connection.phase is ConnectionPhase.UNREAD:
            self._unread.get(connection.pod_uid, {}).pop(connection, None)
        self._open.remove(connection)
        connection.phase = ConnectionPhase.GONE
        self._by_descriptor.pop(descriptor, None)
        self._store.drop(connection.number)
        connection.channel.close()
        self._on_gone(connection)

    # Coming in

    def adopt(self, restored: socket.socket, number: int, *, greeted: bool, spoken: bool) -> Connection:
        """Take over a connection that waited at the previous gate."""
        connection = self._enter(restored, number)
        if spoken or greeted:
            self._identify_anew(connection)
            self._to(connection, ConnectionPhase.READY if spoken else ConnectionPhase.RESUMED)
            if spoken:
                self._on_ready(connection)
        else:
            self._greet_or_hold(connection)
        return connection

    def _accept(self) -> None:
        listener = self._listener
        if listener is None:
            return
        for _ in range(ACCEPTS_A_ROUND):
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._accept_failed.is_due(self._clock()):
                    logger.error("cannot accept a connection, it waits in the kernel; trying again: %s", error)
                self._pause(RETRY_SECONDS)
                return
            self.accepted += 1
            if _is_closed(accepted):
                accepted.close()
                continue
            number = self._store.keep(accepted)  # first of all: what only this process has ends with it
            if len(self._by_descriptor) >= self.limits.per_gpu:
                self._lose_of_the_busiest()
            self._receive_new(accepted, number)
        self._pause(PAUSE_SECONDS)

    def _pause(self, seconds: float) -> None:
        if self._loop is None or self._listener is None:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._accept_timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._loop is not None and self._listener is not None and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _receive_new(self, accepted: socket.socket, number: int) -> None:
        connection = self._enter(accepted, number)
        # Two for one that came: so a pod that had too many when this gate began comes within its bound.
        for _ in range(min(2, self._open.of_pod(connection.pod_uid) - self.limits.per_pod)):
            self._lose(self._open.connection_to_close(connection.pod_uid))
        if connection.phase is not ConnectionPhase.GONE:
            self._greet_or_hold(connection)

    def _enter(self, accepted: socket.socket, number: int) -> Connection:
        now, pid = self._clock(), peer_pid(accepted)
        connection = Connection(Channel(accepted), pid, self._pod_of(pid, now), now, number=number)
        self._by_descriptor[accepted.fileno()] = connection
        self._open.add(connection)
        self._epoll.register(accepted.fileno(), select.EPOLLRDHUP)
        return connection

    def _greet_or_hold(self, connection: Connection) -> None:
        waiting = self._unread.get(connection.pod_uid)
        if self._is_own(connection.pid) or (not waiting and self._bucket(connection.pod_uid)):
            self._greet(connection)
            return
        self._unread.setdefault(connection.pod_uid, {})[connection] = None
        if self._greet_timer is None and self._loop is not None:
            self._greet_timer = self._loop.call_later(RETRY_SECONDS, self._greet_held)

    def _bucket(self, pod_uid: str | None) -> bool:
        now = self._clock()
        if len(self._buckets) > 2 * self._open.pod_count() + MAX_IDLE_BUCKETS:
            self._buckets = {
                p: b for p, b in self._buckets.items() if b.refill(now, self.limits) < self.limits.burst
            }
        bucket = self._buckets.setdefault(pod_uid, TokenBucket(self.limits.burst, now))
        return bucket.take(now, self.limits)

    def _greet_held(self) -> None:
        """Greet held connections, oldest first, as far as each pod's rate allows."""
        self._greet_timer = None
        for pod_uid, waiting in list(self._unread.items()):
            while waiting and self._bucket(pod_uid):
                connection = next(iter(waiting))
                del waiting[connection]
                self._greet(connection)
            if not waiting and self._unread.get(pod_uid) is waiting:
                del self._unread[pod_uid]
        if self._loop is not None and self._unread:
            self._greet_timer = self._loop.call_later(RETRY_SECONDS, self._greet_held)

    def _greet(self, connection: Connection) -> None:
        self._identify_anew(connection)
        with contextlib.suppress(OSError):  # epoll reports a peer that is gone
            connection.channel.socket.send(HELLO, socket.MSG_NOSIGNAL)
        self._store.greeted(connection.number)
        self._to(connection, ConnectionPhase.GREETED)

    def _identify_anew(self, connection: Connection) -> None:
        """Identify the process again without the cached pod, because its ceilings depend on it."""
        peer = peer_of(connection.channel.socket)
        connection.start_ticks = peer.start_ticks
        pod_uid = self._identify(peer.pid)
        if pod_uid != connection.pod_uid:
            self._open.remove(connection)
            connection.pod_uid = pod_uid
            self._open.add(connection)

    def _pod_of(self, pid: int, now: float) -> str | None:
        known = self._pods.get(pid)
        if known is not None and now < known[1]:
            return known[0]
        if len(self._pods) >= MAX_IDENTITIES:
            self._pods.clear()
        pod_uid = self._identify(pid)
        self._pods[pid] = (pod_uid, now + IDENTITY_SECONDS)
        return pod_uid

    # Listening

    def _to(self, connection: Connection, phase: ConnectionPhase) -> None:
        was_watched = connection.phase is not ConnectionPhase.PASSING
        self._open.set_phase(connection, phase)
        descriptor = connection.channel.socket.fileno()
        if phase is ConnectionPhase.PASSING:
            self._epoll.unregister(descriptor)
            return
        events = select.EPOLLRDHUP | (select.EPOLLIN if phase in _HEARD else 0)
        (self._epoll.modify if was_watched else self._epoll.register)(descriptor, events)

    def _hear(self) -> None:
        for descriptor, events in self._epoll.poll(0, EVENTS_A_ROUND):
            connection = self._by_descriptor.get(descriptor)
            if connection is None or connection.phase is ConnectionPhase.PASSING:
                continue
            if events & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
                self.forget(connection)
            else:
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            packet = read_packet(connection.channel.socket)
        except BlockingIOError:
            return
        except OSError:
            self.forget(connection)
            return
        if connection.phase is ConnectionPhase.SERVED:
            self.refuse(connection, RefuseReason.PROTOCOL)
        elif not packet.is_whole or packet.data not in _EXPECTED[connection.phase]:
            self._complain_of(connection, packet.data)
            self._to(connection, ConnectionPhase.ODD)
        elif packet.data == CREDENTIALS:
            self._to(connection, ConnectionPhase.INTRODUCED)
        elif packet.data == CONTROL_TYPE:
            self.refuse(connection, RefuseReason.CONTROL_COMMAND)
        else:
            self._store.spoken(connection.number)
            self._to(connection, ConnectionPhase.READY)
            self._on_ready(connection)

    def _complain_of(self, connection: Connection, data: bytes) -> None:
        """Log an unknown handshake, at most once a minute for a pod, which can speak it as often as it likes."""
        if len(self._unknown_words) > MAX_IDENTITIES:
            self._unknown_words.clear()
        if self._unknown_words.setdefault(connection.pod_uid, _Complaint()).is_due(self._clock()):
            logger.warning(
                "pid %d of pod %s speaks a handshake that this gate does not know, held: %s",
                connection.pid,
                connection.pod_uid,
                data[:12].hex(),
            )

    # Room

    def _lose_of_the_busiest(self) -> None:
        """End a connection of the pod with the most; only connections in their turn are never ended."""
        self._lose(next(filter(None, map(self._open.connection_to_close, self._open.busiest())), None))

    def _lose(self, connection: Connection | None) -> None:
        if connection is None:
            return
        if self._too_many.is_due(self._clock()):
            logger.warning(
                "pod %s has %d of the %d connections that are open: too many, so it loses silent ones"
                " (%d of all pods closed before)",
                connection.pod_uid,
                self._open.of_pod(connection.pod_uid),
                len(self._by_descriptor),
                self.refused[RefuseReason.TOO_MANY_CONNECTIONS],
            )
        self.refuse(connection, RefuseReason.TOO_MANY_CONNECTIONS)


def _is_closed(accepted: socket.socket) -> bool:
    """Return whether its process has already gone away, as in a loop of connect and close."""
    accepted.setblocking(False)
    try:
        return not accepted.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
