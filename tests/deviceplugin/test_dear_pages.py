"""Tenants' pages as dear to read as can be, over real HTTP: the agent's event loop goes on (docs/adr/0263)."""

import asyncio
import itertools
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from tests.deviceplugin.fakes import make_pod
from tests.deviceplugin.test_slo import tell_queued

from gpushare.core.api import ConditionStatus, JobClass, PodSeries, names
from gpushare.core.control import QuantileSample, RequestCounts, SloReading, SloReason, SloTrouble
from gpushare_deviceplugin import page_parser
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.page_budget import POD_CORES, PageBudget
from gpushare_deviceplugin.page_fetch import MOST_CHUNKS, body_of
from gpushare_deviceplugin.page_parser import HungPageError, PageParser
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import Terms
from gpushare_deviceplugin.slo import READ_SECONDS, SloReader
from gpushare_deviceplugin.slo_sources import (
    MOST_BYTES,
    MOST_FAMILY_BYTES,
    MOST_LINES,
    SloPage,
    SloSources,
    parse_page,
)
from gpushare_deviceplugin.state import NodeState

LINE = 'a_bucket{le="1",x="' + '\\"' * 2000 + '"} 1\n'
LINES = LINE * (MOST_FAMILY_BYTES // len(LINE))
# Dearest to parse: escaped quotes. Dearest to search: a series' name of one letter at the begin of each line.
DEAR = (LINES + "a\n" * ((MOST_BYTES - 1024 - len(LINES)) // 2)).encode()
HONEST = b'a_bucket{le="0.05"} 90\na_bucket{le="+Inf"} 100\na_count 100\n'
PODS = 30
SECONDS = 20.0
# Of this process's CPU time between two turns of the loop: what the machine's other load takes does not count, as
# it would by the clock. Parsed in the loop, these pages took 0.46 to 1.17 s.
MOST_STALL_SECONDS = 0.25
TARGET = {names.SLO: "p99<50ms", names.CLASS: "latency"}


def serve(port: "multiprocessing.Queue[int]", hits: "multiprocessing.Queue[tuple[str, float]]") -> None:
    """Answer for all the pods, in a process of its own, so that it costs the reader's process nothing."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port.put(listener.getsockname()[1])
    tiny = b"1\r\nx\r\n" * 100_000

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                path = connection.recv(65536).split()[1].decode()
                hits.put((path, time.monotonic()))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if path in {"/dear", "/honest"}:
                    page = DEAR if path == "/dear" else HONEST
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
                elif path == "/chunks":
                    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    while True:
                        connection.sendall(tiny)
                elif path == "/continue":
                    while True:
                        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 4000)
                else:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    while True:
                        connection.sendall(b"x")
            except OSError:
                pass

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


@pytest.fixture
def pages() -> Iterator[tuple[int, "multiprocessing.Queue[tuple[str, float]]"]]:
    context = multiprocessing.get_context("fork")
    port, hits = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(port, hits), daemon=True)
    process.start()
    try:
        yield port.get(timeout=60), hits
    finally:
        process.kill()
        process.join()


async def longest_stall(seconds: float) -> float:
    """Return the most CPU time of this process between two turns of an event loop that has one each 5 ms."""
    clock = asyncio.get_running_loop().time
    longest, ends_at = 0.0, clock() + seconds
    while clock() < ends_at:
        began = time.process_time()
        await asyncio.sleep(0.005)
        longest = max(longest, time.process_time() - began)
    return longest


async def tell_nobody(_: Notice) -> None:
    """Write no event."""


def pod_of(name: str, port: int, path: str) -> ManagedPod:
    annotations = {**TARGET, names.SLO_FROM: f"port={port},series=a,path={path}"}
    return replace(make_pod(name, phase="Running", **annotations), ip="127.0.0.1")


@pytest.mark.parametrize("path", ["/dear", "/chunks", "/continue", "/bytes"])
async def test_thirty_pods_with_the_dearest_pages_do_not_stall_the_agent(
    state: NodeState,
    pages: tuple[int, "multiprocessing.Queue[tuple[str, float]]"],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parsed in the event loop, each of them stalled it, and all of them kept it busy without end."""
    port, hits = pages
    honest = pod_of("honest", port, "/honest")
    state.put_pod(honest)
    begins: list[bool] = []
    begin = PageBudget.begin

    def noted(budget: PageBudget, uid: str) -> bool:
        may = begin(budget, uid)
        if uid == honest.uid:
            begins.append(may)
        return may

    monkeypatch.setattr(PageBudget, "begin", noted)
    at: dict[str, list[float]] = {"/honest": [], path: []}
    stall = 0.0
    async with SloSources() as sources:
        reader = reader_of(state, sources)
        await reader.step()
        for number in range(PODS):
            state.put_pod(pod_of(f"web-{number}", port, path))
        running = asyncio.create_task(reader.run())
        async with asyncio.timeout(120):
            while len(at[path]) < PODS:  # of pages that were never read nothing is known
                stall = max(stall, await longest_stall(1.0))
                take(hits, at)
        del begins[:]
        began, cpu = time.monotonic(), time.process_time()
        stall = max(stall, await longest_stall(SECONDS))
        cpu_ratio = (time.process_time() - cpu) / (time.monotonic() - began)
        running.cancel()
        await asyncio.wait([running])
    take(hits, at)
    gaps = [after - before for before, after in itertools.pairwise(at["/honest"]) if before >= began]
    apart = [round(gap, 1) for gap in gaps]
    print(
        f"{path}: longest stall {stall:.3f} s, {cpu_ratio:.2f} cores; the honest page's readings {apart} s apart"
    )
    assert stall < MOST_STALL_SECONDS
    assert begins
    assert all(begins), "none is left out"


def take(hits: "multiprocessing.Queue[tuple[str, float]]", at: dict[str, list[float]]) -> None:
    while not hits.empty():
        path, when = hits.get()
        at[path].append(when)


def reader_of(state: NodeState, sources: SloSources) -> SloReader:
    terms = Terms(JobClass.LATENCY, 1.1)
    return SloReader(state, lambda _: terms, sources.fetch, tell=tell_nobody, clock=time.monotonic)


def test_the_dear_page_is_accepted() -> None:
    usual = "".join(
        f'a_bucket{{handler="/api/v1/items/{n}",method="GET",le="1"}} {n}\n' for n in range(MOST_LINES)
    )
    for name, page in (("dear", DEAR), (f"{MOST_LINES} usual samples", usual.encode())):
        began = time.thread_time()
        assert isinstance(parse_page(page, PodSeries(1, "a"), 0.99), RequestCounts)
        print(f"{name}: {time.thread_time() - began:.3f} s of CPU time")


async def test_a_page_too_costly_to_be_read_each_minute_is_told_and_nothing_is_judged_by_it(
    state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is read each two minutes gives neither a missed target nor one that is met."""
    clock, cost, told, read = [1000.0], [2.5], list[Notice](), [0]

    async def fetch(pod: ManagedPod, slo: object) -> SloPage:
        read[0] += 1
        return SloPage(lambda: QuantileSample(0.2))

    async def parse(self: PageParser, parse: Callable[[], SloReading], owed: float) -> tuple[SloReading, float]:
        return parse(), cost[0]

    async def tell(notice: Notice) -> None:
        told.append(notice)

    monkeypatch.setattr(PageParser, "parse", parse)
    state.put_pod(pod_of("web", 1, "/metrics"))
    terms = Terms(JobClass.LATENCY, 1.1)
    reader = SloReader(state, lambda _: terms, fetch, tell=tell, clock=lambda: clock[0])

    async def minutes(number: int) -> set[str]:
        seen = set()
        for _ in range(12 * number):
            clock[0] += READ_SECONDS
            await reader.step()
            await tell_queued(reader)
            status = reader.status(state.pods["uid-web"])
            assert status is not None
            assert status.met is ConditionStatus.UNKNOWN
            assert reader.sign("uid-web") is None
            seen.add(status.reason)
        return seen

    assert await minutes(2) == {"Starting", "TooCostly"}
    assert await minutes(20) == {"TooCostly"}
    assert read[0] == 1 + 22 * 60 * POD_CORES // cost[0]
    assert [(notice.reason, notice.is_warning) for notice in told] == [("SloUnknown", True)]
    assert "costs the agent up to 2500 ms of CPU time" in told[0].note
    cost[0] = 0.001
    for _ in range(70):
        clock[0] += READ_SECONDS
        await reader.step()
    status = reader.status(state.pods["uid-web"])
    assert status is not None
    assert status.met is ConditionStatus.FALSE, "a cheap page is judged again"


async def test_who_owes_least_is_parsed_next_and_waits_for_one_page_at_most() -> None:
    parser, begun, go_on, order = PageParser(), threading.Event(), threading.Event(), []

    def first() -> SloReading:
        begun.set()
        assert go_on.wait(60)
        return QuantileSample(1.0)

    def page(name: str) -> Callable[[], SloReading]:
        def parse() -> SloReading:
            order.append(name)
            return QuantileSample(0.0)

        return parse

    running = asyncio.create_task(parser.parse(first, 0.5))
    await asyncio.to_thread(begun.wait, 60)
    others = [asyncio.create_task(parser.parse(page(f"{owed}"), owed)) for owed in (0.4, 0.3, 0.0, 0.2)]
    await asyncio.sleep(0)
    others[1].cancel()
    go_on.set()
    assert (await running)[0] == QuantileSample(1.0)
    await asyncio.wait(others)
    assert order == ["0.0", "0.2", "0.4"]
    parser.close()


async def test_a_page_that_hangs_or_fails_costs_the_others_neither_thread_nor_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_parser, "HUNG_SECONDS", 0.2)
    parser, go_on = PageParser(), threading.Event()

    def hang() -> SloReading:
        go_on.wait(60)
        return QuantileSample(0.0)

    def fail() -> SloReading:
        raise RuntimeError("a defect")

    with pytest.raises(HungPageError):
        await parser.parse(hang, 0.0)
    with pytest.raises(RuntimeError):
        await parser.parse(fail, 0.0)
    monkeypatch.setattr(page_parser, "HUNG_SECONDS", 60.0)
    reading, cpu_seconds = await parser.parse(lambda: QuantileSample(3.0), 0.0)
    assert reading == QuantileSample(3.0)
    assert cpu_seconds < 1.0
    go_on.set()
    parser.close()


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (HEAD + b"Content-Length: 3\r\n\r\nabcd", b"abc"),
        (HEAD + b"content-length:3 \r\n\r\nab", SloReason.UNREACHABLE),
        (HEAD + b"\r\nabc", b"abc"),
        (CHUNKED + b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\n\r\n", b"abcd"),
        (CHUNKED + b"3\r\nabc\r\n", SloReason.UNREACHABLE),
        (CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n", SloReason.UNREACHABLE),
        (CHUNKED + b"2\r\nabc\r\n0\r\n\r\n", SloReason.UNREACHABLE),
        (CHUNKED + b"1\r\na\r\n" * (MOST_CHUNKS + 1) + b"0\r\n\r\n", SloReason.TOO_LARGE),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" + HEAD, SloReason.UNREACHABLE),
        (HEAD + b"a: b\r\n" * 10_000 + b"\r\nabc", SloReason.UNREACHABLE),
        (b"220 mail.example ESMTP\r\n\r\n", SloReason.UNREACHABLE),
        (b"", SloReason.UNREACHABLE),
    ],
    ids=range(12),
)
def test_answers_by_http(answer: bytes, body: bytes | SloReason) -> None:
    found = body_of(bytearray(answer), "port 1 of the pod")
    assert (found.reason if isinstance(found, SloTrouble) else bytes(found)) == body
