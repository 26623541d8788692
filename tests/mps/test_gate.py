"""The gate before a real twin daemon, with real tenant processes; pods are told apart by pid instead of cgroup."""

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.mps import commands
from gpushare.mps import relay as relaying
from gpushare.mps.control import AsyncMpsControl
from gpushare.mps.ending import Endings, EndingStep
from gpushare.mps.gate import MAX_STARVED_SECONDS, Backend, Gate
from gpushare.mps.host import listen
from gpushare.mps.identity import ends_with, is_alive, start_ticks_of
from gpushare.mps.layout import Decisions, PodDecision, write_decisions
from gpushare.mps.ledger import Admission, ClientLedger
from gpushare.mps.packets import COMPUTE_TYPE, CONTROL_TYPE, CREDENTIALS, HELLO
from gpushare.mps.policy import CeilingPolicy
from gpushare.mps.status import GateState, HoldReason, RefuseReason
from gpushare.mps.turns import WASTE_SECONDS
from gpushare.twin.mps.memory import TwinMemory

from .conftest import SRC, decide, eventually, is_stopped, twin_program

pytestmark = pytest.mark.slow  # real processes throughout: part of `make test`


SEVERAL_CONTEXTS = """
import os, time
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import TwinContext
held = []
for _ in range(3):
    held.append(TwinContext(os.environ, WORKLOADS["stream"]))
    held[-1].allocate(3000)
print("all", flush=True)
time.sleep(1000)
"""


class Stage:
    """A gate, its daemon and what the tests say of pids."""

    def __init__(self, gpu, server_pid: int) -> None:
        self.gpu, self.server_pid = gpu, server_pid
        self.pods: dict[int, str] = {}
        self.default_pod: str | None = None
        self.control = AsyncMpsControl(twin_program(gpu))
        self.ledger = ClientLedger(TwinMemory(gpu), identify=self.identify)
        self.trouble: list[Exception] = []
        self.gate = Gate(
            self.control, CeilingPolicy(gpu), self.ledger, on_trouble=self.trouble.append, identify=self.identify
        )

    def identify(self, pid: int) -> str | None:
        return self.pods.get(pid, self.default_pod)

    async def look(self) -> tuple[int, ...]:
        """What the keeper does once a second."""
        self.ledger.observe_memory(asyncio.get_running_loop().time())
        clients = await self.control.run(commands.client_list(self.server_pid))
        return self.ledger.note_clients(clients, self.gate.current_pid)

    def reasons(self) -> dict[int, HoldReason]:
        return {held.pid: held.reason for held in self.gate.held()}


@pytest.fixture
async def stage(twin, twin_gpu):
    twin.run(commands.start_server(0))
    stage = Stage(twin_gpu, twin.servers()[0])
    await stage.look()
    listener = listen(twin_gpu)
    task = asyncio.create_task(stage.gate.serve(listener))
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    yield stage
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    listener.close()


async def speak(path, *packets: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    connection.connect(str(path))
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(connection, 100) == HELLO
    for packet in packets:
        connection.send(packet)
    return connection


async def test_each_pod_gets_its_own_ceilings_whatever_its_environment_asks(stage, tenants):
    decide(stage.gpu, a=(20, 4096), b=(60, 8192))
    greedy = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "95", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=100G"}
    a = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100", env=greedy)
    b = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100", env=greedy)
    stage.pods |= {a.pid: "a", b.pid: "b"}
    for tenant, sms, limit in ((a, "26", "4096"), (b, "78", "8192")):
        await eventually(tenant.is_connected, "connected")
        assert (tenant.value("sms"), tenant.value("memory_limit_mib")) == (sms, limit)
    await eventually(lambda: stage.gate.turns.count == 2, "both turns over")
    assert {c.pod_uid for c in stage.ledger.clients()} == {"a", "b"}
    assert stage.gate.turns.timeouts == 0


async def test_a_pod_without_a_decision_waits_and_goes_on_when_it_gets_one(stage, tenants):
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.NO_DECISION, "held")
    decide(stage.gpu, a=(20, 20000))
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


async def test_a_process_of_no_pod_waits_for_ever(stage, tenants):
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.UNKNOWN_POD, "held")
    assert not tenant.is_connected()


async def test_a_pod_decided_for_another_gpu_is_caught_at_its_first_connect(stage, tenants):
    other = type(stage.gpu)(stage.gpu.path.parent / "GPU-other")
    other.create()
    decide(other, a=(20, 4096))
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is HoldReason.WRONG_GPU, "held")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (GateState.DOWN, HoldReason.DAEMON_DOWN),
        (GateState.FAULT, HoldReason.FAULT),
        (GateState.STARTING, HoldReason.DAEMON_DOWN),
        (GateState.SELF_TEST, HoldReason.SELF_TEST),
    ],
)
async def test_while_mps_is_not_active_processes_wait_and_then_go_on_under_mps(stage, tenants, state, reason):
    decide(stage.gpu, a=(20, 20000))
    stage.gate.set_backend(Backend(state))
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.reasons().get(tenant.pid) is reason, "held")
    assert "without MPS" not in tenant.text()
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    await eventually(tenant.is_connected, "connected")
    assert tenant.value("sms") == "26"


async def test_five_processes_of_a_pod_never_have_more_than_its_cap(stage, tenants):
    """Before: each had the pod's 20% for itself, together the whole GPU (docs/facts.md 29)."""
    decide(stage.gpu, a=(20, 20000))
    five = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(5)]
    stage.pods |= {tenant.pid: "a" for tenant in five}
    await eventually(lambda: any(t.is_connected() for t in five), "one is in")
    await eventually(
        lambda: list(stage.reasons().values()) == [HoldReason.POD_CAP] * 4, "the others wait, and it is told why"
    )
    (first,) = [tenant for tenant in five if tenant.is_connected()]
    assert first.value("sms") == "26"
    first.end()
    await stage.look()
    await eventually(lambda: sum(t.is_connected() for t in five) == 2, "the next one is in")
    (second,) = [t for t in five if t is not first and t.is_connected()]
    assert second.value("sms") == "26"


async def test_a_pod_that_names_its_processes_has_its_cap_divided_among_them(stage, tenants):
    decide(stage.gpu, processes=4, a=(50, 20000))
    six = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(6)]
    stage.pods |= {tenant.pid: "a" for tenant in six}
    await eventually(lambda: sum(t.is_connected() for t in six) == 4, "four are in", 200)
    await eventually(lambda: list(stage.reasons().values()) == [HoldReason.POD_CAP] * 2, "two wait")
    # 13, 13, 12 and 12% of 132 SMs, which MPS rounds down to pairs
    assert sorted(t.value("sms") for t in six if t.is_connected()) == ["14", "14", "16", "16"]
    await stage.look()
    assert sum(client.thread_percentage for client in stage.ledger.clients()) == 50


async def test_an_uncapped_pod_may_have_processes_without_naming_them(stage, tenants):
    decide(stage.gpu, a=(100, 20000))
    pair = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(2)]
    stage.pods |= {tenant.pid: "a" for tenant in pair}
    for tenant in pair:
        await eventually(tenant.is_connected, "connected")
        assert tenant.value("sms") == "132"


async def test_a_new_decision_binds_the_next_process_and_leaves_the_running_one(stage, tenants):
    decide(stage.gpu, a=(20, 8192))
    first = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "1000")
    stage.pods[first.pid] = "a"
    await eventually(first.is_connected, "connected")
    decide(stage.gpu, a=(60, 20000))
    second = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "1000")
    stage.pods[second.pid] = "a"
    await eventually(second.is_connected, "connected")
    assert (first.value("sms"), second.value("sms")) == ("26", "52"), "the second has what the first one leaves"
    assert first.process.poll() is None


async def test_two_processes_of_a_pod_share_its_limit(stage, tenants):
    decide(stage.gpu, processes=2, a=(50, 8192))
    pair = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "6000") for _ in range(2)]
    stage.pods |= {tenant.pid: "a" for tenant in pair}
    await eventually(lambda: any("out of memory" in t.text() for t in pair), "one refused in CUDA's words")
    await eventually(lambda: any("iterations/s" in t.text() for t in pair), "the other runs")
    assert sum("out of memory" in t.text() for t in pair) == 1


async def test_when_an_older_process_grows_beyond_the_limit_the_newest_is_ended(stage, tenants):
    decide(stage.gpu, processes=2, a=(50, 4096))
    old = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "500")
    stage.pods[old.pid] = "a"
    await eventually(lambda: "iterations/s" in old.text(), "running")
    new = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "3000")
    stage.pods[new.pid] = "a"
    await eventually(lambda: "iterations/s" in new.text(), "running")
    grown = {old.pid: 2000, new.pid: 3125}
    stage.ledger._memory = type("Grown", (), {"used_mib": lambda self: grown})()
    now = 0.0
    stage.gate._endings = Endings(clock=lambda: now)
    for at in (0.0, 0.5, 1.5):
        assert new.process.poll() is None
        now = at
        await stage.look()
        await stage.gate.end_overruns()
    await eventually(lambda: new.process.poll() is not None, "the newest ended")
    assert (new.process.poll(), old.process.poll()) == (-signal.SIGKILL, None)
    assert ["ended process" in each.detail for each in stage.ledger.mismatches] == [True], "told once"


@pytest.fixture
def several_contexts(twin_gpu, short_path):
    """A process that makes three contexts with 3,000 MiB each, and what it logs."""
    log = short_path / "log"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(SRC),
        "CUDA_MPS_PIPE_DIRECTORY": str(twin_gpu.tenant),
    }
    with log.open("w") as file:
        command = [sys.executable, "-c", SEVERAL_CONTEXTS]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    yield process, log
    process.kill()
    process.wait(60)


async def test_a_process_of_several_contexts_has_no_more_memory_than_its_pod(stage, several_contexts):
    process, log = several_contexts
    decide(stage.gpu, a=(20, 4096))
    stage.pods[process.pid] = "a"
    now = 0.0
    stage.gate._endings = Endings(clock=lambda: now)
    await eventually(lambda: "all" in log.read_text(), "three contexts with 3,000 MiB each")
    await stage.look()
    await stage.ledger.watch_memory()
    await stage.gate.end_overruns()
    now = 2.0
    await stage.gate.end_overruns()
    await eventually(lambda: process.poll() == -signal.SIGKILL, "ended")
    assert f"of its 4096 MiB; ended process {process.pid}" in stage.ledger.mismatches[-1].detail


async def test_a_deleted_pods_clients_are_stopped_before_its_kill_and_no_new_one_is_let_in(stage, tenants):
    stage.gate._policy.wall = lambda: now
    stage.gate._endings = Endings(clock=lambda: now)
    now, stays = 1000.0, PodDecision(20, 8192)
    leaves = replace(stays, ends_at=1027.0)  # deleted at 1000 with a grace period of 30 s
    write_decisions(stage.gpu, Decisions({"a": leaves, "b": stays}))
    # terminate_client would take its neighbour along
    victim = tenants(stage.gpu.tenant, "--workload", "gemm-fp16", "--memory-mib", "100")
    neighbour = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100")
    stage.pods[victim.pid], stage.pods[neighbour.pid] = "a", "b"
    await eventually(
        lambda: victim.is_connected() and neighbour.is_connected(), "both connected, in its grace too"
    )
    await stage.look()
    await stage.gate.end_leaving()
    assert not is_stopped(victim.pid), "it has its grace period for itself"
    now = 1027.0
    await stage.gate.end_leaving()
    await eventually(lambda: is_stopped(victim.pid), "stopped before kubelet kills it")
    assert not is_stopped(neighbour.pid)
    late = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100")
    stage.pods[late.pid] = "a"
    await eventually(lambda: stage.reasons().get(late.pid) is HoldReason.POD_ENDS, "a later process waits")
    now = 1030.0
    await stage.gate.end_leaving()
    os.kill(victim.pid, signal.SIGCONT)  # from within its container
    await stage.gate.end_leaving()
    await eventually(lambda: is_stopped(victim.pid), "stopped again")
    now = 1030.6  # kubelet is late
    await stage.gate.end_leaving()
    assert is_stopped(victim.pid), "it was continued, so its kernels get their time anew"
    now = 1033.6
    await stage.gate.end_leaving()
    await eventually(lambda: victim.process.poll() is not None, "ended all the same")
    assert victim.process.poll() == -signal.SIGKILL
    assert neighbour.process.poll() is None
    assert neighbour.pid in await stage.look()
    assert await stage.control.server_state(stage.server_pid) is commands.ServerState.ACTIVE


@pytest.mark.parametrize("state", [GateState.SELF_TEST, GateState.DOWN, GateState.FAULT])
async def test_a_deleted_pods_clients_are_stopped_also_while_the_daemon_is_not_asked(stage, tenants, state):
    """Before: a self-test that is repeated, or a daemon that does not answer, let kubelet kill them unprepared."""
    now = 1000.0
    stage.gate._policy.wall = lambda: now
    stage.gate._endings = Endings(clock=lambda: now)
    write_decisions(stage.gpu, Decisions({"a": PodDecision(20, 8192, ends_at=1027.0)}))
    victim = tenants(stage.gpu.tenant, "--workload", "gemm-fp16", "--memory-mib", "100")
    stage.pods[victim.pid] = "a"
    await eventually(victim.is_connected, "connected")
    await stage.look()
    stage.gate.set_backend(Backend(state, stage.server_pid))
    now = 1027.0
    await eventually(lambda: is_stopped(victim.pid), "stopped without a look")
    now = 1030.5
    await eventually(lambda: victim.process.poll() is not None, "killed without a look")


async def test_who_is_stopped_when_the_server_ends_does_not_stay_stopped(stage, tenants):
    """Before: it was no client any more, so nobody went on with its end."""
    now = 0.0
    stage.gate._endings = Endings(clock=lambda: now)
    decide(stage.gpu, a=(20, 8192))
    victim = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100")
    stage.pods[victim.pid] = "a"
    await eventually(victim.is_connected, "connected")
    await stage.look()
    assert await stage.gate.end_client(stage.server_pid, victim.pid) is EndingStep.STOPPED
    await eventually(lambda: is_stopped(victim.pid), "stopped")
    stage.ledger.forget_clients()
    now = 1.0
    await eventually(lambda: victim.process.poll() is not None, "killed all the same")


CONTAINER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", flush=True)
child.wait()
"""


@contextlib.contextmanager
def pid_namespace():
    """The pids of a pid namespace's first process and of one more in it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a pid namespace needs root and unshare")
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", CONTAINER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as outer:
        if outer.stdout.readline() != b"up\n":
            pytest.skip("no pid namespace can be made here")
        (first,) = children_of(outer.pid)
        (second,) = children_of(first)
        yield first, second
        outer.kill()


@pytest.fixture
def container():
    with pid_namespace() as pids:
        yield pids


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_who_is_in_a_pid_namespace_beside_it_goes_on(container):
    """Two processes of a pod may each be the first of a namespace, in one cgroup."""
    first, second = container
    assert ends_with(first, second)
    assert ends_with(first, first)
    with pid_namespace() as (beside, child):
        assert not ends_with(first, beside)
        assert not ends_with(first, child)
        assert ends_with(beside, child)


async def test_with_a_containers_first_process_its_other_clients_are_stopped_too(stage, container):
    """The kernel kills a whole container with its first process: within the kernels of those that still ran."""
    first, second = container
    now = 0.0
    stage.gate._endings = Endings(clock=lambda: now)
    for pid in (second, first):
        stage.ledger.admit(Admission(pid, start_ticks_of(pid), "a", 20, 100, 100, now))
        stage.ledger.end_turn(pid, is_client=True)
    stage.ledger.note_clients((second, first))
    assert await stage.gate.end_client(stage.server_pid, second) is EndingStep.STOPPED
    assert not is_stopped(first), "its end is not the container's"
    stage.gate._endings = Endings(clock=lambda: now)
    os.kill(second, signal.SIGCONT)
    await eventually(lambda: not is_stopped(second), "runs")
    assert await stage.gate.end_client(stage.server_pid, first) is EndingStep.STOPPED
    await eventually(lambda: is_stopped(first) and is_stopped(second), "both stopped")
    now = 1.0
    await eventually(lambda: not is_alive(first) and not is_alive(second), "both killed")


async def test_a_stranger_that_has_left_costs_no_later_process_with_its_pid(stage, tenants):
    later = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.ledger.note_clients((later.pid,))  # past the gate, so a stranger
    stage.ledger._stranger_ticks[later.pid] -= 1  # the one that was listed had begun earlier
    assert await stage.gate.end_client(stage.server_pid, later.pid) is EndingStep.GONE
    assert not is_stopped(later.pid)


async def test_where_signals_are_not_permitted_kubelet_kills_and_the_daemon_ends_overruns(stage, tenants, caplog):
    def refuse(pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        raise PermissionError

    stage.gate._endings = Endings(send=refuse)
    write_decisions(stage.gpu, Decisions({"a": PodDecision(20, 8192, ends_at=1.0), "b": PodDecision(20, 8192)}))
    stage.gate._policy.wall = lambda: 0.0
    pair = [tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100") for _ in range(2)]
    stage.pods[pair[0].pid], stage.pods[pair[1].pid] = "a", "b"
    await eventually(lambda: all(tenant.is_connected() for tenant in pair), "both connected")
    await stage.look()
    stage.gate._policy.wall = lambda: 2.0
    await stage.gate.end_leaving()
    assert "not permitted" in caplog.text
    assert [tenant.process.poll() for tenant in pair] == [None, None]
    assert await stage.gate.end_client(stage.server_pid, pair[1].pid) is EndingStep.REFUSED
    await eventually(lambda: pair[1].process.poll() is not None, "ended by the daemon")
    assert pair[0].process.poll() is None


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


async def test_a_newcomer_that_gets_no_cpu_keeps_its_turn_but_not_twice(stage, tenants, monkeypatch):
    """One that was slow at a load of 40 lost its turn, went on without it and was ended."""
    monkeypatch.setattr("gpushare.mps.gate.run_delays", lambda _: {"1": time.monotonic()})  # starved all along
    decide(stage.gpu, slow=(20, 4096), good=(40, 20000), other=(40, 20000))
    stage.default_pod = "slow"
    for neighbour in ("good", "other"):
        sitting = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
        await eventually(lambda: stage.gate.current_pid == os.getpid(), "its turn")
        tenant = tenants(stage.gpu.tenant, "--workload", "stream")
        stage.pods[tenant.pid] = neighbour
        await eventually(tenant.is_connected, "connected")
        sitting.close()
    turns = stage.gate.turns
    assert turns.timeouts == 2
    assert turns.duration_seconds_max > WASTE_SECONDS + MAX_STARVED_SECONDS
    assert turns.durations_seconds_sum < 2 * turns.duration_seconds_max, "the second was cut short"


async def test_a_pod_that_is_always_refused_does_not_keep_another_from_its_turn(stage, tenants):
    """Before: a turn that broke off left no trace, and the pod that came first was picked again, for ever."""
    decide(stage.gpu, bad=(20, 2**31 + 1), good=(40, 20000))  # more than the daemon takes as a limit
    stage.default_pod = "bad"
    refused = await speak(stage.gpu.control, CREDENTIALS, COMPUTE_TYPE)
    await eventually(lambda: stage.trouble, "refused once")
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "good"
    await eventually(tenant.is_connected, "connected")
    assert any(held.pod_uid == "bad" for held in stage.gate.held()), "it is held, not closed"
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


async def test_a_daemon_that_dies_in_a_turn_leaves_the_process_waiting(stage, tenants, twin):
    decide(stage.gpu, a=(20, 20000))
    twin.stop(1.0)
    tenant = tenants(stage.gpu.tenant, "--workload", "stream")
    stage.pods[tenant.pid] = "a"
    await eventually(lambda: stage.trouble, "the keeper hears of it")
    await eventually(lambda: tenant.pid in stage.reasons(), "it waits")
    assert "without MPS" not in tenant.text()
    stage.gate.set_backend(Backend(GateState.DOWN))
    twin.start()
    twin.run(commands.start_server(0))
    stage.server_pid = twin.servers()[0]
    stage.gate.set_backend(Backend(GateState.ACTIVE, stage.server_pid))
    await eventually(tenant.is_connected, "connected after all")
    assert tenant.value("sms") == "26"


async def test_24_processes_of_8_pods_at_once_each_get_exactly_their_own(stage, tenants):
    parts = (6, 8, 10, 12, 15, 20, 25, 30)
    caps = {f"p{i}": (3 * part, 4096 + 512 * i) for i, part in enumerate(parts)}
    sms = dict(zip(caps, ("8", "10", "12", "14", "18", "26", "32", "38"), strict=True))
    decide(stage.gpu, processes=3, **caps)
    started = []
    for pod in itertools.chain.from_iterable(itertools.repeat(list(caps), 3)):
        tenant = tenants(stage.gpu.tenant, "--workload", "latency-probe", "--memory-mib", "600")
        stage.pods[tenant.pid] = pod
        started.append((pod, tenant))
    for pod, tenant in started:
        await eventually(lambda tenant=tenant: "iterations/s" in tenant.text(), f"a process of {pod} runs", 200)
        assert tenant.value("sms") == sms[pod]
    await stage.look()
    for pod, (_, limit_mib) in caps.items():
        used = sum(c.memory_used_mib or 0 for c in stage.ledger.clients() if c.pod_uid == pod)
        granted = [c.memory_limit_mib or 0 for c in stage.ledger.clients() if c.pod_uid == pod]
        assert used == 3 * (600 + 125) <= limit_mib
        assert sorted(granted, reverse=True) == [limit_mib - taken for taken in (0, 725, 1450)]


async def test_the_49th_client_waits_until_one_leaves(stage, tenants):
    decide(stage.gpu, **{f"p{i}": (2, 2048) for i in range(49)})
    many = [tenants(stage.gpu.tenant, "--workload", "latency-probe", "--memory-mib", "16") for _ in range(49)]
    stage.pods |= {tenant.pid: f"p{i}" for i, tenant in enumerate(many)}
    await eventually(lambda: sum(t.is_connected() for t in many) == 48, "48 run", 200)
    (held,) = [tenant for tenant in many if not tenant.is_connected()]
    await eventually(lambda: stage.reasons().get(held.pid) is HoldReason.CLIENTS, "the 49th waits")
    next(tenant for tenant in many if tenant is not held).end()
    await stage.look()
    await eventually(held.is_connected, "the 49th got in")
