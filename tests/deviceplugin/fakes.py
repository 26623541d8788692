"""A fake kubelet on real unix sockets, an API server over real HTTP, and pods as it would give them."""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from gpushare.core.api import GpuNodeStatus, from_json, names
from gpushare.core.gpu import GpuHealth, Health
from gpushare.kube import EVENTS, GPUNODES, NODES, PODS
from gpushare.kube.fake import ObjectStore, app
from gpushare.mps.status import ClientStatus, GateState, GateStatus
from gpushare_deviceplugin import api_pb2, api_pb2_grpc, podresources_pb2, podresources_pb2_grpc
from gpushare_deviceplugin.pods import ManagedPod, reduce_pod
from gpushare_deviceplugin.state import NodeState

GPU_A, GPU_B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
WELL = GpuHealth(Health.HEALTHY)


class Clock:
    """Monotonic seconds that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sleeper:
    """asyncio.sleep that the test ends: nobody wakes before `turn`."""

    def __init__(self) -> None:
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []
        self._somebody = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        end = asyncio.get_running_loop().create_future()
        self._sleeping.append((seconds, end))
        self._somebody.set()
        await end

    async def asleep(self) -> float:
        """Wait until somebody sleeps; for how many seconds."""
        await self._somebody.wait()
        return self._sleeping[0][0]

    async def turn(self) -> None:
        """Let the time pass for which somebody sleeps."""
        await self.asleep()
        self._somebody.clear()
        sleeping, self._sleeping = self._sleeping, []
        for _, end in sleeping:
            if not end.done():
                end.set_result(None)


class FakeKubelet(api_pb2_grpc.RegistrationServicer, podresources_pb2_grpc.PodResourcesListerServicer):
    """kubelet's two sockets: it takes registrations and says who has which ids."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.plugins = directory / "device-plugins"
        self.plugins.mkdir(parents=True, exist_ok=True)
        (directory / "pod-resources").mkdir(exist_ok=True)
        self.registered: asyncio.Queue[Any] = asyncio.Queue()
        self.allocated: dict[str, list[str]] = {}
        self.lists = 0
        self._server: Any = None

    async def start(self) -> None:
        for path in self.plugins.glob("*.sock"):  # as the real one does
            path.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        api_pb2_grpc.add_RegistrationServicer_to_server(self, self._server)
        podresources_pb2_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix://{self.plugins}/kubelet.sock")
        pod_resources = self.directory / "pod-resources" / "kubelet.sock"
        pod_resources.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix://{pod_resources}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0)

    async def Register(self, request: Any, context: Any) -> Any:
        await self.registered.put(request)
        return api_pb2.Empty()

    async def List(self, request: Any, context: Any) -> Any:
        self.lists += 1
        pods = []
        for key, ids in self.allocated.items():
            namespace, _, name = key.partition("/")
            devices = podresources_pb2.ContainerDevices(resource_name=names.SHARE_RESOURCE, device_ids=ids)
            container = podresources_pb2.ContainerResources(name="main", devices=[devices])
            pods.append(podresources_pb2.PodResources(name=name, namespace=namespace, containers=[container]))
        pods.append(podresources_pb2.PodResources(name="coredns", namespace="kube-system"))
        return podresources_pb2.ListPodResourcesResponse(pod_resources=pods)


def make_pod(
    name: str = "a",
    *,
    gpu: str | None = GPU_A,
    share: int = 25,
    threads: str = "50",
    memory_mib: int = 8192,
    phase: str = "Pending",
    decided_at: str = "2026-11-21T10:00:00Z",
    uid: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    **annotations: str,
) -> ManagedPod:
    """A pod of this node."""
    decision = (
        {}
        if gpu is None
        else {
            names.GPU: gpu,
            names.THREAD_PERCENTAGE: threads,
            names.DECIDED_AT: decided_at,
            names.MEMORY_LIMIT: ",".join(f"{i}={memory_mib}M" for i in range(gpu.count(",") + 1)),
        }
    )
    return reduce_pod(
        {
            "metadata": {
                "uid": uid or f"uid-{name}",
                "namespace": "shop",
                "name": name,
                "annotations": {names.FRACTION: "0.25", **decision, **annotations},
                **(metadata or {}),
            },
            "spec": {
                "containers": [
                    {
                        "resources": {"limits": {names.SHARE_RESOURCE: str(share)}},
                        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
                    }
                ]
            },
            "status": {"phase": phase},
        }
    )


def raw_pod(
    name: str, gpu: str, threads: str = "50", phase: str = "Pending", share: int = 25, node: str = "n1"
) -> dict[str, Any]:
    return {
        "metadata": {
            "uid": f"uid-{name}",
            "namespace": "shop",
            "name": name,
            "resourceVersion": "1",
            "labels": {names.MANAGED_LABEL: "true"},
            "annotations": {
                names.FRACTION: "0.25",
                names.GPU: gpu,
                names.THREAD_PERCENTAGE: threads,
                names.MEMORY_LIMIT: "0=8192M",
                names.DECIDED_AT: "2026-11-21T10:00:00Z",
            },
        },
        "spec": {"nodeName": node, "containers": [{"resources": {"limits": {names.SHARE_RESOURCE: str(share)}}}]},
        "status": {"phase": phase},
    }


class NodeApi:
    """The API server of one node's agent over HTTP; `away` answers everything with 503 and ends every watch.

    Attributes:
        store: the objects.
        statuses: of the GpuNode, in the order in which they were written.
        changed: set by every write; the reader clears it.
    """

    def __init__(self, node: str = "n1") -> None:
        self.node = node
        self.store = ObjectStore()
        self.statuses: list[GpuNodeStatus] = []
        self.changed = asyncio.Event()
        self._away = False
        self.store.put(NODES, {"metadata": {"name": node, "uid": "node-uid"}})

    @property
    def app(self) -> web.Application:
        """A new application that serves the store."""
        made = app(self.store)
        made.middlewares.append(self._record)
        return made

    @property
    def away(self) -> bool:
        """Whether everything is refused."""
        return self._away

    @away.setter
    def away(self, is_away: bool) -> None:
        self._away = is_away
        if is_away:
            self.store.break_watches()

    @property
    def pods(self) -> Mapping[str, dict[str, Any]]:
        """Pods by name."""
        return {pod["metadata"]["name"]: pod for pod in self.store.objects(PODS).values()}

    @property
    def gpunode(self) -> dict[str, Any] | None:
        """The node's GpuNode, once the agent has made it."""
        return self.store.objects(GPUNODES).get(self.node)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events in the order in which they were told."""
        return list(self.store.objects(EVENTS).values())

    def put(self, pod: dict[str, Any]) -> None:
        """Let a pod appear or change."""
        self.store.put(PODS, pod)
        self.changed.set()

    def remove(self, name: str) -> None:
        """Let a pod go."""
        [key] = [key for key, pod in self.store.objects(PODS).items() if pod["metadata"]["name"] == name]
        self.store.remove(PODS, key)
        self.changed.set()

    @web.middleware
    async def _record(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        if self._away:
            return web.json_response({"kind": "Status", "message": "away"}, status=503)
        response: web.StreamResponse = await handler(request)
        if request.method != "GET" and response.status < HTTPStatus.BAD_REQUEST:
            if request.path.endswith(f"/gpunodes/{self.node}/status"):
                self.statuses.append(from_json(GpuNodeStatus, (await request.json())["status"]))
            self.changed.set()
        return response


def gate(state: GateState = GateState.ACTIVE, at: float = 1.0, **fields: object) -> GateStatus:
    return GateStatus(GPU_A, state, at, **fields)  # type: ignore[arg-type]  # fields by name


def client(uid: str | None, threads: int | None = 50, used: int | None = 500) -> ClientStatus:
    return ClientStatus(hash(uid) % 9999, uid, threads, 8192, used)


def tenant(state: NodeState, name: str, gpu: str = GPU_A, share: int = 25, threads: str = "50") -> str:
    pod = make_pod(name, gpu=gpu, share=share, threads=threads, phase="Running", **{"gpushare.io/workload": name})
    state.put_pod(pod)
    gpus = gpu.split(",")
    state.set_allocations({**(state.allocations or {}), pod.uid: {g: share // len(gpus) for g in gpus}})
    return pod.uid
