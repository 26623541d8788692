"""A live cluster as the packing engine sees it: nodes, what is left on them, and where pods run or wait."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpushare.core.admission.resolve import resolve, share_of
from gpushare.core.api import names
from gpushare.core.api.decision import Decision
from gpushare.core.api.objects import GpuNode, GpuShare
from gpushare.core.api.quantity import parse_count, parse_quantity
from gpushare.core.api.rejection import Rejection
from gpushare.core.gpu.devices import Health
from gpushare.core.placement.shapes import MILLI_PER_PERCENT, GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.kube import GPUNODES, GPUSHARES, NODES, PODS, Api, Json

GPU_MEMORY_RESERVE_MIB: Final = 512  # as the extender keeps back by default: the MPS server's own context
_MIB: Final = 2**20
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a plan starts from.

    Attributes:
        nodes: with the CPU and memory that pods without our annotation leave, and GPU memory for tenants.
        pods: those with our annotation; None for where when they wait. `pod_uid` is "namespace/name".
        unhealthy: uuids of GPUs that take no tenants.
        notes: sentences on what was left out and why.
    """

    nodes: tuple[NodeSpec, ...]
    pods: tuple[tuple[PlacementRequest, Placement | None], ...]
    unhealthy: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())


async def read_cluster(api: Api) -> Cluster:
    """Read nodes, GpuNodes, GpuShares and pods."""

    def whole(obj: Json) -> Json:
        return obj

    return cluster_of(
        (await api.list(NODES, whole)).items,
        (await api.list(GPUNODES, GpuNode.from_object)).items,
        (await api.list(GPUSHARES, GpuShare.from_object)).items,
        (await api.list(PODS, whole)).items,
    )


def cluster_of(
    nodes: Iterable[Json], gpunodes: Iterable[GpuNode], shares: Iterable[GpuShare], pods: Iterable[Json]
) -> Cluster:
    """Join what the API says."""
    notes: list[str] = []
    by_namespace: dict[str, list[GpuShare]] = {}
    for share in shares:
        by_namespace.setdefault(share.namespace, []).append(share)
    ours: list[tuple[PlacementRequest, Placement | None]] = []
    others: dict[str, list[int]] = {}
    for pod in pods:
        if (pod.get("status") or {}).get("phase") in _ENDED:
            continue
        spec, metadata = pod.get("spec") or {}, pod["metadata"]
        if names.FRACTION not in (metadata.get("annotations") or {}):
            if node := spec.get("nodeName"):
                taken = others.setdefault(node, [0, 0])
                cpu_milli, memory_mib = requests_of(spec)
                taken[0] += cpu_milli
                taken[1] += memory_mib
            continue
        request = request_of(pod, by_namespace.get(metadata.get("namespace", ""), ()))
        if isinstance(request, Rejection):
            notes.append(f"pod {key_of(pod)} is left out: {request}")
            continue
        ours.append((request, _placement(pod, request)))
    offered = {node["metadata"]["name"]: (node.get("status") or {}).get("allocatable") or {} for node in nodes}
    found: list[NodeSpec] = []
    unhealthy: set[str] = set()
    for gpunode in gpunodes:
        allocatable = offered.get(gpunode.name)
        if allocatable is None:
            notes.append(f"node {gpunode.name} is left out: it has a GpuNode but is not in the cluster")
            continue
        cpu_taken, memory_taken = others.get(gpunode.name, [0, 0])
        gpus = sorted(gpunode.status.gpus, key=lambda gpu: gpu.index)
        unhealthy.update(gpu.uuid for gpu in gpus if gpu.health is not Health.HEALTHY)
        found.append(
            NodeSpec(
                gpunode.name,
                tuple(
                    GpuSpec(gpu.uuid, gpu.model, max(gpu.memory_mib - GPU_MEMORY_RESERVE_MIB, 0) or None)
                    for gpu in gpus
                ),
                max(int(parse_quantity(allocatable.get("cpu", "0")) * 1000) - cpu_taken, 0),
                max(int(parse_quantity(allocatable.get("memory", "0")) / _MIB) - memory_taken, 0),
            )
        )
    present = {gpu.uuid for node in found for gpu in node.gpus}
    kept = []
    for request, placement in ours:
        if placement is not None and not present.issuperset(placement.gpu_uuids):
            notes.append(
                f"pod {request.pod_uid} is left out: its GPU {placement.gpu_uuids[0]} is not in any GpuNode"
            )
            continue
        kept.append((request, placement))
    return Cluster(tuple(found), tuple(kept), frozenset(unhealthy), tuple(notes))


def request_of(pod: Mapping[str, Any], shares: Iterable[GpuShare] = ()) -> PlacementRequest | Rejection:
    """What a pod object asks, merged with the GpuShare that speaks for it."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    owners = [str(owner["uid"]) for owner in metadata.get("ownerReferences") or () if "uid" in owner]
    share = share_of(metadata.get("labels") or {}, owners, shares)
    limit = sum(
        parse_count(((container.get("resources") or {}).get("limits") or {}).get(names.SHARE_RESOURCE, 0))
        for container in spec.get("containers") or ()
    )
    needs = resolve(metadata.get("annotations") or {}, share, limit_percent=limit or None)
    if isinstance(needs, Rejection):
        return needs
    cpu_milli, memory_mib = requests_of(spec)
    return PlacementRequest(
        key_of(pod),
        needs.share_percent * MILLI_PER_PERCENT,
        needs.gpu_count,
        needs.memory_mib,
        cpu_milli,
        memory_mib,
        job_class=needs.job_class,
        workload=needs.workload,
        fault_domain=needs.fault_domain,
    )


def requests_of(spec: Mapping[str, Any]) -> tuple[int, int]:
    """CPU (thousandths) and memory (MiB) that a pod's containers request.

    Raises:
        ValueError: a request is not a quantity.
    """
    cpu_milli = memory_mib = 0
    for container in spec.get("containers") or ():
        asked = (container.get("resources") or {}).get("requests") or {}
        cpu_milli += int(parse_quantity(asked.get("cpu", "0")) * 1000)
        memory_mib += int(parse_quantity(asked.get("memory", "0")) / _MIB)
    return cpu_milli, memory_mib


def key_of(pod: Mapping[str, Any]) -> str:
    """Namespace and name."""
    return f"{pod['metadata'].get('namespace') or 'default'}/{pod['metadata']['name']}"


def _placement(pod: Mapping[str, Any], request: PlacementRequest) -> Placement | None:
    """Where a pod runs by its decision; None while it waits."""
    node = (pod.get("spec") or {}).get("nodeName")
    try:
        decision = Decision.from_annotations(pod["metadata"].get("annotations") or {})
    except ValueError:
        return None
    if not node or decision is None or len(decision.gpu_uuids) != request.gpu_count:
        return None
    return Placement(node, decision.gpu_uuids, decision.memory_limit_mib)
