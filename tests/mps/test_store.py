import errno
import os
import socket
import subprocess
import sys
import threading

import pytest

from gpushare.mps import store as storing
from gpushare.mps.store import ConnectionStore, StoreClient

from .conftest import SRC, until


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
    gate.flush()
    gate.drop(numbers[2])
    for each in (silent, spoken, done, channel):
        each.close()  # as the kernel does when the gate is killed
    successor_channel = store.attach()
    successor = StoreClient(successor_channel)
    restored = successor.restore()
    assert [(each.number, each.greeted, each.spoken) for each in restored] == [
        (numbers[0], False, False),
        (numbers[1], True, True),
    ]
    restored[1].connection.send(b"hello")
    assert spoken_peer.recv(100) == b"hello"
    assert is_open(silent_peer)
    assert not is_open(done_peer)
    assert successor.keep(pair()[0]) not in numbers
    for each in restored:
        successor.drop(each.number)
        each.connection.close()
    until(lambda: not is_open(silent_peer) and not is_open(spoken_peer), "closed when both copies are")
    successor_channel.close()


def test_a_connection_that_the_host_gives_back_late_is_taken_then(store, monkeypatch):
    """Before: it was dropped with its descriptor open, and its process waited for ever."""
    first = store.attach()
    gate = StoreClient(first)
    gate.restore()
    (waiting, peer), (other, _) = pair(), pair()
    number = gate.keep(waiting)
    gate.spoken(number)
    for each in (waiting, first):
        each.close()
    real, carries = storing._send, threading.Event()

    def in_flight(channel, message, descriptor=None):
        if message.get("id") == number and not carries.is_set():
            raise OSError(errno.ETOOMANYREFS, "too many references")
        real(channel, message, descriptor)

    monkeypatch.setattr(storing, "_send", in_flight)
    monkeypatch.setattr(storing, "RESTORE_SECONDS", 0.05)
    second = store.attach()
    successor = StoreClient(second)
    assert successor.restore() == []
    own = successor.keep(other)
    assert own > number, "it is not taken for the one that is still to come"
    carries.set()
    late = []
    until(lambda: late.extend(successor.flush()) or late, "it came")
    [restored] = late
    assert (restored.number, restored.greeted, restored.spoken) == (number, True, True)
    restored.connection.send(b"hello")
    assert peer.recv(100) == b"hello"
    until(lambda: successor.flush() == [] and set(store._kept) == {number, own}, "the host has both")
    successor.drop(number)
    restored.connection.close()
    until(lambda: not is_open(peer), "closed when both copies are")
    second.close()


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


IN_FLIGHT = """
import errno, os, resource, socket, sys, time
from gpushare.mps.store import ConnectionStore, StoreClient

if os.geteuid() == 0:
    os.setuid(65534)  # root may have as many in flight as it likes
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
pair = lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
store = ConnectionStore()
gate = StoreClient(store.attach())
gate.restore()
flooding = []
try:
    while len(flooding) < 50:
        ours, theirs = pair()
        flooding.append((ours, theirs))
        for _ in range(5):
            socket.send_fds(ours, [b"x"], [0] * 50)
except OSError as error:
    assert error.errno == errno.ETOOMANYREFS, error
else:
    sys.exit("nothing stopped the flood")
mine, peer = pair()
number = gate.keep(mine)
gate.spoken(number)
gate.flush()
assert len(store) == 0 and gate.behind_seconds() > 0, (len(store), gate.behind_seconds())
for ours, theirs in flooding:
    ours.close(); theirs.close()
deadline = time.monotonic() + 60
while len(store) != 1 or gate.behind_seconds():
    assert time.monotonic() < deadline, "the store has died"
    gate.flush()
    time.sleep(0.01)
[kept] = store._kept.values()
deadline = time.monotonic() + 60
while not kept.spoken:
    assert time.monotonic() < deadline
    time.sleep(0.01)
print("survived")
"""


def test_descriptors_in_flight_delay_the_store_and_end_nothing():
    """Before: the first word that the kernel did not carry ended the gate's tie to the host for good."""
    done = subprocess.run(
        [sys.executable, "-c", IN_FLIGHT],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip() == "survived", done.stderr


def test_a_host_without_a_free_descriptor_asks_again(store, monkeypatch):
    channel = store.attach()
    gate = StoreClient(channel)
    gate.restore()
    real = storing._send

    def loses_the_descriptor(channel, message, descriptor=None):
        real(channel, message)  # as the kernel does where the receiver has no number free

    with monkeypatch.context() as full:
        full.setattr(storing, "_send", loses_the_descriptor)
        gate.keep(pair()[0])
    assert len(store) == 0

    def kept() -> bool:
        gate.flush()
        return len(store) == 1

    until(kept, "handed over after all")
    channel.close()


def test_what_is_done_with_before_the_host_could_take_it_is_not_remembered(store, monkeypatch):
    gate = StoreClient(store.attach())
    gate.restore()

    def full(*_):
        raise OSError(errno.ETOOMANYREFS, "too many references")

    with monkeypatch.context() as broken:
        broken.setattr(storing, "_send", full)
        for _ in range(1000):
            ours, theirs = pair()
            number = gate.keep(ours)
            gate.drop(number)
            ours.close()
            theirs.close()
        assert gate.behind_seconds() > 0
        assert not gate._unsaid
    gate.flush()
    assert gate.behind_seconds() == 0
    assert len(store) == 0
