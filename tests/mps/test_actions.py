"""Clients ended from outside the gate, on a real twin daemon."""

import os
import signal
import time

import pytest

from gpushare.mps import commands
from gpushare.mps.actions import end_clients
from gpushare.mps.commands import ServerState
from gpushare.mps.ending import Endings
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.layout import write_status
from gpushare.mps.status import ClientStatus, GateState, GateStatus

from .conftest import is_stopped, until

pytestmark = pytest.mark.slow


@pytest.fixture
def products(twin, twin_gpu, tenants):
    """A client within matrix products and a neighbour, as the gate's status lists them."""
    twin.run(commands.start_server(0))
    server = twin.servers()[0]
    pair = [tenants(twin_gpu.pipe, "--workload", name, "--memory-mib", "100") for name in ("gemm-fp16", "stream")]
    until(lambda: {t.pid for t in pair} == set(twin.run(commands.client_list(server))), "both listed")
    listed = tuple(ClientStatus(t.pid, "uid", start_ticks=start_ticks_of(t.pid)) for t in pair)
    write_status(twin_gpu, GateStatus(twin_gpu.uuid, GateState.ACTIVE, time.time(), clients=listed))
    return pair


def test_a_client_within_products_is_ended_and_its_neighbour_goes_on(twin, twin_gpu, products):
    """Before: by terminate_client, which takes the neighbour along."""
    victim, neighbour = products
    now = [0.0]

    def pause(seconds: float) -> None:
        until(lambda: victim.process.poll() is not None or is_stopped(victim.pid), "stopped")
        time.sleep(0.2)  # the twin looks twenty times a second who is stopped
        now[0] += seconds

    ended = end_clients(twin_gpu, [victim.pid], endings=Endings(clock=lambda: now[0]), pause=pause)
    assert (ended.pids, ended.refused) == ((victim.pid,), ())
    assert victim.process.wait(60) == -signal.SIGKILL
    assert neighbour.process.poll() is None
    assert twin.server_state(twin.servers()[0]) is ServerState.ACTIVE


def test_who_interrupts_the_command_leaves_nobody_stopped(twin_gpu, products):
    victim = products[0]

    def interrupt(_seconds: float) -> None:
        until(lambda: is_stopped(victim.pid), "stopped")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end_clients(twin_gpu, [victim.pid], pause=interrupt)
    until(lambda: not is_stopped(victim.pid), "continued")
    assert victim.process.poll() is None


def test_a_pid_that_is_no_client_is_refused_and_not_touched(twin_gpu, products):
    victim = products[0]
    listed = ClientStatus(victim.pid, "uid", start_ticks=(start_ticks_of(victim.pid) or 0) + 1)
    write_status(twin_gpu, GateStatus(twin_gpu.uuid, GateState.ACTIVE, time.time(), clients=(listed,)))
    ended = end_clients(twin_gpu, [os.getpid(), victim.pid])
    assert ended.pids == ()
    assert [(pid, why.split(":")[0]) for pid, why in ended.refused] == [
        (os.getpid(), "the gate lists no such client"),
        (victim.pid, "no such process is seen here"),
    ]
    assert not is_stopped(victim.pid)


def test_where_signals_are_refused_the_daemon_ends_it(twin_gpu, products):
    neighbour = products[1]  # not within products: nobody falls with it

    def refuse(_pid: int, _ticks: int | None, _number: signal.Signals) -> bool:
        raise PermissionError

    ended = end_clients(twin_gpu, [neighbour.pid], endings=Endings(send=refuse))
    assert ended.pids == (neighbour.pid,)
    until(lambda: neighbour.process.poll() is not None, "ended by the daemon")
    assert products[0].process.poll() is None
