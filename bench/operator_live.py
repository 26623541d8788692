"""The whole operator against a real API server: `python -m bench operator --live`.

A control plane of its own (etcd, kube-apiserver), the objects made beforehand, then the operator as the chart
starts it, with Kopf's own probe besides, which shows how long the event loop is busy. Timed is what a user waits
for: from its start until each GpuShare's status names its pod; and until the events about that, which the operator
writes afterwards, are written too.
"""

import asyncio
import math
import os
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from devcluster.loopback import unused_port
from prometheus_client.parser import text_string_to_metric_families

from bench import controlplane
from bench.controlplane import ControlPlane
from bench.figures import resident_mib
from bench.throughput import create_all
from gpushare.kube import GPUSHARES, NAMESPACES, PODS, Api, Resource, connect

Json = dict[str, Any]
LOOK_SECONDS: Final = 0.2
# Between two looks at the metrics: at most what Prometheus usually waits; less near the estimated end.
LONGEST_SCRAPE_SECONDS: Final = 15.0
SHORTEST_SCRAPE_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 900.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_CPU_FIELDS: Final = slice(11, 13)  # of /proc/PID/stat after the command's name: in user mode, in the kernel


@dataclass(frozen=True)
class LiveResult:
    """Cost of one start of the operator.

    Attributes:
        seconds: from its start until all statuses are written.
        longest_answer_seconds: the slowest answer of Kopf's own probe, which the reconciler's event loop gives.
        longest_stall_seconds: the operator's event loop was never late by more, by its own metric's buckets.
        processor_seconds: by process, until then: the operator, kube-apiserver, etcd.
        all_seconds: from its start until no event waits to be written either.
        all_processor_seconds: by process, until then.
    """

    seconds: float
    longest_answer_seconds: float
    longest_stall_seconds: float
    resident_mib: float
    processor_seconds: dict[str, float]
    named_pods: int
    all_seconds: float
    all_processor_seconds: dict[str, float]


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[_CPU_FIELDS])) / _TICKS


def storable(resource: Resource, obj: Json) -> Json:
    """Return an object of a scene as an API server takes it: of a kind, without a uid, with a container."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in ("uid", "generation")}
    spec = dict(obj["spec"])
    if "nodeName" in spec:
        spec["containers"] = [{"name": "main", "image": "none"}]
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": spec}


def start_operator(plane: ControlPlane, probe_port: int, metrics_port: int) -> None:
    paths = os.pathsep.join(str(controlplane.ROOT / part) for part in ("src", "operator", "deviceplugin"))
    plane.start(
        "operator",
        sys.executable,
        *("-m", "gpushare_operator", "run", "-m", "gpushare_operator.handlers", "--standalone"),
        *("--liveness", f"http://127.0.0.1:{probe_port}/healthz", "--all-namespaces", "--quiet"),
        env={
            "KUBECONFIG": str(plane.kubeconfig),
            "PYTHONPATH": paths,
            "GPUSHARE_METRICS_PORT": str(metrics_port),
        },
    )


async def _get(url: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(url, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(get)


def samples(text: str) -> dict[str, float]:
    """Return the samples without labels of a page of metrics."""
    found = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in found if not sample.labels}


def longest_stall_seconds(page: str) -> float:
    """Return the bound of the smallest bucket of `gpushare_event_loop_lag_seconds` that holds all looks."""
    looks = {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "gpushare_event_loop_lag_seconds_bucket"
    }
    return min(bound for bound, count in looks.items() if count == looks[math.inf])


class Countdown:
    """Estimate of when a number that falls reaches zero, by the last two looks at it."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def seconds_for(self, left: float, now: float) -> float:
        """Return in how many seconds nothing will be left at the pace since the last look; inf if unknown."""
        before, self._last = self._last, (left, now)
        if before is None or before[0] <= left or before[1] >= now:
            return math.inf
        return left * (now - before[1]) / (before[0] - left)


def until_next_scrape(estimated_seconds: float) -> float:
    """Return how long to leave the metrics alone: at every look they were half of the work measured."""
    return min(LONGEST_SCRAPE_SECONDS, max(SHORTEST_SCRAPE_SECONDS, 0.8 * estimated_seconds))


def named_pods(share: Json) -> int:
    return len((share.get("status") or {}).get("placements") or ())


async def measure_live(shares: list[Json], pods: list[Json]) -> LiveResult:
    """Make the objects, start the operator, and wait until every pod is named."""
    with controlplane.running() as plane:
        async with connect(plane.kubeconfig) as api:
            namespaces = sorted({each["metadata"]["namespace"] for each in (*shares, *pods)})
            await create_all(api, NAMESPACES, [{"metadata": {"name": name}} for name in namespaces])
            for name in namespaces:
                for resource, objects in ((GPUSHARES, shares), (PODS, pods)):
                    theirs = [
                        storable(resource, each) for each in objects if each["metadata"]["namespace"] == name
                    ]
                    await create_all(api, resource, theirs, namespace=name)
            return await _timed(plane, api, len(shares), len(pods))


async def _timed(plane: ControlPlane, api: Api, share_count: int, pod_count: int) -> LiveResult:
    probe_port, metrics_port = unused_port(), unused_port()
    pids = {name: plane.processes[name].pid for name in ("apiserver", "etcd")}
    before = {name: processor_seconds(pid) for name, pid in pids.items()}
    expected = share_count or pod_count  # where there is none, the operator makes one for each pod
    started = time.monotonic()
    start_operator(plane, probe_port, metrics_port)
    pids["operator"], before["operator"] = plane.processes["operator"].pid, 0.0

    def spent() -> dict[str, float]:
        return {name: processor_seconds(pid) - before[name] for name, pid in pids.items()}

    longest, begun, scrape_at, countdown = 0.0, False, started, Countdown()
    named_after: tuple[float, dict[str, float]] | None = None
    async with asyncio.timeout(LONGEST_SECONDS):
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if plane.processes["operator"].poll() is not None:
                raise RuntimeError(f"the operator has ended:\n{plane.log('operator')}")
            with suppress(OSError):  # until it listens
                asked = time.monotonic()
                await _get(f"http://127.0.0.1:{probe_port}/healthz")
                if begun:
                    longest = max(longest, time.monotonic() - asked)
                begun = True
                if time.monotonic() < scrape_at:
                    continue
                page = await _get(f"http://127.0.0.1:{metrics_port}/metrics")
                found = samples(page)
                written = found.get("gpushare_operator_status_writes_total", 0.0)
                left = expected - written if named_after is None else found["gpushare_operator_events_waiting"]
                scrape_at = time.monotonic() + until_next_scrape(countdown.seconds_for(left, time.monotonic()))
                if written >= expected and not found["gpushare_operator_queue_length"]:
                    named_after = named_after or (time.monotonic() - started, spent())
                    if not found["gpushare_operator_events_waiting"]:
                        break
    all_seconds, all_spent = time.monotonic() - started, spent()
    resident = resident_mib(pids["operator"], "VmHWM")
    named = sum((await api.list(GPUSHARES, named_pods)).items)
    assert named >= pod_count, f"{named} of {pod_count} pods are named"
    return LiveResult(
        named_after[0],
        longest,
        longest_stall_seconds(page),
        resident,
        named_after[1],
        named,
        all_seconds,
        all_spent,
    )


def describe(result: LiveResult) -> str:
    return (
        f"{result.seconds:.1f} s until {result.named_pods} pods are named, slowest probe "
        f"{result.longest_answer_seconds:.2f} s, event loop late by at most {result.longest_stall_seconds:g} s, "
        f"{result.resident_mib:.0f} MiB at most; processor time: "
        f"{_by_process(result.processor_seconds)}; with the events {result.all_seconds:.1f} s, processor time: "
        f"{_by_process(result.all_processor_seconds)}"
    )


def _by_process(spent: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in sorted(spent.items()))
