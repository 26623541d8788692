import ctypes
import os
import signal
import socket
import time
import uuid

import pytest

from gpushare.core.gpu import ComputeMode
from gpushare.mps import commands
from gpushare.mps.commands import ServerState
from gpushare.mps.errors import ControlTimeoutError
from gpushare.mps.faultlog import FaultLog
from gpushare.mps.freezer import CGROUP_ROOT
from gpushare.mps.identity import RunState, is_traced, run_state_of
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import (
    CONTROL_TYPE,
    CREDENTIALS,
    CudaError,
    NoMpsError,
    TwinContext,
    connect,
    request_server,
)
from gpushare.twin.mps.server import CONTEXT_MIB, visible_sms
from gpushare.twin.mps.state import MODE_FILE, state_path, state_reader

from .cgroups import RealPods
from .conftest import PATIENCE, is_stopped, raw_connection, until

pytestmark = pytest.mark.slow  # real processes throughout: part of `make test`
STREAM = WORKLOADS["stream"]
PTRACE_SEIZE = 0x4206  # traces without a stop


@pytest.fixture
def server(twin):
    twin.run(commands.start_server(0))
    return twin.servers()[0]


def tick_until_ended(client) -> None:
    """Ticks may have been sent before the end."""
    while True:
        client.tick(PATIENCE)


def context(gpu, env=None):
    return TwinContext({"CUDA_MPS_PIPE_DIRECTORY": str(gpu.pipe), **(env or {})}, STREAM, PATIENCE)


@pytest.mark.parametrize(
    ("percentage", "sms"), [(50, 66), (25, 32), (10, 12), (20, 26), (60, 78), (80, 104), (100, 132), (5, 8)]
)
def test_sms_as_measured_on_an_h200(percentage, sms):
    assert visible_sms(132, percentage) == sms  # docs/facts.md 7 and 11


def test_a_servers_ceilings_bind_whatever_the_environment_asks(twin, twin_gpu, server):
    twin.apply(
        [commands.set_active_thread_percentage(server, 20), commands.set_device_pinned_mem_limit(server, 0, 6144)]
    )
    greedy = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=16G"}
    with_env, without = context(twin_gpu, greedy), context(twin_gpu)
    assert (with_env.attached.sm_count, with_env.attached.limit_mib) == (26, 6144)
    assert (without.attached.sm_count, without.attached.limit_mib) == (26, 6144)
    modest = context(
        twin_gpu, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G"}
    )
    assert (modest.attached.sm_count, modest.attached.limit_mib) == (12, 1024)
    for each in (with_env, without, modest):
        each.close()


def test_a_daemons_default_is_no_ceiling(twin, twin_gpu, server):
    twin.run(commands.set_default_active_thread_percentage(30))
    assert context(twin_gpu, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80"}).attached.sm_count == 104  # facts.md 11
    assert context(twin_gpu).attached.sm_count == 38


def test_a_client_keeps_what_was_in_force_when_it_connected(twin, twin_gpu, server):
    twin.run(commands.set_active_thread_percentage(server, 50))
    early = context(twin_gpu)
    twin.run(commands.set_active_thread_percentage(server, 10))
    assert (early.attached.sm_count, context(twin_gpu).attached.sm_count) == (66, 12)


def test_memory_beyond_the_limit_is_refused_in_cudas_words(twin, twin_gpu, server):
    twin.run(commands.set_device_pinned_mem_limit(server, 0, 4096))
    client = context(twin_gpu)
    with pytest.raises(CudaError, match="out of memory"):
        client.allocate(6144)
    client.allocate(4096 - CONTEXT_MIB)
    with pytest.raises(CudaError, match="out of memory"):
        client.allocate(1)
    client.free(100)
    client.allocate(100)


def test_a_fault_ends_every_client_and_the_server_comes_back(twin, twin_gpu, server):
    culprit, bystander = context(twin_gpu), context(twin_gpu)
    culprit.fault()
    for client in (culprit, bystander):
        with pytest.raises(CudaError, match="illegal memory access"):
            tick_until_ended(client)
    assert twin.server_state(server) is ServerState.FAULT
    culprit.close()
    bystander.close()
    until(lambda: twin.server_state(server) is ServerState.ACTIVE, "ACTIVE again")
    assert twin.run(commands.client_list(server)) == ()


def test_the_injected_fault_does_the_same(twin, twin_gpu, server):
    bystander = context(twin_gpu)
    twin.run(commands.Command("twin_fault", commands.check))
    with pytest.raises(CudaError, match="illegal memory access"):
        tick_until_ended(bystander)
    bystander.close()
    until(lambda: twin.server_state(server) is ServerState.ACTIVE, "ACTIVE again")


def test_one_client_is_ended_and_its_neighbour_goes_on(twin, twin_gpu, server, tenants):
    victim, neighbour = tenants(twin_gpu.pipe, "--workload", "stream"), context(twin_gpu)
    until(lambda: victim.pid in twin.run(commands.client_list(server)), "listed")
    twin.run(commands.terminate_client(server, victim.pid))
    until(lambda: victim.process.poll() is not None, "the victim ended")
    assert "terminated" in victim.text()
    assert neighbour.tick(PATIENCE)["progress"] > 0


def read_on(client: TwinContext) -> None:
    """Read what the server sends, what it sent before a fault too."""
    for _ in range(1000):
        client.tick(PATIENCE)


def test_ending_a_client_within_matrix_products_takes_its_neighbour_along_unless_it_is_stopped(
    twin, twin_gpu, server, tenants
):
    neighbour = context(twin_gpu)
    for stopped in (True, False):
        victim = tenants(twin_gpu.pipe, "--workload", "gemm-fp16")
        until(lambda pid=victim.pid: pid in twin.run(commands.client_list(server)), "listed")
        if stopped:
            os.kill(victim.pid, signal.SIGSTOP)
            until(lambda pid=victim.pid: is_stopped(pid), "stopped")
            time.sleep(1)  # the twin looks twenty times a second
            os.kill(victim.pid, signal.SIGKILL)
            until(lambda pid=victim.pid: pid not in twin.run(commands.client_list(server)), "gone")
            assert neighbour.tick(PATIENCE)["progress"] > 0
        else:
            twin.run(commands.terminate_client(server, victim.pid))
            with pytest.raises(CudaError, match="illegal memory access"):
                read_on(neighbour)
    neighbour.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="ptrace of another process needs root")
def test_ending_a_client_within_matrix_products_that_is_traced_takes_nobody_along(twin, twin_gpu, server, tenants):
    """Where the server answers late, its threads execute step by step: it looks running (docs/facts.md 36)."""
    neighbour = context(twin_gpu)
    victim = tenants(twin_gpu.pipe, "--workload", "gemm-fp16")
    until(lambda: victim.pid in twin.run(commands.client_list(server)), "listed")
    assert not is_traced(victim.pid)
    assert ctypes.CDLL(None).ptrace(PTRACE_SEIZE, victim.pid, None, None) == 0
    assert is_traced(victim.pid)
    assert run_state_of(victim.pid) is RunState.RUNS
    twin.run(commands.terminate_client(server, victim.pid))
    for _ in range(3):
        assert neighbour.tick(PATIENCE)["progress"] > 0
    neighbour.close()


@pytest.mark.parametrize("reads", [True, False])
def test_who_is_killed_within_a_kernel_takes_its_neighbours_along_and_is_not_listed(
    twin, twin_gpu, server, tenants, reads
):
    """As on an H200 in each of 4 tries, by the log's list too (docs/facts.md 35, gpushare.mps.faultlog)."""
    neighbour = context(twin_gpu)
    assert neighbour.tick(PATIENCE)
    killed = in_a_kernel(twin_gpu, 600, reads=reads)
    until(lambda: killed in twin.run(commands.client_list(server)), "listed")
    log = FaultLog(twin_gpu.log / "server.log")
    end(killed)
    with pytest.raises(CudaError, match="illegal memory access"):
        read_on(neighbour)
    fault = log.read()
    assert fault is not None
    assert fault.pids == (os.getpid(),)
    neighbour.close()
    until(lambda: twin.server_state(server) is ServerState.ACTIVE, "ACTIVE again")


def test_who_is_killed_within_a_kernel_takes_its_neighbours_along_though_somebody_speaks_in_its_place(
    twin, twin_gpu, server
):
    neighbour, (ours, theirs) = context(twin_gpu), socket.socketpair()
    killed = in_a_kernel(twin_gpu, 600, reads=True, hands_on=theirs)
    [copy] = socket.recv_fds(ours, 1, 1)[1]
    until(lambda: killed in twin.run(commands.client_list(server)), "listed")
    end(killed)
    with socket.socket(fileno=copy) as kept:
        kept.send(CREDENTIALS)
    with pytest.raises(CudaError, match="illegal memory access"):
        read_on(neighbour)
    for each in (neighbour, ours, theirs):
        each.close()


def test_who_ends_after_its_kernel_or_is_terminated_within_it_takes_nobody_along(twin, twin_gpu, server):
    neighbour = context(twin_gpu)
    over, asked = in_a_kernel(twin_gpu, 0.5, reads=True), in_a_kernel(twin_gpu, 600, reads=True)
    until(lambda: {over, asked} < set(twin.run(commands.client_list(server))), "listed")
    time.sleep(0.6)
    end(over)
    twin.run(commands.terminate_client(server, asked))
    end(asked)
    until(lambda: twin.run(commands.client_list(server)) == (os.getpid(),), "both gone")
    for _ in range(2):
        assert neighbour.tick(PATIENCE)["progress"] > 0
    neighbour.close()


def in_a_kernel(gpu, seconds: float, *, reads: bool, hands_on: socket.socket | None = None) -> int:
    """Fork a client that launches a kernel of so many seconds, and may never read what the server sends it."""
    pid = os.fork()
    if pid == 0:
        try:
            client = context(gpu)
            client.launch(seconds)
            if hands_on is not None:
                socket.send_fds(hands_on, [b"x"], [client.fileno()])
            while True:
                client.tick(PATIENCE) if reads else time.sleep(1)
        finally:
            os._exit(1)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_with_the_unprivileged_socket_alone_nothing_can_be_set(twin, twin_gpu, server):
    def ask(command: str) -> str:
        with raw_connection(twin_gpu.pipe / "control") as c:
            c.recv(100)
            c.send(CREDENTIALS)
            c.send(CONTROL_TYPE)
            c.send(command.encode())
            return c.recv(1000).decode()

    assert ask("set_default_active_thread_percentage 10") == "Insufficient privileges\n"  # docs/facts.md 2
    assert ask("quit") == "Insufficient privileges\n"
    assert ask("get_server_list") == "\0"
    assert twin.run(commands.get_default_active_thread_percentage()) == 100


def test_a_silent_connection_blocks_the_daemon_as_it_does_the_real_one(twin, twin_gpu, server):
    with raw_connection(twin_gpu.pipe / "control") as silent:
        silent.recv(100)
        begun = time.monotonic()
        with pytest.raises(NoMpsError):
            connect(twin_gpu.pipe / "control", 0.5)  # docs/facts.md 14: behind the silent one nobody is greeted
        assert time.monotonic() - begun >= 0.4
    context(twin_gpu).close()


def test_without_a_daemon_a_process_runs_without_mps(twin_gpu, tenants):
    tenant = tenants(twin_gpu.pipe, "--workload", "stream")
    until(lambda: "without MPS, uncapped" in tenant.text(), "the line")
    assert tenant.value("sms") == "all"


def test_while_the_gpu_is_exclusive_a_process_outside_mps_gets_no_context(
    twin, twin_gpu, server, tenants, tmp_path
):
    def outside():
        env = {"NVIDIA_VISIBLE_DEVICES": twin_gpu.uuid}
        return tenants(tmp_path / "nobody", "--workload", "stream", env=env)

    def listed() -> set[int]:
        state = state_reader(twin_gpu).read()
        return {client.pid for client in state.clients if not client.is_mps_client} if state else set()

    before = outside()
    until(lambda: listed() == {before.pid}, "listed")
    state_path(twin_gpu).with_name(MODE_FILE).write_text(ComputeMode.EXCLUSIVE_PROCESS)
    refused = outside()
    until(lambda: refused.process.poll() is not None, "refused")
    assert refused.process.returncode == 1, refused.text()
    assert "busy or unavailable" in refused.text()
    assert "without MPS, uncapped" not in refused.text()
    assert listed() == {before.pid}, "it has its context already"
    context(twin_gpu).close()
    state_path(twin_gpu).with_name(MODE_FILE).write_text(ComputeMode.DEFAULT)
    after = outside()
    until(lambda: listed() == {before.pid, after.pid}, "listed too")


def test_a_neighbours_arrival_lowers_the_rate_and_the_state_shows_it(twin, twin_gpu, server, tenants):
    first = tenants(twin_gpu.pipe, "--workload", "stream", "--memory-mib", "1000")
    until(lambda: "iterations/s" in first.text(), "a rate")
    until(lambda: float(first.value("progress")) == 1.0, "its own speed alone")
    second = tenants(twin_gpu.pipe, "--workload", "stream", "--memory-mib", "2000")
    until(second.is_connected, "connected")
    until(lambda: float(first.value("progress")) < 0.6, "slower beside a neighbour")
    reader = state_reader(twin_gpu)
    until(lambda: len(((state := reader.read()) and state.clients) or ()) == 2, "two clients in the state")
    until(lambda: reader.read().memory_used_mib == 3000 + 2 * CONTEXT_MIB, "their memory in the state")
    state = reader.read()
    assert {c.pid for c in state.clients} == {first.pid, second.pid}
    assert state.server_pid == server
    assert state.counters.dram_bw_util > 0.8
    assert state.counters.hmma_tensor_util == 0.0


def test_a_frozen_tenant_stands_still_and_its_neighbour_runs_as_alone(twin, twin_gpu, server, tenants):
    pods = RealPods("v1" if (CGROUP_ROOT / "freezer" / "tasks").exists() else "v2")
    try:
        uid = str(uuid.uuid4())
        cgroup = pods.add(uid)
        frozen = tenants(twin_gpu.pipe, "--workload", "stream")
        (pods.make(cgroup / "container") / "cgroup.procs").write_text(str(frozen.pid))
        until(frozen.is_connected, "connected")
        neighbour, state = context(twin_gpu), state_reader(twin_gpu)

        def progress() -> dict[int, float]:
            now = state.read()
            return {each.pid: each.progress for each in now.clients} if now else {}

        until(lambda: len(progress()) == 2, "two clients")
        beside = progress()[os.getpid()]
        assert beside < 0.95
        pods.freezer.freeze(cgroup)
        until(lambda: progress()[frozen.pid] == 0.0, "the frozen tenant without progress")
        assert progress()[os.getpid()] == 1.0
        pods.freezer.thaw(cgroup)
        until(lambda: progress()[frozen.pid] > 0.0, "the thawed tenant at work")
        assert progress()[os.getpid()] == beside
        neighbour.close()
    finally:
        pods.close()


def leave(server):
    server.close()


def leave_with_the_pipes(server):
    """It has taken and closed them, and says its word then."""
    for _ in range(4):
        _, descriptors, _, _ = socket.recv_fds(server, 100, 1)
        for each in descriptors:
            os.close(each)
    server.send(CREDENTIALS)


@pytest.mark.parametrize("end", [leave, leave_with_the_pipes])
def test_a_server_that_did_not_hear_a_client_serves_nobody_any_more(twin, twin_gpu, server, tenants, end):
    """As on an H200: tests/gpu/half_handshake.py, docs/facts.md 37."""
    neighbour = tenants(twin_gpu.pipe, "--workload", "stream")
    until(lambda: "iterations/s" in neighbour.text(), "a rate")
    half = request_server(twin_gpu.pipe / "control", PATIENCE)
    end(half)
    with pytest.raises(ControlTimeoutError):
        twin.run(commands.client_list(server), 2.0)
    seen = neighbour.text().count("iterations/s")
    until(lambda: neighbour.text().count("iterations/s") > seen + 1, "the neighbour goes on")
    with pytest.raises(NoMpsError):
        connect(twin_gpu.pipe / "control", 0.5)
    half.close()


def test_a_server_that_waits_for_a_clients_word_goes_on_when_it_has_heard_any(twin, twin_gpu, server):
    half = request_server(twin_gpu.pipe / "control", PATIENCE)
    with pytest.raises(ControlTimeoutError):
        twin.run(commands.client_list(server), 1.0)
    half.send(b"garbage")
    assert twin.run(commands.client_list(server), PATIENCE) == ()
    context(twin_gpu).close()
    half.close()
