"""The keeper's supervision without a daemon: its control answers what each test says."""

import asyncio
import contextlib
import dataclasses
import json
import os
import threading

import pytest

from gpushare.core.backoff import Backoff
from gpushare.mps import keeper as keeping
from gpushare.mps.control import AsyncMpsControl
from gpushare.mps.errors import ControlTimeoutError, DaemonDownError, NotSentError
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.layout import Decisions, GpuDirectory, PodDecision, status_reader, write_decisions
from gpushare.mps.ledger import Admission
from gpushare.mps.status import GateState, SelfTest, SelfTestResult
from gpushare.twin.gpus import parse_simulated

from .conftest import eventually


class Scripted(AsyncMpsControl):
    """A daemon that answers at once, or fails as the test says; this process stands for daemon and server."""

    failure: Exception | None = None
    state = "ACTIVE"
    asked = 0

    async def run(self, command, timeout_seconds=0.0):
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        name = command.text.split()[0]
        return command.parse(self.state if name == "get_server_status" else "")

    async def servers(self):
        if self.failure is not None:
            raise self.failure
        return (os.getpid(),)

    async def start(self):
        return os.getpid()


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping, "PUBLISH_SECONDS", 0.01)
    [info] = parse_simulated("H200:1", "n")
    gpu = GpuDirectory.of(tmp_path, info.uuid)
    gpu.create()
    setup = keeping.setup_of(gpu, json.dumps(dataclasses.asdict(info)))
    control = Scripted(setup.control.program)
    kept = keeping.Keeper(gpu, dataclasses.replace(setup, control=control))
    kept.control = control
    kept.reader = status_reader(gpu)
    return kept


@contextlib.asynccontextmanager
async def running(coroutine):
    task = asyncio.ensure_future(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def up(kept) -> None:
    me = os.getpid()
    kept._status = dataclasses.replace(kept._status, daemon_pid=me, server_pid=me)
    kept._status = dataclasses.replace(kept._status, self_test=SelfTest(SelfTestResult.PASSED))
    kept._daemon_ticks = start_ticks_of(me)
    kept._set_state(GateState.ACTIVE)


async def test_one_busy_daemon_is_not_down(kept):
    """Before: a command that the daemon did not take, and the GPU was unhealthy."""
    up(kept)
    kept.control.failure = NotSentError("Cannot send command to MPS control daemon process")
    async with running(kept._watch()) as watching:
        await eventually(lambda: kept.control.asked > 5, "asked again and again")
        assert not watching.done()
        assert kept.reader.read().state is GateState.ACTIVE
        kept.control.failure = None
        asked = kept.control.asked
        await eventually(lambda: kept.control.asked > asked + 5, "it answers again")
        assert kept.reader.read().state is GateState.ACTIVE


async def test_a_daemon_that_takes_nothing_for_long_is_down_until_it_answers(kept, monkeypatch):
    monkeypatch.setattr(keeping, "BUSY_SECONDS", 0.0)
    up(kept)
    kept.control.failure = NotSentError("Cannot send command to MPS control daemon process")
    async with running(kept._watch()):
        await eventually(lambda: kept.reader.read().state is GateState.DOWN, "down")
        kept.control.failure = None
        await eventually(lambda: kept.reader.read().state is GateState.ACTIVE, "back")
        kept.control.failure = ControlTimeoutError("no answer within 15 s")
        await eventually(lambda: kept.reader.read().state is GateState.DOWN, "down at once")


async def test_a_silent_daemon_is_replaced_once_it_serves_nobody(kept, monkeypatch):
    """Before: a daemon that waited for a client's word for ever was DOWN for ever, whoever had left."""
    monkeypatch.setattr(keeping, "DESERTED_SECONDS", 0.0)
    stopped: list[float] = []

    async def stop(timeout_seconds):
        stopped.append(timeout_seconds)

    monkeypatch.setattr(kept.control, "stop", stop)
    up(kept)
    kept._ledger.note_clients((os.getppid(),))
    kept.control.failure = ControlTimeoutError("no answer within 15 s")
    async with running(_that_replaces(kept)) as watching:
        await eventually(lambda: kept.control.asked > 5, "asked again and again")
        assert not watching.done()
        assert not stopped, "its client runs on"
        kept._ledger.forget_clients()
        await eventually(watching.done, "given up")
        assert stopped


async def test_a_daemon_that_was_silent_when_the_keeper_started_is_replaced_too(kept, monkeypatch):
    """Before: it was asked for its server's state for ever, and never watched."""
    monkeypatch.setattr(keeping, "DESERTED_SECONDS", 0.0)
    monkeypatch.setattr(keeping, "RESTART_BACKOFF", Backoff(0.01, 30.0))
    stopped: list[float] = []

    async def stop(timeout_seconds):
        stopped.append(timeout_seconds)
        kept.control.failure = None

    async def passes(*_):
        return SelfTest(SelfTestResult.PASSED, "26 of 132 SMs")

    monkeypatch.setattr(kept.control, "stop", stop)
    monkeypatch.setattr(keeping, "run_self_test", passes)
    kept.control.failure = ControlTimeoutError("no answer within 15 s")
    async with running(kept._supervise()):
        await eventually(lambda: stopped, "ended")
        await eventually(lambda: (s := kept.reader.read()) and s.state is GateState.ACTIVE, "another serves")


async def _that_replaces(kept):
    with pytest.raises(DaemonDownError):
        await kept._watch()


async def test_a_self_test_that_fails_keeps_newcomers_waiting_and_is_tried_until_it_passes(kept, monkeypatch):
    """Before: ACTIVE all the same, and never tried again."""
    monkeypatch.setattr(keeping, "RETEST_BACKOFF", Backoff(0.01, 300.0))
    results = [SelfTestResult.FAILED, SelfTestResult.FAILED, SelfTestResult.PASSED]
    seen: list[GateState] = []

    async def self_test(*_):
        seen.append(kept.gate.backend.state)
        return SelfTest(results[min(len(seen), 3) - 1], "26 of 132 SMs")

    monkeypatch.setattr(keeping, "run_self_test", self_test)
    async with running(kept._supervise()):
        await eventually(lambda: kept.reader.read() and kept.reader.read().state is GateState.ACTIVE, "active")
        assert seen == [GateState.SELF_TEST] * 3
        assert kept.reader.read().self_test.result is SelfTestResult.PASSED


async def test_where_unproven_ceilings_are_allowed_tenants_come_in_and_the_test_is_repeated(kept, monkeypatch):
    monkeypatch.setattr(keeping, "RETEST_BACKOFF", Backoff(0.01, 0.01))
    kept._setup = dataclasses.replace(kept._setup, admits_unproven=True)
    tests = 0

    async def self_test(*_):
        nonlocal tests
        tests += 1
        return SelfTest(SelfTestResult.FAILED, "132 of 132 SMs")

    monkeypatch.setattr(keeping, "run_self_test", self_test)
    async with running(kept._supervise()):
        await eventually(lambda: tests >= 3, "tried again")
        await eventually(lambda: kept.reader.read().state is GateState.ACTIVE, "active")


async def test_a_driver_that_hangs_degrades_the_gate_and_stops_nothing(kept, monkeypatch):
    """Before: the loop waited for the driver, and with it accepts, turns, supervision and the status."""
    monkeypatch.setattr("gpushare.mps.patience.PATIENCE_SECONDS", 0.05)
    release = threading.Event()
    kept._ledger._memory = type("Hangs", (), {"used_mib": lambda self: release.wait(120) and {}})()
    up(kept)
    async with running(kept._watch()), running(kept._publish_regularly()):
        await eventually(lambda: kept.reader.read().state is GateState.DEGRADED, "said")
        status = kept.reader.read()
        assert "the driver has not told" in status.detail
        assert kept.gate.backend.state is GateState.ACTIVE, "tenants come and go"
        written = status.written_at
        await eventually(lambda: kept.control.asked > 5, "the daemon is looked after")
        await eventually(lambda: kept.reader.read().written_at > written, "the status goes on")
        release.set()
        await eventually(lambda: kept.reader.read().state is GateState.ACTIVE, "it answers again")


async def test_logs_that_cannot_be_trimmed_for_want_of_a_thread_do_not_end_the_keeper(kept, monkeypatch):
    monkeypatch.setattr(keeping, "TRIM_EVERY", 1)
    tries = []

    async def no_thread(*_):
        tries.append(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(keeping.asyncio, "to_thread", no_thread)
    async with running(kept._publish_regularly()) as publishing:
        await eventually(lambda: len(tries) > 2 or publishing.done(), "tried again")
        assert not publishing.done()


async def test_a_host_that_takes_no_copies_degrades_the_gate(kept, monkeypatch):
    up(kept)
    monkeypatch.setattr(kept.gate.store, "behind_seconds", lambda: 60.0)
    kept.publish()
    status = kept.reader.read()
    assert status.state is GateState.DEGRADED
    assert "copies of held connections" in status.detail


async def test_a_fault_during_the_self_test_is_told_and_does_not_hold_the_next_probe(kept, monkeypatch):
    up(kept)
    log = kept.control.program.log / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    waits = []

    async def tested(_server_pid):
        waits.append(kept._faults.has_fault())
        if len(waits) == 1:
            log.write_text("[2026-11-26 13:30:25.724 Server  2480] Server is handling a fatal GPU error.\n")
            return "the probe ended"
        return ""

    monkeypatch.setattr(kept, "_self_test", tested)
    monkeypatch.setattr(keeping, "RETEST_BACKOFF", Backoff(0.01, 0.01))
    await kept._prove(os.getpid())
    assert waits == [False, False]
    assert kept._status.faults == 1
    assert "fatal GPU error" in kept._status.last_fault


async def test_a_fault_during_which_the_daemon_is_silent_counts_once(kept, monkeypatch):
    """Before: as two, and an agent that sees two at once tells every pod of the GPU that its processes ended."""
    up(kept)
    states = iter(["FAULT", ControlTimeoutError("no answer within 15 s"), "FAULT", "ACTIVE", "ACTIVE", "FAULT"])
    answered = kept.control.run

    async def run(command, timeout_seconds=0.0):
        if command.text.startswith("get_server_status"):
            state = next(states, "ACTIVE")
            if isinstance(state, Exception):
                raise state
            kept.control.state = state
        return await answered(command)

    monkeypatch.setattr(kept.control, "run", run)
    with pytest.raises(ControlTimeoutError):
        await kept._look(os.getpid())
    await kept._look(os.getpid())
    assert kept._status.faults == 1
    await kept._look(os.getpid())
    await kept._look(os.getpid())
    assert kept._status.faults == 2, "another one"


POD = "11111111-1111-4111-8111-111111111111"
OTHER_POD = "22222222-2222-4222-8222-222222222222"
PID = 2**22 + 9  # of no process
FAULT_LINE = "[2026-11-26 13:30:25.724 Server  2480] Server is handling a fatal GPU error.\n"


def successor(kept, **previous):
    """The keeper that follows one whose last status was as its present one, but for these fields."""
    kept.publish()
    status = kept.reader.read()
    next_one = keeping.Keeper(kept.gpu, kept._setup)
    next_one._previous = dataclasses.replace(status, **previous)
    next_one.reader = kept.reader
    next_one._take_over()
    return next_one


async def until_active(keeper):
    async with running(keeper._supervise()):
        await eventually(lambda: keeper._status.state is GateState.ACTIVE, "it serves")
    return keeper.reader.read()


@pytest.fixture
def adopted(monkeypatch):
    """This process stands for a daemon that runs on when its keeper has ended."""
    monkeypatch.setattr(keeping.ControlProgram, "daemon_pid", lambda _self: os.getpid())


@pytest.mark.usefixtures("adopted")
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_fault_of_the_moment_in_which_the_keeper_ended_is_told(kept, has_begun):
    """Before: the next keeper skipped what the log had, so a fault that ended every client was told to nobody."""
    up(kept)
    log = kept.control.program.log / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(FAULT_LINE)
    assert kept._read_faults(), "an earlier one, which is told"
    kept._note_fault(1.0)
    kept._ledger.admit(Admission(PID, 1, POD, 20, 4096, 4096, kept._ledger._clock()))
    kept._ledger.note_clients((PID,), PID)
    kept.publish()
    with log.open("a") as file:
        file.write(FAULT_LINE.replace("13:30", "13:31"))
    if has_begun:
        fault = kept._read_faults()
        kept._set_state(GateState.FAULT, fault.line)
    status = await until_active(successor(kept))
    assert (status.faults, status.last_fault_pods, status.last_fault_by) == (2, (POD,), None)
    assert (await until_active(successor(kept))).faults == 2, "once"


@pytest.mark.usefixtures("adopted")
async def test_who_lost_its_processes_by_a_fault_is_on_record_until_it_connects_another(kept):
    """Also where a keeper or an agent is started meanwhile: it is told and shown as long as it lasts."""
    up(kept)
    mine = os.getppid()
    for pid, pod in ((PID, POD), (PID + 1, OTHER_POD)):
        kept._ledger.admit(Admission(pid, 1, pod, 20, 4096, 4096, kept._ledger._clock()))
    kept._ledger.note_clients((PID, PID + 1))
    write_decisions(kept.gpu, Decisions({POD: PodDecision(20, 4096), OTHER_POD: PodDecision(20, 4096)}))
    kept._note_fault(1.0)
    kept.publish()
    assert kept.reader.read().lost_pods == (POD, OTHER_POD)
    next_one = successor(kept)
    assert (await until_active(next_one)).lost_pods == (POD, OTHER_POD)
    next_one._ledger.admit(Admission(mine, start_ticks_of(mine), POD, 20, 4096, 4096, next_one._ledger._clock()))
    next_one._ledger.note_clients((mine,), mine)
    next_one._ledger.note_clients(())
    next_one.publish()
    assert kept.reader.read().lost_pods == (OTHER_POD,), "one came and went"
    write_decisions(kept.gpu, Decisions({POD: PodDecision(20, 4096)}))
    next_one.publish()
    assert kept.reader.read().lost_pods == (), "it is not there any more"


@pytest.mark.usefixtures("adopted")
async def test_a_server_that_ended_while_no_keeper_ran_counts_as_restarted(kept):
    """Before: not counted, so the pods whose processes had ended with it were told nothing."""
    up(kept)
    status = await until_active(successor(kept, server_pid=PID))
    assert status.server_restarts == 1
    status = await until_active(successor(kept, server_restarts=1))  # the same server
    assert status.server_restarts == 1


@pytest.fixture
def faulted(kept, monkeypatch):
    """A keeper whose server stays in FAULT until the daemon is stopped; `stopped` has a number for each time."""
    monkeypatch.setattr(keeping, "SERVER_UP_SECONDS", 0.02)
    monkeypatch.setattr(keeping, "FAULT_LOG_SECONDS", 0.01)
    monkeypatch.setattr(keeping, "FAULT_RECOVERY_SECONDS", 0.02)
    monkeypatch.setattr(keeping, "RESTART_BACKOFF", Backoff(0.01, 0.01))
    monkeypatch.setattr(keeping, "RETEST_BACKOFF", Backoff(0.01, 0.01))
    kept.stopped = []

    async def stop(timeout_seconds):
        kept.stopped.append(timeout_seconds)
        kept.control.state = "ACTIVE"

    async def self_test(*_):
        passes = kept.control.state == "ACTIVE"
        return SelfTest(SelfTestResult.PASSED if passes else SelfTestResult.FAILED, "the probe")

    monkeypatch.setattr(kept.control, "stop", stop)
    monkeypatch.setattr(keeping, "run_self_test", self_test)
    return kept


async def test_a_server_that_is_in_fault_when_the_keeper_starts_is_replaced(faulted):
    """Before: it was asked for its state for ever, as only a server that is watched was replaced."""
    faulted.control.state = "FAULT"
    async with running(faulted._supervise()):
        await eventually(lambda: faulted.stopped, "the daemon is stopped")
        await eventually(lambda: faulted.reader.read().state is GateState.ACTIVE, "another serves")
        status = faulted.reader.read()
        assert (status.faults, status.last_fault) == (1, "server in FAULT")
    assert len(faulted.stopped) == 1


async def test_a_fault_that_the_former_keeper_noted_is_not_counted_again(faulted):
    me = faulted._status
    faulted._previous = dataclasses.replace(
        me, state=GateState.FAULT, faults=1, last_fault="fatal", last_fault_pods=("a",), is_fault_counted=True
    )
    faulted._take_over()
    faulted.control.state = "FAULT"
    async with running(faulted._supervise()):
        await eventually(lambda: faulted.stopped, "the daemon is stopped")
        await eventually(lambda: faulted.reader.read().state is GateState.ACTIVE, "another serves")
        status = faulted.reader.read()
        assert (status.faults, status.last_fault, status.last_fault_pods) == (1, "fatal", ("a",))


@pytest.mark.usefixtures("adopted")
async def test_a_fault_that_was_counted_while_the_daemon_was_silent_is_not_counted_by_the_next_keeper(faulted):
    """Before: its state was written as Down, so the next keeper counted the server's FAULT as another one."""
    up(faulted)
    faulted.control.state = "FAULT"

    async def silent(*_):
        faulted.control.failure = ControlTimeoutError("no answer within 15 s")
        raise faulted.control.failure

    faulted._is_back = silent
    async with running(faulted._watch()):
        await eventually(lambda: faulted.reader.read().state is GateState.DOWN, "silent")
    status = faulted.reader.read()
    assert (status.state, status.faults) == (GateState.DOWN, 1)
    faulted.control.failure = None
    assert (await until_active(successor(faulted))).faults == 1
    assert faulted.stopped, "the server was in FAULT until the daemon was stopped"


async def test_a_server_that_stays_in_fault_during_the_self_test_is_replaced(faulted, monkeypatch):
    """Before: the self-test was repeated for ever."""
    states = []
    set_state = faulted._set_state
    monkeypatch.setattr(faulted, "_set_state", lambda state, *why: (states.append(state), set_state(state, *why)))
    tested = faulted._self_test

    async def self_test(server_pid):
        if not faulted.stopped:
            faulted.control.state = "FAULT"
        return await tested(server_pid)

    monkeypatch.setattr(faulted, "_self_test", self_test)
    async with running(faulted._supervise()):
        await eventually(lambda: faulted.stopped, "the daemon is stopped")
        await eventually(lambda: faulted.reader.read().state is GateState.ACTIVE, "another serves")
        assert faulted.reader.read().faults == 1
        assert states.count(GateState.ACTIVE) == 1, "nobody was let in before the ceilings were proven"


async def test_a_server_that_recovers_during_the_self_test_lets_nobody_in_unproven(faulted, monkeypatch):
    up(faulted)
    states = []
    set_state = faulted._set_state
    monkeypatch.setattr(faulted, "_set_state", lambda state, *why: (states.append(state), set_state(state, *why)))
    monkeypatch.setattr(keeping, "FAULT_RECOVERY_SECONDS", 60.0)
    faulted.control.state = "FAULT"
    async with running(faulted._prove(os.getpid())) as proving:
        await eventually(lambda: GateState.FAULT in states, "it is waited for")
        faulted.control.state = "ACTIVE"
        await eventually(proving.done, "proven")
    assert GateState.ACTIVE not in states
    assert not faulted.stopped
