"""Copies of handovers that outlive a gate that is killed in the middle of one (docs/adr/0258)."""

import asyncio
import contextlib
import os
import socket

import pytest

from gpushare.mps.handover import DAEMON, SERVER, Handover
from gpushare.mps.handover_copies import HandoverCopies, finish_handovers
from gpushare.mps.host import listen
from gpushare.mps.layout import status_reader
from gpushare.mps.packets import COMPUTE_TYPE, CREDENTIALS, close_all
from gpushare.mps.status import GateState
from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps.client import TwinContext, connect, request_server

from .conftest import PATIENCE, eventually
from .test_deserted_server import gpu, keeping_on  # noqa: F401 - a fixture


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
    await finish_handovers(first.left(), answered)
    ours.send(b"its own")
    assert server.recv(99) == b"its own"
    handover.close()


async def test_the_last_one_is_spoken_for_first_and_the_others_only_if_that_did_not_help(ends):
    first, _ = ends
    sockets = [pair() for _ in range(2)]
    for ours, _ in sockets:
        first.add(SERVER, [ours.fileno()])
    answered = asyncio.Event()
    task = asyncio.create_task(finish_handovers(first.left(), answered, patience_seconds=0.1))
    sockets[1][1].setblocking(False)
    loop = asyncio.get_running_loop()
    assert await loop.sock_recv(sockets[1][1], 99) == CREDENTIALS
    answered.set()  # what the server does once it has been spoken to
    await task
    sockets[0][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        sockets[0][1].recv(99)


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
