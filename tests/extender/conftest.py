"""A cluster in memory behind the client's interface, and an extender served over real HTTP in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
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
    Resource,
    Retryable,
)
from gpushare.kube.api import WatchEvent
from gpushare.kube.fake import FakeApi

pytest.register_assert_rewrite("tests.extender.playing", "tests.extender.views")


class ApiWithKubelet(FakeApi):
    """The fake API server, with what kubelet and admission would do, and failures on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = {resource: self.store.objects(resource) for resource in (PODS, NODES, GPUNODES, GPUSHARES)}
        self.bind_fails: list[str] = []
        self.get_fails: list[str] = []
        self.late: list[Callable[[], Awaitable[None]]] = []
        """Bindings that were not answered and are still on their way."""
        self.flowing = asyncio.Event()
        """Cleared, every watch holds its events back."""
        self.flowing.set()
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
        asked = {"gpushare.io/fraction": fraction} | {
            f"gpushare.io/{key}": text for key, text in annotations.items()
        }
        pod = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}-{next(self._uids)}",
                "labels": {"gpushare.io/managed": "true"},
                "annotations": asked,
            },
            "spec": {
                "schedulerName": "gpushare-scheduler",
                "priority": priority,
                "containers": [{"name": "c", "resources": {"limits": {"gpushare.io/share": str(units)}}}],
            },
            "status": {"phase": "Pending"},
        }
        return self.put(PODS, pod)

    def put(self, resource: Resource, obj: dict[str, Any]) -> dict[str, Any]:
        return self.store.put(resource, obj)

    def remove(self, resource: Resource, key: str) -> None:
        self.store.remove(resource, key)

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

    async def settle(self) -> None:
        """Until every watch has delivered everything."""
        while not self.store.is_settled:  # noqa: ASYNC110 - queues have no such event
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)

    # -- the client's side

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None) -> dict[str, Any]:
        if self.get_fails:
            raise Retryable(self.get_fails.pop(0), retry_after_seconds=1)
        return await super().get(resource, name, namespace=namespace)

    async def patch(self, resource: Resource, name: str, body: Any, **more: Any) -> dict[str, Any]:
        self.patches.append((name, body))
        return await super().patch(resource, name, body, **more)

    async def watch(self, resource: Resource, **more: Any) -> AsyncIterator[WatchEvent]:
        async for event in super().watch(resource, **more):
            await self.flowing.wait()
            yield event

    async def bind(self, name: str, node: str, **more: Any) -> None:
        await asyncio.sleep(0)
        failure = self.bind_fails.pop(0) if self.bind_fails else ""
        if failure == "refused":
            raise Conflict("binding refused", status=409, reason="Conflict")
        if failure == "lost":
            raise Retryable("no answer", retry_after_seconds=1)
        if failure == "late":
            self.late.append(functools.partial(super().bind, name, node, **more))
            raise Retryable("no answer", retry_after_seconds=1)
        if failure == "busy":
            raise Retryable("too many requests", status=429, retry_after_seconds=1)
        await super().bind(name, node, **more)
        if failure == "answer lost":
            raise Retryable("no answer", retry_after_seconds=1)


def options(**changes: Any) -> ExtenderOptions:
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "metrics_host": "127.0.0.1",
        "metrics_port": 0,
        "probe_port": 0,
        "kubeconfig": None,
        "best_nodes": 8,
        "settings": Settings(gpu_memory_reserve_mib=0),
        "fence_timeout_seconds": 10.0,
        "log_level": "INFO",
        "unseen_seconds": 0.0,  # a cluster of this machine has kube-schedulers that a test would end
    }
    return ExtenderOptions(**values | changes)


class Served:
    """One running extender and kube-scheduler's view of it."""

    def __init__(self, cluster: ApiWithKubelet, extender: Extender, client: TestClient[Any, Any]) -> None:
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
        return {names.get(uid, uid): reservation.placement.gpu_uuids for uid, reservation in reservations.items()}


@contextlib.asynccontextmanager
async def served(
    cluster: ApiWithKubelet, clock: Callable[[], float] | None = None, **changes: Any
) -> AsyncIterator[Served]:
    """Serve an extender for which no time passes but by the test's clock: a machine may be busy for seconds."""
    began = time.monotonic()
    clock = clock or (lambda: began)
    extender = Extender(cluster, options(**changes), clock=clock)  # type: ignore[arg-type]
    async with extender.watching(), TestClient(TestServer(extender.verbs.app())) as client:
        while extender.not_ready():  # noqa: ASYNC110 - readiness is a question, not an event
            await asyncio.sleep(0)
        await extender._listed.wait()  # it has learnt from the first lists too, which takes a thread
        await cluster.settle()
        yield Served(cluster, extender, client)


@pytest.fixture
def cluster() -> ApiWithKubelet:
    return ApiWithKubelet()


@pytest.fixture
async def running(cluster: ApiWithKubelet) -> AsyncIterator[Served]:
    cluster.add_node("n1")
    cluster.add_node("n2")
    async with served(cluster) as ready:
        yield ready


@pytest.fixture
def serve_cluster() -> Any:
    return served


@pytest.fixture
def make_cluster() -> Any:
    return ApiWithKubelet


@pytest.fixture
async def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Awaitable[None]]:
    """turn(seconds): the event loop's clock, which stands still otherwise, moves, and what is due is done."""
    loop = asyncio.get_running_loop()
    began, offset = loop.time(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: began + offset[0])

    async def turned(seconds: float) -> None:
        offset[0] += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    return turned
