"""Clients that the gate ends before a real twin daemon: of deleted pods, of containers that end, and overruns."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare.mps import commands
from gpushare.mps.ending import LEAVING_DRAIN_SECONDS, Endings, EndingStep
from gpushare.mps.gate import Backend
from gpushare.mps.identity import ends_with, is_alive, start_ticks_of
from gpushare.mps.layout import Decisions, PodDecision, write_decisions
from gpushare.mps.ledger import Admission
from gpushare.mps.status import GateState, HoldReason

from .conftest import decide, eventually, is_stopped

pytestmark = pytest.mark.slow  # real processes throughout: part of `make test`


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


@pytest.fixture
async def deleted(stage, tenants):
    """A client of a pod that is deleted at 1000 with a grace period of 30 s, and its neighbour."""
    write_decisions(stage.gpu, Decisions({"a": PodDecision(20, 8192, ends_at=1027.0), "b": PodDecision(20, 8192)}))
    stage.gate._policy.wall = lambda: 1000.0
    victim = tenants(stage.gpu.tenant, "--workload", "gemm-fp16", "--memory-mib", "100")
    neighbour = tenants(stage.gpu.tenant, "--workload", "stream", "--memory-mib", "100")
    stage.pods[victim.pid], stage.pods[neighbour.pid] = "a", "b"
    await eventually(lambda: victim.is_connected() and neighbour.is_connected(), "both connected")
    await stage.look()
    yield victim, neighbour
    assert neighbour.process.poll() is None
    assert not is_stopped(neighbour.pid)


async def test_when_the_wall_clock_jumps_ahead_they_are_stopped_that_much_earlier(stage, deleted):
    victim, _ = deleted
    wall, now = 1005.0, 5.0
    stage.gate._policy.wall = lambda: wall
    stage.gate._endings = Endings(clock=lambda: now)
    await stage.gate.end_leaving()
    assert not is_stopped(victim.pid)
    wall += 600.0
    await stage.gate.end_leaving()
    await eventually(lambda: is_stopped(victim.pid), "stopped 22 s early")
    wall -= 600.0
    now += LEAVING_DRAIN_SECONDS
    await eventually(
        lambda: victim.process.poll() is not None, "ended by the gate's own clock, wherever the other is"
    )


async def test_when_the_wall_clock_jumps_back_kubelet_kills_them_unprepared(stage, deleted):
    victim, _ = deleted
    wall = 1026.0
    stage.gate._policy.wall = lambda: wall
    stage.gate._endings = Endings(clock=lambda: 0.0)
    wall -= 600.0
    for _ in range(4):  # until kubelet's kill, which follows no wall clock
        wall += 1.0
        await stage.gate.end_leaving()
        assert not is_stopped(victim.pid)
    wall = 1027.0  # the clock was set right again
    await stage.gate.end_leaving()
    await eventually(lambda: is_stopped(victim.pid), "stopped late, if it still runs")


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
        try:
            yield first, second
        finally:
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
