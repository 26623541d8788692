"""Connections at the gate before a real twin daemon: turns, and what odd, silent and greedy clients reach."""

import asyncio
import errno
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpushare.mps import gate, turns
from gpushare.mps import relay as relaying
from gpushare.mps.frozen import record_of
from gpushare.mps.packets import COMPUTE_TYPE, CONTROL_TYPE, CREDENTIALS
from gpushare.mps.status import HoldReason, RefuseReason
from gpushare.mps.turns import MAX_STARVED_SECONDS, WASTE_SECONDS

from .conftest import PATIENCE, SRC, decide, eventually, speak

pytestmark = pytest.mark.slow  # real processes throughout: part of `make test`


# A process that takes the server's socket and never says its first word there.
HALF_WAY = """
import os, pathlib, socket, sys, time
from gpushare.twin.mps.client import COMPUTE_TYPE, CREDENTIALS, _ask, connect, request_server
path = pathlib.Path(sys.argv[1])
if sys.argv[2] == "sits with its second":  # what it does on the first is in order
    with request_server(path) as first:
        _ask(first, {"op": "query"})
if sys.argv[2] == "sits with two":  # both are ready at once
    both = [connect(path) for _ in range(2)]
    for each in both:
        each.send(CREDENTIALS)
        each.send(COMPUTE_TYPE)
    server = socket.recv_fds(both[0], 100, 1)[1]
    both[0].send(bytes(4))
else:
    server = request_server(path)
if sys.argv[2] == "leaves with the pipes":
    for _ in range(4):
        for each in socket.recv_fds(server, 100, 1)[1]:
            os.close(each)
print("taken", flush=True)
if sys.argv[2].startswith("sits"):
    time.sleep(1000)
"""


# A process with many connections ready that acknowledges each late, and becomes no client by it.
LATE = """
import pathlib, socket, sys, time
from gpushare.twin.mps.client import ACKNOWLEDGED, COMPUTE_TYPE, CREDENTIALS, _ask, connect
ready = [connect(pathlib.Path(sys.argv[1])) for _ in range(13)]
for each in ready:
    each.send(CREDENTIALS)
    each.send(COMPUTE_TYPE)
for each in ready:
    [descriptor] = socket.recv_fds(each, 100, 1)[1]
    time.sleep(1.5)
    each.send(ACKNOWLEDGED)
    with socket.socket(fileno=descriptor) as server:
        _ask(server, {"op": "query"})
"""


def goes_half_way(path: Path, way: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", HALF_WAY, str(path), way]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def acknowledges_late(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LATE, str(path)], env={**os.environ, "PYTHONPATH": str(SRC)})


async def test_control_commands_go_nowhere_and_are_counted(stage):
    decide(stage.gpu, a=(20, 4096))
    stage.default_pod = "a"
    connection = await speak(stage.gpu.control, CREDENTIALS, CONTROL_TYPE)
    assert await asyncio.get_running_loop().sock_recv(connection, 100) == b""
    connection.close()
    assert stage.gate.refused[RefuseReason.CONTROL_COMMAND] == 1
    assert await stage.control.servers() == (stage.server_pid,)


async def test_silent_half_spoken_and_odd_connections_delay_nobody(stage, tenants):
    decide(stage.gpu, bad=(20, 4096), good=(40, 20000))
    stage.default_pod = "bad"
    open_ = [await speak(stage.gpu.control) for _ in range(5)]
    open_ += [await speak(stage.gpu.control, CREDENTIALS) for _ in range(5)]
    open_ += [await speak(stage.gpu.control, b"GET / HTTP/1.1") for _ in range(2)]
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "good"
    await eventually(tenant.is_connected, "connected")
    assert stage.gate.turns.timeouts == 0
    assert [h.reason for h in stage.gate.held()].count(HoldReason.PROTOCOL) == 2
    for connection in open_:
        connection.close()
    await eventually(lambda: stage.gate.connection_count == 0, "nothing left of them")


async def test_a_process_that_takes_its_place_and_stops_waits_behind_the_others_next_time(
    stage, tenants, monkeypatch
):
    monkeypatch.setattr("gpushare.mps.gate.TURN_SECONDS", 0.5)
    decide(stage.gpu, bad=(20, 4096), good=(40, 20000))
    stage.default_pod = "bad"
    connection = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
    await eventually(lambda: stage.gate.turns.timeouts == 1, "its turn timed out")
    again = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
    await eventually(lambda: HoldReason.BACK_OFF in stage.reasons().values(), "held back")
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "good"
    await eventually(tenant.is_connected, "connected")
    for each in (connection, again):
        each.close()


async def test_who_sits_in_its_turn_is_cut_off_when_another_pod_waits(stage, tenants, monkeypatch):
    """Before: 8 s without a step and up to 24 s in all, whoever waited."""
    monkeypatch.setattr("gpushare.mps.gate.TURN_SECONDS", 10_000.0)
    monkeypatch.setattr("gpushare.mps.gate.MAX_TURN_SECONDS", 10_000.0)
    decide(stage.gpu, bad=(20, 4096), good=(40, 20000))
    stage.default_pod = "bad"
    sitting = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
    await eventually(lambda: stage.gate.current_pid is not None, "its turn")
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "good"
    await eventually(tenant.is_connected, "connected")
    assert stage.gate.turns.timeouts >= 1
    sitting.close()


@pytest.mark.parametrize(
    "way", ["leaves", "leaves with the pipes", "sits", "sits with two", "sits with its second"]
)
async def test_a_process_that_never_speaks_to_the_server_harms_nobody(stage, tenants, way, monkeypatch):
    """Before: the MPS server waited for it for ever, and with that every later process of every pod."""
    decide(stage.gpu, bad=(20, 4096), good=(40, 20000), late=(40, 20000))
    running = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[running.pid] = "good"
    await eventually(running.is_connected, "connected")
    await eventually(lambda: stage.gate.turns.count == 1, "its turn over")
    half = goes_half_way(stage.gpu.control, way)
    stage.pods[half.pid] = "bad"
    try:
        with monkeypatch.context() as short:  # for the others a turn is as long as ever: they may get no CPU
            short.setattr("gpushare.mps.gate.TURN_SECONDS", 2.0)
            assert await asyncio.to_thread(half.stdout.readline) == "taken\n"
            await eventually(lambda: stage.gate.turns.timeouts >= 1, "the bad one's turn over")
        newcomer = tenants(stage.gpu.tenant, "--workload", "stream")
        stage.pods[newcomer.pid] = "late"
        await eventually(newcomer.is_connected, "a newcomer is in")
        assert set(await stage.look()) == {running.pid, newcomer.pid}
        assert stage.ledger.strangers() == ()
        assert not stage.trouble
        assert "error" not in running.text()
    finally:
        half.kill()
        half.communicate()


# A process that is killed within its kernel, before the gate has seen it in the server's list.
KILLED_AT_ONCE = """
import os, signal
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import TwinContext
TwinContext(os.environ, WORKLOADS["montecarlo-fp32"]).launch(1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_for_a_process_that_has_spoken_and_is_killed_within_a_kernel_nothing_is_said(
    stage, tenants, monkeypatch, caplog
):
    """Before: the server got the word in the midst of a connection, and did not notice why that was over."""
    monkeypatch.setattr("gpushare.mps.gate.LISTING_SECONDS", 0.001)
    decide(stage.gpu, good=(40, 20000), killed=(20, 4096))
    neighbour = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[neighbour.pid] = "good"
    await eventually(neighbour.is_connected, "connected")
    environment = {**os.environ, "PYTHONPATH": str(SRC), "CUDA_MPS_PIPE_DIRECTORY": str(stage.gpu.tenant)}
    command = [sys.executable, "-c", KILLED_AT_ONCE]
    killed = await asyncio.to_thread(subprocess.Popen, command, env=environment)
    stage.pods[killed.pid] = "killed"
    assert await asyncio.to_thread(killed.wait, PATIENCE) == -signal.SIGKILL
    await eventually(lambda: neighbour.process.poll() == 1, "its neighbour ended with it")
    assert "an illegal memory access was encountered" in neighbour.text()
    assert "said in its place" not in caplog.text


def delay_runs(monkeypatch, run_delays):
    """Have the gate and its turns see these waits of a process's threads for a CPU, and none of the machine's."""
    for user in (gate, turns):
        monkeypatch.setattr(user, "run_delays", run_delays)


async def test_a_newcomer_that_gets_no_cpu_keeps_its_turn_but_not_twice(stage, tenants, monkeypatch):
    """One that was slow at a load of 40 lost its turn, went on without it and was ended."""
    delay_runs(monkeypatch, lambda _: {"1": time.monotonic()})  # starved all along
    decide(stage.gpu, slow=(20, 4096), good=(40, 20000), other=(40, 20000))
    stage.default_pod = "slow"
    silent = []
    note = stage.gate._note_turn

    def note_turn(turn, asked):
        if not turn.listed:
            silent.append(time.monotonic() - turn.started)
        note(turn, asked)

    monkeypatch.setattr(stage.gate, "_note_turn", note_turn)
    for neighbour in ("good", "other"):
        sitting = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
        await eventually(lambda: stage.gate.current_pid == os.getpid(), "its turn")
        tenant = tenants(stage.gpu.tenant, "--workload", "stream")
        stage.pods[tenant.pid] = neighbour
        await eventually(tenant.is_connected, "connected")
        sitting.close()
    first, second = silent
    assert first > WASTE_SECONDS + MAX_STARVED_SECONDS
    assert second < first, "the second was cut short"


async def test_a_pod_that_we_froze_in_its_turn_is_neither_cut_off_nor_charged(stage, tenants, monkeypatch, caplog):
    """Before: it paid for the freezes of readings and throttle, and was cut off if they took two seconds."""
    delay_runs(monkeypatch, lambda _: {})
    decide(stage.gpu, frozen=(20, 4096), other=(40, 20000))
    now, accounts = time.monotonic(), stage.gate._accounts
    for _ in range(10):
        accounts.note_waste("frozen", 0.4, now, has_left=True)
    assert accounts.allowance_seconds("frozen", now) == turns.LEAST_TURN_SECONDS
    lasted, charged, note_turn, note_client = {}, {}, stage.gate._note_turn, accounts.note_client

    def note_lasted(turn, asked):
        lasted[turn.pod_uid] = time.monotonic() - turn.started
        note_turn(turn, asked)

    def note_charged(uid, seconds, at):
        charged[uid] = seconds
        note_client(uid, seconds, at)

    monkeypatch.setattr(stage.gate, "_note_turn", note_lasted)
    monkeypatch.setattr(accounts, "note_client", note_charged)
    mark = record_of(stage.gpu.path.parent) / "frozen"
    mark.parent.mkdir()
    loop, relay, stopped = asyncio.get_running_loop(), stage.gate._relay, []

    def thaw(pid):
        os.kill(pid, signal.SIGCONT)
        mark.unlink()

    async def freeze_and_relay(connection, turn):
        if turn.pod_uid == "frozen" and not stopped:
            stopped.append(turn.process[0])
            mark.touch()
            os.kill(turn.process[0], signal.SIGSTOP)
            loop.call_later(2.2, thaw, turn.process[0])
        await relay(connection, turn)

    monkeypatch.setattr(stage.gate, "_relay", freeze_and_relay)
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "frozen"
    await eventually(lambda: stopped == [tenant.pid], "frozen in its turn")
    neighbour = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[neighbour.pid] = "other"
    await eventually(tenant.is_connected, "the frozen one connected")
    await eventually(neighbour.is_connected, "the other one connected")
    assert "said in its place" not in caplog.text
    assert 0.0 < charged["frozen"] < lasted["frozen"] - 2.0


async def test_a_pods_long_held_connections_do_not_all_go_before_a_newcomer(stage, tenants, monkeypatch):
    """Before: each brought its whole waiting along, so a pod that let many wait had turn after turn."""
    monkeypatch.setattr("gpushare.mps.grants.SETTLE_SECONDS", 0.0)  # else its pod waits between its turns anyhow
    order = []
    note = stage.gate._note_turn
    monkeypatch.setattr(stage.gate, "_note_turn", lambda turn, at: (order.append(turn.pod_uid), note(turn, at)))
    old = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(3)]
    stage.pods |= {tenant.pid: "old" for tenant in old}
    await eventually(lambda: len(stage.gate._waiting) == 3, "all wait for their decision")
    for [connection] in stage.gate._waiting.values():
        connection.opened_at -= 1200.0
    newcomer = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100")
    stage.pods[newcomer.pid] = "new"
    await eventually(lambda: len(stage.gate._waiting) == 4, "the newcomer waits too")
    decide(stage.gpu, processes=3, old=(60, 20000), new=(20, 20000))
    for tenant in (*old, newcomer):
        await eventually(tenant.is_connected, "connected")
    await eventually(lambda: len(order) == 4, "all turns over")
    assert order == ["old", "new", "old", "old"]


async def test_a_clients_own_silence_is_not_the_daemons_time(stage, tenants, monkeypatch):
    """Before: what it took to acknowledge was not counted, and nine of its connections passed in one turn."""
    delay_runs(monkeypatch, lambda _: {})
    passed = []
    relay = stage.gate._relay
    monkeypatch.setattr(
        stage.gate, "_relay", lambda connection, turn: (passed.append(turn.pod_uid), relay(connection, turn))[1]
    )
    late = acknowledges_late(stage.gpu.control)
    stage.pods[late.pid] = "late"
    try:
        await eventually(lambda: [len(each) for each in stage.gate._waiting.values()] == [13], "all are ready")
        for connection in next(iter(stage.gate._waiting.values())):
            connection.opened_at -= 60.0
        newcomer = tenants(stage.gpu.tenant, "--workload", "stream")
        stage.pods[newcomer.pid] = "new"
        await eventually(lambda: len(stage.gate._waiting) == 2, "another pod waits")
        decide(stage.gpu, late=(20, 4096), new=(20, 20000))
        await eventually(newcomer.is_connected, "connected")
        before = passed.index("new")
        assert passed[:before] == ["late"] * before
        # Three seconds for its waste, two for what it does meanwhile, at 1.5 s each; fewer on a busy machine.
        assert 1 <= before <= 4
    finally:
        late.kill()
        late.communicate()


async def test_a_pod_that_is_always_refused_does_not_keep_another_from_its_turn(stage, tenants):
    """Before: a turn that broke off left no trace, and the pod that came first was picked again, for ever."""
    decide(stage.gpu, bad=(20, 2**31 + 1), good=(40, 20000))  # more than the daemon takes as a limit
    stage.default_pod = "bad"
    refused = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
    await eventually(lambda: stage.trouble, "refused once")
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "good"
    await eventually(tenant.is_connected, "connected")
    assert any(waiting.pod_uid == "bad" for waiting in stage.gate.held()), "it is held, not closed"
    refused.close()


async def test_what_a_client_says_beyond_the_protocol_ends_it_at_the_gate(stage):
    decide(stage.gpu, a=(20, 4096))
    stage.default_pod = "a"
    connection = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
    connection.send(b"x" * 60_000)
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(connection, 100):
        pass
    connection.close()
    assert stage.gate.refused[RefuseReason.PROTOCOL] == 1
    assert await stage.control.servers() == (stage.server_pid,)


async def test_a_client_that_the_server_turns_away_is_noted_and_not_taken_for_a_breach_of_the_protocol(stage):
    decide(stage.gpu, a=(20, 4096))
    stage.default_pod = "a"
    connection = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
    connection.send(bytes.fromhex("27030000"))  # CUDA error 807: the server is not ready to accept new clients
    await eventually(lambda: stage.ledger.lost_in_their_turn(-math.inf), "noted")
    assert [each.pod_uid for each in stage.ledger.lost_in_their_turn(-math.inf)] == ["a"]
    assert [each.cuda_error for each in stage.ledger.turned_away(-math.inf, math.inf)] == [807]
    assert stage.gate.refused[RefuseReason.PROTOCOL] == 0
    connection.close()


async def test_a_descriptor_that_the_kernel_does_not_carry_leaves_the_process_waiting(stage, tenants, monkeypatch):
    """Before: the gate closed it, and it ran uncapped."""
    real, failures = relaying._deliver, []

    async def fails_first(client, answer):
        if len(failures) < 3:
            failures.append(1)
            raise OSError(errno.ETOOMANYREFS, "too many references")
        await real(client, answer)

    monkeypatch.setattr(relaying, "_deliver", fails_first)
    decide(stage.gpu, a=(20, 20000))
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(tenant.is_connected, "connected after all")
    assert tenant.value("sms") == "26"
    assert len(failures) == 3


async def test_a_pod_of_many_processes_leaves_each_neighbour_its_client(stage, tenants, monkeypatch):
    monkeypatch.setattr("gpushare.mps.policy.MAX_CLIENTS_PER_GPU", 3)
    decide(stage.gpu, processes=3, greedy=(20, 4096), b=(20, 4096), c=(20, 4096))
    many = [tenants(stage.gpu.tenant, "--workload", "latency-probe", "--memory-mib", "16") for _ in range(3)]
    stage.pods |= {tenant.pid: "greedy" for tenant in many}
    await eventually(lambda: sum(t.is_connected() for t in many) == 1, "one is in")
    await eventually(
        lambda: list(stage.reasons().values()) == [HoldReason.CLIENTS_RESERVED] * 2, "the others are held"
    )
    for pod in ("b", "c"):
        tenant = tenants(stage.gpu.tenant, "--workload", "latency-probe", "--memory-mib", "16")
        stage.pods[tenant.pid] = pod
        await eventually(tenant.is_connected, "a neighbour is in")


async def test_who_attaches_outside_its_turn_is_a_stranger(stage, tenants):
    decide(stage.gpu, a=(20, 4096))
    tenant = tenants(stage.gpu.pipe, "--workload", "stream")  # past the gate
    stage.pods[tenant.pid] = "a"
    await eventually(tenant.is_connected, "connected")
    assert tenant.pid in await stage.look()
    (stranger,) = stage.ledger.strangers()
    assert (stranger.pod_uid, stranger.pid) == ("a", tenant.pid)
    assert "outside its turn" in stranger.detail
