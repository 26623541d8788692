"""The whole host as its own process: what its parts' deaths do to tenants."""

import os
import signal
import subprocess
import sys

import pytest

from gpushare.mps import commands
from gpushare.mps.actions import clients_of_pod, end_clients
from gpushare.mps.control import SyncMpsControl
from gpushare.mps.host import main
from gpushare.mps.identity import is_alive
from gpushare.mps.layout import gpu_directories, status_reader
from gpushare.mps.status import GateState, HoldReason, SelfTestResult

from .conftest import SRC, decide, is_stopped, twin_program, until

pytestmark = pytest.mark.slow

POD = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"


class Host:
    def __init__(self, base) -> None:
        self.base, self.proc = base / "run", base / "proc"
        self.proc.mkdir()
        self.start()
        until(lambda: gpu_directories(self.base), "a GPU directory")
        (self.gpu,) = gpu_directories(self.base)
        self.reader = status_reader(self.gpu)
        self.until_active()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpushare.mps.host",
                "--directory",
                str(self.base),
                "--simulated",
                "H200:1",
                "--node-name",
                "n",
                "--port",
                "0",
                "--proc",
                str(self.proc),
            ],
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )

    def status(self):
        return self.reader.read()

    def until_active(self) -> None:
        until(lambda: self.status() and self.status().state is GateState.ACTIVE, "ACTIVE")

    def belongs(self, pid: int, pod_uid: str) -> None:
        (self.proc / str(pid)).mkdir()
        (self.proc / str(pid) / "cgroup").write_text(f"0::/kubepods/besteffort/pod{pod_uid}/c\n")

    def stop(self) -> None:
        daemon = status.daemon_pid if (status := self.status()) else None
        self.process.terminate()
        self.process.wait(60)
        if daemon and is_alive(daemon):
            os.kill(daemon, signal.SIGKILL)


@pytest.fixture
def host(short_path):
    host = Host(short_path)
    yield host
    host.stop()


@pytest.fixture
def run(host, tenants):
    """Starts a tenant of a pod; the gate learns the pod of a process when it connects, so the file comes first."""

    def start(pod_uid: str, *arguments: str):
        tenant = tenants(host.gpu.tenant, *arguments)
        host.belongs(tenant.pid, pod_uid)
        return tenant

    return start


def test_the_tenant_directory_holds_control_and_nothing_else_and_the_self_test_passed(host):
    assert [path.name for path in host.gpu.tenant.iterdir()] == ["control"]
    assert host.status().self_test.result is SelfTestResult.PASSED


def test_a_killed_gate_ends_no_tenant_and_lets_nobody_escape(host, run):
    decide(host.gpu, processes=2, **{POD: (40, 20000)})
    running = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(running.is_connected, "connected")
    undecided = run(OTHER, "--workload", "stream", "--memory-mib", "100")
    until(lambda: any(h.reason is HoldReason.NO_DECISION for h in host.status().waiting_connections), "one held")
    before = host.status()
    os.kill(before.gate_pid, signal.SIGKILL)
    queued = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(lambda: host.status().gate_pid != before.gate_pid, "another gate")
    host.until_active()
    until(queued.is_connected, "who came meanwhile is connected")
    decide(host.gpu, processes=2, **{POD: (40, 20000), OTHER: (80, 20000)})
    until(undecided.is_connected, "who was held is connected")
    assert (queued.value("sms"), undecided.value("sms")) == ("26", "52")
    after = host.status()
    assert after.daemon_pid == before.daemon_pid
    assert after.daemon_restarts == before.daemon_restarts
    assert running.process.poll() is None
    until(lambda: clients_of_pod(host.gpu, POD), "the status lists the pod's clients")
    mine = [client for client in host.status().clients if client.pid == running.pid]
    assert [client.thread_percentage for client in mine] == [20]


def test_a_killed_daemon_comes_back_and_who_waited_goes_on_under_mps(host, run):
    decide(host.gpu, **{POD: (20, 20000)})
    running = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(running.is_connected, "connected")
    before = host.status()
    os.kill(before.daemon_pid, signal.SIGKILL)
    waiting = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(lambda: running.process.poll() is not None, "the client ended with its server")
    until(lambda: host.status().daemon_restarts == before.daemon_restarts + 1, "restarted")
    until(waiting.is_connected, "connected")
    assert waiting.value("sms") == "26"
    assert "without MPS" not in waiting.text()


def test_a_killed_server_is_counted_and_replaced(host, run):
    decide(host.gpu, **{POD: (20, 20000)})
    running = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(running.is_connected, "connected")
    before = host.status()
    os.kill(before.server_pid, signal.SIGKILL)
    until(lambda: running.process.poll() is not None, "the client ended with its server")
    until(lambda: host.status().server_restarts == before.server_restarts + 1, "counted")
    host.until_active()
    after = host.status()
    assert (after.daemon_pid, after.daemon_restarts) == (before.daemon_pid, before.daemon_restarts)
    assert after.server_pid != before.server_pid
    os.kill(after.gate_pid, signal.SIGKILL)
    until(lambda: host.status().gate_pid != after.gate_pid, "another gate")
    host.until_active()
    assert host.status().server_restarts == after.server_restarts


@pytest.mark.parametrize("what", ["fault", "server"])
def test_what_ends_every_client_while_the_gate_hangs_and_is_killed_is_told(host, run, what):
    """Before: the next gate skipped what the server had logged, and took another server for the same."""
    decide(host.gpu, **{POD: (40, 20000)})
    tenant = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(lambda: clients_of_pod(host.gpu, POD), "connected, and in the status")
    before = host.status()
    os.kill(before.gate_pid, signal.SIGSTOP)
    if what == "fault":
        SyncMpsControl(twin_program(host.gpu)).run(commands.Command("twin_fault", commands.check))
    else:
        os.kill(before.server_pid, signal.SIGKILL)
    until(lambda: tenant.process.poll() is not None, "its end")
    os.kill(before.gate_pid, signal.SIGKILL)
    until(lambda: host.status().gate_pid != before.gate_pid, "another gate")
    host.until_active()
    status = host.status()
    assert (status.daemon_pid, status.daemon_restarts) == (before.daemon_pid, before.daemon_restarts)
    if what == "fault":
        assert (status.faults, status.last_fault_pods, status.server_restarts) == (1, (POD,), 0)
    else:
        assert (status.faults, status.server_restarts) == (0, 1)


def test_a_fault_is_seen_and_nobody_is_blamed_for_it_and_the_gpu_recovers(host, run):
    decide(host.gpu, **{POD: (20, 20000), OTHER: (20, 20000)})
    bystander = run(OTHER, "--workload", "stream", "--memory-mib", "100")
    until(bystander.is_connected, "connected")
    culprit = run(POD, "--workload", "stream", "--memory-mib", "100", "--fault-after", "0.5")
    until(lambda: host.status().faults == 1, "the fault in the status")
    told = host.status().last_fault
    assert "in 2 processes; the server does not tell which began it" in told
    assert not any(str(word) in told for word in (culprit.pid, bystander.pid, POD, OTHER))
    until(lambda: bystander.process.poll() is not None, "every client ended")
    host.until_active()
    again = run(OTHER, "--workload", "stream", "--memory-mib", "100", "--fault-after", "0.5")
    until(lambda: host.status().faults == 2, "the second fault")
    assert f"in process {again.pid} of pod {OTHER} alone" in host.status().last_fault


def test_a_restarted_host_adopts_the_daemon_and_its_tenants(host, run):
    decide(host.gpu, **{POD: (20, 20000)})
    running = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(lambda: clients_of_pod(host.gpu, POD), "listed")
    before = host.status()
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(30) == 0
    assert not is_alive(before.gate_pid)
    host.start()
    until(lambda: host.status().gate_pid != before.gate_pid, "another gate")
    host.until_active()
    assert host.status().daemon_pid == before.daemon_pid
    assert running.process.poll() is None
    until(lambda: clients_of_pod(host.gpu, POD) == (running.pid,), "still its client")


def test_an_orderly_end_leaves_no_directory_of_a_gpu_without_tenants(host, run):
    decide(host.gpu, **{POD: (20, 20000)})
    tenant = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(tenant.is_connected, "connected")
    before = host.status()
    daemon = before.daemon_pid
    host.process.terminate()
    assert host.process.wait(60) == 0
    assert host.gpu.control.exists(), "a pod mounts it"
    assert is_alive(daemon)
    tenant.process.kill()
    tenant.process.wait(60)
    decide(host.gpu)
    host.start()
    until(lambda: host.status().gate_pid != before.gate_pid, "another gate")
    until(lambda: host.status().state is GateState.ACTIVE and not host.status().clients, "back, and nobody there")
    host.process.terminate()
    assert host.process.wait(60) == 0
    assert not host.gpu.path.exists()
    assert not is_alive(daemon)


def test_a_pods_clients_are_ended_and_its_neighbours_are_not(host, run):
    decide(host.gpu, **{POD: (20, 20000), OTHER: (20, 20000)})
    victim = run(POD, "--workload", "stream", "--memory-mib", "100")
    neighbour = run(OTHER, "--workload", "stream", "--memory-mib", "100")
    until(lambda: len(host.status().clients) == 2, "both listed")
    ended = end_clients(host.gpu, clients_of_pod(host.gpu, POD))
    assert ended.pids == (victim.pid,)
    until(lambda: victim.process.poll() is not None, "ended")
    assert neighbour.process.poll() is None


def test_a_daemon_that_hangs_is_down_holds_newcomers_and_ends_nobody(host, run):
    decide(host.gpu, **{POD: (20, 20000), OTHER: (40, 20000)})
    running = run(POD, "--workload", "stream", "--memory-mib", "100")
    until(running.is_connected, "connected")
    before = host.status()
    os.kill(before.daemon_pid, signal.SIGSTOP)
    try:
        until(lambda: host.status().state is GateState.DOWN, "down")
        assert "no answer" in host.status().detail
        waiting = run(OTHER, "--workload", "stream", "--memory-mib", "100")
        until(lambda: any(h.pid == waiting.pid for h in host.status().waiting_connections), "the newcomer is held")
        assert host.status().daemon_pid == before.daemon_pid, "its clients run on: it is not killed"
    finally:
        os.kill(before.daemon_pid, signal.SIGCONT)
    host.until_active()
    until(waiting.is_connected, "connected")
    assert waiting.value("sms") == "52"
    assert running.process.poll() is None
    assert (host.status().daemon_pid, host.status().daemon_restarts) == (before.daemon_pid, before.daemon_restarts)


def test_a_client_past_the_gate_is_reported_and_ended(host, tenants):
    stranger = tenants(host.gpu.pipe, "--workload", "stream", "--memory-mib", "100")
    until(lambda: stranger.process.poll() is not None, "ended")
    assert stranger.process.returncode == -signal.SIGKILL, stranger.text()
    until(lambda: any(m.pid == stranger.pid for m in host.status().mismatches), "reported")
    (told,) = [m.detail for m in host.status().mismatches if m.pid == stranger.pid]
    assert told.endswith("; it is ended"), "its pod's event says who ended it"


def test_who_was_stopped_when_host_and_daemon_were_killed_is_killed_by_the_next_host(host, tenants):
    """Before: it was nobody's client, so it stayed stopped for ever."""
    stranger = tenants(host.gpu.pipe, "--workload", "stream", "--memory-mib", "100")
    until(lambda: stranger.process.poll() is not None or is_stopped(stranger.pid), "stopped")
    daemon = host.status().daemon_pid
    host.process.kill()
    host.process.wait(60)
    os.kill(daemon, signal.SIGKILL)
    until(lambda: not is_alive(daemon), "the daemon gone")
    host.start()
    until(lambda: stranger.process.poll() is not None, "killed by the next host")
    assert stranger.process.returncode == -signal.SIGKILL, stranger.text()
    host.until_active()


def test_bad_arguments_end_at_once_with_a_sentence(short_path, caplog):
    assert main(["--directory", str(short_path), "--simulated", "H999:1", "--port", "0"]) == 2
    assert "allowed is MODEL:COUNT" in caplog.text
