"""Invariant 1 and 3 of docs/design.md 6 through the HTTP verbs, whatever happens in between.

Random interleavings of pods, concurrent binds, refused, lost and late bindings, watches that are behind, the
explainer's rounds, deletions, finished pods, allocations, unhealthy GPUs and extender restarts. Truth is what the
API holds: the annotations of bound pods.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare.kube import GPUNODES, PODS, ApiError

NODES = ("n1", "n2")
MEMORY_MIB = 10_000

SHORT = {"type": "PodScheduled", "status": "False", "message": "1 Insufficient gpushare.io/share"}
POD = st.tuples(
    st.just("pod"),
    st.sampled_from(["0.1", "0.3", "0.4", "0.5", "0.6", "1", "2"]),
    st.sampled_from(["100Mi", "100Mi", "7000Mi", None]),
)
STEP = st.one_of(
    POD,
    POD,
    st.tuples(st.just("bind"), st.lists(st.integers(0, 30), min_size=1, max_size=8), st.sampled_from(NODES)),
    st.tuples(st.just("bind"), st.lists(st.integers(0, 30), min_size=1, max_size=8), st.sampled_from(NODES)),
    st.tuples(st.just("fail"), st.sampled_from(["refused", "lost", "answer lost", "late", "busy"]), st.booleans()),
    st.tuples(st.sampled_from(["delete", "finish", "allocate", "filter"]), st.integers(0, 30)),
    st.tuples(st.just("health"), st.sampled_from(NODES), st.integers(0, 1)),
    st.tuples(st.just("watches"), st.booleans()),
    st.tuples(st.sampled_from(["carry out", "explain", "restart"])),
)


def truth(cluster):
    """By GPU: (summed share, summed memory limit, tenants) of the pods that the API says are there."""
    share, memory, tenants = Counter(), Counter(), Counter()
    for pod in cluster.objects[PODS].values():
        if pod["status"]["phase"] in ("Succeeded", "Failed") or not pod["spec"].get("nodeName"):
            continue
        annotations = pod["metadata"]["annotations"]
        gpus = annotations["gpushare.io/gpu"].split(",")
        units = int(pod["spec"]["containers"][0]["resources"]["limits"]["gpushare.io/share"])
        for gpu, limit in zip(gpus, annotations["gpushare.io/memory-limit"].split(","), strict=True):
            assert gpu.startswith(f"GPU-{pod['spec']['nodeName']}-")
            share[gpu] += units // len(gpus)
            memory[gpu] += int(limit.partition("=")[2].rstrip("M"))
            tenants[gpu] += 1
    return share, memory, tenants


def present(cluster):
    """Names of pods that may hold room: those that have not ended. One whose outcome is unknown is not bound."""
    return {
        pod["metadata"]["name"]
        for pod in cluster.objects[PODS].values()
        if pod["status"]["phase"] not in ("Succeeded", "Failed")
    }


def check(cluster, running):
    share, memory, tenants = truth(cluster)
    assert all(total <= 100 for total in share.values()), share
    assert all(total <= MEMORY_MIB for total in memory.values()), memory
    assert all(count <= 48 for count in tenants.values()), tenants
    reserved = Counter(gpu for gpus in running.held().values() for gpu in gpus)
    for gpu, count in tenants.items():
        assert reserved[gpu] >= count, f"a tenant of {gpu} is not counted"


async def carry_out(cluster):
    """The API server comes to the bindings that it did not answer."""
    for late in cluster.late:
        with contextlib.suppress(ApiError):  # bound already, or gone
            await late()
    cluster.late.clear()


async def play(steps, make_cluster, serve_cluster):
    cluster = make_cluster()
    for name in NODES:
        cluster.add_node(name, memory_mib=MEMORY_MIB)
    names: list[str] = []
    stack = contextlib.AsyncExitStack()
    running = await stack.enter_async_context(serve_cluster(cluster, fence_timeout_seconds=0.0))
    try:
        for step in steps:
            match step:
                case ("pod", fraction, memory):
                    names.append(f"p{len(names)}")
                    extra = {"memory": memory} if memory else {}
                    pod = cluster.make_pod(names[-1], fraction, limit=int(float(fraction) * 100), **extra)
                    cluster.put(PODS, pod | {"status": {"phase": "Pending", "conditions": [SHORT]}})
                case ("bind", picks, node) if names:
                    pods = {names[i % len(names)] for i in picks} & {
                        pod["metadata"]["name"] for pod in cluster.objects[PODS].values()
                    }
                    await asyncio.gather(*(running.bind(name, node) for name in sorted(pods)))
                case ("fail", how, get_too):
                    cluster.bind_fails.append(how)
                    cluster.get_fails = ["away"] if get_too else []
                case ("watches", flow):
                    cluster.flowing.set() if flow else cluster.flowing.clear()
                case ("carry out",):
                    await carry_out(cluster)
                case ("explain",):
                    await running.extender.explainer.round()
                case ("restart",):
                    await carry_out(cluster)  # nobody knows of them afterwards (ADR 0169)
                    cluster.flowing.set()
                    await stack.aclose()
                    stack = contextlib.AsyncExitStack()
                    cluster.get_fails = []
                    running = await stack.enter_async_context(serve_cluster(cluster, fence_timeout_seconds=0.0))
                case ("health", node, index):
                    gpunode = cluster.objects[GPUNODES][node]
                    gpu = gpunode["status"]["gpus"][index]
                    gpu["health"] = "Healthy" if gpu["health"] == "Unhealthy" else "Unhealthy"
                    cluster.put(GPUNODES, gpunode)
                case (what, index) if names:
                    name = names[index % len(names)]
                    if f"default/{name}" not in cluster.objects[PODS]:
                        continue
                    bound = bool(cluster.pod(name)["spec"].get("nodeName")) and name in present(cluster)
                    if what == "delete":
                        cluster.remove(PODS, f"default/{name}")
                    elif what == "finish" and bound:
                        cluster.finish(name)
                    elif what == "allocate" and bound:
                        cluster.allocate(name)
                    elif what == "filter" and not cluster.pod(name)["spec"].get("nodeName"):
                        before = running.held()
                        await running.filter(name)
                        assert {k: v for k, v in before.items() if k != name} == {
                            k: v for k, v in running.held().items() if k != name
                        }
            check(cluster, running)
            if not cluster.flowing.is_set():
                continue
            await cluster.settle()
            check(cluster, running)
            assert set(running.held()) <= present(cluster), "somebody who left still holds room"
        await carry_out(cluster)
        check(cluster, running)
        cluster.flowing.set()
        # at rest, after a restart, exactly what the API says is held
        await stack.aclose()
        stack = contextlib.AsyncExitStack()
        running = await stack.enter_async_context(serve_cluster(cluster))
        reserved = Counter(gpu for gpus in running.held().values() for gpu in gpus)
        assert reserved == truth(cluster)[2]
    finally:
        await stack.aclose()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEP, min_size=10, max_size=50))
def test_no_gpu_is_ever_overcommitted(make_cluster, serve_cluster, steps):
    asyncio.run(play(steps, make_cluster, serve_cluster))
