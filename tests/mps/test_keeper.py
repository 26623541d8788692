"""The keeper's status file when the disk does not take it, and what it says of faults that are noticed late."""

import asyncio
import dataclasses
import json
import os
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from gpushare.mps import keeper as keeping
from gpushare.mps.blame import fault_sentence, killed_in_kernel
from gpushare.mps.commands import ServerState
from gpushare.mps.errors import CommandRefusedError
from gpushare.mps.faultlog import Fault
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.layout import GpuDirectory, status_reader
from gpushare.mps.ledger import Admission, Presence
from gpushare.mps.logs import trim
from gpushare.mps.status import GateState
from gpushare.mps.turned_away import TURNED_AWAY_SECONDS
from gpushare.twin.gpus import parse_simulated

from .conftest import eventually


async def test_a_full_disk_is_said_once_and_the_status_follows_when_there_is_room(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    [info] = parse_simulated("H200:1", "n")
    gpu = GpuDirectory.of(tmp_path, info.uuid)
    gpu.create()
    kept = keeping.Keeper(gpu, keeping.setup_of(gpu, json.dumps(dataclasses.asdict(info))))
    kept.publish()
    before = gpu.status.read_bytes()
    with monkeypatch.context() as broken:

        def full(*_):
            raise OSError(28, "No space left on device")

        broken.setattr(keeping, "write_status", full)
        for _ in range(5):
            kept.publish()
    assert gpu.status.read_bytes() == before, "a reader sees the old word, and takes it for silence soon"
    kept.publish()
    assert status_reader(gpu).read().written_at > json.loads(before)["written_at"]
    messages = [record.getMessage() for record in caplog.records]
    assert len([line for line in messages if "No space left" in line]) == 1
    assert len([line for line in messages if "written again" in line]) == 1


def test_counts_are_of_the_same_series_until_a_gate_finds_no_former_status(tmp_path):
    [info] = parse_simulated("H200:1", "n")
    gpu = GpuDirectory.of(tmp_path, info.uuid)
    gpu.create()
    setup = keeping.setup_of(gpu, json.dumps(dataclasses.asdict(info)))
    series = []
    for loses in (False, False, True, False):
        if loses:
            gpu.status.write_text("{")
        kept = keeping.Keeper(gpu, setup)
        kept._take_over()
        kept.publish()
        series.append(status_reader(gpu).read().counts_since)
    assert series[0] == series[1] > 0
    assert series[1] < series[2] == series[3]


POD = "11111111-1111-4111-8111-111111111111"
OTHER_POD = "22222222-2222-4222-8222-222222222222"
PID = 2**22 + 9  # of no process
NOT_READY, TOO_MANY = 807, 808  # CUDA's errors of a process that the server turns away


class Control:
    """A daemon whose only client faults just after the keeper has read the server's log."""

    def __init__(self, directory, stamped_early=0.0) -> None:
        self.stamped_early = stamped_early
        self.program = SimpleNamespace(log=directory)
        self.log = directory / "server.log"
        self.log.write_text("")
        self.clients: tuple[int, ...] = (PID,)
        self.will_fault = True

    async def server_state(self, _pid):
        if self.will_fault:
            self.will_fault = False
            self.clients = ()
            moment = datetime.now().astimezone().replace(tzinfo=None) - timedelta(seconds=self.stamped_early)
            stamp = moment.isoformat(sep=" ", timespec="milliseconds")
            with self.log.open("a") as log:
                for line in (
                    "Server is handling a fatal GPU error.",
                    "The following client process have a sticky error set:",
                    str(PID),
                ):
                    log.write(f"[{stamp} Server   458] {line}\n")
        return ServerState.ACTIVE

    async def run(self, _command):
        return self.clients


class Memory:
    def used_mib(self):
        return {}


@pytest.mark.parametrize("stamped_early", [0.0, 0.4])
async def test_a_fault_that_is_noticed_when_its_client_has_left_the_list_still_names_it(tmp_path, stamped_early):
    """Also where the log's stamp is from before the client came, since it is cut to whole seconds."""
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    control = Control(tmp_path, stamped_early)
    keeper = keeping.Keeper(gpu, keeping.Setup(control, Memory(), None, identify=lambda _pid: None))
    ledger = keeper._ledger
    ledger.note_clients(())
    ledger.admit(Admission(PID, None, POD, 20, 4096, 4096, ledger._clock()))
    ledger.note_clients((PID,), PID)
    ledger.end_turn(PID, is_client=True)
    await keeper._look(os.getpid())
    assert ledger.clients() == (), "it left before the fault was noticed"
    assert keeper._status.faults == 0
    await keeper._look(os.getpid())
    keeper.publish()
    status = status_reader(gpu).read()
    assert status.faults == 1
    assert f"in process {PID} of pod {POD} alone" in status.last_fault
    assert status.last_fault_pods == (POD,)
    await keeper._look(os.getpid())
    assert keeper._status.faults == 1


@pytest.fixture
def faulting(tmp_path):
    """A keeper that has looked just before its server faults; nobody was connected."""
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    control = Control(tmp_path, stamped_early=0.02)
    control.clients = ()
    keeper = keeping.Keeper(gpu, keeping.Setup(control, Memory(), None, identify=lambda _pid: None))
    keeper.control = control
    keeper._ledger.note_clients(())
    return keeper


def begins_its_turn(keeper, pid: int, pod: str, start_ticks: int | None = None) -> None:
    ledger = keeper._ledger
    ledger.admit(Admission(pid, start_ticks, pod, 20, 4096, 4096, ledger._clock()))


async def told(keeper) -> tuple[str, ...]:
    """The pods that hear of the fault."""
    await keeper._look(os.getpid())
    keeper.publish()
    status = status_reader(keeper.gpu).read()
    assert status.faults == 1
    return status.last_fault_pods


@pytest.mark.parametrize("is_in_its_turn", [False, True])
async def test_a_fault_names_who_came_meanwhile_and_was_turned_away(faulting, is_in_its_turn):
    """Before: a client that the server refused while it handled the fault failed, and its pod was told nothing."""
    await faulting._look(os.getpid())
    for number, (pod, is_turned_away) in enumerate({POD: True, OTHER_POD: False}.items()):
        pid = PID + 1 + number
        begins_its_turn(faulting, pid, pod)
        if is_turned_away:
            faulting._ledger.note_turned_away(pid, NOT_READY)
        if not is_turned_away or not is_in_its_turn:
            faulting._ledger.end_turn(pid, is_client=False)
    assert await told(faulting) == (POD,)


async def test_a_fault_names_who_was_handed_to_the_server_meanwhile_and_ended(faulting):
    """Before: only who answered by an error; another is refused its context when it has answered, and ends."""
    await faulting._look(os.getpid())
    runs = os.getppid()
    for pid, pod, ticks in ((PID + 1, POD, None), (runs, OTHER_POD, start_ticks_of(runs))):
        begins_its_turn(faulting, pid, pod, ticks)
        faulting._ledger.note_handed(pid)
        faulting._ledger.end_turn(pid, is_client=False)
    assert await told(faulting) == (POD,), "and not whose process goes on"


async def test_who_is_turned_away_in_its_turn_as_the_server_is_active_again_is_told(faulting):
    """Before: the fault was published when the server was back, and whoever said so later was told nothing."""
    await faulting._look(os.getpid())
    begins_its_turn(faulting, PID + 1, POD)
    faulting.gate._is_between_turns.clear()

    async def turned_away() -> None:
        await eventually(lambda: faulting._status.state is GateState.FAULT, "noticed")
        faulting._ledger.note_turned_away(PID + 1, NOT_READY)
        faulting._ledger.end_turn(PID + 1, is_client=False)
        faulting.gate._is_between_turns.set()

    turn = asyncio.create_task(turned_away())
    assert await told(faulting) == (POD,)
    await turn


async def test_who_is_turned_away_just_after_the_server_called_itself_active_is_told(faulting):
    """Before: only who came before, as the fault was published by then."""
    await faulting._look(os.getpid())
    assert await told(faulting) == ()
    for pid, pod, is_turned_away in ((PID + 1, POD, True), (PID + 2, OTHER_POD, False)):
        begins_its_turn(faulting, pid, pod)
        if is_turned_away:
            faulting._ledger.note_turned_away(pid, NOT_READY)
        else:
            faulting._ledger.note_handed(pid)
        faulting._ledger.end_turn(pid, is_client=False)
    assert await told(faulting) == (POD,), "and not who only looked at the GPU"
    faulting._faulted_at -= TURNED_AWAY_SECONDS
    begins_its_turn(faulting, PID + 3, OTHER_POD)
    faulting._ledger.note_turned_away(PID + 3, NOT_READY)
    assert await told(faulting) == (POD,), "not long after it"


async def test_who_was_turned_away_and_came_again_is_not_told(faulting):
    """Before: it was told that the fault had ended its process, which works."""
    await faulting._look(os.getpid())
    pid, ledger = os.getppid(), faulting._ledger
    for is_client in (False, True):
        begins_its_turn(faulting, pid, POD, start_ticks_of(pid))
        if is_client:
            ledger.note_handed(pid)
        else:
            ledger.note_turned_away(pid, NOT_READY)
        ledger.note_clients((pid,) if is_client else (), pid)
        ledger.end_turn(pid, is_client=is_client)
    faulting.control.clients = (pid,)
    assert await told(faulting) == ()


async def test_who_had_its_turn_as_the_server_faulted_and_was_given_nothing_is_not_told(faulting):
    """Before: it was told that the fault had ended its process, which waits and then works."""
    begins_its_turn(faulting, os.getppid(), POD, start_ticks_of(os.getppid()))
    faulting.control.stamped_early = 0.0
    await faulting._look(os.getpid())
    faulting._ledger.end_turn(os.getppid(), is_client=False)
    assert await told(faulting) == ()


async def test_who_was_turned_away_before_is_not_told_of_a_later_fault(faulting):
    begins_its_turn(faulting, PID + 1, POD)
    faulting._ledger.note_turned_away(PID + 1, NOT_READY)
    faulting._ledger.end_turn(PID + 1, is_client=False)
    await asyncio.sleep(0.05)
    await faulting._look(os.getpid())
    assert await told(faulting) == ()


async def test_who_is_turned_away_without_a_fault_is_told_so(faulting, monkeypatch):
    """Before: the gate's log alone had it."""
    faulting.control.will_fault = False
    begins_its_turn(faulting, PID + 1, POD)
    faulting._ledger.note_turned_away(PID + 1, TOO_MANY)
    monkeypatch.setattr("gpushare.mps.turned_away.TURNED_AWAY_SECONDS", 0.0)
    await faulting._look(os.getpid())
    faulting.publish()
    status = status_reader(faulting.gpu).read()
    assert [(each.pod_uid, each.cuda_error) for each in status.turned_away] == [(POD, TOO_MANY)]
    assert status.faults == 0


async def test_a_client_that_the_gate_sees_while_the_keeper_asks_stays_a_client(tmp_path):
    """Before: the keeper's older list took it away, and with it its part of the pod's cap."""
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    control = Control(tmp_path)
    control.will_fault = False
    keeper = keeping.Keeper(gpu, keeping.Setup(control, Memory(), None, identify=lambda _pid: POD))
    ledger, pid = keeper._ledger, os.getppid()
    ledger.note_clients(())

    async def answered_before_it_came(_command):
        asked = ledger._clock()
        ledger.admit(Admission(pid, start_ticks_of(pid), POD, 20, 4096, 4096, asked))
        ledger.note_clients((pid,), pid, asked_at=asked)
        ledger.end_turn(pid, is_client=True)
        return ()

    control.run = answered_before_it_came
    await keeper._look(os.getpid())
    assert ledger.percentages(POD, PID) == (20,)


async def test_what_the_server_logs_just_before_its_log_is_shortened_is_read(tmp_path, monkeypatch):
    """Before: a fault was never told of, and a context beyond its pod's cap was not counted."""
    gpu = GpuDirectory.of(tmp_path, "GPU-1")
    gpu.create()
    control = Control(gpu.log)
    keeper = keeping.Keeper(gpu, keeping.Setup(control, Memory(), None, identify=lambda _pid: POD))
    monkeypatch.setattr(keeping, "trim", lambda paths: trim(paths, limit_bytes=0))
    line = "[2026-11-28 13:30:25.724 Server  2480] Client {PID: %d, Context ID: %d} connected\n"
    control.log.write_text(line % (os.getppid(), 0) + line % (os.getppid(), 1))
    keeper._ledger.note_clients((os.getppid(),))
    with control.log.open("a") as log:
        log.write(line % (os.getppid(), 2))
        log.write("[2026-11-28 13:30:25.724 Server  2480] Server is handling a fatal GPU error.\n")
    publishing = asyncio.create_task(keeper._publish_regularly())
    await eventually(lambda: control.log.stat().st_size == 0, "shortened")
    publishing.cancel()
    assert keeper._ledger.contexts_of(os.getppid()) == 2
    fault = keeper._read_faults()
    assert fault is not None
    assert "fatal GPU error" in fault.line


@pytest.mark.parametrize(
    ("pids", "clients", "expected"),
    [
        ((), (), "fatal"),
        ((7,), (Presence(7, "a", 1.0, 2.0), Presence(8, "b", 1.0)), "fatal (in process 7 of pod a alone)"),
        ((9,), (Presence(7, "a", 1.0),), "fatal (in process 9 alone)"),
        ((7, 8), (), "fatal (in 2 processes; the server does not tell which began it)"),
        (
            (),
            (Presence(7, "a", 1.0), Presence(8, "b", 1.0)),
            "fatal (with 2 processes connected; the server does not tell which began it)",
        ),
        (
            (),
            (Presence(7, "a", 1.0),),
            "fatal (with 1 process connected; the server does not tell which began it)",
        ),
    ],
)
def test_a_fault_in_words(pids, clients, expected):
    assert fault_sentence(Fault("fatal", pids), clients) == expected


def ended(number: int, pod: str | None) -> Presence:
    """A client whose process is gone."""
    return Presence(PID + number, pod, 1.0, listed=True)


def alive(pod: str, *, listed: bool) -> Presence:
    """A process that runs: this one."""
    return Presence(os.getpid(), pod, 1.0, start_ticks=start_ticks_of(os.getpid()), listed=listed)


@pytest.mark.parametrize(
    ("numbers", "clients", "expected"),
    [
        ((8, 9), (ended(7, "a"), ended(8, "b"), ended(9, "c")), "a"),
        ((8,), (ended(7, "a"), ended(8, "b"), ended(6, "a")), "a"),
        ((7, 8), (ended(7, "a"), ended(8, "b")), None),  # an illegal access: nobody was killed
        ((8,), (ended(7, "a"), ended(8, "b"), ended(9, "c")), None),  # one of two
        ((), (ended(7, "a"), ended(8, "b")), None),  # the log does not say
        ((6,), (ended(6, "a"), ended(7, "a")), None),  # it was alone
        ((8,), (ended(7, None), ended(8, "b")), None),  # no pod's process
        ((8,), (alive("a", listed=False), ended(8, "b")), None),  # an illegal access while another has its turn
        ((8,), (alive("a", listed=True), ended(8, "b")), None),  # it runs, so it was not killed
        ((8,), (replace(ended(7, "a"), listed=False), ended(8, "b")), None),  # it was never a client
    ],
)
def test_who_was_killed_in_a_kernel_and_ended_the_others(numbers, clients, expected):
    fault = Fault("fatal", tuple(PID + number for number in numbers))
    assert killed_in_kernel(fault, clients) == expected


class EndedServer:
    """A daemon that knows already that its server has ended: it refuses commands about it."""

    async def servers(self):
        return ()

    async def run(self, _command):
        raise CommandRefusedError("Server 7 not found")

    async def server_state(self, _pid):
        raise CommandRefusedError("Server 7 not found")


async def test_a_server_that_the_daemon_knows_to_have_ended_counts_as_ended(tmp_path, monkeypatch):
    """At load 12 the daemon answered "Server not found" before the keeper had looked: nothing was counted."""
    [info] = parse_simulated("H200:1", "n")
    gpu = GpuDirectory.of(tmp_path, info.uuid)
    gpu.create()
    kept = keeping.Keeper(gpu, keeping.setup_of(gpu, json.dumps(dataclasses.asdict(info))))
    monkeypatch.setattr(kept, "_control", EndedServer())
    monkeypatch.setattr(kept, "_check_alive", lambda: None)  # both processes are still seen
    monkeypatch.setattr(kept, "_read_faults", lambda: None)
    kept._status = dataclasses.replace(kept._status, daemon_pid=os.getpid(), server_pid=7)
    kept._poke.set()
    with pytest.raises(keeping._ServerGoneError):
        await kept._watch()
