"""Measure the cost of a small extender heap at full size: a full collection, and returning memory."""

import argparse
import asyncio
import contextlib
import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import orjson
from devcluster.loopback import unused_port

from bench import fleet
from bench.figures import resident_mib
from bench.latency import kubeconfig, process
from gpushare.core.api import PodView
from gpushare.extender import Extender
from gpushare.extender.options import parse_options
from gpushare.extender.reduce import reduce_gpunode
from gpushare.kube import Change, connect
from gpushare.runtime.heap import COLLECTING_RATIO, LOOK_SECONDS, trim

CHUNK = 500  # of changes between two turns of the event loop


class Fleet:
    """Fleet as the watches would deliver it again, with changes in the fields that change all the time."""

    def __init__(self, nodes: int, gpus: int, tenants: int) -> None:
        self.nodes, self.gpus = nodes, gpus
        self.placed = fleet.place(nodes, gpus, tenants, seed=7)
        self.by_node: dict[int, dict[int, list[tuple[str, int]]]] = {}
        for index, (at, gpu, percent) in enumerate(self.placed):
            self.by_node.setdefault(at, {}).setdefault(gpu, []).append((fleet.pod_uid(index), percent))

    def write_gpunodes(self, extender: Extender, observed_at: str) -> Iterable[None]:
        """Let every agent write its GpuNode, as it does every 10 s."""
        for index in range(self.nodes):
            view = reduce_gpunode(fleet.gpunode(index, self.gpus, self.by_node.get(index)))
            view = replace(view, observed_at=observed_at)
            extender.ledger.gpunode_changed(Change.MODIFIED, view.name, view)
            yield

    def write_pods(self, extender: Extender) -> Iterable[None]:
        """Change every tenant's pod once."""
        for index, (at, gpu, percent) in enumerate(self.placed):
            raw = orjson.dumps(fleet.pod(index, percent, node_index=at, gpu=gpu))
            pod = PodView.from_object(orjson.loads(raw))
            extender.ledger.pod_changed(Change.MODIFIED, pod.key, pod)
            yield


async def drain(changes: Iterable[None]) -> None:
    """Apply the changes, and let other tasks run in between."""
    for count, _ in enumerate(changes):
        if count % CHUNK == 0:
            await asyncio.sleep(0)


def timed_ms(work: Callable[[], object]) -> tuple[float, float]:
    """Return the time of a call by the clock and in processor time."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return (time.perf_counter() - wall) * 1000, (time.thread_time() - cpu) * 1000


def row(stage: str) -> str:
    """Collect and trim once, as the extender does; return a row of the table."""
    tracked, before = sum(len(gc.get_objects(generation)) for generation in range(3)), resident_mib(os.getpid())
    collect_ms, collect_cpu_ms = timed_ms(gc.collect)
    trim_ms, _ = timed_ms(trim)
    after = resident_mib(os.getpid())
    again = max(LOOK_SECONDS, collect_cpu_ms / 1000 / COLLECTING_RATIO)
    return (
        f"| {stage} | {tracked:,} | {collect_ms:.1f}, {collect_cpu_ms:.1f} | {again:.0f} | {trim_ms:.1f} | "
        f"{before:.0f}, {after:.0f} |"
    )


async def measure(url: str, world: Fleet) -> list[str]:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        config = kubeconfig(directory, url)
        async with connect(config, field_manager="bench") as api:
            extender = Extender(api, parse_options(["--kubeconfig", config]))
            async with extender.watching():
                while extender.not_ready() or not gc.get_freeze_count():  # noqa: ASYNC110 - questions, not events
                    await asyncio.sleep(0.1)
                rows.append(row("ready"))
                await drain(world.write_gpunodes(extender, "1"))
                rows.append(row("every GpuNode written once since"))
                await drain(world.write_pods(extender))
                rows.append(row("and every tenant's pod"))
                await drain(world.write_gpunodes(extender, "2"))
                rows.append(row("every GpuNode written again"))
                gc.unfreeze()
                rows.append(row("the same, if the startup heap were not frozen"))
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench heap", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--tenants", type=int, default=20_000)
    parser.add_argument("--other-pods", type=int, default=0)
    options = parser.parse_args(arguments)
    port = unused_port()
    fake = {
        "port": port,
        "nodes": options.nodes,
        "gpus": options.gpus,
        "tenants": options.tenants,
        "other-pods": options.other_pods,
        "waiting": 0,
    }
    command = (sys.executable, "-m", "bench.fakeapi", *(f"--{name}={value}" for name, value in fake.items()))
    with process(*command):
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        world = Fleet(options.nodes, options.gpus, options.tenants)
        rows = asyncio.run(measure(f"http://127.0.0.1:{port}", world))
    print(
        "| since | objects that the collector looks at | full collection: by the clock, processor time, ms | "
        "the next after, s | malloc_trim, ms | resident before, after, MiB |\n|---|---|---|---|---|---|"
    )
    print("\n".join(rows))
