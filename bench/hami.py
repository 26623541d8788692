"""HAMi's scheduler beside gpushare's extender: the same API server, kube-scheduler, nodes and pods, in turn.

HAMi's scheduler is built from its own source (docs/comparison.md); its configuration is what its chart renders.
The nodes are objects only. In place of its device plugin this program does what the plugin's Allocate does last:
it marks the pod's binding as a success and takes the node's lock away, at once, which favours HAMi.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench import controlplane, fleet, throughput
from bench.figures import resident_mib
from gpushare.kube import GPUNODES, NODES, PODS, Api, Reflector, connect

SPLIT_COUNT = 10  # devicePlugin.deviceSplitCount of its chart
LOCK = "hami.io/mutex.lock"
RESOURCES = ("gpu", "gpumem", "gpucores", "gpumem-percentage", "priority")
FILTERS = 20

# charts/hami/templates/scheduler/device-configmap.yaml with its values.yaml, the part about NVIDIA
DEVICE_CONFIGURATION = {
    "nvidia": {
        "resourceCountName": "nvidia.com/gpu",
        "resourceMemoryName": "nvidia.com/gpumem",
        "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
        "resourceCoreName": "nvidia.com/gpucores",
        "resourcePriorityName": "nvidia.com/priority",
        "overwriteEnv": False,
        "defaultMemory": 0,
        "defaultCores": 0,
        "defaultGPUNum": 1,
        "memoryFactor": 1,
        "deviceSplitCount": SPLIT_COUNT,
        "deviceMemoryScaling": 1,
        "deviceCoreScaling": 1,
        "gpuCorePolicy": "default",
        "libCudaLogLevel": 1,
    }
}
OURS, SHIPPED, TUNED = "gpushare", "hami as shipped", "hami tuned"
OPTIONS = {
    SHIPPED: ["-v=4"],
    TUNED: ["-v=0", "--kube-qps=2000", "--kube-burst=4000"],
}


def node(index: int, gpus: int) -> dict[str, Any]:
    """Return a node as HAMi's device plugin registers it."""
    made = throughput.small_node(index, gpus)
    devices = [
        {
            "id": fleet.gpu_uuid(index, gpu),
            "index": gpu,
            "count": SPLIT_COUNT,
            "devmem": fleet.GPU_MEMORY_MIB,
            "devcore": 100,
            "type": "NVIDIA-NVIDIA H200",
            "mode": "hami-core",
            "health": True,
        }
        for gpu in range(gpus)
    ]
    made["metadata"]["annotations"] = {"hami.io/node-nvidia-register": json.dumps(devices)}
    for part in ("capacity", "allocatable"):
        made["status"][part] = {**made["status"][part], "nvidia.com/gpu": str(SPLIT_COUNT * gpus)}
    return made


def pod(name: str, percent: int, memory_mib: int, scheduler: str = "hami-scheduler") -> dict[str, Any]:
    """Return a pod as large as gpushare's in the same benchmark, with an equal request to HAMi."""
    made = throughput.pending_pod(0, prefer=False)
    made["metadata"] = {
        "name": name,
        "labels": {"app": "serving"},
        "annotations": {"prometheus.io/scrape": "true"},
    }
    made["spec"] |= {"schedulerName": scheduler}
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory_mib), "nvidia.com/gpucores": str(percent)}
    made["spec"]["containers"][0]["resources"] = {
        "limits": {**limits, "memory": "8Gi"},
        "requests": {**limits, "memory": "8Gi", "cpu": "1"},
    }
    return made


def scheduler_configuration(plane: controlplane.ControlPlane, kind: str) -> dict[str, Any]:
    """Return kube-scheduler's configuration of HAMi's chart; tuned: with gpushare's client limits and back-off."""
    own: dict[str, Any] = {
        "profiles": [{"schedulerName": "hami-scheduler"}],
        "extenders": [
            {
                "urlPrefix": f"http://127.0.0.1:{plane.extender_port}",
                "filterVerb": "filter",
                "bindVerb": "bind",
                "nodeCacheCapable": True,
                "weight": 1,
                "httpTimeout": "30s",
                "managedResources": [
                    {"name": f"nvidia.com/{each}", "ignoredByScheduler": True} for each in RESOURCES
                ],
            }
        ],
    }
    if kind == SHIPPED:
        own |= {
            "clientConnection": {"kubeconfig": str(plane.kubeconfig)},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 10,
        }
    return own


def start_hami(plane: controlplane.ControlPlane, binary: Path, kind: str, nodes: int) -> None:
    """Start HAMi's scheduler and wait until it knows the nodes, which its readiness probe does not wait for."""
    log = plane.directory / "hami.log"
    seen = log.stat().st_size if log.exists() else 0  # of one that was killed
    configuration = plane.directory / "device-config.yaml"
    configuration.write_text(json.dumps(DEVICE_CONFIGURATION))
    plane.start(
        "hami",
        str(binary),
        f"--http_bind=127.0.0.1:{plane.extender_port}",
        f"--metrics-bind-address=127.0.0.1:{plane.metrics_port}",
        "--scheduler-name=hami-scheduler",
        "--node-scheduler-policy=binpack",
        "--gpu-scheduler-policy=spread",
        f"--device-config-file={configuration}",
        *OPTIONS[kind],
        env={"KUBECONFIG": str(plane.kubeconfig), "POD_NAMESPACE": throughput.NAMESPACE},
    )
    url = f"http://127.0.0.1:{plane.extender_port}/readyz"
    plane.wait("hami", lambda: urllib.request.urlopen(url, timeout=5).status == 200)
    plane.wait("hami", lambda: log.read_bytes()[seen:].count(b'"Node device added"') >= nodes, seconds=3600)


async def allocated(api: Api, key: str, node_name: str) -> None:
    """Do what HAMi's device plugin and kubelet do once a pod is bound."""
    namespace, _, name = key.partition("/")
    success = {"metadata": {"annotations": {"hami.io/bind-phase": "success"}}}
    await api.patch(PODS, name, success, namespace=namespace)
    await api.patch(NODES, node_name, {"metadata": {"annotations": {LOCK: None}}})
    await api.patch(PODS, name, throughput.ADMITTED, namespace=namespace, subresource="status")


def filter_milliseconds(
    plane: controlplane.ControlPlane, pods: list[dict[str, Any]], nodes: list[str]
) -> list[float]:
    """Return how long each pod waits for the extender's filter over all nodes, with kube-scheduler's request."""
    took = []
    for each in pods:
        body = json.dumps({"Pod": each, "NodeNames": nodes}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{plane.extender_port}/filter",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        took.append(1000 * (time.perf_counter() - began))
    return sorted(took[1:])  # the first one finds everything cold


def overcommitted(pods: list[dict[str, Any]]) -> list[str]:
    """Return the GPUs whose pods were given more than all of it, by HAMi's own annotation."""
    used: dict[str, int] = {}
    for each in pods:
        given = (each["metadata"].get("annotations") or {}).get("hami.io/vgpu-devices-to-allocate", "")
        if each["spec"].get("nodeName"):
            for part in given.replace(";", ":").split(":"):
                if part.count(",") == 3:
                    uuid, _, _, percent = part.split(",")
                    used[uuid] = used.get(uuid, 0) + int(percent)
    return [uuid for uuid, percent in used.items() if percent > 100]


async def measure(
    plane: controlplane.ControlPlane, binary: Path, kind: str, nodes: int, gpus: int, pods: int, seconds: float
) -> dict[str, Any]:
    """Filter latency before anybody is placed; then pods per second until all are bound or the time is over."""
    bound: dict[str, float] = {}
    done = asyncio.Event()
    waiting: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def admit(api: Api) -> None:
        while True:
            await allocated(api, *await waiting.get())

    def on_change(_: object, key: str, at: str) -> None:
        if at and key not in bound:
            bound[key] = time.monotonic()
            waiting.put_nowait((key, at))
            if len(bound) == pods:
                done.set()

    async with connect(plane.kubeconfig) as api:
        await throughput.create_all(api, NODES, [node(i, gpus) for i in range(nodes)])
        began = time.monotonic()
        await asyncio.to_thread(start_hami, plane, binary, kind, nodes)
        ready = time.monotonic() - began
        more = [pod(f"filter-{i}", 10, 1000, "nobody") for i in range(FILTERS)]
        await throughput.create_all(api, PODS, more, throughput.NAMESPACE)
        asked = [await api.get(PODS, f"filter-{i}", namespace=throughput.NAMESPACE) for i in range(FILTERS)]
        names = [fleet.node_name(i) for i in range(nodes)]
        latencies = await asyncio.to_thread(filter_milliseconds, plane, asked, names)
        async with Reflector(api, PODS, lambda it: it["spec"].get("nodeName") or "", on_change=on_change) as seen:
            await seen.synced.wait()
            fractions = [fleet.FRACTIONS[i % len(fleet.FRACTIONS)] for i in range(pods)]
            made = [pod(f"p-{i:05d}", p, fleet.GPU_MEMORY_MIB * p // 100) for i, p in enumerate(fractions)]
            await throughput.create_all(api, PODS, made, throughput.NAMESPACE)
            plugins = [asyncio.create_task(admit(api)) for _ in range(8)]
            started = time.monotonic()
            plane.start_scheduler(**scheduler_configuration(plane, kind))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), seconds)
            took = time.monotonic() - started
            for task in plugins:
                task.cancel()
            throughput.raise_failures(await asyncio.gather(*plugins, return_exceptions=True))
        listing = await api.list(PODS, lambda it: it)
    return {
        "system": kind,
        "ready_seconds": ready,
        "bound": len(bound),
        "seconds": took,
        "pods_per_second": rate(sorted(bound.values())),
        "filter_ms": [statistics.median(latencies), latencies[-1]],
        "resident_mib": resident_mib(plane.processes["hami"].pid),
        "overcommitted": overcommitted(listing.items),
    }


def rate(times: list[float]) -> float:
    """Return pods per second between the first and the last tenth; 0 if fewer than ten were bound."""
    if len(times) < 10:
        return 0.0
    first, last = len(times) // 10, len(times) * 9 // 10
    return (last - first) / (times[last] - times[first])


async def filter_of_ours(plane: controlplane.ControlPlane, nodes: int, gpus: int) -> list[float]:
    """Filter latency before anybody is placed, as HAMi is asked."""
    async with connect(plane.kubeconfig) as api:
        await throughput.create_all(api, NODES, [throughput.small_node(i, gpus) for i in range(nodes)])
        await throughput.create_all(api, GPUNODES, [throughput.small_gpunode(i, gpus) for i in range(nodes)])
        plane.start_extender("--best-nodes", "8")
        more = [throughput.pending_pod(i, prefer=False) for i in range(FILTERS)]
        for each in more:
            each["spec"]["schedulerName"] = "nobody"
        await throughput.create_all(api, PODS, more, throughput.NAMESPACE)
        asked = [await api.get(PODS, each["metadata"]["name"], namespace=throughput.NAMESPACE) for each in more]
    names = [fleet.node_name(i) for i in range(nodes)]
    return await asyncio.to_thread(filter_milliseconds, plane, asked, names)


async def measure_ours(
    plane: controlplane.ControlPlane, nodes: int, gpus: int, pods: int, latencies: list[float]
) -> dict[str, Any]:
    """Measure gpushare in the same way."""
    found = await throughput.measure(plane, nodes, gpus, pods, "the scheduler's last words:")
    return {
        "system": OURS,
        "bound": pods,
        "seconds": found["all_bound_after_seconds"],
        "pods_per_second": found["pods_per_second"],
        "filter_ms": [statistics.median(latencies), latencies[-1]],
        "resident_mib": resident_mib(plane.processes["extender"].pid),
        "overcommitted": [],  # throughput.measure has checked this, and would have ended
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench hami", description=__doc__)
    parser.add_argument(
        "--binary", type=Path, required=True, help="HAMi's scheduler, built from its cmd/scheduler"
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60, help="the longest that HAMi is watched, each time")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--systems", nargs="*", choices=[OURS, SHIPPED, TUNED], default=[OURS, SHIPPED, TUNED])
    options = parser.parse_args(arguments)
    if why := controlplane.missing():
        raise SystemExit(why)
    for number in range(options.rounds):
        for system in options.systems:
            size = (options.nodes, options.gpus, options.pods)
            if system == OURS:
                with controlplane.running() as plane:
                    latencies = asyncio.run(filter_of_ours(plane, options.nodes, options.gpus))
            with controlplane.running() as plane:
                if system == OURS:
                    found = asyncio.run(measure_ours(plane, *size, latencies))
                else:
                    found = asyncio.run(measure(plane, options.binary, system, *size, options.seconds))
            print(json.dumps({"round": number, **found}), flush=True)
