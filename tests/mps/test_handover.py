"""The copies that the gate keeps of what a client is handed (docs/adr/0188)."""

import os
import socket
from pathlib import Path

import pytest

from gpushare.mps.handover import Handover
from gpushare.mps.packets import CREDENTIALS, DESCRIPTOR


@pytest.fixture
def ends():
    """The server's end and the client's of a new connection, and our ends of the four pipes that wait in it."""
    server, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = [os.pipe() for _ in range(4)]
    for read, _ in pipes:
        socket.send_fds(server, [DESCRIPTOR], [read])
        os.close(read)
    server.send(bytes(1))
    yield server, client, [write for _, write in pipes]
    for _, write in pipes:
        os.close(write)
    server.close()
    client.close()


async def test_the_pipes_stay_for_the_client_and_outlive_what_it_does_with_them(ends):
    _, client, pipes = ends
    handover = await Handover.of(client.fileno())
    for number in range(4):
        data, (pipe,), _, _ = socket.recv_fds(client, 100, 1)
        assert data == DESCRIPTOR
        os.write(pipes[number], b"x")
        assert os.read(pipe, 10) == b"x"
        os.close(pipe)
    assert client.recv(100) == bytes(1)
    os.write(pipes[0], b"x")  # somebody holds the other end: no SIGPIPE, no error
    handover.close()
    with pytest.raises(BrokenPipeError):
        os.write(pipes[0], b"x")


async def test_data_that_the_server_has_not_read_is_noticed(ends):
    server, client, _ = ends
    handover = await Handover.of(client.fileno())
    assert not handover.is_unread
    client.send(CREDENTIALS)
    assert handover.is_unread
    assert server.recv(100) == CREDENTIALS
    assert not handover.is_unread
    handover.close()


async def test_speaking_sends_the_credentials_once_and_closes_the_connection(ends):
    server, client, _ = ends
    handover = await Handover.of(client.fileno())
    for _ in range(2):
        handover.speak()
    assert handover.has_spoken
    assert server.recv(100) == CREDENTIALS
    assert server.recv(100) == b""
    with pytest.raises(BrokenPipeError):
        client.send(CREDENTIALS)
    handover.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_what_is_no_socket_is_left_alone():
    read, write = os.pipe()
    before = open_descriptors()
    assert await Handover.of(read) is None
    assert open_descriptors() == before
    os.close(read)
    os.close(write)
