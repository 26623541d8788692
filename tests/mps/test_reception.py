"""Connections that come too fast: held without a greeting, never closed, and nobody else waits for them."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys

import pytest

from gpushare.mps.host import listen
from gpushare.mps.packets import COMPUTE_TYPE, CREDENTIALS, HELLO
from gpushare.mps.reception import ConnectionPhase, PodLimits, Reception
from gpushare.mps.status import RefuseReason
from gpushare.mps.store import StoreClient

from .conftest import eventually

# One connects and leaves at once, the other keeps all that it opens, for as long as somebody reads what it prints.
CHURN = """
import socket, sys
while True:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); s.close()
"""
HOARD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
kept = []
while True:
    try:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); kept.append(s)
    except OSError:
        time.sleep(0.1)
"""


class Desk:
    """A reception whose pods the tests name and whose clock they turn."""

    def __init__(self, gpu, limits: PodLimits) -> None:
        self.path, self.now = gpu.control, 0.0
        self.pods: dict[int, str] = {}
        self.ready: list = []
        self.gone: list = []
        self.reception = Reception(
            StoreClient(),
            identify=lambda pid: self.pods.get(pid, "a"),
            clock=lambda: self.now,
            is_own=lambda _pid: False,
            on_ready=self.ready.append,
            on_gone=self.gone.append,
            limits=limits,
        )
        self.listener = listen(gpu)
        self.reception.open(self.listener)
        self.opened: list[socket.socket] = []

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(self.path))
        connection.setblocking(False)
        self.opened.append(connection)
        return connection

    async def settled(self) -> None:
        await eventually(lambda: len(self.reception) + len(self.gone) == len(self.opened), "all accepted")

    def phases(self) -> list[ConnectionPhase]:
        return [connection.phase for connection in self.reception._by_descriptor.values()]

    def close(self) -> None:
        self.reception.close()
        self.listener.close()
        for connection in self.opened:
            connection.close()


@pytest.fixture
async def desk(twin_gpu, request):
    desk = Desk(twin_gpu, getattr(request, "param", PodLimits(per_second=1.0, burst=3.0)))
    yield desk
    desk.close()


def heard(connection: socket.socket) -> bytes | None:
    """What came: the greeting, b"" for a closed connection, None for nothing yet."""
    try:
        return connection.recv(64)
    except BlockingIOError:
        return None


async def test_what_comes_too_fast_is_held_unread_and_greeted_in_its_order_when_the_rate_allows(desk):
    connections = []
    for _ in range(6):
        connections.append(desk.connect())
        await desk.settled()
    assert [heard(each) for each in connections] == [HELLO] * 3 + [None] * 3
    assert desk.reception.unread_count == 3
    assert [waiting.pod_uid for waiting in desk.reception.held_unread()] == ["a"]
    desk.now += 2.0
    await eventually(lambda: desk.reception.unread_count == 1, "two more greeted")
    assert [heard(each) for each in connections[3:]] == [HELLO, HELLO, None]
    assert desk.gone == []


@pytest.mark.parametrize("desk", [PodLimits(per_second=1.0, burst=1.0)], indirect=True)
async def test_one_pods_haste_costs_another_nothing(desk):
    hasty = desk.connect()
    await desk.settled()
    connection = desk.connect()
    await desk.settled()
    desk.pods[os.getpid()] = "b"
    desk.now += 1.5  # the pid's pod is looked up anew
    desk.reception._buckets["a"].tokens, desk.reception._buckets["a"].at = 0.0, desk.now
    other = desk.connect()
    await desk.settled()
    assert heard(hasty) == HELLO
    assert heard(other) == HELLO
    assert heard(connection) is None


async def test_who_speaks_the_handshake_is_ready_and_who_leaves_is_forgotten(desk):
    one, two = desk.connect(), desk.connect()
    await desk.settled()
    for packet in (CREDENTIALS, COMPUTE_TYPE):
        one.send(packet)
    two.send(b"GET / HTTP/1.1")
    await eventually(lambda: desk.ready, "ready")
    assert desk.ready[0].pod_uid == "a"
    await eventually(lambda: list(desk.reception.odd()), "odd")
    assert desk.gone == [], "what no client says is held, not closed"
    one.close()
    two.close()
    await eventually(lambda: len(desk.reception) == 0, "forgotten")


@pytest.mark.parametrize("desk", [PodLimits(per_second=1000.0, burst=1000.0, per_pod=24)], indirect=True)
async def test_a_process_that_opens_very_many_loses_silent_ones_and_the_one_that_spoke_stays(desk):
    spoken = desk.connect()
    for packet in (CREDENTIALS, COMPUTE_TYPE):
        spoken.send(packet)
    await eventually(lambda: desk.ready, "ready")
    for _ in range(30):
        desk.connect()
    await desk.settled()
    await eventually(lambda: desk.reception.refused[RefuseReason.TOO_MANY_CONNECTIONS] == 7, "the excess ended")
    assert len(desk.reception) == 24
    assert desk.ready[0].phase is ConnectionPhase.READY
    assert desk.ready[0] not in desk.gone


@pytest.mark.parametrize("desk", [PodLimits(per_second=1000.0, burst=1000.0, per_pod=4, per_gpu=6)], indirect=True)
async def test_processes_with_as_few_connections_as_a_cuda_program_never_lose_one(desk, monkeypatch):
    pids = iter(range(100_000, 100_100))
    monkeypatch.setattr("gpushare.mps.reception.peer_pid", lambda _connection: next(pids))
    for _ in range(12):
        desk.connect()
    await desk.settled()
    assert desk.gone == []
    assert len(desk.reception) == 12


@pytest.mark.parametrize(
    ("greeted", "spoken", "words"),
    [
        (False, False, (CREDENTIALS, COMPUTE_TYPE)),
        (True, False, (CREDENTIALS, COMPUTE_TYPE)),
        (True, False, (COMPUTE_TYPE,)),
        (True, True, ()),
    ],
    ids=["held-unread", "greeted", "introduced", "ready"],
)
async def test_a_connection_of_the_gate_before_goes_on_where_it_was(desk, greeted, spoken, words):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    desk.opened.append(theirs)
    connection = desk.reception.adopt(ours, 7, greeted=greeted, spoken=spoken)
    assert heard(theirs) == (None if greeted else HELLO), "nobody is greeted twice"
    for word in words:
        theirs.send(word)
    await eventually(lambda: desk.ready == [connection], "ready")
    theirs.close()
    await eventually(lambda: desk.gone == [connection], "forgotten")


def test_a_small_limit_of_descriptors_lowers_what_may_be_open(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    limits = PodLimits.of_process()
    assert limits.per_gpu < 1024
    assert limits.per_pod <= limits.per_gpu // 4


@contextlib.contextmanager
def flood(path, *programs: str):
    running = [subprocess.Popen([sys.executable, "-I", "-S", "-c", each, str(path)]) for each in programs]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


@pytest.mark.parametrize("desk", [PodLimits(per_second=5.0, burst=5.0, per_pod=2000)], indirect=True)
async def test_a_flood_from_ten_processes_leaves_the_loop_to_others(desk, monkeypatch):
    """Before: no heartbeat in 7 s, a task for each connection."""
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.01)

    heart = asyncio.create_task(beat())
    desk.pods[os.getpid()] = "quiet"
    with flood(desk.path, *[CHURN] * 5, *[HOARD] * 5):
        await eventually(lambda: desk.reception.accepted > 3000, "a flood")
        before, accepted = beats, desk.reception.accepted
        await eventually(lambda: beats > before + 50, "others have their turns during the flood")
        await eventually(lambda: desk.reception.accepted > accepted, "it goes on")
        assert len(asyncio.all_tasks()) < 10
        await eventually(lambda: desk.reception.unread_count > 200, "hoarded ones are held")
        quiet = await asyncio.to_thread(desk.connect)
        await eventually(lambda: heard(quiet) == HELLO, "a neighbour is greeted during the flood")
        assert desk.reception.refused[RefuseReason.TOO_MANY_CONNECTIONS] == 0 or len(desk.reception) >= 1500
    heart.cancel()
    quiet.close()
    await eventually(lambda: len(desk.reception) == 0, "nothing is left of it")
