"""The gate in front of one GPU's MPS daemon (docs/design.md 2.4, docs/facts.md 11 to 17).

Every CUDA process that shares the GPU connects here first. The gate finds its pod, waits for the pod's decision,
gives one process at a time its turn with the server's ceilings set to that pod's, and passes its connections on.
Connections that it cannot serve yet are held, because a closed connection would let the process run uncapped
(docs/facts.md 15).
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import JobClass
from gpushare.mps import commands
from gpushare.mps.control import AsyncMpsControl
from gpushare.mps.ending import LEAVING_DRAIN_SECONDS, Endings, EndingStep
from gpushare.mps.errors import CommandRefusedError, MpsError
from gpushare.mps.grants import grant_mib, grant_percentage, known_mib, to_end
from gpushare.mps.handover import HEARD_SECONDS, Copies, Handover, Recipient
from gpushare.mps.holding import Holds
from gpushare.mps.identity import ends_with, is_alive, is_namespace_init, pod_uid_of
from gpushare.mps.ledger import Admission, ClientLedger
from gpushare.mps.policy import CeilingPolicy
from gpushare.mps.reception import PodLimits, Reception
from gpushare.mps.relay import ACKNOWLEDGE_SECONDS, Passed, ServerRefusal, relay
from gpushare.mps.room import Connection, ConnectionPhase
from gpushare.mps.starvation import run_delays
from gpushare.mps.status import GateState, HeldStatus, HoldReason, RefuseReason, TurnStatistics
from gpushare.mps.store import Restored, StoreClient
from gpushare.mps.turns import LEAST_TURN_SECONDS, ProcessKey, Turn, TurnAccounts
from gpushare.runtime.tasks import without_end

logger = logging.getLogger(__name__)

TURN_SECONDS: Final = 8.0  # longest turn without progress; a start takes 0.13 to 0.25 s (docs/facts.md 13)
MAX_TURN_SECONDS: Final = 24.0  # longest turn with progress: three connections, each as slow as a turn may be
# A server that waits for a client's first message answers nobody (gpushare.mps.handover). Meanwhile the client is
# checked every LISTING_SECONDS. If it has died, or its turn is over and the server has been silent for
# MUTE_SECONDS, its message is sent in its place.
LISTING_SECONDS: Final = 0.1
MUTE_SECONDS: Final = 1.0
FROZEN_LOOK_SECONDS: Final = 0.02  # how often it is checked whether we have frozen the pod whose turn it is
TICK_SECONDS: Final = 0.1  # how often held connections are checked again
TEND_SECONDS: Final = 1.0  # interval at which records of processes and pods that are gone are dropped
SHOWN_OF_A_POD: Final = 64  # held processes of a pod in the status; readers refuse a file of more than 4 MiB
SHOWN_HELD: Final = 1024


@dataclass(frozen=True, slots=True)
class Backend:
    """The daemon as its keeper reports it; connections pass in state ACTIVE (in SELF_TEST only the probe's)."""

    state: GateState = GateState.STARTING
    server_pid: int | None = None


class Gate:
    """Gate of one GPU: it holds tenants' connections and passes them on."""

    def __init__(
        self,
        control: AsyncMpsControl,
        policy: CeilingPolicy,
        ledger: ClientLedger,
        *,
        on_trouble: Callable[[MpsError], None],
        store: StoreClient | None = None,
        identify: Callable[[int], str | None] = pod_uid_of,
        clock: Callable[[], float] = time.monotonic,
        limits: PodLimits | None = None,
        endings: Endings | None = None,
        has_fault: Callable[[], bool] = lambda: False,
        copies: Copies | None = None,
    ) -> None:
        self._has_fault, self._copies = has_fault, copies
        self._control, self._policy, self._ledger = control, policy, ledger
        self._endings = endings or Endings()
        self._unstoppable: dict[int, int | None] = {}  # clients for which this was logged
        self._on_trouble, self._clock = on_trouble, clock
        self.store, self.backend = store or StoreClient(), Backend()
        self.reception = Reception(
            self.store,
            identify=identify,
            clock=clock,
            is_own=policy.is_probe,
            on_ready=self._on_ready,
            on_gone=self._on_gone,
            limits=limits,
        )
        self._waiting: dict[ProcessKey, list[Connection]] = {}
        self._accounts, self._wake = TurnAccounts(), asyncio.Event()
        self._current: Turn | None = None
        self._is_between_turns = asyncio.Event()
        self._is_between_turns.set()
        self._priority: int | None = None
        self.turns = TurnStatistics()

    async def serve(self, listener: socket.socket) -> None:
        """Accept and arbitrate until cancelled; the listener stays open, so that a successor can use it."""
        restored = await asyncio.to_thread(self.store.restore)
        self.reception.open(listener)
        try:
            self._adopt(restored)
            async with asyncio.TaskGroup() as group:
                group.create_task(without_end("tending connections", self._tend()))
                group.create_task(without_end("giving turns", self._arbitrate()))
        finally:
            self.reception.close()

    def _adopt(self, restored: Iterable[Restored]) -> None:
        for each in restored:
            self.reception.adopt(each.connection, each.number, greeted=each.greeted, spoken=each.spoken)

    def set_backend(self, backend: Backend) -> None:
        """Record the daemon's state from the keeper, and check waiting connections again."""
        if backend.server_pid != self.backend.server_pid:
            self._priority = None
        self.backend = backend
        self._wake.set()

    def held(self) -> tuple[HeldStatus, ...]:
        """Return the processes whose connections wait, with reasons and Unix times; only the first of many."""
        now, unix = self._clock(), time.time()
        holds = self._holds(now)
        shown: dict[str | None, int] = {}
        listed: list[HeldStatus] = []

        def show(connection: Connection, reason: HoldReason) -> None:
            shown[connection.pod_uid] = shown.get(connection.pod_uid, 0) + 1
            if shown[connection.pod_uid] <= SHOWN_OF_A_POD and len(listed) < SHOWN_HELD:
                since = unix - (now - connection.opened_at)
                listed.append(HeldStatus(connection.pid, connection.pod_uid, reason, since))

        for process, waiting in self._waiting.items():
            if self._current is None or process != self._current.process:
                show(waiting[0], holds.why(waiting[0]) or HoldReason.TURN)
        for connection in self.reception.odd():
            show(connection, HoldReason.PROTOCOL)
        for connection in self.reception.held_unread():
            show(connection, HoldReason.RATE)
        return tuple(listed)

    @property
    def current_pid(self) -> int | None:
        """Return the process whose turn it is now."""
        return self._current.process[0] if self._current is not None else None

    async def turn_ends(self, timeout_seconds: float) -> None:
        """Wait until the turn in progress is over, if there is one, or until the time is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._is_between_turns.wait()

    @property
    def connection_count(self) -> int:
        """Return the number of open sockets, silent ones included."""
        return len(self.reception)

    @property
    def refused(self) -> dict[RefuseReason, int]:
        """Return how many connections were closed, by reason."""
        return self.reception.refused

    def _on_ready(self, connection: Connection) -> None:
        self._waiting.setdefault(connection.process, []).append(connection)
        self._wake.set()

    def _on_gone(self, connection: Connection) -> None:
        waiting = self._waiting.get(connection.process, [])
        if connection in waiting:
            waiting.remove(connection)
            if not waiting:
                del self._waiting[connection.process]

    def _take(self, process: ProcessKey) -> Connection | None:
        """Return the process's oldest waiting connection; the caller is responsible for it from now on."""
        waiting = self._waiting.get(process)
        if not waiting:
            return None
        connection = waiting.pop(0)
        if not waiting:
            del self._waiting[process]
        self.reception.take(connection)
        return connection

    def _put_back(self, connection: Connection) -> None:
        if connection.phase is ConnectionPhase.PASSING:
            self.reception.put_back(connection)
            self._waiting.setdefault(connection.process, []).insert(0, connection)

    # Turns

    async def _tend(self) -> None:
        """Do regular housekeeping: the host's copies, clients to end, and processes and pods that are gone."""
        last = self._clock()
        while True:
            self._adopt(self.store.flush())
            await self.end_leaving()
            if (now := self._clock()) - last >= TEND_SECONDS:
                last = now
                self._drop_the_dead()
                self._accounts.forget_idle(self.reception.pods(), now)
            await asyncio.sleep(TICK_SECONDS)

    async def _arbitrate(self) -> None:
        while True:
            self._wake.clear()
            process = self._next()
            if process is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS if self._waiting else None):
                        await self._wake.wait()
                continue
            trouble: MpsError | None = None
            self._is_between_turns.clear()
            try:
                await self._turn(process)
            except MpsError as error:
                trouble = error
            finally:
                self._current = None
                self._is_between_turns.set()
            if trouble is not None:
                logger.warning("turn of pid %d broke off, it waits on: %s", process[0], trouble)
                self._on_trouble(trouble)
                await asyncio.sleep(TICK_SECONDS)

    def _drop_the_dead(self) -> None:
        for (pid, start_ticks), waiting in list(self._waiting.items()):
            if not is_alive(pid, start_ticks):
                for connection in list(waiting):
                    self.reception.forget(connection)

    def _holds(self, now: float) -> Holds:
        return Holds(
            state=self.backend.state,
            server_pid=self.backend.server_pid,
            policy=self._policy,
            ledger=self._ledger,
            accounts=self._accounts,
            now=now,
        )

    def _next(self) -> ProcessKey | None:
        """Return the process with the next turn: of the pod that paid least for its turns, less its waiting."""
        now = self._clock()
        holds = self._holds(now)
        best: tuple[float, float] | None = None
        chosen: ProcessKey | None = None
        for process, waiting in self._waiting.items():
            first = waiting[0]
            rank = (self._accounts.rank(first.pod_uid, now - first.opened_at, now), first.opened_at)
            if (best is None or rank < best) and holds.why(first) is None:
                best, chosen = rank, process
        return chosen

    def _others_wait(self, turn: Turn) -> bool:
        """Return whether a process of another pod could have the turn now."""
        holds = self._holds(self._clock())
        return any(
            waiting[0].pod_uid != turn.pod_uid and holds.why(waiting[0]) is None
            for waiting in self._waiting.values()
        )

    async def _turn(self, process: ProcessKey) -> None:
        """Give one process its turn: set the ceilings, then pass its connections on until the server lists it."""
        first = self._waiting[process][0]
        pid, pod_uid, started = first.pid, first.pod_uid, self._clock()
        server_pid = self.backend.server_pid
        if server_pid is None:
            raise MpsError("no server", retryable=True)
        ceiling = self._policy.ceiling(pid, pod_uid)
        if ceiling is None:
            return
        turn = self._current = Turn(process, pod_uid, started, server_pid=server_pid)
        await self._ledger.watch_memory()
        siblings = () if self._policy.is_probe(pid) else self._ledger.siblings(pod_uid, pid)
        granted = grant_mib(ceiling.memory_mib, siblings, self._clock())
        others = () if self._policy.is_probe(pid) else self._ledger.percentages(pod_uid, pid)
        percentage = grant_percentage(ceiling.thread_percentage, ceiling.processes, others)
        if granted is None or percentage is None:
            return
        try:
            await self._set_priority(0 if ceiling.job_class is JobClass.LATENCY else 1)
            await self._control.apply(
                [
                    commands.set_active_thread_percentage(server_pid, percentage),
                    commands.set_device_pinned_mem_limit(server_pid, 0, granted),
                ]
            )
            self._ledger.admit(
                Admission(
                    pid,
                    first.start_ticks,
                    pod_uid,
                    percentage,
                    granted,
                    ceiling.memory_mib,
                    self._clock(),
                )
            )
            try:
                turn.listed = await self._pass_on(turn, server_pid)
            finally:
                self._ledger.end_turn(pid, is_client=turn.listed)
        except CommandRefusedError:
            self._accounts.note_refusal(pod_uid, turn.charged_seconds(self._clock()), self._clock())
            raise
        except MpsError:
            self._accounts.note_broken_off(pod_uid, turn.charged_seconds(self._clock()), self._clock())
            raise
        self._note_turn(turn, first.opened_at)
        logger.info(
            "passed on pid %d of pod %s: %d of %d%% threads, %d of %d MiB, %s after %.3f s (waited %.3f s)",
            pid,
            pod_uid,
            percentage,
            ceiling.thread_percentage,
            granted,
            ceiling.memory_mib,
            "client" if turn.listed else "not a client",
            self._clock() - started,
            started - first.opened_at,
        )

    async def _set_priority(self, priority: int) -> None:
        """Give latency clients priority; best effort (docs/facts.md 18), so a driver without it is accepted."""
        if priority == self._priority:
            return
        try:
            await self._control.run(commands.set_default_client_priority(priority))
        except CommandRefusedError as error:
            logger.warning("this driver has no client priorities, going on without: %s", error)
        self._priority = priority

    async def _is_listed(self, turn: Turn, server_pid: int) -> bool:
        """Return whether the server lists the process.

        The server answers only after it has received the first message of every client that it waits for. If this
        client has ended or its turn is over, the message is sent in its place.
        """
        pid, asked_at = turn.process[0], self._clock()
        listing = asyncio.ensure_future(self._control.run(commands.client_list(server_pid)))
        try:
            while not (await asyncio.wait({listing}, timeout=LISTING_SECONDS))[0]:
                is_late = self._clock() - asked_at > MUTE_SECONDS and self._is_over(turn)
                if is_late or not is_alive(*turn.process):
                    self._speak_for(turn)
            listed = listing.result()
        finally:
            if not listing.done():
                listing.cancel()
                with contextlib.suppress(asyncio.CancelledError, MpsError):
                    await listing
        turn.settle()
        turn.heard_before = self._ledger.heard(pid)
        return pid in self._ledger.note_clients(listed, pid, asked_at)

    def _is_over(self, turn: Turn) -> bool:
        """Return whether a turn has lasted as long as it may."""
        now = self._clock()
        if now >= min(turn.step_at + TURN_SECONDS, turn.started + MAX_TURN_SECONDS):
            return True
        return self._is_spent(turn) and self._others_wait(turn)

    async def _pass_on(self, turn: Turn, server_pid: int) -> bool:
        """Pass the process's connections on as they come; return True once the server lists it."""
        watching = (
            asyncio.create_task(self._count_frozen(turn, turn.pod_uid)) if turn.pod_uid is not None else None
        )
        try:
            return await self._pass_on_until_listed(turn, server_pid)
        finally:
            if watching is not None:
                watching.cancel()
            if turn.handovers:  # the daemon did not answer, so it is unknown which messages the server received
                asyncio.get_running_loop().call_later(MUTE_SECONDS, self._give_up, turn)

    async def _count_frozen(self, turn: Turn, pod_uid: str) -> None:
        """Count the time for which we keep a turn's pod frozen, until cancelled."""
        looked_at = self._clock()
        while True:
            is_frozen = self._policy.is_frozen(pod_uid)
            await asyncio.sleep(FROZEN_LOOK_SECONDS)
            now = self._clock()
            turn.frozen_seconds += now - looked_at if is_frozen else 0.0
            looked_at = now

    def _give_up(self, turn: Turn) -> None:
        """Send missing first messages of a client whose turn broke off, and later close the copies."""
        self._speak_for(turn)
        asyncio.get_running_loop().call_later(HEARD_SECONDS, turn.settle)

    def _speak_for(self, turn: Turn) -> None:
        """Send the first message of a client that does not send it, so that the server continues."""
        if mute := turn.mute(self._ledger.heard(turn.process[0])):
            logger.warning(
                "pid %d of pod %s says nothing to the MPS server, or has ended: said in its place",
                turn.process[0],
                turn.pod_uid,
            )
        for each in mute:
            each.speak()

    async def _pass_on_until_listed(self, turn: Turn, server_pid: int) -> bool:
        passed, pause = False, 0.005
        turn.waits_since = turn.step_at = self._clock()
        turn.delays = run_delays(turn.process[0])
        turn.heard_before = self._ledger.heard(turn.process[0])
        contexts_before = self._ledger.contexts_of(turn.process[0])
        while self._clock() < min(turn.step_at + TURN_SECONDS, turn.started + MAX_TURN_SECONDS):
            self._wake.clear()
            # A context that it has made is counted before another one may follow.
            has_context = self._ledger.contexts_of(turn.process[0]) > contexts_before
            connection = None if has_context else self._take(turn.process)
            if connection is not None:
                await self._relay(connection, turn)
                passed, pause, turn.step_at = True, 0.005, self._clock()
            # Ask after each connection. Otherwise the second of two would wait behind a silent first one, and
            # contexts of several threads would pass in one turn without being counted.
            if passed and await self._is_listed(turn, server_pid):
                return True
            if not is_alive(*turn.process):
                return False
            if self._is_spent(turn) and self._others_wait(turn):
                return False
            if connection is None or turn.process not in self._waiting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                pause = min(0.1, pause * 1.5)
        return False

    def _is_spent(self, turn: Turn) -> bool:
        allowance, now = self._allowance(turn), self._clock()
        return turn.is_spent(now, allowance) and turn.is_spent(now, allowance, self._excused(turn, allowance))

    @staticmethod
    def _excused(turn: Turn, allowance: float) -> float:
        """Return how much of a turn does not count; who wasted its allowance may starve itself on purpose."""
        return turn.excused_seconds(is_starvation_excused=allowance > LEAST_TURN_SECONDS)

    def _allowance(self, turn: Turn) -> float:
        return self._accounts.allowance_seconds(turn.pod_uid, self._clock())

    async def _relay(self, connection: Connection, turn: Turn) -> None:
        """Connect a client's connection to the daemon.

        Raises:
            MpsError: the client has received nothing; the connection is kept for another try.
        """
        try:
            self._check_server(turn)
        except MpsError:
            self._put_back(connection)
            raise
        allowance, began = self._allowance(turn), self._clock()
        answered = began

        async def keep(descriptor: int) -> Handover | None:
            nonlocal answered
            answered = self._clock()  # what follows is the client's own time
            to = Recipient(connection.pid, connection.start_ticks, self._ledger.log_bytes)
            if (handover := await Handover.of(descriptor, self._copies, to)) is not None:
                turn.handovers.append(handover)
            try:
                self._check_server(turn)
            except MpsError:
                if handover is not None:
                    handover.speak()  # the client does not get the socket, and the server waits for it
                raise
            self._ledger.note_handed(connection.pid)
            return handover

        try:
            outcome = await relay(
                connection.channel,
                self._control.program.socket,
                min(ACKNOWLEDGE_SECONDS, allowance),
                keep,
                lambda: self._excused(turn, allowance),
                copies=self._copies,
            )
        except MpsError:
            self._put_back(connection)
            raise
        if outcome is Passed.SERVED:
            turn.served_seconds += answered - began
        if isinstance(outcome, ServerRefusal):
            logger.warning(
                "the MPS server did not take pid %d of pod %s: CUDA error %d",
                *(connection.pid, turn.pod_uid, outcome.cuda_error),
            )
            self._ledger.note_turned_away(connection.pid, outcome.cuda_error)
        if outcome is Passed.BROKE_PROTOCOL:
            logger.warning(
                "ended the connection of pid %d of pod %s: unknown message", connection.pid, turn.pod_uid
            )
            self.reception.refuse(connection, RefuseReason.PROTOCOL)
        else:
            self.reception.served(connection)

    def _check_server(self, turn: Turn) -> None:
        """Check that a turn may go on: that its server has no fault, and is still the one with its ceilings.

        The keeper looks once a second; meanwhile a fault turns clients away, and the daemon replaces a server that
        has ended by one without ceilings.

        Raises:
            MpsError: it may not.
        """
        if self._has_fault():
            raise MpsError("the server has logged a fault", retryable=True)
        if self.backend.state in {GateState.FAULT, GateState.DOWN}:
            raise MpsError(f"MPS is in state {self.backend.state}", retryable=True)
        if self.backend.server_pid != turn.server_pid or not is_alive(turn.server_pid):
            raise MpsError("the server has ended since the ceilings were set", retryable=True)

    def _note_turn(self, turn: Turn, asked: float) -> None:
        now = self._clock()
        seconds, charged = now - turn.started, turn.charged_seconds(now)
        if turn.listed:
            self._accounts.note_client(turn.pod_uid, charged, now)
        else:
            self._accounts.note_waste(turn.pod_uid, charged, now, has_left=not is_alive(*turn.process))
        t = self.turns
        self.turns = TurnStatistics(
            t.count + 1,
            t.timeouts + (not turn.listed),
            t.waits_seconds_sum + max(0.0, turn.started - asked),
            t.durations_seconds_sum + seconds,
            max(t.duration_seconds_max, seconds),
        )

    async def end_leaving(self) -> None:
        """Stop the clients of pods that are about to be killed; a kill during a kernel would end every neighbour.

        kubelet kills them after their kernels had time to finish; if it is late, the gate does. This uses the
        clients at the last look, so it waits for no daemon.
        """
        for pid in self._endings.go_on():
            logger.info("killed client %d, which had been stopped", pid)
        ending = self._policy.ending()
        self._unstoppable = {pid: ticks for pid, ticks in self._unstoppable.items() if ending}
        for client in self._ledger.clients() if ending else ():
            if client.pod_uid not in ending or client.start_ticks is None:
                continue
            match self._endings.end(client.pid, client.start_ticks, drain_seconds=LEAVING_DRAIN_SECONDS):
                case EndingStep.STOPPED:
                    logger.info("stopped client %d of pod %s, which is being deleted", client.pid, client.pod_uid)
                case EndingStep.REFUSED if self._unstoppable.get(client.pid) != client.start_ticks:
                    self._unstoppable[client.pid] = client.start_ticks
                    logger.warning(
                        "client %d of pod %s cannot be stopped before it is killed: not permitted",
                        client.pid,
                        client.pod_uid,
                    )

    async def end_client(self, server_pid: int, pid: int) -> EndingStep:
        """Take the next step to end a client that may not stay: by signals, else by the daemon.

        Raises:
            MpsError: signals are not permitted, and the daemon refused or does not answer.
        """
        clients = self._ledger.clients()
        client = next((c for c in clients if c.pid == pid), None)
        if client is None or client.start_ticks is None:
            return EndingStep.GONE
        step = self._endings.end(pid, client.start_ticks)
        if step is EndingStep.REFUSED:
            await self._control.run(commands.terminate_client(server_pid, pid))
        elif step is not EndingStep.GONE and is_namespace_init(pid):
            # The kernel kills the rest of its container with it, so their kernels must finish too.
            for other in clients:
                if other.pid != pid and other.start_ticks is not None and ends_with(pid, other.pid):
                    self._endings.end(other.pid, other.start_ticks)
        return step

    async def end_overruns(self) -> None:
        """End the newest processes of pods that exceeded their limit (gpushare.mps.grants)."""
        server_pid = self.backend.server_pid
        if server_pid is None:
            return
        for pod_uid, limit_mib, processes in self._ledger.pods():
            for pid in to_end(limit_mib, processes):
                with contextlib.suppress(MpsError):
                    if await self.end_client(server_pid, pid) in {EndingStep.STOPPED, EndingStep.REFUSED}:
                        self._ledger.note_overrun(pod_uid, pid, known_mib(processes), limit_mib)
