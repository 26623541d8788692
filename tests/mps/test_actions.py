"""Clients ended from outside the gate, on a real twin daemon."""

import os
import signal
import subprocess
import time

import pytest

from gpushare.mps import commands
from gpushare.mps.actions import GATE_SECONDS, end_clients
from gpushare.mps.commands import ServerState
from gpushare.mps.ending import DRAIN_SECONDS, Endings, clients_being_ended, send_signal
from gpushare.mps.identity import is_alive, start_ticks_of
from gpushare.mps.layout import write_atomically, write_status
from gpushare.mps.status import ClientStatus, GateState, GateStatus

from .conftest import is_stopped, until
from .test_gate_deletion import pid_namespace

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


@pytest.fixture
def sleepers(twin_gpu):
    """Two processes that the gate's status lists as clients; no daemon runs."""
    pair = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    listed = tuple(ClientStatus(each.pid, "uid", start_ticks=start_ticks_of(each.pid)) for each in pair)
    write_status(
        twin_gpu,
        GateStatus(twin_gpu.uuid, GateState.ACTIVE, time.time(), gate_pid=os.getpid(), clients=listed),
    )
    yield pair
    for each in pair:
        each.kill()
        each.wait(60)


class Signals:
    """Sends signals and keeps them; those to `refused` may not be sent."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.sent: list[tuple[int, signal.Signals]] = []

    def __call__(self, pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        if pid == self.refused:
            raise PermissionError
        self.sent.append((pid, number))
        return send_signal(pid, start_ticks, number)


def gate_ends(gpu, *processes):
    """Write the gate's record of clients that it is ending."""
    listed = [{"pid": p.pid, "start_ticks": start_ticks_of(p.pid), "drain_seconds": 3.5} for p in processes]
    write_atomically(gpu.endings, {"processes": listed})


def test_who_was_ended_is_known_though_another_is_refused(twin_gpu, sleepers):
    """Before: the daemon's error hid that the first one had been killed."""
    first, second = sleepers
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    endings = Endings(send=Signals(second.pid), clock=lambda: now[0])
    ended = end_clients(twin_gpu, [first.pid, second.pid], endings=endings, pause=pause)
    assert ended.pids == (first.pid,)
    [(pid, why)] = ended.refused
    assert (pid, bool(why)) == (second.pid, True)
    assert first.wait(60) == -signal.SIGKILL


def test_a_client_that_the_gate_is_ending_is_left_to_it(twin_gpu, sleepers):
    """Before: it was stopped while the server ended it, and killed within its kernel, at the neighbours' cost."""
    first, second = sleepers
    now, sender = [0.0], Signals()

    def pause(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 0.35:
            gate_ends(twin_gpu, first, second)
        if now[0] > 2.0 and first.poll() is None:
            first.kill()
            first.wait(60)
            second.kill()
            second.wait(60)
            write_atomically(twin_gpu.endings, {"processes": []})

    gate_ends(twin_gpu, first)
    ended = end_clients(
        twin_gpu, [first.pid, second.pid], endings=Endings(send=sender, clock=lambda: now[0]), pause=pause
    )
    assert (set(ended.pids), ended.by_gate, ended.refused) == (
        {first.pid, second.pid},
        (first.pid, second.pid),
        (),
    )
    killed = [pid for pid, number in sender.sent if number is signal.SIGKILL]
    assert killed == []
    assert [pid for pid, _ in sender.sent[:4]] == [second.pid] * 4, "until the gate began with it too"


def test_a_gate_that_does_not_end_it_is_not_waited_for_long(twin_gpu, sleepers):
    now, sender = [0.0], Signals()

    def pause(seconds: float) -> None:
        now[0] += seconds

    gate_ends(twin_gpu, sleepers[0])
    ended = end_clients(
        twin_gpu, [sleepers[0].pid], endings=Endings(send=sender, clock=lambda: now[0]), pause=pause
    )
    assert ended.pids == (sleepers[0].pid,)
    assert GATE_SECONDS < now[0] < GATE_SECONDS + 3
    assert sender.sent[-1] == (sleepers[0].pid, signal.SIGKILL)


def test_who_interrupts_the_command_continues_nobody_whom_the_gate_stopped(twin_gpu, sleepers):
    def interrupt(_seconds: float) -> None:
        until(lambda: is_stopped(sleepers[0].pid), "stopped")
        gate_ends(twin_gpu, sleepers[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end_clients(twin_gpu, [sleepers[0].pid], pause=interrupt)
    assert is_stopped(sleepers[0].pid)


def test_a_client_that_has_ended_since_the_gates_status_is_no_refusal(twin_gpu, sleepers):
    """Before: whoever asked was sent to the node, on which they were."""
    sleepers[0].kill()
    sleepers[0].wait(60)
    ended = end_clients(twin_gpu, [sleepers[0].pid], endings=Endings(send=Signals()))
    assert (ended.pids, ended.refused, ended.gone) == ((), (), (sleepers[0].pid,))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"processes": [{"pid": "x"}]}', '{"processes": 7}'])
def test_a_record_of_the_gate_that_cannot_be_read_names_nobody(twin_gpu, sleepers, text):
    twin_gpu.endings.write_text(text)
    assert clients_being_ended(twin_gpu.endings) == {}


def test_with_a_containers_first_process_its_other_clients_get_their_time_too(twin_gpu):
    """Before: Linux killed them with it, unstopped, so a kernel of theirs in progress ended every neighbour."""
    seen: list[bool] = []
    with pid_namespace() as (first, second), pid_namespace() as (_, beside):
        listed = tuple(
            ClientStatus(pid, "uid", start_ticks=start_ticks_of(pid)) for pid in (second, first, beside)
        )
        write_status(twin_gpu, GateStatus(twin_gpu.uuid, GateState.ACTIVE, time.time(), clients=listed))
        now = [0.0]

        def pause(seconds: float) -> None:
            # Then the first is killed, and Linux may wake the second to die before its turn.
            if now[0] < DRAIN_SECONDS:
                until(lambda: is_stopped(first) and is_stopped(second), "both stopped")
                seen.append(is_stopped(beside))
            now[0] += seconds

        ended = end_clients(twin_gpu, [first], endings=Endings(clock=lambda: now[0]), pause=pause)
        assert set(seen) == {False}
        assert set(ended.pids) == {first, second}
        until(lambda: not is_alive(first) and not is_alive(second), "both ended")
        assert is_alive(beside)


def test_where_signals_are_refused_the_daemon_ends_it(twin_gpu, products):
    neighbour = products[1]  # not within products: nobody falls with it

    def refuse(_pid: int, _ticks: int | None, _number: signal.Signals) -> bool:
        raise PermissionError

    ended = end_clients(twin_gpu, [neighbour.pid], endings=Endings(send=refuse))
    assert ended.pids == (neighbour.pid,)
    until(lambda: neighbour.process.poll() is not None, "ended by the daemon")
    assert products[0].process.poll() is None
