"""Copies of handovers that outlive a gate that is killed in the middle of one (docs/adr/0258)."""

import asyncio
import contextlib
import os
import signal
import socket

import pytest

from gpushare.mps.contexts import ContextLog
from gpushare.mps.handover import DAEMON, SERVER, Handover, Recipient
from gpushare.mps.handover_copies import HandoverCopies, finish_handovers
from gpushare.mps.host import listen
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.layout import status_reader
from gpushare.mps.packets import COMPUTE_TYPE, CREDENTIALS, close_all
from gpushare.mps.status import GateState
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import TwinContext, connect, request_server

from .conftest import PATIENCE, eventually
from .test_deserted_server import gpu, keeping_on  # noqa: F401 - a fixture

GONE = 2**22 + 7  # of no process


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.fixture
def ends():
    """The host's ends, and the copies of two keepers, one after the other."""
    host = pair()
    keepers = [HandoverCopies(*(end.dup() for end in host)) for _ in range(2)]
    yield keepers
    for end in (*host, *(end for keeper in keepers for end in (keeper.into, keeper.out))):
        end.close()


def killed(keeper: HandoverCopies, *descriptors: int) -> None:
    """What the kernel does with a killed keeper's descriptors."""
    close_all(descriptors)
    keeper.into.close()
    keeper.out.close()


def test_what_was_not_removed_is_left_in_order_and_works(ends):
    first, second = ends
    (a, _), (b, peer), pipe = pair(), pair(), os.pipe()
    number = first.add(DAEMON, [a.fileno()])
    first.add(SERVER, [b.fileno(), pipe[1]])
    assert number is not None
    first.remove(number)
    first.remove(number)
    first.remove(None)
    killed(first, pipe[1])
    b.close()
    [left] = second.left()
    assert (left.data, len(left.descriptors)) == (SERVER, 2)
    os.write(left.descriptors[1], b"x")
    assert os.read(pipe[0], 9) == b"x"
    with socket.socket(fileno=left.descriptors[0]) as copy:
        copy.send(b"word")
        assert peer.recv(9) == b"word"
    os.close(left.descriptors[1])
    os.close(pipe[0])
    assert second.left() == []


def test_what_is_removed_closes_and_the_others_stay(ends):
    first, second = ends
    sockets = [pair() for _ in range(4)]
    numbers = [first.add(SERVER, [ours.fileno()]) for ours, _ in sockets]
    first.remove(numbers[1])
    for ours, _ in sockets:
        ours.close()
    assert sockets[1][1].recv(9) == b"", "nobody has it any more"
    left = second.left()
    assert len(left) == 3
    for each, (_, peer) in zip(left, [sockets[0], *sockets[2:]], strict=True):
        os.write(each.descriptors[0], b"here")
        assert peer.recv(9) == b"here"
        close_all(each.descriptors)


def test_where_the_kernel_carries_no_more_the_gate_goes_on(ends, caplog):
    first, _ = ends
    first.into.close()
    one, _ = pair()
    for _ in range(3):
        assert first.add(SERVER, [one.fileno()]) is None
    first.remove(None)
    [told] = caplog.messages
    assert "would not outlive this gate" in told


async def test_for_a_server_that_answers_nobody_speaks(ends):
    first, _ = ends
    ours, server = pair()
    handover = await Handover.of(ours.fileno(), first)
    assert handover is not None
    answered = asyncio.Event()
    answered.set()
    await finish_handovers(first, answered)
    assert first.left() == [], "dropped"
    ours.send(b"its own")
    assert server.recv(99) == b"its own"
    handover.close()


async def test_the_last_one_is_spoken_for_first_and_the_others_only_if_that_did_not_help(ends):
    first, _ = ends
    sockets = [pair() for _ in range(2)]
    for ours, _ in sockets:
        first.add(SERVER, [ours.fileno()])
    answered = asyncio.Event()
    task = asyncio.create_task(finish_handovers(first, answered, patience_seconds=0.1))
    sockets[1][1].setblocking(False)
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(sockets[1][1], 99) == CREDENTIALS
    answered.set()  # what the server does once it has been spoken to
    await task
    sockets[0][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        sockets[0][1].recv(99)


SPOKEN = f"[2026-11-28 13:30:25.724 Server  2480] Client {{PID: {os.getpid()}, Context ID: 0}} connected\n"
OTHERS = SPOKEN.replace(f"PID: {os.getpid()}", "PID: 7")


async def handed(keeper: HandoverCopies, log: ContextLog, pid: int) -> tuple[socket.socket, socket.socket]:
    """The client's end and the server's of a handover to a process, in which a gate was killed."""
    ours, server = pair()
    server.setblocking(False)
    ticks = start_ticks_of(pid)
    handover = await Handover.of(ours.fileno(), keeper, Recipient(pid, ticks, log.read_bytes))
    assert handover is not None
    return ours, server


@pytest.mark.parametrize(
    ("who", "written", "is_spoken_for"),
    [
        ("lives", SPOKEN, False),  # before: cut off, if the next gate had no answer within 3 s for any reason
        ("lives", OTHERS, True),
        ("lives", "", False),  # this driver's log does not tell
        ("has ended", SPOKEN, True),
        ("has ended", "", True),
    ],
    ids=["lives and spoke", "lives, another spoke", "lives, no log", "ended and spoke", "ended, no log"],  # no pid
)
async def test_who_lives_and_has_spoken_is_not_cut_off(ends, tmp_path, who, written, is_spoken_for):
    path = tmp_path / "server.log"
    path.write_text(SPOKEN if written else "")  # its first connection, of which the handover is not
    log = ContextLog(path)
    client, server = await handed(ends[0], log, os.getpid() if who == "lives" else GONE)
    with path.open("a") as file:
        file.write(written)
    answered = asyncio.Event()
    log.read()
    task = asyncio.create_task(finish_handovers(ends[0], answered, log.has_heard, patience_seconds=0.01))
    if is_spoken_for:
        assert await asyncio.get_running_loop().sock_recv(server, 99) == CREDENTIALS
    else:
        await asyncio.sleep(0.1)
        client.send(b"a launch")
        assert await asyncio.get_running_loop().sock_recv(server, 99) == b"a launch"
        assert not task.done(), "it may end without having spoken"
    answered.set()
    await task


def test_a_gate_that_is_killed_while_it_waits_with_what_is_left_leaves_it_to_the_next(ends):
    """Before: a second kill within 3 s, and the server waited for ever; random play found it."""
    first, second = ends
    server, upstream = pair(), pair()
    asked, asking = os.pipe()

    def hears(*_: int) -> bool:
        os.write(asking, b"x")
        return True

    first.add(DAEMON, [upstream[0].fileno()])
    label = Recipient(os.getpid(), start_ticks_of(os.getpid()), 0).to_bytes()
    first.add(label, [server[0].fileno()])
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            asyncio.run(finish_handovers(first, asyncio.Event(), hears, patience_seconds=0.01))
        os._exit(1)
    assert os.read(asked, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = second.left()
    assert sorted(each.data for each in left) == [DAEMON, label]
    for each in left:
        close_all(each.descriptors)
    close_all([asked, asking])
    for each in (*server, *upstream):
        each.close()


async def test_what_is_sent_and_not_read_yet_is_the_clients_own_message(ends, tmp_path):
    (tmp_path / "server.log").write_text(OTHERS)
    log = ContextLog(tmp_path / "server.log")
    client, server = await handed(ends[0], log, os.getpid())
    client.send(b"its own")
    answered = asyncio.Event()
    task = asyncio.create_task(finish_handovers(ends[0], answered, log.has_heard, patience_seconds=0.01))
    await asyncio.sleep(0.1)
    assert server.recv(99) == b"its own"
    client.send(b"a launch")
    assert server.recv(99) == b"a launch"
    answered.set()
    await task


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["has the socket", "waits for the daemon"])
async def test_a_gate_that_is_killed_in_a_handover_leaves_no_server_that_waits_for_ever(gpu, ends, stage):  # noqa: F811
    """Neighbours go on, and the daemon stays: chaos found a GPU that served no newcomer for minutes."""
    first, second = ends
    status = status_reader(gpu)

    def is_active() -> bool:
        return (now := status.read()) is not None and now.state is GateState.ACTIVE

    with contextlib.closing(listen(gpu)) as listener:
        async with keeping_on(gpu, listener, ends_strangers=False):
            await eventually(is_active, "it serves", 2 * PATIENCE)
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(gpu.pipe)}
        neighbour = await asyncio.to_thread(TwinContext, environment, WORKLOADS["stream"], PATIENCE)
        before = status.read()
        if stage == "has the socket":
            server = await asyncio.to_thread(request_server, gpu.pipe / "control", PATIENCE)
            handover = await Handover.of(server.fileno(), first)
            assert handover is not None
            server.close()
            handover._server.close()
            killed(first, *handover._pipes)
        else:
            upstream = connect(gpu.pipe / "control", PATIENCE)
            upstream.send(CREDENTIALS)
            upstream.send(COMPUTE_TYPE)
            first.add(DAEMON, [upstream.fileno()])
            upstream.close()
            killed(first)
        async with keeping_on(gpu, listener, second, ends_strangers=False):
            await eventually(lambda: status.read().gate_started_at > before.gate_started_at, "a new one", PATIENCE)
            await eventually(is_active, "it serves again", PATIENCE)
            assert status.read().daemon_pid == before.daemon_pid
            assert status.read().server_pid == before.server_pid
            await asyncio.to_thread(neighbour.tick, PATIENCE)
        neighbour.close()


def test_without_the_other_end_there_is_nothing_left():
    copies = HandoverCopies()
    copies.into.close()
    assert copies.left() == []
    copies.out.close()
