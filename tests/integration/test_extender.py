"""The extender with the real API server and the real kube-scheduler, nodes and kubelet's answers made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from bench import controlplane

from gpushare.kube import PODS, Change, Conflict, Reflector, connect

pytestmark = [pytest.mark.integration, pytest.mark.own_server, pytest.mark.timeout(180)]
PODS_PATH = "/api/v1/namespaces/default/pods"
GPUNODES_PATH = "/apis/gpushare.io/v1alpha1/gpunodes"


class Cluster:
    """The control plane with the verbs that these tests need."""

    def __init__(self, plane: controlplane.ControlPlane) -> None:
        self.plane = plane
        self.call = plane.call

    def add_node(self, name: str, gpus: int = 2, uuids: list[str] | None = None) -> None:
        resources = {"cpu": "64", "memory": "256Gi", "pods": "200", "gpushare.io/share": str(100 * gpus)}
        node = {
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {
                "capacity": resources,
                "allocatable": resources,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Fake", "message": "by hand"}],
            },
        }
        self.call("POST", "/api/v1/nodes", node)
        # No controller manager runs here that would take these away from a node that is ready.
        self.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
        self.call("POST", GPUNODES_PATH, gpunode_object(name))
        self.gpunode(name, gpus)

    def gpunode(self, name: str, gpus: int = 2, unhealthy: tuple[int, ...] = (), memory_mib: int = 81920) -> None:
        status = {
            "gpus": [
                {
                    "uuid": f"GPU-{name}-{i}",
                    "index": i,
                    "model": "H200",
                    "memoryMiB": memory_mib,
                    "health": "Unhealthy" if i in unhealthy else "Healthy",
                }
                for i in range(gpus)
            ]
        }
        self.merge(f"{GPUNODES_PATH}/{name}/status", {"status": status})

    def merge(self, path: str, body: Any) -> Any:
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def create(self, name: str, fraction: str, *, priority_class: str = "") -> None:
        units = str(int(float(fraction) * 100))
        spec: dict[str, Any] = {
            "schedulerName": "gpushare-scheduler",
            "containers": [
                {"name": "main", "image": "none", "resources": {"limits": {"gpushare.io/share": units}}}
            ],
            "terminationGracePeriodSeconds": 0,
        }
        if priority_class:
            spec["priorityClassName"] = priority_class
        metadata = {
            "name": name,
            "labels": {"gpushare.io/managed": "true"},
            "annotations": {"gpushare.io/fraction": fraction},
        }
        self.call("POST", PODS_PATH, {"metadata": metadata, "spec": spec})

    def pod(self, name: str) -> Any:
        return self.call("GET", f"{PODS_PATH}/{name}")

    def gpu(self, name: str) -> str:
        return self.pod(name)["metadata"].get("annotations", {}).get("gpushare.io/gpu", "")

    def allocate(self, name: str) -> None:
        """What kubelet's status says once it has admitted the pod."""
        status = {"phase": "Running", "startTime": "2026-11-21T00:00:00Z"}
        self.merge(f"{PODS_PATH}/{name}/status", {"status": status})

    def delete(self, name: str) -> None:
        self.call("DELETE", f"{PODS_PATH}/{name}?gracePeriodSeconds=0")

    def events(self, name: str) -> str:
        uid = self.pod(name)["metadata"]["uid"]
        listed = self.call("GET", "/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        return "\n".join(e.get("note", "") for e in listed if e["regarding"].get("uid") == uid)

    async def until(self, what: Any, seconds: float = 90) -> Any:
        """Poll; the other side is a real server with a clock of its own."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.HTTPError):
                if found := what():
                    return found
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {seconds:g} s; extender says:\n{self.plane.log('extender')}")

    def node(self, name: str) -> str:
        return str(self.pod(name)["spec"].get("nodeName") or "")

    async def bound(self, name: str, seconds: float = 90) -> str:
        return str(await self.until(lambda: self.node(name), seconds))

    async def refused(self, name: str, why: str) -> None:
        """Wait until an event says so; kube-scheduler may have said before that it knows of no node."""
        await self.until(lambda: why in self.events(name))


def gpunode_object(name: str) -> dict[str, Any]:
    return {"apiVersion": "gpushare.io/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}}


@pytest.fixture(scope="module")
def plane() -> Any:
    if why := controlplane.missing():
        pytest.skip(why)
    with controlplane.running() as started:
        started.start_extender("--gpu-memory-reserve", "0")
        started.start_scheduler()
        yield started


@pytest.fixture
def cluster(plane: controlplane.ControlPlane) -> Any:
    """An empty cluster; pods and nodes of a test leave with it."""
    cluster = Cluster(plane)
    yield cluster
    for path in (PODS_PATH, "/api/v1/nodes", GPUNODES_PATH):
        for item in cluster.call("GET", path)["items"]:
            with contextlib.suppress(urllib.error.HTTPError):
                cluster.call("DELETE", f"{path}/{item['metadata']['name']}?gracePeriodSeconds=0")


async def test_annotations_and_node_appear_together(cluster):
    cluster.add_node("n1")
    cluster.create("a", "0.25")
    assert await cluster.bound("a") == "n1"
    annotations = cluster.pod("a")["metadata"]["annotations"]
    assert annotations["gpushare.io/gpu"] in {"GPU-n1-0", "GPU-n1-1"}
    assert annotations["gpushare.io/thread-percentage"] == "25"
    assert annotations["gpushare.io/memory-limit"] == "0=20480M"


async def test_three_pods_of_forty_percent_never_share_a_gpu(cluster):
    cluster.add_node("n1")
    for name in ("a", "b", "c", "d"):
        cluster.create(name, "0.4")
        await cluster.bound(name)
        cluster.allocate(name)
    gpus = [cluster.gpu(name) for name in ("a", "b", "c", "d")]
    assert all(gpus.count(gpu) == 2 for gpu in gpus)


async def test_a_pod_that_fits_nowhere_says_why_and_starts_when_room_appears(cluster):
    cluster.add_node("n1")
    for name, fraction in (("a", "0.6"), ("b", "0.7")):
        cluster.create(name, fraction)
        await cluster.bound(name)
        cluster.allocate(name)
    cluster.create("c", "0.5")  # 70% of the node are free, but no GPU has 50%
    await cluster.refused("c", "needs 50 percent of one GPU, the freest has 40 percent free")
    cluster.delete("b")
    assert await cluster.bound("c") == "n1"  # by itself kube-scheduler would try again after five minutes


async def test_a_recovered_gpu_lets_the_waiting_pod_start_without_any_event_for_the_scheduler(cluster):
    """GpuNodes are nothing that kube-scheduler watches: the extender wakes the pod (ADR 0041)."""
    cluster.add_node("n1", gpus=1)
    cluster.gpunode("n1", gpus=1, unhealthy=(0,))
    for number in itertools.count():  # until the extender's watch has told it of the GPU, for which it has no sign
        name = f"a-{number}"
        cluster.create(name, "0.5")
        await cluster.until(lambda name=name: cluster.node(name) or "healthy" in cluster.events(name))
        if not cluster.node(name):
            break
        cluster.delete(name)
    cluster.gpunode("n1", gpus=1)
    assert await cluster.bound(name) == "n1"


async def test_the_fence_keeps_pods_of_one_size_apart(cluster):
    cluster.add_node("n1")
    cluster.create("a", "0.6")
    await cluster.bound("a")
    cluster.create("b", "0.6")
    await asyncio.sleep(2)
    assert not cluster.pod("b")["spec"].get("nodeName")  # kubelet has not allocated a
    cluster.allocate("a")
    await cluster.bound("b")
    assert {cluster.gpu("a"), cluster.gpu("b")} == {"GPU-n1-0", "GPU-n1-1"}


async def test_preemption_frees_one_gpu_and_no_more(cluster):
    with contextlib.suppress(urllib.error.HTTPError):
        cluster.call(
            "POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000}
        )
    cluster.add_node("n1")
    for name in ("a", "b", "c", "d"):
        cluster.create(name, "0.5")
        await cluster.bound(name)
        cluster.allocate(name)
    cluster.create("vip", "1", priority_class="high")
    assert await cluster.bound("vip") == "n1"
    left = {pod["metadata"]["name"] for pod in cluster.call("GET", PODS_PATH)["items"]}
    assert "vip" in left
    assert len(left) == 3  # two of four were enough
    assert cluster.gpu("vip") not in {cluster.gpu(name) for name in left - {"vip"}}


async def test_a_burst_never_overcommits_and_a_killed_extender_counts_nothing_twice(cluster):
    for index in range(4):
        cluster.add_node(f"n{index}")
    names = [f"p{index}" for index in range(50)]
    for index, name in enumerate(names):
        cluster.create(name, "0.3")
        if index == 25:
            cluster.plane.stop("extender", kill=True)
            cluster.plane.start_extender("--gpu-memory-reserve", "0")

    def allocate_all() -> bool:
        listed = cluster.call("GET", PODS_PATH)["items"]
        for pod in listed:
            if pod["spec"].get("nodeName") and not pod["status"].get("startTime"):
                cluster.allocate(pod["metadata"]["name"])
        return sum(bool(pod["spec"].get("nodeName")) for pod in listed) == 24  # three on each of 8 GPUs

    await cluster.until(allocate_all, 180)
    await asyncio.sleep(3)
    gpus = [cluster.gpu(name) for name in names if cluster.gpu(name)]
    assert len(gpus) == 24
    assert all(gpus.count(gpu) == 3 for gpu in gpus)


async def test_a_watch_survives_the_api_servers_death(cluster):
    """gpushare.kube against the real server: kill -9, a change meanwhile impossible, then on."""
    seen: list[tuple[Change, str]] = []
    async with (
        connect(cluster.plane.kubeconfig) as api,
        Reflector(
            api, PODS, lambda pod: pod["metadata"]["uid"], on_change=lambda c, k, _: seen.append((c, k))
        ) as pods,
    ):
        await asyncio.wait_for(pods.synced.wait(), 10)
        cluster.create("before", "0.1")
        await cluster.until(lambda: (Change.ADDED, "default/before") in seen)
        uid = cluster.pod("before")["metadata"]["uid"]
        with pytest.raises(Conflict):
            await api.delete(PODS, "before", namespace="default", uid="another")
        assert pods.items["default/before"] == uid
        command = cluster.plane.processes["apiserver"].args
        cluster.plane.stop("apiserver", kill=True)
        cluster.plane.start("apiserver", *command)  # type: ignore[misc]  # the same command line
        cluster.plane.wait("apiserver", lambda: cluster.call("GET", "/readyz") == "ok")
        cluster.create("after", "0.1")
        await cluster.until(lambda: (Change.ADDED, "default/after") in seen)
        cluster.delete("before")
        await cluster.until(lambda: (Change.DELETED, "default/before") in seen)
        assert pods.bad_objects == 0
