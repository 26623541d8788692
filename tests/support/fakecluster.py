"""A cluster that the command line asks over HTTP, objects to put there, and screens held against their files."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from rich.console import Console

from gpushare.core.api import (
    Decision,
    GpuNode,
    GpuNodeStatus,
    GpuStatus,
    MpsState,
    MpsStatus,
    TenantStatus,
    Utilization,
    names,
)
from gpushare.core.gpu import Health
from gpushare.kube import Resource
from gpushare.kube.fake import ObjectStore, Refusal

SCREENS = Path(__file__).resolve().parents[1] / "cli" / "screens"
WRITE = "WRITE_SCREENS"


@dataclass
class HttpApiServer:
    """An API server over HTTP.

    Attributes:
        forbidden: paths, by what they end in, that are refused.
        broken: the server answers 503 to everything.
    """

    store: ObjectStore = field(default_factory=ObjectStore)
    forbidden: set[str] = field(default_factory=set)
    broken: bool = False
    kubeconfig: Path = Path()

    def put(self, resource: Resource, *objects: dict[str, Any]) -> None:
        for obj in objects:
            self.store.put(resource, obj)

    def serves(self, path: str) -> bool:
        """Whether a path is of an API that the server has: our group only in the versions that it is told."""
        _, *parts = path.split("/")
        if parts[:2] != ["apis", names.GROUP]:
            return True
        versions = self.store.served.get(names.GROUP, ())
        return parts[2] in versions if len(parts) > 2 else bool(versions)

    @web.middleware
    async def rights(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        refusal = None
        if self.broken:
            refusal = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable", "etcd is away")
        elif any(request.path.endswith(each) for each in self.forbidden):
            refusal = Refusal(HTTPStatus.FORBIDDEN, "Forbidden", f'User "ann" cannot list {request.path}')
        if refusal is not None:
            return web.json_response(refusal.body, status=int(refusal.status))
        if not self.serves(request.path):  # as a real one answers for a path of no API
            return web.Response(text="404 page not found\n", status=int(HTTPStatus.NOT_FOUND))
        response: web.StreamResponse = await handler(request)
        return response


def kubeconfig(server: str, namespace: str = "shop") -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        }
    )


def check_screen(name: str, text: str) -> None:
    """Hold a screen against its file; WRITE_SCREENS=1 writes the file anew, to be looked at before a commit."""
    path = SCREENS / f"{name}.txt"
    if os.environ.get(WRITE):
        path.write_text(text)
    assert text == path.read_text(), f"the screen differs from {path}; {WRITE}=1 writes it anew"


def printed(width: int, show: Callable[[Console], None]) -> str:
    """What a terminal of a width shows, without colours."""
    sink = io.StringIO()
    show(Console(file=sink, width=width, force_terminal=True, color_system=None))
    return sink.getvalue()


def pod_object(
    name: str,
    uid: str,
    *,
    namespace: str = "shop",
    gpu: str | None = None,
    node: str = "node-a",
    share: int = 25,
    annotations: dict[str, str] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A managed pod; with `gpu` it was placed there and runs."""
    found = {names.FRACTION: f"{share / 100:g}", **(annotations or {})}
    spec: dict[str, Any] = {
        "containers": [
            {
                "name": "main",
                "resources": {
                    "limits": {names.SHARE_RESOURCE: str(share)},
                    "requests": {"cpu": "1", "memory": "1Gi"},
                },
            }
        ]
    }
    if gpu is not None:
        found |= Decision((gpu,), share, share * 1024, "2026-11-22T12:00:00Z").to_annotations()
        spec["nodeName"] = node
        status = {"phase": "Running", "startTime": "2026-11-22T12:00:01Z", **status}
    else:
        waits = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes are available",
        }
        status = {"phase": "Pending", "conditions": [waits], **status}
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "labels": {names.MANAGED_LABEL: "true"},
        "annotations": found,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def tenant(uid: str, pod: str, namespace: str = "shop", **figures: Any) -> TenantStatus:
    return TenantStatus(pod_uid=uid, pod=pod, namespace=namespace, **figures)


def busy_node() -> dict[str, Any]:
    """Two GPUs: on the first a promise is broken and a neighbour throttled, the second has MPS trouble."""
    first = GpuStatus(
        uuid="GPU-0",
        index=0,
        model="NVIDIA H200",
        memory_mib=143_155,
        memory_used_mib=30_100,
        mps=MpsStatus(state=MpsState.ACTIVE, clients=3),
        utilization=Utilization(sm=0.81, dram=0.42),
        tenants=(
            tenant(
                "u1",
                "serve-7c9f8d6b5-xk2lp",
                share_percent=25,
                memory_used_mib=9_100,
                promise_ratio=0.91,
                progress_ratio=0.72,
                progress_error_ratio=0.05,
                slowdown_ratio=1.39,
            ),
            tenant(
                "u2",
                "train-5d4c-p9",
                share_percent=50,
                memory_used_mib=21_000,
                promise_ratio=0.33,
                progress_ratio=0.61,
                slowdown_ratio=1.64,
                throttle_ratio=0.3,
            ),
        ),
    )
    second = GpuStatus(
        uuid="GPU-1",
        index=1,
        model="NVIDIA H200",
        memory_mib=143_155,
        health=Health.UNHEALTHY,
        health_reason="XID 94: contained ECC error",
        mps=MpsStatus(state=MpsState.FAULT),
        tenants=(tenant("u3", "lab", "research", share_percent=10),),
    )
    return GpuNode("node-a", GpuNodeStatus.of((first, second))).to_object()
