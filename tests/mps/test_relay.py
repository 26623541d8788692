"""What a client says after the handshake, before a daemon that writes down all that reaches it."""

import asyncio
import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from gpushare.mps.errors import MpsError
from gpushare.mps.packets import (
    ACKNOWLEDGED,
    COMPUTE_TYPE,
    CREDENTIALS,
    DESCRIPTOR,
    HELLO,
    Channel,
    read_packet,
)
from gpushare.mps.relay import ANSWER_SECONDS, NotDeliveredError, Passed, ServerRefusal, relay

from .conftest import eventually


class Daemon:
    """Serves one connection as the real one does; `heard` is each packet with its count of descriptors."""

    def __init__(self, path, answer: bytes = DESCRIPTOR, descriptors: int = 1) -> None:
        self.path, self._answer, self._descriptors = path, answer, descriptors
        self.heard: list[tuple[bytes, int]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, self._listener:
            connection.send(HELLO)
            for _ in range(2):
                self._hear(connection)
            if self._answer:
                socket.send_fds(connection, [self._answer], [0] * self._descriptors)
            while self._hear(connection):
                pass

    def _hear(self, connection: socket.socket) -> bool:
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, 253)
        for each in descriptors:
            os.close(each)
        if data:
            self.heard.append((data, len(descriptors)))
        return bool(data)

    def ended(self) -> list[tuple[bytes, int]]:
        """What it heard after the introduction, once its connection is over."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.heard[:2] == [(CREDENTIALS, 0), (COMPUTE_TYPE, 0)]
        return self.heard[2:]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def client():
    """The gate's end and the tenant's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(60)
    channel = Channel(ours)
    yield channel, theirs
    channel.socket.close()
    theirs.close()


async def test_the_recorded_handshake_passes(short_path, client):
    daemon, (channel, tenant) = Daemon(short_path / "control"), client
    tenant.send(ACKNOWLEDGED)
    assert await relay(channel, daemon.path) is Passed.SERVED
    packet = read_packet(tenant, 4)
    assert packet.says(DESCRIPTOR, descriptors=1)
    os.close(packet.descriptors[0])
    assert await asyncio.to_thread(daemon.ended) == [(ACKNOWLEDGED, 0)]


@pytest.mark.parametrize(
    ("data", "descriptors"),
    [
        (b"x" * 65536, 0),
        (b"x" * 65, 0),
        (ACKNOWLEDGED, 1),
        (ACKNOWLEDGED, 200),
        (ACKNOWLEDGED + b"\0", 0),
        (b"\xff" * 4, 0),
        (b"get_server_list\0", 0),
        (CREDENTIALS, 0),
    ],
    ids=["64-KiB", "65-bytes", "descriptor", "200-descriptors", "five-bytes", "no-error", "command", "again"],
)
async def test_what_the_protocol_does_not_know_never_reaches_the_daemon(short_path, client, data, descriptors):
    """Before: bytes and descriptors were passed on as they came."""
    daemon, (channel, tenant) = Daemon(short_path / "control"), client
    open_before = open_descriptors()
    socket.send_fds(tenant, [data], [0] * descriptors)
    assert await relay(channel, daemon.path) is Passed.BROKE_PROTOCOL
    assert await asyncio.to_thread(daemon.ended) == []
    assert open_descriptors() <= open_before, "no descriptor of the tenant's entered the gate"


async def test_a_client_that_the_server_does_not_take_says_so_by_an_error(short_path, client):
    """As recorded on an H200: CUDA error 807, "not ready to accept new clients", while it handles a fault."""
    daemon, (channel, tenant) = Daemon(short_path / "control"), client
    tenant.send(bytes.fromhex("27030000"))
    assert await relay(channel, daemon.path) == ServerRefusal(807)
    assert await asyncio.to_thread(daemon.ended) == []


@pytest.mark.parametrize(
    ("answer", "descriptors"),
    [(b"OUTBNOPE\0", 0), (DESCRIPTOR, 0), (DESCRIPTOR, 2), (b"", 0), (b"OUTBCUFD\0!", 1)],
)
async def test_an_answer_that_is_none_is_not_passed_on_and_the_client_can_be_held(
    short_path, client, answer, descriptors, monkeypatch
):
    monkeypatch.setattr("gpushare.mps.relay.ANSWER_SECONDS", 1.0)
    daemon, (channel, tenant) = Daemon(short_path / "control", answer, descriptors), client
    if not answer:
        daemon._hear = lambda connection: (Daemon._hear(daemon, connection), False)[1]  # closes after two words
    with pytest.raises(MpsError) as error:
        await relay(channel, daemon.path)
    assert error.value.retryable
    tenant.setblocking(False)
    with pytest.raises(BlockingIOError):
        tenant.recv(64)


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.EMFILE])
async def test_a_descriptor_that_the_kernel_does_not_carry_is_tried_again(short_path, client, number, monkeypatch):
    """Before: the gate closed the client, which then ran uncapped."""
    daemon, (channel, tenant) = Daemon(short_path / "control"), client

    class Full:
        def __init__(self, real: socket.socket) -> None:
            self._real = real

        def sendmsg(self, *_: object) -> int:
            raise OSError(number, os.strerror(number))

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    real, channel.socket = channel.socket, Full(channel.socket)
    with pytest.raises(NotDeliveredError):
        await relay(channel, daemon.path)
    channel.socket = real
    assert await asyncio.to_thread(daemon.ended) == []
    again = Daemon(short_path / "again")
    tenant.send(ACKNOWLEDGED)
    assert await relay(channel, again.path) is Passed.SERVED
    assert read_packet(tenant, 1).data == DESCRIPTOR


async def test_a_client_that_is_gone_is_no_trouble_of_the_daemons(short_path, client):
    daemon, (channel, tenant) = Daemon(short_path / "control"), client
    tenant.close()
    assert await relay(channel, daemon.path) is Passed.LEFT


async def test_a_client_without_a_cpu_has_so_much_longer_for_its_message(short_path, client):
    """Before: one that got none for two seconds counted as gone, though it answered next."""
    daemon, (channel, tenant) = Daemon(short_path / "control"), client
    waited = [0.0, 60.0]  # for a CPU, when the descriptor was handed over and when the patience had ended

    def starved_seconds() -> float:
        if len(waited) == 1:
            tenant.send(ACKNOWLEDGED)
        return waited.pop(0)

    assert await relay(channel, daemon.path, 0.05, starved_seconds=starved_seconds) is Passed.SERVED
    assert waited == []
    assert await asyncio.to_thread(daemon.ended) == [(ACKNOWLEDGED, 0)]


@pytest.mark.parametrize("waited", [[3.0, 3.0], [3.0, 3.04], [0.0, 0.1, 0.2, 0.2]])
async def test_a_client_that_had_a_cpu_and_says_nothing_has_left(short_path, client, waited):
    daemon, (channel, _) = Daemon(short_path / "control"), client
    assert await relay(channel, daemon.path, 0.05, starved_seconds=lambda: waited.pop(0)) is Passed.LEFT
    assert waited == []
    assert await asyncio.to_thread(daemon.ended) == []


async def test_no_daemon_is_worth_a_retry(short_path, client):
    with pytest.raises(MpsError, match="cannot connect") as error:
        await relay(client[0], short_path / "nothing")
    assert error.value.retryable


async def test_the_gate_sends_the_credentials_of_a_client_whose_answer_comes_too_late(
    short_path, client, monkeypatch
):
    """Before: the server's socket was closed as it came, and the server waited for that client for ever."""
    server, handed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.settimeout(60)
    asked_too_long = threading.Event()

    class LateDaemon(Daemon):
        def _serve(self) -> None:
            connection, _ = self._listener.accept()
            with connection, self._listener, handed:
                connection.send(HELLO)
                for _ in range(2):
                    self._hear(connection)
                assert asked_too_long.wait(60)
                socket.send_fds(connection, [DESCRIPTOR], [handed.fileno()])

    daemon, (channel, tenant) = LateDaemon(short_path / "control"), client
    relaying = asyncio.create_task(relay(channel, daemon.path))
    await eventually(lambda: len(daemon.heard) == 2, "the daemon is asked")
    loop = asyncio.get_running_loop()
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ANSWER_SECONDS)
    with pytest.raises(MpsError, match="did not answer"):
        await relaying
    asked_too_long.set()
    assert await asyncio.to_thread(server.recv, 100) == CREDENTIALS
    tenant.setblocking(False)
    with pytest.raises(BlockingIOError):
        tenant.recv(64)
    server.close()
