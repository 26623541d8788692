import socket

import pytest

from gpushare.mps.store import ConnectionStore, StoreClient

from .conftest import until


def pair():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_open(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        return peer.recv(100) != b""
    except BlockingIOError:
        return True


@pytest.fixture
def store():
    return ConnectionStore()


def test_a_killed_gates_connections_stay_open_and_go_to_its_successor(store):
    channel = store.attach()
    gate = StoreClient(channel)
    assert gate.restore() == []
    (silent, silent_peer), (spoken, spoken_peer), (done, done_peer) = pair(), pair(), pair()
    numbers = [gate.keep(each) for each in (silent, spoken, done)]
    gate.spoken(numbers[1])
    gate.drop(numbers[2])
    for each in (silent, spoken, done, channel):
        each.close()  # as the kernel does when the gate is killed
    successor_channel = store.attach()
    successor = StoreClient(successor_channel)
    restored = successor.restore()
    assert [(number, has_spoken) for number, _, has_spoken in restored] == [
        (numbers[0], False),
        (numbers[1], True),
    ]
    restored[1][1].send(b"hello")
    assert spoken_peer.recv(100) == b"hello"
    assert is_open(silent_peer)
    assert not is_open(done_peer)
    assert successor.keep(pair()[0]) not in numbers
    for number, connection, _ in restored:
        successor.drop(number)
        connection.close()
    until(lambda: not is_open(silent_peer) and not is_open(spoken_peer), "closed when both copies are")
    successor_channel.close()


def test_a_gate_on_its_own_keeps_nothing():
    alone = StoreClient()
    assert alone.restore() == []
    ours, _ = pair()
    number = alone.keep(ours)
    alone.spoken(number)
    alone.drop(number)


def test_a_host_that_is_gone_is_logged_and_no_crash(caplog):
    ours, theirs = pair()
    theirs.close()
    gate = StoreClient(ours)
    gate.keep(pair()[0])
    assert "cannot hand a connection to the host" in caplog.text
    gate.drop(1)
