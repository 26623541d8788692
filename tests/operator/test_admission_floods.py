"""The admission server under floods: large bodies, bodies that do not come, silent connections."""

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
import unittest.mock
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.operator.admissionclient import Client, Serving, pod
from yarl import URL

from gpushare_operator.admission.connections import HANDSHAKES_AT_ONCE, Connections, _AcceptedConnection
from gpushare_operator.admission.server import ServerLimits
from gpushare_operator.admission.sources import BySource

Json = dict[str, Any]


async def test_a_large_body_that_does_not_come_holds_up_no_small_one(serving: Serving) -> None:
    patient = ServerLimits(reading=1, read_seconds=60.0, wait_seconds=60.0)
    async with serving(patient) as client:
        status, _ = await client.post("/mutate", b"x" * (patient.body_bytes + 1))
        assert status == 413
        _, writer = await client.half_a_review(70_000)
        for _ in range(3):
            assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        writer.close()
        large = pod(fraction="0.5")
        large["metadata"]["annotations"]["example.com/x"] = "x" * 100_000
        assert (await client.review("/mutate", large))["allowed"] is True, "the slot was given back"


async def test_a_flood_of_large_reviews_delays_a_small_one_by_one_of_them(serving: Serving) -> None:
    """Counted in reviews, not in time: nearly all of the flood are answered after the small one."""
    crowd = pod(fraction="0.5")
    crowd["spec"]["containers"] = [{"name": f"c{number}", "image": "x"} for number in range(1400)]
    request = {"uid": "r1", "operation": "CREATE", "namespace": "shop", "object": crowd, "kind": {"kind": "Pod"}}
    large = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    body = json.dumps(large).encode()
    assert len(body) < 65_536
    patient = ServerLimits(read_seconds=120.0, wait_seconds=120.0)
    async with serving(patient) as client:
        answered: list[str] = []
        five = asyncio.Event()

        async def flood() -> None:
            status, _ = await client.post("/mutate", body)
            assert status == 200
            answered.append("large")
            if len(answered) == 5:
                five.set()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(80):
                tasks.create_task(flood())
            await five.wait()
            await client.review("/mutate", pod(fraction="0.5"))
            answered.append("small")
        assert answered.index("small") < 60


@dataclass
class Flood:
    """Kept connections from another address, on which a request follows each answer; counts the answers."""

    answers: int = 0
    is_enough: bool = False
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def has_had(self, answers: int) -> None:
        async with self.news:
            await self.news.wait_for(lambda: self.answers >= answers)

    async def on_one(self, client: Client, asked: bytes) -> None:
        address = URL(client.base)
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=client.trusted, local_addr=("127.0.0.2", 0)
        )
        while not self.is_enough:
            writer.write(asked)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            self.answers += 1
            async with self.news:
                self.news.notify_all()
        writer.close()


TINY = b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "asked",
    [TINY, *(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for path in ("/healthz", "/metrics", "/nothing"))],
    ids=["reviews", "healthz", "metrics", "nothing"],
)
async def test_tiny_reviews_from_another_address_delay_none_by_more_than_a_few(
    serving: Serving, asked: bytes
) -> None:
    """Before: one pod that kept some tiny ones waiting kept every review waiting, until it was answered 503.

    Counted in answers to the flood, which ends by itself once it has had very many.
    """
    flood, connections, delays = Flood(), 60, list[int]()
    async with (
        serving(ServerLimits(read_seconds=600.0, wait_seconds=600.0)) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(connections):
            tasks.create_task(flood.on_one(client, asked))
        await flood.has_had(2 * connections)
        for _ in range(10):
            before = flood.answers
            waiting = asyncio.create_task(client.review("/mutate", pod(fraction="0.5")))
            enough = asyncio.create_task(flood.has_had(before + 2000))
            await asyncio.wait((waiting, enough), return_when=asyncio.FIRST_COMPLETED)
            delays.append(flood.answers - before)
            enough.cancel()
            if not waiting.done():
                break
        flood.is_enough = True
        assert (await waiting)["allowed"] is True
    assert max(delays) < 20, delays


def test_a_source_with_very_many_connections_makes_room_before_others_that_are_silent() -> None:
    """The API server's newcomers are silent during their handshakes, beside a flood that always has reviews."""
    connections = Connections(most=32, handshakes=4, usual_seconds=1.0)

    def add(source: str, kind: BySource[Any]) -> _AcceptedConnection:
        one = _AcceptedConnection(unittest.mock.Mock(), source, connections)
        one.transport = unittest.mock.Mock()
        kind.add(source, one)
        return one

    busy = [add("pod", connections._busy) for _ in range(6)]
    new = add("api", connections._silent)
    idle = add("api", connections._idle)
    for _ in range(2):
        connections.close_one()
    assert [one for one in busy if one in connections._busy] == busy[2:]
    assert new in connections._silent
    connections.close_one()
    connections.close_one()
    assert (new in connections._silent, idle in connections._idle) == (False, False), "nobody has very many"


async def test_too_many_reviews_at_once_are_told_so(serving: Serving) -> None:
    async with serving(ServerLimits(waiting=1)) as client:
        answers = Counter[tuple[int, bytes]]()
        connections = [await client.connect() for _ in range(40)]
        for _, writer in connections:
            writer.write(TINY)
        for reader, writer in connections:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            answers[int(head.split()[1]), await reader.readexactly(length)] += 1
            writer.close()
        refused = answers[503, b"too many reviews at once\n"]
        assert 0 < refused < 40
        assert f'reviews_total{{result="overloaded",webhook="mutate"}} {refused}.0' in await client.get("/metrics")


async def test_bodies_that_do_not_come_are_given_up(serving: Serving) -> None:
    async with serving(ServerLimits(reading=1, read_seconds=0.05, wait_seconds=0.05)) as client:
        opened = [await client.half_a_review(length) for length in (70_000, 70_000, 70_000, 100)]
        for reader, writer in opened:
            answer = await asyncio.wait_for(reader.read(), 60)  # to the end: the server closes the connection
            assert answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 503 "))
            writer.close()
        assert 'reviews_total{result="unread",webhook="mutate"} 4.0' in await client.get("/metrics")


async def test_a_connection_that_never_asks_is_closed(serving: Serving) -> None:
    async with serving(ServerLimits(idle_seconds=0.1)) as client:
        reader, writer = await client.connect()
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        await client.get("/healthz")


BOUNDED = ServerLimits(
    connections=16, read_seconds=600.0, wait_seconds=600.0, idle_seconds=600.0, handshake_seconds=600.0
)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Waits for its end; a connection that stays open fails the test."""
    with contextlib.suppress(OSError):
        await asyncio.wait_for(reader.read(), 60)
    return True


async def test_a_flood_of_connections_that_say_nothing_keeps_no_review_waiting(serving: Serving) -> None:
    """Before: connections were not bounded, and each kept a descriptor for 5 s without a handshake, 30 s with."""
    async with serving(BOUNDED) as client:
        address = URL(client.base)
        silent = []
        for number in range(60):
            tls = client.trusted if number % 2 else None
            silent.append(await asyncio.open_connection(address.host, address.port, ssl=tls))
            if number % 10 == 0:
                assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for reader, _ in silent[: 60 - 16]:
            assert await is_closed(reader)
        shown = await client.get("/metrics")
        assert "gpushare_admission_connections 16.0" in shown
        assert "gpushare_admission_connections_closed 0.0" not in shown
        assert len(client.session.connector._conns) == 1, "the API server's own connection was never closed"
        for _, writer in silent:
            writer.close()


async def test_who_asked_once_and_keeps_its_connection_makes_room_too(serving: Serving) -> None:
    async with serving(BOUNDED) as client:
        kept = []
        for _ in range(40):
            reader, writer = await client.connect()
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
            kept.append((reader, writer))
        assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for reader, _ in kept[: 40 - 16]:
            assert await is_closed(reader)
        for _, writer in kept:
            writer.close()


async def test_very_many_bodies_that_do_not_come_keep_no_review_waiting(serving: Serving) -> None:
    """Small bodies have no slots of their own: connections bound them."""
    async with serving(BOUNDED) as client:
        halves = [await client.half_a_review(1000) for _ in range(40)]
        assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for reader, _ in halves[: 40 - 16]:
            assert await is_closed(reader)
        for _, writer in halves:
            writer.close()


async def test_bodies_that_do_not_come_cost_neither_the_api_servers_connections_nor_new_ones(
    serving: Serving,
) -> None:
    """Before: headers and one byte were a request under way, for which connections that waited were closed."""
    request = {"uid": "r1", "operation": "CREATE", "namespace": "shop", "object": pod(fraction="0.5")}
    asked = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    body = json.dumps({**asked, "request": {**request, "kind": {"kind": "Pod"}}}).encode()
    head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(head + body)
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
        return answer.startswith(b"HTTP/1.1 200 ") and b'"allowed":true' in answer

    async def new_one(client: Client) -> bool:
        reader, writer = await client.connect()
        try:
            return await answered(reader, writer)
        finally:
            writer.close()

    async with serving(replace(BOUNDED, connections=64)) as client:
        kept = await client.connect()
        assert await answered(*kept)
        halves: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(17):  # 32 at once; 544 in all
            async with asyncio.TaskGroup() as tasks:
                slow = [tasks.create_task(client.half_a_review(1000)) for _ in range(16)]
                new = tasks.create_task(new_one(client))
                slow += [tasks.create_task(client.half_a_review(1000)) for _ in range(16)]
            halves += [each.result() for each in slow]
            assert new.result()
            assert await answered(*kept)
        assert "gpushare_admission_connections_closed 0.0" not in await client.get("/metrics")
        for _, writer in (kept, *halves):
            writer.close()


@pytest.mark.parametrize("what", [b"GET /healthz HTTP/1.1\r\n", b"POST /mutate HTTP/1.1\r\nContent-Length: 2\r\n"])
async def test_who_never_had_a_review_answered_goes_before_who_had(serving: Serving, what: bytes) -> None:
    async with serving(BOUNDED) as client:
        await client.review("/mutate", pod(fraction="0.5"))
        others = []
        for _ in range(40):
            reader, writer = await client.connect()
            writer.write(what + b"Host: x\r\n\r\n" + (b"{}" if what.startswith(b"POST") else b""))
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 ")
            others.append(writer)
        connections = [each for every in client.session.connector._conns.values() for each in every]
        assert [each[0].is_connected() for each in connections] == [True], "the API server's own"
        for writer in others:
            writer.close()


def client_hello(client: Client) -> bytes:
    """The first message of a client, for which a server signs."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client.trusted.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def half_a_handshake(client: Client) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begins a handshake from the address of another pod."""
    address = URL(client.base)
    reader, writer = await asyncio.open_connection(address.host, address.port, local_addr=("127.0.0.2", 0))
    writer.write(client_hello(client))
    return reader, writer


async def test_handshakes_that_one_address_begins_cost_no_other_its_connection(serving: Serving) -> None:
    """Before: each newcomer was closed for the next ones, so the API server had no new connection in a flood."""
    async with serving(BOUNDED) as client:
        early, writer = await client.connect()
        flood = [await half_a_handshake(client) for _ in range(60)]
        for reader, _ in flood[: 60 - 15]:
            assert await is_closed(reader)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await asyncio.wait_for(early.readuntil(b"ok\n"), 60)
        assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for each in (writer, *(other for _, other in flood)):
            each.close()


async def test_handshakes_that_are_not_finished_are_bounded(serving: Serving) -> None:
    """Each can be made to cost its 1.5 ms when its other side likes, all of them in one round of the loop."""
    async with serving(replace(BOUNDED, connections=64, handshakes=4, usual_handshake_seconds=0.05)) as client:
        begun = []
        for _ in range(10):
            begun.append(await half_a_handshake(client))
            assert await asyncio.wait_for(begun[-1][0].read(1), 60), "the server's answer"
        for reader, _ in begun[: 10 - 4]:
            assert await is_closed(reader)
        assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for _, writer in begun:
            writer.close()


async def test_few_handshakes_are_begun_in_a_round_of_the_loop() -> None:
    """Before: a round did the handshakes of all that had come, up to 512 of 1.5 ms, before it read a review."""
    rounds, begun = itertools.count(), list[int]()
    loop, all_begun, now = asyncio.get_running_loop(), asyncio.Event(), 0

    def tick() -> None:
        nonlocal now
        now = next(rounds)
        if not all_begun.is_set():
            loop.call_soon(tick)

    class Noted(Connections):
        async def _open(self, *_: Any, **__: Any) -> None:
            begun.append(now)
            if len(begun) == 20:
                all_begun.set()

    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    listening.setblocking(False)
    others = [socket.create_connection(listening.getsockname()) for _ in range(20)]
    for other in others:
        other.sendall(b"x")
    tick()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting = asyncio.create_task(Noted(64, 64, 60.0).accept(listening, asyncio.Protocol, tls, 60.0))
    await asyncio.wait_for(all_begun.wait(), 60)
    assert max(Counter(begun).values()) <= HANDSHAKES_AT_ONCE
    accepting.cancel()
    await asyncio.gather(accepting, return_exceptions=True)
    for other in others:
        other.close()


def test_each_source_has_its_turn_and_the_one_with_the_most_makes_room() -> None:
    found: BySource[int] = BySource()
    for number in range(5):
        found.add("flood", number)
    found.add("other", 10)
    found.add("third", 20)
    found.add("third", 21)
    assert (len(found), sorted(found)) == (8, [0, 1, 2, 3, 4, 10, 20, 21])
    assert found.oldest_of_most() == 0
    found.discard("flood", 0)
    found.discard("flood", 0)
    found.discard("nobody", 0)
    assert [found.take() for _ in range(7)] == [1, 10, 20, 2, 21, 3, 4]
    assert not found
