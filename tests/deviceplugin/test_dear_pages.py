"""Tenants' pages that are as dear to read as can be, over real HTTP: the agent's event loop goes on (docs/adr/0263)."""

import asyncio
import itertools
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.deviceplugin.fakes import make_pod

from gpushare.core.api import ConditionStatus, JobClass, names
from gpushare.core.control import LONGEST_WINDOW_SECONDS, QuantileSample, SloReading, SloReason, SloTrouble
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.page_fetch import MOST_CHUNKS, body_of
from gpushare_deviceplugin.page_parser import PageParser
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import Terms
from gpushare_deviceplugin.slo import READ_SECONDS, SloReader
from gpushare_deviceplugin.slo_sources import MOST_BYTES, MOST_FAMILY_BYTES, SloPage, SloSources
from gpushare_deviceplugin.state import NodeState

LINE = 'a_bucket{le="1",x="' + '\\"' * 2000 + '"} 1\n'
LINES = LINE * (MOST_FAMILY_BYTES // len(LINE))
# Dearest to parse: escaped quotes. Dearest to search: a series' name of one letter at the begin of each line.
DEAR = (LINES + "a\n" * ((MOST_BYTES - 1024 - len(LINES)) // 2)).encode()
HONEST = b'a_bucket{le="0.05"} 90\na_bucket{le="+Inf"} 100\na_count 100\n'
PODS = 30
SECONDS = 16.0
SLACK_SECONDS = 3.0  # a round with hanging pages lasts 6 s; a busy machine
# Of this process's CPU time between two turns of the loop: what the machine's other load takes does not count, as it
# would by the clock. A dear page that is parsed in the loop takes longer than that.
MOST_STALL_SECONDS = 0.1
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
                if path == "/dear" or path == "/honest":
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
    state: NodeState, pages: tuple[int, "multiprocessing.Queue[tuple[str, float]]"], path: str
) -> None:
    """Parsed in the event loop, each of them stalled it, and all of them kept it busy without end."""
    port, hits = pages
    state.put_pod(pod_of("honest", port, "/honest"))
    read_at: list[float] = []
    async with SloSources() as sources:
        reader = reader_of(state, sources)
        async with asyncio.timeout(60):
            await reader.step()
        for number in range(PODS):
            state.put_pod(pod_of(f"web-{number}", port, path))
        running = asyncio.create_task(reader.run())
        cpu = time.process_time()
        stall = await longest_stall(SECONDS)
        cpu_ratio = (time.process_time() - cpu) / SECONDS
        running.cancel()
        await asyncio.wait([running])
    while not hits.empty():
        of, at = hits.get()
        read_at += [at] if of == "/honest" else []
    gaps = [after - before for before, after in itertools.pairwise(read_at)]
    print(f"{path}: longest stall {stall:.3f} s, {cpu_ratio:.2f} cores; honest after {[round(gap, 1) for gap in gaps]} s")
    assert stall < MOST_STALL_SECONDS
    assert len(gaps) >= SECONDS / (READ_SECONDS + SLACK_SECONDS)
    assert max(gaps) < READ_SECONDS + SLACK_SECONDS


def reader_of(state: NodeState, sources: SloSources) -> SloReader:
    terms = Terms(JobClass.LATENCY, 1.1)
    return SloReader(state, lambda _: terms, sources.fetch, tell=tell_nobody, clock=time.monotonic)
