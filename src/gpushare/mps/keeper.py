"""The keeper of one GPU: runs its MPS daemon, server and gate, and keeps its status file up to date.

It is a child process of `gpushare.mps.host`. The daemon is not its child, so killing the keeper ends no tenant;
its successor adopts the daemon, and the record of the clients from the status file.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from gpushare.core.api import MAX_CLIENTS_PER_GPU, MAX_CLIENTS_PER_POD
from gpushare.core.backoff import Backoff
from gpushare.mps import commands
from gpushare.mps.asks import boottime
from gpushare.mps.blame import news_of
from gpushare.mps.commands import ServerState
from gpushare.mps.contexts import ContextLog
from gpushare.mps.control import REAL_EXECUTABLE, TWIN_EXECUTABLE, AsyncMpsControl, ControlProgram, SyncMpsControl
from gpushare.mps.ending import Endings, EndingStep
from gpushare.mps.ends import wakes
from gpushare.mps.errors import CommandRefusedError, ControlTimeoutError, DaemonDownError, MpsError, NotSentError
from gpushare.mps.faultlog import Fault, FaultLog
from gpushare.mps.gate import Backend, Gate
from gpushare.mps.handover_copies import HandoverCopies, finish_handovers
from gpushare.mps.identity import PROC, is_alive, pod_uid_of, start_ticks_of
from gpushare.mps.layout import (
    GpuDirectory,
    PodDecision,
    status_reader,
    throttle_in_force,
    throttled_reader,
    write_status,
)
from gpushare.mps.ledger import ClientLedger
from gpushare.mps.logs import trim
from gpushare.mps.memory import MemoryReader, NvmlMemory
from gpushare.mps.patience import DaemonSilence
from gpushare.mps.policy import CeilingPolicy
from gpushare.mps.relay import ACKNOWLEDGE_SECONDS
from gpushare.mps.selftest import Probe, run_self_test
from gpushare.mps.simulated import simulated_memory
from gpushare.mps.status import GateState, GateStatus, SelfTestResult
from gpushare.mps.store import BEHIND_SECONDS, StoreClient
from gpushare.mps.terminating import Terminator
from gpushare.mps.turned_away import TURNED_AWAY_SECONDS, TurnedAwayRecord
from gpushare.runtime.logs import log_level_of, set_up_logging
from gpushare.runtime.options import options_of
from gpushare.runtime.parent import end_with_parent
from gpushare.runtime.tasks import without_end

logger = logging.getLogger(__name__)

PUBLISH_SECONDS: Final = 1.0
TRIM_EVERY: Final = 60  # status writes between two trims of the logs
SERVER_UP_SECONDS: Final = 20.0
FAULT_RECOVERY_SECONDS: Final = 15.0  # the server is ACTIVE again once its clients are gone (docs/facts.md 4)
FAULT_LOG_SECONDS: Final = 2.0  # the server writes its report within milliseconds and is back in about 0.3 s
DEPARTED_SECONDS: Final = 10.0  # departed clients are remembered for this long after the log was read
BUSY_SECONDS: Final = 15.0  # a daemon that does not answer for this long is not just busy with another connection
DESERTED_SECONDS: Final = 20.0  # after this time a silent daemon without clients is replaced
RETEST_BACKOFF: Final = Backoff(first_seconds=5.0, longest_seconds=300.0)  # after a failed self-test
RESTART_BACKOFF: Final = Backoff(first_seconds=0.05, longest_seconds=30.0)  # a dead daemon is restarted at once
SRC: Final = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that differ between real GPUs and the twin, and between nodes.

    Attributes:
        ends_strangers: end clients that bypassed the gate or connected outside their turn.
        admits_unproven: admit tenants although the self-test did not prove that ceilings are enforced.
    """

    control: AsyncMpsControl
    memory: MemoryReader
    probe: Probe
    identify: Callable[[int], str | None] = pod_uid_of
    ends_strangers: bool = True
    max_clients_per_pod: int = MAX_CLIENTS_PER_POD
    admits_unproven: bool = False


class _ServerGoneError(Exception):
    """The server process ended while the daemon runs on."""


class Keeper:
    """One GPU's daemon, gate and status."""

    def __init__(
        self,
        gpu: GpuDirectory,
        setup: Setup,
        store: StoreClient | None = None,
        copies: HandoverCopies | None = None,
    ) -> None:
        self.gpu, self._setup, self._control = gpu, setup, setup.control
        self._copies = copies or HandoverCopies()
        self._server_answered = asyncio.Event()
        self._policy = CeilingPolicy(gpu, setup.max_clients_per_pod)
        self._ledger = ClientLedger(
            setup.memory,
            identify=setup.identify,
            ends_strangers=setup.ends_strangers,
            contexts=ContextLog(setup.control.program.log / "server.log"),
            own_pid=os.getpid(),
        )
        self._faults = FaultLog(setup.control.program.log / "server.log")
        self._turned_away = TurnedAwayRecord(self._ledger)
        self.gate = Gate(
            setup.control,
            self._policy,
            self._ledger,
            on_trouble=self._trouble,
            store=store,
            identify=setup.identify,
            endings=Endings(record=gpu.endings, terminate=Terminator(self._terminate)),
            has_fault=self._faults.has_fault,
            copies=self._copies,
        )
        self._previous = status_reader(gpu).read()
        self._throttled = throttled_reader(gpu)
        started_at = time.time()
        self._status = GateStatus(
            gpu.uuid,
            GateState.STARTING,
            started_at,
            gate_pid=os.getpid(),
            gate_started_at=started_at,
            counts_since=started_at,
        )
        self._log_read_at = time.monotonic()
        self._poke = asyncio.Event()
        self._daemon_ticks: int | None = None
        self._is_counted = False  # the fault that the server is in
        self._faulted_at = -math.inf  # when the last fault was published
        self._server_before: int | None = None  # the former keeper's
        self._tested = False
        self._test_again_at = 0.0
        self._is_unwritten = False
        self._silent = DaemonSilence()

    async def run(self, listener: socket.socket) -> None:
        """Keep daemon, server and gate running until cancelled; the daemon stays."""
        self._take_over()
        async with asyncio.TaskGroup() as group:
            group.create_task(finish_handovers(self._copies, self._server_answered, self._ledger.has_heard))
            group.create_task(without_end("the gate", self.gate.serve(listener)))
            group.create_task(without_end("publishing the status", self._publish_regularly()))
            group.create_task(without_end("supervision", self._supervise()))

    def _take_over(self) -> None:
        """Continue with what the former keeper wrote: its clients, its counts, and how far it read the log."""
        self._ledger.restore(self._previous)
        if self._previous is not None:
            p = self._previous
            self._status = self._status.following(p)
            self._server_before = p.server_pid
            self._is_counted = p.is_fault_counted
            if p.faults_settled_bytes is not None:
                self._faults.resume(p.faults_settled_bytes)
                self._log_read_at -= max(0.0, time.time() - p.written_at)

    def publish(self) -> None:
        """Write the status; log a failing disk once, and its recovery once.

        The agent treats a status that no longer changes as a gate that is down, so a failed write is noticed.
        """
        decisions = self._policy.decisions()
        self._status = replace(
            self._status,
            written_at=time.time(),
            unknown_decision_values=decisions.unknown,
            clients=self._ledger.clients(),
            waiting_connections=self.gate.held(),
            refused={str(reason): count for reason, count in self.gate.refused.items()},
            mismatches=self._ledger.mismatches,
            connections=self.gate.connection_count,
            unread=self.gate.reception.unread_count,
            turns=self.gate.turns,
            throttle=throttle_in_force(self._throttled, boottime()),
            faults_settled_bytes=self._faults.settled_bytes,
            is_fault_counted=self._is_counted,
            lost_pods=self._ledger.lost_pods(decisions.pods),
            turned_away=self._turned_away.latest,
        )
        try:
            write_status(self.gpu, self._shown())
        except OSError as error:
            if not self._is_unwritten:
                logger.error("cannot write %s, retrying: %s", self.gpu.status, error)
            self._is_unwritten = True
        else:
            if self._is_unwritten:
                logger.info("%s is written again", self.gpu.status)
            self._is_unwritten = False

    def _shown(self) -> GateStatus:
        """Return the status to write; DEGRADED if tenants are served but something other than MPS hangs."""
        trouble = self._what_hangs() if self._status.state is GateState.ACTIVE else ""
        return replace(self._status, state=GateState.DEGRADED, detail=trouble) if trouble else self._status

    def _what_hangs(self) -> str:
        if (seconds := self._ledger.memory_hangs_seconds) > 0:
            return f"the driver has not told processes' memory for {seconds:.0f} s; grants count in full"
        if (seconds := self.gate.store.behind_seconds()) > BEHIND_SECONDS:
            return f"the host has not taken copies of held connections for {seconds:.0f} s"
        return ""

    def _trouble(self, error: MpsError) -> None:
        logger.warning("trouble with the daemon of %s: %s", self.gpu.uuid, error)
        self._poke.set()

    def _terminate(self, pid: int, timeout_seconds: float) -> None:
        """Make the server end a client; called in another thread."""
        server_pid = self._status.server_pid
        if server_pid is None or self._status.state is GateState.DOWN:
            raise MpsError("no server", retryable=True)
        SyncMpsControl(self._control.program).run(commands.terminate_client(server_pid, pid), timeout_seconds)
        self._ledger.note_terminated(pid)

    # Supervision

    async def _supervise(self) -> None:
        failures = 0
        while True:
            try:
                await self._bring_up()
                failures = 0
                await self._watch()
            except _ServerGoneError:
                if not self._is_counted and self._read_faults():
                    self._note_fault(time.time())
                self._ledger.forget_clients()
                restarts = self._status.server_restarts + 1
                self._status = replace(self._status, server_restarts=restarts, server_pid=None)
                self._set_state(GateState.DOWN, "the MPS server ended; starting another")
                logger.error("MPS server of %s ended and every client with it; starting another", self.gpu.uuid)
            except (MpsError, OSError) as error:
                self._set_state(GateState.DOWN, str(error))
                # A daemon that was silent before this keeper started is never watched, so check it here.
                if isinstance(error, ControlTimeoutError) and await self._ends_deserted():
                    continue
                failures += 1
                seconds = RESTART_BACKOFF.seconds(failures)
                logger.error("MPS of %s is down, trying again in %g s: %s", self.gpu.uuid, seconds, error)
                await asyncio.sleep(seconds)

    async def _bring_up(self) -> None:
        """Start or adopt the daemon, start the server before clients, prove the ceilings, then become ACTIVE."""
        self.gpu.create()
        program = self._control.program
        adopted = await asyncio.to_thread(program.daemon_pid)
        before = self._status.daemon_pid or (self._previous.daemon_pid if self._previous else None)
        pid = await self._control.start()
        if adopted is None:
            self._ledger.forget_clients()
            if before is not None:
                self._status = replace(self._status, daemon_restarts=self._status.daemon_restarts + 1)
            self._status, self._server_before = replace(self._status, server_pid=None), None
        self._daemon_ticks = start_ticks_of(pid)
        was = self._previous.daemon_up_since if adopted and self._previous else None
        self._status = replace(self._status, daemon_pid=pid, daemon_up_since=was or time.time())
        server_pid = await self._server_up()
        self._server_answered.set()
        self._status = replace(self._status, server_pid=server_pid)
        if self._server_before not in {None, server_pid}:  # it ended while no keeper ran, and its clients with it
            self._ledger.forget_clients()
            self._status = replace(self._status, server_restarts=self._status.server_restarts + 1)
        self._server_before = None
        self._ledger.note_clients(await self._control.run(commands.client_list(server_pid)))
        logger.info(
            "MPS of %s: daemon %d %s, server %d",
            self.gpu.uuid,
            pid,
            "adopted" if adopted else "started",
            server_pid,
        )
        if adopted and not self._is_counted and self._read_faults():  # while no keeper looked
            self._note_fault(time.time(), is_late=True)
        self._faults.skip()
        self._log_read_at, self._is_counted = time.monotonic(), False
        # The driver cannot change while a keeper or a daemon runs.
        if not ((adopted or self._tested) and self._status.self_test.result is SelfTestResult.PASSED):
            await self._prove(server_pid)
            self._tested = True
        self._set_state(GateState.ACTIVE)

    async def _prove(self, server_pid: int) -> None:
        """Repeat the self-test until it proves the ceilings; meanwhile newcomers wait and running clients stay."""
        for failures in itertools.count(1):
            fault = self._read_faults()  # while it is not read, the gate passes nobody on, the probe neither
            state: ServerState | None = None
            with contextlib.suppress(NotSentError):
                state = await self._control.server_state(server_pid)
            if state is ServerState.FAULT:
                await self._recover(server_pid, fault)
            elif fault:
                self._note_fault(time.time())
            why = await self._self_test(server_pid)
            if not why or self._setup.admits_unproven:
                self._test_again_at = time.monotonic() + RETEST_BACKOFF.longest_seconds
                return
            seconds = RETEST_BACKOFF.seconds(failures)
            self._set_state(GateState.SELF_TEST, f"{why}; trying again in {seconds:.0f} s")
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                self._check_alive()
                await asyncio.sleep(min(PUBLISH_SECONDS, seconds))
                with contextlib.suppress(NotSentError):
                    self._ledger.note_clients(await self._control.run(commands.client_list(server_pid)))

    def _check_alive(self) -> None:
        """Raise an error if daemon or server have ended."""
        daemon_pid, server_pid = self._status.daemon_pid or 0, self._status.server_pid or 0
        if not is_alive(daemon_pid, self._daemon_ticks):
            self._set_state(GateState.DOWN, f"the MPS daemon {daemon_pid} died")
            raise DaemonDownError(f"the MPS daemon {daemon_pid} died")
        if not is_alive(server_pid):
            raise _ServerGoneError

    async def _server_up(self) -> int:
        deadline = time.monotonic() + SERVER_UP_SECONDS
        asked = False
        while True:
            servers = await self._control.servers()
            if servers and await self._control.server_state(servers[0]) is ServerState.ACTIVE:
                return servers[0]
            if not servers and not asked:
                await self._control.run(commands.start_server(0))
                asked = True
            elif time.monotonic() > deadline:
                if servers and await self._control.server_state(servers[0]) is ServerState.FAULT:
                    if not self._is_counted:
                        self._read_faults()
                        self._note_fault(time.time(), is_late=True)
                        self._is_counted = True
                    await self._end_faulted()
                raise MpsError("the MPS server did not become ACTIVE", retryable=True)
            else:
                await asyncio.sleep(0.05)

    async def _self_test(self, server_pid: int) -> str:
        """Run the self-test once; return why ceilings are not proven, empty if they are."""
        if self._ledger.client_count >= MAX_CLIENTS_PER_GPU:
            return f"the self-test needs one of the {MAX_CLIENTS_PER_GPU} clients, and all are taken"
        self.gate.set_backend(Backend(GateState.SELF_TEST, server_pid))
        self._set_state(GateState.SELF_TEST)

        def grant(pid: int, ceiling: PodDecision | None) -> None:
            if ceiling is None:
                self._policy.probes.pop(pid, None)
            else:
                self._policy.probes[pid] = ceiling

        result = await run_self_test(self.gpu, self._setup.probe, grant, self._control.program.env())
        self._status = replace(self._status, self_test=result)
        level = logging.INFO if result.result is SelfTestResult.PASSED else logging.ERROR
        logger.log(level, "self-test of %s %s: %s", self.gpu.uuid, result.result, result.detail)
        return "" if result.result is SelfTestResult.PASSED else f"the self-test failed: {result.detail}"

    async def _watch(self) -> None:
        """Watch daemon, server and clients until the daemon or the server is gone."""
        self._silent.since = None
        daemon_pid, server_pid = self._status.daemon_pid or 0, self._status.server_pid or 0
        with wakes(daemon_pid, self._poke), wakes(server_pid, self._poke):
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PUBLISH_SECONDS):
                        await self._poke.wait()
                self._poke.clear()
                self._check_alive()
                try:
                    await self._look(server_pid)
                except (ControlTimeoutError, NotSentError) as error:
                    # Its clients run on, so it is not killed. If it stays silent, newcomers wait and the status
                    # says so.
                    seconds = self._silent.lasts(time.monotonic())
                    if isinstance(error, ControlTimeoutError) or seconds >= BUSY_SECONDS:
                        self._set_state(GateState.DOWN, f"no answer for {seconds:.0f} s: {error}")
                    if await self._ends_deserted():
                        raise DaemonDownError("a silent daemon without clients was ended") from error
                except CommandRefusedError as error:
                    # The daemon may notice before we do that its server has ended.
                    self._check_alive()
                    if server_pid not in await self._control.servers():
                        raise _ServerGoneError from error
                    raise
                else:
                    self._silent.since = None
                    if self._status.state is not GateState.ACTIVE:
                        self._set_state(GateState.ACTIVE)
                    await self._test_again(server_pid)

    async def _ends_deserted(self) -> bool:
        """End a daemon that has been silent for long and has no clients; return whether it was ended.

        Replacing it harms no tenant, and newcomers wait for it.
        """
        if self._silent.lasts(time.monotonic()) < DESERTED_SECONDS:
            return False
        if self._ledger.has_live() or self.gate.current_pid is not None:
            return False
        logger.error(
            "the MPS daemon of %s is silent and no longer serves clients; starting another", self.gpu.uuid
        )
        await self._control.stop(2.0)
        return True

    async def _test_again(self, server_pid: int) -> None:
        """Repeat a failed self-test at intervals, if tenants are admitted in spite of it."""
        proven = self._status.self_test.result is SelfTestResult.PASSED
        if not proven and time.monotonic() >= self._test_again_at:
            await self._prove(server_pid)
            self._set_state(GateState.ACTIVE)

    async def _look(self, server_pid: int) -> None:
        await self._ledger.watch_memory()
        fault = self._read_faults()
        if fault or await self._control.server_state(server_pid) is ServerState.FAULT:
            await self._recover(server_pid, fault)
            self._set_state(GateState.ACTIVE)
        self._is_counted = False
        asked_at = time.monotonic()
        listed = await self._control.run(commands.client_list(server_pid))
        self._ledger.note_clients(listed, self.gate.current_pid, asked_at)
        if asked_at < self._faulted_at + TURNED_AWAY_SECONDS:
            lost = self._ledger.lost_in_their_turn(self._faulted_at)
            late = (each.pod_uid for each in lost if each.turned_away_at is not None and each.pod_uid is not None)
            pods = tuple(dict.fromkeys((*self._status.last_fault_pods, *late)))
            self._status = replace(self._status, last_fault_pods=pods)
        await self.gate.end_overruns()
        if self._setup.ends_strangers:
            for stranger in self._ledger.strangers():
                with contextlib.suppress(MpsError):
                    step = await self.gate.end_client(server_pid, stranger.pid)
                    if step in {EndingStep.STOPPED, EndingStep.REFUSED}:
                        logger.error(
                            "ending client %d of pod %s: %s", stranger.pid, stranger.pod_uid, stranger.detail
                        )

    def _read_faults(self) -> Fault | None:
        """Read new lines of the server's log, and forget clients that left before the previous read."""
        fault = self._faults.read()
        if fault is None:
            self._log_read_at = time.monotonic()
            faulted_at, pods = self._faulted_at, self._status.last_fault_pods
            self._turned_away.settle(self._log_read_at, time.time(), faulted_at, pods)
            self._ledger.forget_departed(self._log_read_at - DEPARTED_SECONDS)
        return fault

    async def _recover(self, server_pid: int, fault: Fault | None) -> None:
        """Recover from a fault, which ended every client (docs/facts.md 4): wait for the server, or restart it."""
        noticed_at = time.time()
        text = fault.line if fault else "server in FAULT"
        self._set_state(GateState.FAULT, text)
        logger.error("MPS server of %s is in FAULT, new clients wait: %s", self.gpu.uuid, text)
        try:
            is_back = await self._is_back(server_pid, FAULT_LOG_SECONDS)
            if is_back:
                await self.gate.turn_ends(ACKNOWLEDGE_SECONDS)  # its process may be about to say that it failed
        finally:
            if fault or not self._is_counted:
                self._note_fault(noticed_at)
                self._is_counted = True
        if not is_back:
            self._set_state(GateState.FAULT, self._status.last_fault)
        if not is_back and not await self._is_back(server_pid, FAULT_RECOVERY_SECONDS - FAULT_LOG_SECONDS):
            await self._end_faulted()
        self._faults.skip()
        self._log_read_at, self._is_counted = time.monotonic(), False
        logger.info("MPS server of %s is ACTIVE again", self.gpu.uuid)

    async def _end_faulted(self) -> NoReturn:
        """End a daemon whose server stays in FAULT; the supervision starts another."""
        logger.error("MPS server of %s stays in FAULT; restarting the daemon", self.gpu.uuid)
        await self._control.stop(2.0)
        raise DaemonDownError("daemon stopped after a fault that did not clear")

    async def _is_back(self, server_pid: int, patience_seconds: float) -> bool:
        """Wait until the server is ACTIVE; return False if that takes too long."""
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            if not is_alive(server_pid):
                raise _ServerGoneError
            if await self._control.server_state(server_pid) is ServerState.ACTIVE:
                return True
            await asyncio.sleep(0.1)
        return False

    def _note_fault(self, noticed_at: float, *, is_late: bool = False) -> None:
        """Count a fault, and publish what log and ledger show about it once the server has written its report.

        Args:
            is_late: no keeper looked when it came, so who had ended before is not known, and nobody is blamed.
        """
        fault, now = self._faults.complete() or Fault("server in FAULT"), time.monotonic()
        news = news_of(fault, self._ledger, read_before=self._log_read_at, now=now, unix_now=time.time())
        self._faults.skip()
        self._ledger.note_lost(news.pods)
        self._log_read_at = self._faulted_at = now
        self._status = replace(
            self._status,
            faults=self._status.faults + 1,
            last_fault=news.sentence,
            last_fault_at=noticed_at,
            last_fault_pods=news.pods,
            last_fault_by=None if is_late else news.begun_by,
        )
        logger.error("a fault on %s ended every MPS client: %s", self.gpu.uuid, news.sentence)

    # Status

    def _set_state(self, state: GateState, detail: str = "") -> None:
        self._status = replace(self._status, state=state, detail=detail)
        self.gate.set_backend(Backend(state, self._status.server_pid if state is not GateState.DOWN else None))
        self.publish()

    async def _publish_regularly(self) -> None:
        logs = [self.gpu.log / name for name in ("control.log", "server.log")]
        for count in itertools.count():
            self.publish()
            if count % TRIM_EVERY == 0:
                self._faults.has_fault()  # what is not read yet would be lost
                self._ledger.read_contexts()
                with contextlib.suppress(RuntimeError):  # the node has no thread left
                    await asyncio.to_thread(trim, logs)
            await asyncio.sleep(PUBLISH_SECONDS)


def setup_of(gpu: GpuDirectory, twin: str | None, proc: Path = PROC, *, ends_strangers: bool = True) -> Setup:
    """Return the real setup, or the twin's when its GPU is given as JSON of a GpuInfo."""

    def identify(pid: int) -> str | None:
        return pod_uid_of(pid, proc)

    if twin is None:
        control = AsyncMpsControl(ControlProgram.of(gpu, REAL_EXECUTABLE))
        return Setup(control, NvmlMemory(gpu.uuid), Probe(), identify, ends_strangers)
    control = AsyncMpsControl(ControlProgram.of(gpu, TWIN_EXECUTABLE, {"GPUSHARE_TWIN_GPU": twin}))
    probe = Probe((sys.executable, "-m", "gpushare.twin.mps.probe"), (("PYTHONPATH", SRC),))
    return Setup(control, simulated_memory(gpu), probe, identify, ends_strangers)


async def keep(
    gpu: GpuDirectory, setup: Setup, listener: socket.socket, store: StoreClient, copies: HandoverCopies
) -> None:
    """Run a keeper until SIGTERM."""
    task = asyncio.ensure_future(Keeper(gpu, setup, store, copies).run(listener))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main(arguments: list[str] | None = None) -> int:
    """Run the keeper; entry point of the child process."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = options_of(parser, None)
    add("directory", None, "where the host's directories of GPUs are", required=True)
    add("uuid", None, "the GPU", required=True)
    add("listener", None, "inherited descriptor of the listening socket", type=int, required=True)
    add("store", None, "inherited descriptor to the host's store", type=int, required=True)
    add("copies-into", None, "inherited descriptor that copies of handovers are sent to", type=int, required=True)
    add("copies-out", None, "inherited descriptor that they wait at", type=int, required=True)
    add("twin", None, "the simulated GPU, JSON")
    add("proc", PROC, "where the node's /proc is", type=Path)
    add("keep-strangers", False, "report clients past the gate, do not end them", action="store_true")
    add("max-clients-per-pod", MAX_CLIENTS_PER_POD, "MPS clients that one pod may have on the GPU", type=int)
    add("admit-unproven", False, "let tenants in without proof that ceilings bind", action="store_true")
    options = parser.parse_args(arguments)
    set_up_logging(log_level_of())
    if options.twin is not None:
        json.loads(options.twin)
    gpu = GpuDirectory.of(options.directory, options.uuid)
    setup = setup_of(gpu, options.twin, options.proc, ends_strangers=not options.keep_strangers)
    setup = replace(setup, max_clients_per_pod=options.max_clients_per_pod, admits_unproven=options.admit_unproven)
    channel = socket.socket(fileno=options.store)
    copies = HandoverCopies(socket.socket(fileno=options.copies_into), socket.socket(fileno=options.copies_out))
    end_with_parent()  # the host: two gates at one daemon would mix up their ceilings
    asyncio.run(keep(gpu, setup, socket.socket(fileno=options.listener), StoreClient(channel), copies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
