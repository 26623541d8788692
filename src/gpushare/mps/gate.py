"""The gate before one GPU's MPS daemon (docs/design.md 2.4, docs/facts.md 11 to 17).

Every CUDA process that shares the GPU connects here first. The gate knows its pod, waits for its decision, gives
one process at a time its turn with the server's ceilings set to that pod's, and passes its connections on. What it
cannot
serve it holds: a closed connection would let the process run uncapped (docs/facts.md 15).
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.api.names import MAX_CLIENTS_PER_GPU
from gpushare.core.api.request import JobClass
from gpushare.mps import commands
from gpushare.mps.control import AsyncMpsControl
from gpushare.mps.errors import CommandRefusedError, MpsError
from gpushare.mps.grants import grant_mib, known_mib, to_end
from gpushare.mps.identity import Peer, is_alive, peer_of, pod_uid_of
from gpushare.mps.ledger import Admission, Ledger
from gpushare.mps.packets import COMPUTE_TYPE, CONTROL_TYPE, CREDENTIALS, HELLO, Channel, close_all
from gpushare.mps.policy import Policy
from gpushare.mps.status import HeldStatus, HoldReason, MpsState, RefuseReason, TurnStatistics
from gpushare.mps.store import StoreClient

logger = logging.getLogger(__name__)

TURN_SECONDS: Final = 8.0  # without a step forward; a start takes 0.13 to 0.25 s (docs/facts.md 13)
MAX_TURN_SECONDS: Final = 24.0  # with steps: three connections, each as slow as a turn may be
RELAY_SECONDS: Final = 12.0  # the daemon itself gives up a silent connection after 10 s (docs/facts.md 14)
ACKNOWLEDGE_SECONDS: Final = (
    2.0  # a client answers the server's descriptor at once; one that stalls blocks the daemon
)
MAX_CONNECTIONS_PER_POD: Final = 64  # more than the 48 clients that a GPU can have at all
BACK_OFF_SECONDS: Final = 1.0  # after a pod's turn that led nowhere, doubled each time
MAX_BACK_OFF_SECONDS: Final = 60.0
TICK_SECONDS: Final = 0.1  # how often held connections are looked at again


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted socket; `spoken` once it asked for a compute client's place."""

    channel: Channel
    peer: Peer
    pod_uid: str | None
    opened_at: float
    number: int = 0
    spoken: bool = False
    is_odd: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Conduct:
    """How a pod's turns went lately, so that one that wastes turns waits behind the others."""

    served_at: float = 0.0
    wasted: int = 0
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class Backend:
    """The daemon as its keeper sees it; connections pass while `state` is ACTIVE (SELF_TEST: the probe's)."""

    state: MpsState = MpsState.STARTING
    server_pid: int | None = None


class Gate:
    """Accepts, holds and passes on the connections of one GPU's tenants."""

    def __init__(
        self,
        control: AsyncMpsControl,
        policy: Policy,
        ledger: Ledger,
        *,
        on_trouble: Callable[[MpsError], None],
        store: StoreClient | None = None,
        identify: Callable[[int], str | None] = pod_uid_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control, self._policy, self._ledger = control, policy, ledger
        self._on_trouble, self._identify, self._clock = on_trouble, identify, clock
        self._store = store or StoreClient()
        self.backend = Backend()
        self._connections: set[Connection] = set()
        self._waiting: dict[int, list[Connection]] = {}
        self._conduct: dict[str | None, _Conduct] = {}
        self._current: int | None = None
        self._wake = asyncio.Event()
        self._priority: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused: dict[RefuseReason, int] = dict.fromkeys(RefuseReason, 0)
        self.turns = TurnStatistics()

    async def serve(self, listener: socket.socket) -> None:
        """Accept and arbitrate until cancelled; the listener stays open, so that a successor goes on with it."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        for number, restored, spoken in self._store.restore():
            self.adopt(restored, number, spoken=spoken)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._arbitrate())
                while True:
                    try:
                        accepted, _ = await loop.sock_accept(listener)
                    except OSError as error:
                        logger.error("cannot accept a connection, trying again: %s", error)
                        await asyncio.sleep(TICK_SECONDS)
                        continue
                    self.adopt(accepted)
        finally:
            for task in self._tasks:
                task.cancel()

    def adopt(self, accepted: socket.socket, number: int | None = None, *, spoken: bool = False) -> Connection:
        """Take a connection in: a new one, or by its number one that waited at the gate before this one."""
        peer = peer_of(accepted)
        pod_uid = self._identify(peer.pid)
        connection = Connection(Channel(accepted), peer, pod_uid, self._clock(), spoken=spoken)
        self._make_room(pod_uid)
        self._connections.add(connection)
        if number is None:
            with contextlib.suppress(OSError):
                accepted.send(HELLO, socket.MSG_NOSIGNAL)
            number = self._store.keep(accepted)
        connection.number = number
        task = asyncio.get_running_loop().create_task(self._listen(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return connection

    def set_backend(self, backend: Backend) -> None:
        """The keeper's news of the daemon; what waits is looked at again."""
        if backend.server_pid != self.backend.server_pid:
            self._priority = None
        self.backend = backend
        self._wake.set()

    def held(self) -> tuple[HeldStatus, ...]:
        """Processes whose connections wait, with why; Unix times."""
        now, unix = self._clock(), time.time()
        held = [
            HeldStatus(pid, waiting[0].pod_uid, self._why_held(pid, now) or HoldReason.TURN,
                       unix - (now - waiting[0].opened_at))
            for pid, waiting in self._waiting.items()
            if pid != self._current
        ]  # fmt: skip
        held += [
            HeldStatus(c.peer.pid, c.pod_uid, HoldReason.PROTOCOL, unix - (now - c.opened_at))
            for c in self._connections
            if c.is_odd
        ]
        return tuple(held)

    @property
    def current_pid(self) -> int | None:
        """The process whose turn it is now."""
        return self._current

    @property
    def connection_count(self) -> int:
        """Open sockets, silent ones included."""
        return len(self._connections)

    def _make_room(self, pod_uid: str | None) -> None:
        """Bound what one pod may hold open: the process with the most connections loses its oldest silent one.

        A CUDA process has one connection at a time and speaks at once, so it is never the one that loses.
        """
        own = [c for c in self._connections if c.pod_uid == pod_uid]
        if len(own) < MAX_CONNECTIONS_PER_POD:
            return
        count: dict[int, int] = {}
        for connection in own:
            count[connection.peer.pid] = count.get(connection.peer.pid, 0) + 1
        victim = min(own, key=lambda c: (-count[c.peer.pid], c.spoken, c.opened_at))
        self.refused[RefuseReason.TOO_MANY_CONNECTIONS] += 1
        self._forget(victim)

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if waiting := self._waiting.get(connection.peer.pid):
            with contextlib.suppress(ValueError):
                waiting.remove(connection)
            if not waiting:
                del self._waiting[connection.peer.pid]
        self._store.drop(connection.number)
        connection.channel.close()
        connection.ended.set()

    async def _listen(self, connection: Connection) -> None:
        """Wait for the first words after the greeting; only who asks for a client's place waits for a turn."""
        channel = connection.channel
        try:
            for expected in () if connection.spoken else (CREDENTIALS, COMPUTE_TYPE):
                data, descriptors = await channel.receive()
                close_all(descriptors)
                if data == COMPUTE_TYPE:
                    break  # the credentials went to the gate before this one
                if not data:
                    self._forget(connection)
                    return
                if data == CONTROL_TYPE and expected == COMPUTE_TYPE:
                    self.refused[RefuseReason.CONTROL_COMMAND] += 1
                    self._forget(connection)
                    return
                if data != expected:
                    logger.warning("pid %d of pod %s speaks a handshake that this gate does not know, held: %s",
                                   connection.peer.pid, connection.pod_uid, data[:12].hex())  # fmt: skip
                    connection.is_odd = True
                    await self._until_closed(connection)
                    return
            connection.spoken = True
            self._store.spoken(connection.number)
            self._waiting.setdefault(connection.peer.pid, []).append(connection)
            self._wake.set()
        except OSError:
            self._forget(connection)

    async def _until_closed(self, connection: Connection) -> None:
        while True:
            data, descriptors = await connection.channel.receive()
            close_all(descriptors)
            if not data:
                self._forget(connection)
                return

    # Turns

    async def _arbitrate(self) -> None:
        while True:
            self._wake.clear()
            self._drop_the_dead()
            pid = self._next()
            if pid is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS if self._waiting else None):
                        await self._wake.wait()
                continue
            self._current = pid
            trouble: MpsError | None = None
            try:
                await self._turn(pid)
            except MpsError as error:
                trouble = error
            finally:
                self._current = None
            if trouble is not None:
                logger.warning("turn of pid %d broke off, it waits on: %s", pid, trouble)
                self._on_trouble(trouble)
                await asyncio.sleep(TICK_SECONDS)

    def _drop_the_dead(self) -> None:
        for pid, waiting in list(self._waiting.items()):
            if not is_alive(pid, waiting[0].peer.start_ticks):
                for connection in list(waiting):
                    self._forget(connection)

    def _next(self) -> int | None:
        """The process whose turn it is: of the pod that wasted least and was served longest ago."""
        now = self._clock()
        ready = [pid for pid in self._waiting if self._why_held(pid, now) is None]

        def rank(pid: int) -> tuple[int, float, float]:
            first = self._waiting[pid][0]
            conduct = self._conduct.get(first.pod_uid, _Conduct())
            return conduct.wasted, conduct.served_at, first.opened_at

        return min(ready, key=rank, default=None)

    def _why_held(self, pid: int, now: float) -> HoldReason | None:
        connection = self._waiting[pid][0]
        state = self.backend.state
        if self._policy.is_probe(pid):
            return None if state in {MpsState.ACTIVE, MpsState.SELF_TEST} else HoldReason.DAEMON_DOWN
        if connection.pod_uid is None:
            return HoldReason.UNKNOWN_POD
        decision, reason = self._policy.decide(connection.pod_uid)
        if decision is None:
            return reason
        if state is not MpsState.ACTIVE or self.backend.server_pid is None:
            if state is MpsState.FAULT:
                return HoldReason.FAULT
            return HoldReason.SELF_TEST if state is MpsState.SELF_TEST else HoldReason.DAEMON_DOWN
        if not self._ledger.is_client(pid) and self._ledger.client_count >= MAX_CLIENTS_PER_GPU:
            return HoldReason.CLIENTS
        if now < self._conduct.get(connection.pod_uid, _Conduct()).not_before:
            return HoldReason.BACK_OFF
        if grant_mib(decision.memory_mib, self._ledger.siblings(connection.pod_uid, pid), now) is None:
            return HoldReason.MEMORY_SETTLING
        return None

    async def _turn(self, pid: int) -> None:
        """One process's turn: ceilings first, then its connections, until the server lists it."""
        first = self._waiting[pid][0]
        server_pid = self.backend.server_pid
        if server_pid is None:
            raise MpsError("no server", retryable=True)
        pod_uid, started = first.pod_uid, self._clock()
        ceiling = self._policy.ceiling(pid, pod_uid)
        if ceiling is None:
            return
        self._ledger.observe_memory(started)
        siblings = () if self._policy.is_probe(pid) else self._ledger.siblings(pod_uid, pid)
        granted = grant_mib(ceiling.memory_mib, siblings, started)
        if granted is None:
            return
        await self._set_priority(0 if ceiling.job_class is JobClass.LATENCY else 1)
        await self._control.apply(
            [
                commands.set_active_thread_percentage(server_pid, ceiling.thread_percentage),
                commands.set_device_pinned_mem_limit(server_pid, 0, granted),
            ]
        )
        self._ledger.admit(
            Admission(
                pid,
                first.peer.start_ticks,
                pod_uid,
                ceiling.thread_percentage,
                granted,
                ceiling.memory_mib,
                started,
            )
        )
        is_client = await self._pass_on(pid, server_pid, started)
        ended = self._clock()
        self._ledger.end_turn(pid, is_client=is_client)
        self._note_turn(pod_uid, first.opened_at, started, ended, is_good=is_client or not is_alive(pid))
        logger.info(
            "passed on pid %d of pod %s: %d%% threads, %d of %d MiB, %s after %.3f s (waited %.3f s)",
            pid, pod_uid, ceiling.thread_percentage, granted, ceiling.memory_mib,
            "client" if is_client else "not a client", ended - started, started - first.opened_at,
        )  # fmt: skip

    async def _set_priority(self, priority: int) -> None:
        """Latency clients before the others: a help, not a limit (facts.md 18): a driver without it is fine."""
        if priority == self._priority:
            return
        try:
            await self._control.run(commands.set_default_client_priority(priority))
        except CommandRefusedError as error:
            logger.warning("this driver has no client priorities, going on without: %s", error)
        self._priority = priority

    async def _list(self, server_pid: int) -> tuple[int, ...]:
        return await self._control.run(commands.client_list(server_pid))

    async def _pass_on(self, pid: int, server_pid: int, started: float) -> bool:
        """Pass the process's connections on as they come; True once the server lists it."""
        passed, pause, step = False, 0.005, self._clock()
        while self._clock() < min(step + TURN_SECONDS, started + MAX_TURN_SECONDS):
            self._wake.clear()
            if waiting := self._waiting.get(pid):
                passed = await self._relay(waiting[0]) or passed
                pause, step = 0.005, self._clock()
            if (
                passed
                and not self._waiting.get(pid)
                and pid in self._ledger.note_clients(await self._list(server_pid), pid)
            ):
                return True
            if not is_alive(pid):
                return False
            if not self._waiting.get(pid):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                pause = min(0.1, pause * 1.5)
        return False

    async def _relay(self, connection: Connection) -> bool:
        """Connect one connection through; True if the server's descriptor was passed.

        Raises:
            MpsError: the daemon went away before it answered; the connection is kept for another try.
        """
        answered = False
        try:
            upstream = Channel.connect(self._control.program.socket)
        except OSError as error:
            raise MpsError(f"cannot connect to the daemon: {error}", retryable=True) from None
        try:
            async with asyncio.timeout(RELAY_SECONDS):
                hello, descriptors = await upstream.receive()
                close_all(descriptors)
                if hello != HELLO:
                    raise MpsError(f"the daemon greets with {hello[:12].hex()!r}", retryable=True)
                await upstream.send(CREDENTIALS)
                await upstream.send(COMPUTE_TYPE)
                data, descriptors = await upstream.receive()
                if not data:
                    raise MpsError("the daemon closed without an answer", retryable=True)
                answered = True
                self._store.drop(connection.number)
                try:
                    await connection.channel.send(data, descriptors)
                finally:
                    close_all(descriptors)
                await self._pump(connection.channel, upstream)
            return bool(descriptors)
        except TimeoutError:
            if not answered:
                raise MpsError("the daemon did not answer a client", retryable=True) from None
            return True
        except OSError as error:
            if not answered:
                raise MpsError(f"the daemon broke off: {error}", retryable=True) from None
            return True
        finally:
            upstream.close()
            if answered:
                self._forget(connection)

    async def _pump(self, client: Channel, upstream: Channel) -> None:
        """Carry packets both ways until either side closes; the client has to speak first, and soon."""
        async with asyncio.timeout(ACKNOWLEDGE_SECONDS):
            data, descriptors = await client.receive()
        if not data:
            return
        try:
            await upstream.send(data, descriptors)
        finally:
            close_all(descriptors)

        async def carry(source: Channel, target: Channel) -> None:
            while True:
                data, descriptors = await source.receive()
                try:
                    if not data:
                        return
                    await target.send(data, descriptors)
                finally:
                    close_all(descriptors)

        tasks = [asyncio.create_task(carry(client, upstream)), asyncio.create_task(carry(upstream, client))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note_turn(
        self, pod_uid: str | None, asked: float, started: float, ended: float, *, is_good: bool
    ) -> None:
        conduct = self._conduct.setdefault(pod_uid, _Conduct())
        conduct.served_at = ended
        if is_good:
            conduct.wasted, conduct.not_before = 0, 0.0
        else:
            conduct.wasted += 1
            conduct.not_before = ended + min(
                MAX_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2 ** min(conduct.wasted - 1, 10)
            )
        t = self.turns
        self.turns = TurnStatistics(
            t.count + 1,
            t.timeouts + (not is_good),
            t.waits_seconds_sum + max(0.0, started - asked),
            t.durations_seconds_sum + (ended - started),
            max(t.duration_seconds_max, ended - started),
        )

    async def end_overruns(self) -> None:
        """End the newest processes of pods that passed their limit (gpushare.mps.grants)."""
        server_pid = self.backend.server_pid
        if server_pid is None:
            return
        for pod_uid, limit_mib, processes in self._ledger.pods():
            for pid in to_end(limit_mib, processes):
                self._ledger.note_overrun(pod_uid, pid, known_mib(processes), limit_mib)
                with contextlib.suppress(MpsError):
                    await self._control.run(commands.terminate_client(server_pid, pid))
