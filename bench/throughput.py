"""Pods per second through the real kube-scheduler, extender, API server and etcd; the nodes are objects only.

kubelet's answer (the pod is admitted, its devices allocated) is written by this program as soon as a pod is bound.
kwok, which would play it, needs streaming lists that Debian's etcd 3.4 cannot serve.
"""

import argparse
import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from bench import controlplane, fleet, latency
from gpushare.core.api import names
from gpushare.kube import GPUNODES, NODES, PODS, Api, Reflector, Resource, connect

NAMESPACE = "default"
PROFILE_AFTER_SECONDS = 4
PROFILE_SECONDS = 10
ADMITTED = {"status": {"phase": "Running", "startTime": "2026-11-21T00:00:00Z"}}


async def create_all(
    api: Api, resource: Resource, objects: list[dict[str, Any]], namespace: str | None = None, workers: int = 16
) -> None:
    queue = iter(objects)

    async def work() -> None:
        for obj in queue:
            await api.create(resource, obj, namespace=namespace)
            if resource is GPUNODES:
                name, status = obj["metadata"]["name"], {"status": obj["status"]}
                await api.patch(resource, name, status, subresource="status")
            elif resource is NODES:  # admission taints new nodes; no controller manager runs here to take it away
                await api.patch(resource, obj["metadata"]["name"], {"spec": {"taints": None}})

    await asyncio.gather(*(work() for _ in range(workers)))


def small_node(index: int, gpus: int) -> dict[str, Any]:
    node = fleet.node(index, gpus)
    del node["metadata"]["uid"]
    node["status"].pop("images")
    return node


def small_gpunode(index: int, gpus: int) -> dict[str, Any]:
    view = fleet.gpunode(index, gpus)
    del view["metadata"]["resourceVersion"]
    return view


def pending_pod(index: int, prefer: bool) -> dict[str, Any]:
    percent = fleet.FRACTIONS[index % len(fleet.FRACTIONS)]
    pod = fleet.pod(index, percent)
    metadata = {key: pod["metadata"][key] for key in ("name", "labels", "annotations")}
    spec = {key: pod["spec"][key] for key in ("schedulerName", "containers", "tolerations")}
    del spec["containers"][0]["volumeMounts"]
    if prefer:
        spec["affinity"] = fleet.PREFERENCE
    return {"metadata": metadata, "spec": spec}


async def measure(
    plane: controlplane.ControlPlane,
    nodes: int,
    gpus: int,
    pods: int,
    gate: str,
    *,
    patience_seconds: float = 120,
    percentage: int = 0,
    best_nodes: int = 8,
    prefer: bool = False,
    profiles: Path | None = None,
) -> dict[str, Any]:
    bound: dict[str, float] = {}
    done = asyncio.Event()
    to_admit: asyncio.Queue[str] = asyncio.Queue()

    async def admit(api: Api) -> None:
        while True:
            namespace, _, name = (await to_admit.get()).partition("/")
            await api.patch(PODS, name, ADMITTED, namespace=namespace, subresource="status")

    def on_change(_: object, key: str, node: str) -> None:
        if node and key not in bound:
            bound[key] = time.monotonic()
            to_admit.put_nowait(key)
            if len(bound) == pods:
                done.set()

    async with connect(plane.kubeconfig) as api:
        await create_all(api, NODES, [small_node(i, gpus) for i in range(nodes)])
        await create_all(api, GPUNODES, [small_gpunode(i, gpus) for i in range(nodes)])
        plane.start_extender("--best-nodes", str(best_nodes))
        async with Reflector(
            api, PODS, lambda pod: pod["spec"].get("nodeName") or "", on_change=on_change
        ) as reflector:
            await reflector.synced.wait()
            await create_all(api, PODS, [pending_pod(i, prefer) for i in range(pods)], NAMESPACE)
            kubelets = [asyncio.create_task(admit(api)) for _ in range(8)]
            started = time.monotonic()
            own_before = time.process_time()
            idle_before, busy_before = machine_seconds()
            cpu_before = {name: latency.cpu_seconds(process.pid) for name, process in plane.processes.items()}
            profile = {"schedulerName": "gpushare-scheduler", "percentageOfNodesToScore": percentage}
            # All pods wait already: scheduling is measured, not creation.
            plane.start_scheduler(profiles=[profile])
            profiling = [
                asyncio.to_thread(plane.profile, name, PROFILE_SECONDS, profiles)
                for name in ("scheduler", "apiserver")
                if profiles is not None
            ]
            if profiling:
                await asyncio.sleep(PROFILE_AFTER_SECONDS)
                profiling = [asyncio.gather(*profiling)]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), patience_seconds)
            for task in kubelets:
                task.cancel()
            raise_failures(await asyncio.gather(*kubelets, *profiling, return_exceptions=True))
        idle, busy = machine_seconds()
        took = time.monotonic() - started
        cpu = {
            name: latency.cpu_seconds(process.pid) - cpu_before.get(name, 0.0)
            for name, process in plane.processes.items()
        }
        cpu["bench"] = time.process_time() - own_before
        cores = {
            "ours": sum(cpu.values()) / took,
            "others": (busy - busy_before - sum(cpu.values())) / took,
            "idle": (idle - idle_before) / took,
        }
        inside = latency.inside(plane.metrics_port)
        refused = latency.count(plane.metrics_port, "gpushare_extender_bind_failures_total")
        listing = await api.list(PODS, lambda pod: pod)
        check(listing)
        unallocated = sum(
            bool(pod["spec"].get("nodeName")) and "startTime" not in pod["status"] for pod in listing.items
        )
    if len(bound) < pods:
        raise SystemExit(
            f"only {len(bound)} of {pods} pods were bound, {unallocated} of them not admitted; {gate}\n"
            f"{plane.log('scheduler')[-600:]}"
        )
    times = sorted(bound.values())
    first, last = times[len(times) // 10], times[len(times) * 9 // 10]
    return {
        "pods": pods,
        "pods_per_second": (len(times) * 9 // 10 - len(times) // 10) / (last - first),
        "all_bound_after_seconds": times[-1] - started,
        "cpu_seconds": cpu,
        "cores": cores,
        "inside_ms": inside,
        "refused_bindings": refused,
    }


def machine_seconds() -> tuple[float, float]:
    """Return idle and busy seconds of all cores since the machine started."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return idle / os.sysconf("SC_CLK_TCK"), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")


def share_percent(pod: dict[str, Any]) -> int:
    """Return the share that a pod of one container holds; its cap may be higher."""
    return int(pod["spec"]["containers"][0]["resources"]["limits"][names.SHARE_RESOURCE])


def raise_failures(ended: list[BaseException | None]) -> None:
    """Raise the first error of cancelled tasks: where a played device plugin died, its system looks slow."""
    for error in ended:
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error


def check(listing: Any) -> None:
    """Check that no GPU is above 100 percent and every pod has a decision."""
    used: dict[str, int] = {}
    for pod in listing.items:
        if not pod["spec"].get("nodeName"):
            continue
        annotations = pod["metadata"]["annotations"]
        used.setdefault(annotations["gpushare.io/gpu"], 0)
        used[annotations["gpushare.io/gpu"]] += share_percent(pod)
    if worst := [gpu for gpu, percent in used.items() if percent > 100]:
        raise SystemExit(f"over-committed: {worst}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench throughput", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--pods", type=int, default=3000)
    parser.add_argument(
        "--percentage",
        type=int,
        default=0,
        help="percentageOfNodesToScore; 0, as in the chart: kube-scheduler's own (42 at 1,000 nodes)",
    )
    parser.add_argument("--prefer", action="store_true", help="pods with a preferred affinity")
    parser.add_argument("--best-nodes", type=int, default=8, help="as the extender's option")
    parser.add_argument("--api-gogc", help="GOGC of etcd and the API server; default: Go's own 100")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="keep processor profiles of the Go processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if why := controlplane.missing():
        raise SystemExit(why)
    with controlplane.running({"GOGC": options.api_gogc} if options.api_gogc else None) as plane:
        result = asyncio.run(
            measure(
                plane,
                options.nodes,
                options.gpus,
                options.pods,
                "the scheduler's last words:",
                percentage=options.percentage,
                best_nodes=options.best_nodes,
                prefer=options.prefer,
                profiles=options.profile,
            )
        )
    result |= {"nodes": options.nodes, "gpus_per_node": options.gpus, "cpus": os.cpu_count()}
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{options.nodes} nodes x {options.gpus} GPUs, {options.pods} pods through kube-scheduler on "
        f"{result['cpus']} cores that everything shares:\n"
        f"  {result['pods_per_second']:.0f} pods/s (between the first and the last tenth), all bound "
        f"{result['all_bound_after_seconds']:.1f} s after kube-scheduler was started\n"
        f"  processor milliseconds a pod, from kube-scheduler's start to the last binding: "
        + ", ".join(
            f"{name} {1000 * seconds / options.pods:.1f}" for name, seconds in result["cpu_seconds"].items()
        )
        + "\n  cores meanwhile: "
        + ", ".join(f"{what} {count:.2f}" for what, count in result["cores"].items())
        + "\n  inside the extender: "
        + ", ".join(f"{verb} {mean:.2f} ms" for verb, mean in result["inside_ms"].items())
        + " in the mean\n  bindings refused: "
        + (", ".join(f"{what} {count:.0f}" for what, count in result["refused_bindings"].items()) or "none")
    )
