"""A cluster in memory behind the client's interface, and an extender served over real HTTP in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gpushare.core.placement import Settings
from gpushare.extender import Extender, ExtenderOptions
from gpushare.kube import (
    GPUNODES,
    GPUSHARES,
    NODES,
    PODS,
    Conflict,
    Listing,
    NotFound,
    Resource,
    Retryable,
    WatchEvent,
)

Selector = Callable[[dict[str, Any]], bool]


def selector_of(label_selector: str | None = None, field_selector: str | None = None, **_: Any) -> Selector:
    """The API server's selectors, as far as they are made of `=` and `!=`."""

    def matches(obj: dict[str, Any]) -> bool:
        labels = obj["metadata"].get("labels") or {}
        for term in filter(None, (label_selector or "").split(",")):
            name, differs, value = term.replace("==", "=").partition("!=" if "!=" in term else "=")
            if (labels.get(name) == value) is (differs == "!="):
                return False
        for term in filter(None, (field_selector or "").split(",")):
            path, differs, value = term.replace("==", "=").partition("!=" if "!=" in term else "=")
            found: Any = obj
            for part in path.split("."):
                found = (found or {}).get(part)
            if ((found or "") == value) is (differs == "!="):
                return False
        return True

    return matches


class FakeCluster:
    """Objects by resource and key, with watches; the methods are those of `gpushare.kube.Api`."""

    def __init__(self) -> None:
        self.objects: dict[Resource, dict[str, dict[str, Any]]] = {
            PODS: {},
            NODES: {},
            GPUNODES: {},
            GPUSHARES: {},
        }
        self.version = 0
        self.watchers: list[tuple[Resource, Selector, asyncio.Queue[WatchEvent]]] = []
        self.bind_fails: list[str] = []
        self.get_fails: list[str] = []
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self._uids = itertools.count(1)

    # -- the test's side

    def add_node(self, name: str, gpus: int = 2, memory_mib: int = 81920, model: str = "H200") -> None:
        node = {"metadata": {"name": name}, "status": {"allocatable": {"gpushare.io/share": str(100 * gpus)}}}
        node["status"]["allocatable"] |= {"cpu": "64", "memory": "512Gi"}  # type: ignore[operator]
        self.put(NODES, node)
        status = {
            "gpus": [
                {
                    "uuid": f"GPU-{name}-{i}",
                    "index": i,
                    "model": model,
                    "memoryMiB": memory_mib,
                    "health": "Healthy",
                    "tenants": [],
                }
                for i in range(gpus)
            ]
        }
        self.put(GPUNODES, {"metadata": {"name": name}, "status": status})

    def make_pod(
        self, name: str, fraction: str = "0.25", *, limit: int | None = None, priority: int = 0, **annotations: str
    ) -> dict[str, Any]:
        """Create a pending pod as admission leaves it."""
        units = limit if limit is not None else int(float(fraction) * 100)
        said = {"gpushare.io/fraction": fraction} | {
            f"gpushare.io/{key}": text for key, text in annotations.items()
        }
        pod = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}-{next(self._uids)}",
                "labels": {"gpushare.io/managed": "true"},
                "annotations": said,
            },
            "spec": {
                "schedulerName": "gpushare-scheduler",
                "priority": priority,
                "containers": [{"name": "c", "resources": {"limits": {"gpushare.io/share": str(units)}}}],
            },
            "status": {"phase": "Pending"},
        }
        return self.put(PODS, pod)

    def key(self, obj: dict[str, Any]) -> str:
        metadata = obj["metadata"]
        return f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else metadata["name"]

    def put(self, resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        before = self.objects[resource].get(self.key(obj))
        self.objects[resource][self.key(obj)] = obj
        self.tell(resource, before, obj)
        return obj

    def remove(self, resource: Resource, key: str) -> None:
        obj = self.objects[resource].pop(key)
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.tell(resource, obj, None)

    def pod(self, name: str) -> dict[str, Any]:
        return self.objects[PODS][f"default/{name}"]

    def allocate(self, name: str) -> None:
        """Kubelet takes the pod: devices are allocated, the status says so."""
        pod = copy.deepcopy(self.pod(name))
        pod["status"] |= {"startTime": "2026-11-21T00:00:00Z", "phase": "Running"}
        self.put(PODS, pod)

    def finish(self, name: str, phase: str = "Succeeded") -> None:
        pod = copy.deepcopy(self.pod(name))
        pod["status"]["phase"] = phase
        self.put(PODS, pod)

    def tell(self, resource: Resource, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        """What each watch sees of a change: an object that no longer matches its selector is gone to it."""
        for watched, selector, queue in self.watchers:
            if watched != resource:
                continue
            was, stays = before is not None and selector(before), after is not None and selector(after)
            if was or stays:
                kind = ("MODIFIED" if was else "ADDED") if stays else "DELETED"
                queue.put_nowait(WatchEvent(kind, copy.deepcopy(after or before or {})))

    async def settle(self) -> None:
        """Until every watch has delivered everything."""
        while any(not queue.empty() for *_, queue in self.watchers):  # noqa: ASYNC110 - queues have no such event
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)

    # -- the client's side

    async def list(self, resource: Resource, reduce: Callable[[Any], Any], **query: Any) -> Listing[Any]:
        selector = selector_of(**query)
        found = [reduce(copy.deepcopy(obj)) for obj in self.objects[resource].values() if selector(obj)]
        return Listing(found, str(self.version))

    async def watch(self, resource: Resource, **query: Any) -> AsyncIterator[WatchEvent]:
        entry = (resource, selector_of(**query), asyncio.Queue[WatchEvent]())
        self.watchers.append(entry)
        try:
            while True:
                yield await entry[2].get()
        finally:
            self.watchers.remove(entry)

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        if self.get_fails:
            raise Retryable(self.get_fails.pop(0), retry_after_seconds=1)
        key = f"{namespace}/{name}" if namespace else name
        if key not in self.objects[resource]:
            raise NotFound(f"{key} not found", status=404, reason="NotFound")
        return copy.deepcopy(self.objects[resource][key])

    async def patch(self, resource: Resource, name: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.patches.append((name, body))
        return body

    async def bind(self, name: str, node: str, *, namespace: str, uid: str, annotations: dict[str, str]) -> None:
        await asyncio.sleep(0)
        failure = self.bind_fails.pop(0) if self.bind_fails else ""
        if failure == "refused":
            raise Conflict("binding refused", status=409, reason="Conflict")
        if failure == "lost":
            raise Retryable("no answer", retry_after_seconds=1)
        pod = self.objects[PODS].get(f"{namespace}/{name}")
        if pod is None or pod["metadata"]["uid"] != uid:
            raise NotFound("pod is gone", status=404, reason="NotFound")
        if pod["spec"].get("nodeName"):
            raise Conflict("pod is already assigned", status=409, reason="Conflict")
        pod = copy.deepcopy(pod)
        pod["spec"]["nodeName"] = node
        pod["metadata"]["annotations"] |= annotations
        self.put(PODS, pod)
        if failure == "answer lost":
            raise Retryable("no answer", retry_after_seconds=1)


def options(**changes: Any) -> ExtenderOptions:
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "metrics_host": "127.0.0.1",
        "metrics_port": 0,
        "kubeconfig": None,
        "best_nodes": 8,
        "settings": Settings(gpu_memory_reserve_mib=0),
        "fence_timeout_seconds": 10.0,
        "log_level": "INFO",
    }
    return ExtenderOptions(**values | changes)


class Served:
    """One running extender and kube-scheduler's view of it."""

    def __init__(self, cluster: FakeCluster, extender: Extender, client: TestClient[Any, Any]) -> None:
        self.cluster = cluster
        self.extender = extender
        self.client = client

    async def post(self, verb: str, body: Any) -> Any:
        response = await self.client.post(f"/{verb}", json=body)
        assert response.status == 200, await response.text()
        return await response.json(content_type=None)

    async def filter(self, name: str, nodes: list[str] | None = None) -> Any:
        names = nodes if nodes is not None else list(self.cluster.objects[NODES])
        return await self.post("filter", {"Pod": self.cluster.pod(name), "Nodes": None, "NodeNames": names})

    async def bind(self, name: str, node: str, uid: str | None = None) -> str:
        uid = uid or self.cluster.pod(name)["metadata"]["uid"]
        body = {"PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": node}
        return (await self.post("bind", body))["Error"]

    def held(self) -> dict[str, tuple[str, ...]]:
        """Names of pods with the GPUs they hold."""
        names = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self.cluster.objects[PODS].values()}
        reservations = self.extender.ledger.state.reservations
        return {names.get(uid, uid): held.placement.gpu_uuids for uid, held in reservations.items()}


@contextlib.asynccontextmanager
async def served(cluster: FakeCluster, **changes: Any) -> AsyncIterator[Served]:
    extender = Extender(cluster, options(**changes))  # type: ignore[arg-type]
    async with extender.watching(), TestClient(TestServer(extender.verbs.app())) as client:
        while extender.not_ready():  # noqa: ASYNC110 - readiness is a question, not an event
            await asyncio.sleep(0)
        await cluster.settle()
        yield Served(cluster, extender, client)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
async def running(cluster: FakeCluster) -> AsyncIterator[Served]:
    cluster.add_node("n1")
    cluster.add_node("n2")
    async with served(cluster) as ready:
        yield ready


@pytest.fixture
def serve_cluster() -> Any:
    return served


@pytest.fixture
def make_cluster() -> Any:
    return FakeCluster
