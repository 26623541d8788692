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
from gpushare.mps.layout import GpuDirectory, status_reader
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
        me, state=GateState.FAULT, detail="fatal", faults=1, last_fault="fatal", last_fault_pods=("a",)
    )
    faulted._status = dataclasses.replace(me, faults=1, last_fault="fatal", last_fault_pods=("a",))
    faulted.control.state = "FAULT"
    async with running(faulted._supervise()):
        await eventually(lambda: faulted.stopped, "the daemon is stopped")
        await eventually(lambda: faulted.reader.read().state is GateState.ACTIVE, "another serves")
        status = faulted.reader.read()
        assert (status.faults, status.last_fault, status.last_fault_pods) == (1, "fatal", ("a",))


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
