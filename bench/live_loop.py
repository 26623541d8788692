"""Seconds from a promise broken to kept by the real agent, and its CPU.

As root on a machine with a freezer; the loop as in test_live_loop, a node of its own each time. In turn with
programs whose progress is drawn from the shipped model, and with two of the table, measured on an H200.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from aiohttp.test_utils import TestServer
from tests.deviceplugin.fakes import FakeKubelet, NodeApi
from tests.deviceplugin.live import MEASURED, MODELLED, LiveNode, bad_pair, kept_after, until

CALM_SECONDS = 30.0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


async def share_of_core(pid: int, seconds: float) -> float:
    """Return the CPU of a process over the next seconds, in percent of a core."""
    before, began = cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - began)


async def once(number: int, programs: tuple[str, str]) -> float:
    """Return the seconds from a bad neighbour's start on one node until the promise is kept."""
    with tempfile.TemporaryDirectory(prefix="gs") as folder:
        kubelet = FakeKubelet(Path(folder) / "kubelet")
        await kubelet.start()
        api = NodeApi()
        async with TestServer(api.app) as server:
            node = LiveNode(Path(folder), api, str(server.make_url("")).rstrip("/"), kubelet)
            try:
                victim, bad = bad_pair(node, is_known=True, programs=programs)
                await node.start()
                node.begin(victim)
                await until("its progress alone", lambda: (t := node.tenant(victim)) and t.progress_ratio)
                told = node.tenant(victim)
                assert told is not None
                assert node.agent is not None
                calm = await share_of_core(
                    node.agent.pid, CALM_SECONDS if number == 0 else 1.0 + number * 0.37 % 1
                )
                began = time.monotonic()
                node.begin(bad)
                await until("kept", lambda: kept_after(victim, told.promise_ratio, began) is not None)
                seconds = kept_after(victim, told.promise_ratio, began)
                assert seconds is not None
                if number == 0:
                    busy = await share_of_core(node.agent.pid, CALM_SECONDS)
                    print(f"agent's CPU: calm {calm:.2f}% of a core, with a throttle {busy:.2f}%", flush=True)
                return seconds
            finally:
                node.close()
                await kubelet.stop()


def main(arguments: Sequence[str]) -> None:
    """Measure, and print each time and the median."""
    parser = argparse.ArgumentParser(prog="python -m bench live-loop", description=__doc__)
    parser.add_argument("times", type=int, metavar="TIMES")
    options = parser.parse_args(arguments)
    found: dict[str, list[float]] = {"modelled": [], "measured": []}
    for number in range(options.times):
        for name, programs in (("modelled", MODELLED), ("measured", MEASURED)):
            found[name].append(asyncio.run(once(number, programs)))
            print(f"{name}: from broken to kept {found[name][-1]:.1f} s", flush=True)
    for name, times in found.items():
        print(f"{name}: median {statistics.median(times):.1f} s, longest {max(times):.1f} s of {len(times)}")
