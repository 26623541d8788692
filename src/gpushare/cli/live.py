"""A live cluster as the packing engine sees it: nodes, what is left on them, and where pods run or wait."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpushare.cli.errors import UsageError
from gpushare.core.admission.resolve import Defaults, resolve, share_of
from gpushare.core.api import names
from gpushare.core.api.decision import Decision
from gpushare.core.api.objects import GpuNode, GpuShare
from gpushare.core.api.quantity import parse_count, parse_quantity
from gpushare.core.api.rejection import Rejection
from gpushare.core.control.profiles import known_of
from gpushare.core.gpu.devices import Health
from gpushare.core.placement.settings import Settings, SettingsError, parse_settings
from gpushare.core.placement.shapes import MILLI_PER_PERCENT, GpuSpec, NodeSpec, Placement, PlacementRequest
from gpushare.kube import CONFIGMAPS, GPUNODES, GPUSHARES, NODES, PODS, Api, Json

SETTINGS_LABEL: Final = f"{names.GROUP}/settings=true"
_MIB: Final = 2**20
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Objects:
    """What a cluster's API says of everything that decisions depend on.

    Attributes:
        settings: data of the release's ConfigMap; None where there is none.
        nodes, gpunodes, gpushares, pods: raw objects.
    """

    settings: Mapping[str, str] | None
    nodes: Sequence[Json] = ()
    gpunodes: Sequence[Json] = ()
    gpushares: Sequence[Json] = ()
    pods: Sequence[Json] = ()


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """What a plan starts from.

    Attributes:
        nodes: with the CPU and memory that pods without our annotation leave.
        pods: those with our annotation; None for where when they wait. `pod_uid` is "namespace/name".
        unhealthy: uuids of GPUs that take no tenants.
        notes: sentences on what was left out and why.
        settings: what the release decides by.
        shares: GpuShares by namespace.
    """

    nodes: tuple[NodeSpec, ...]
    pods: tuple[tuple[PlacementRequest, Placement | None], ...]
    unhealthy: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=())
    settings: Settings = field(default_factory=Settings)
    shares: Mapping[str, Sequence[GpuShare]] = field(default_factory=dict)

    def request_of(self, pod: Mapping[str, Any]) -> PlacementRequest | Rejection:
        """What a pod asks here: merged with the GpuShare that speaks for it and the release's defaults."""
        namespace = pod["metadata"].get("namespace") or "default"
        return request_of(pod, self.shares.get(namespace, ()), self.settings.defaults)


async def read_cluster(api: Api) -> LiveCluster:
    """Read the release's settings, nodes, GpuNodes, GpuShares and pods."""
    return cluster_of(await read_objects(api))


async def read_objects(api: Api) -> Objects:
    """Read everything that decisions depend on, each object reduced to the parts that matter.

    Raises:
        UsageError: the release's settings cannot be used.
    """
    found = (
        await api.list(CONFIGMAPS, lambda obj: dict(obj.get("data") or {}), label_selector=SETTINGS_LABEL)
    ).items
    return Objects(
        found[0] if found else None,
        (await api.list(NODES, _reduced_node)).items,
        (await api.list(GPUNODES, _whole)).items,
        (await api.list(GPUSHARES, _whole)).items,
        (await api.list(PODS, _reduced_pod)).items,
    )


def _whole(obj: Json) -> Json:
    return obj


def _reduced_node(obj: Json) -> Json:
    allocatable = (obj.get("status") or {}).get("allocatable") or {}
    return {
        "metadata": {"name": obj["metadata"]["name"]},
        "status": {"allocatable": {key: allocatable[key] for key in ("cpu", "memory") if key in allocatable}},
    }


def _reduced_pod(obj: Json) -> Json:
    metadata, spec = obj["metadata"], obj.get("spec") or {}
    annotations = metadata.get("annotations") or {}
    return {
        "metadata": {
            **{
                key: metadata[key]
                for key in ("name", "namespace", "uid", "labels", "ownerReferences")
                if key in metadata
            },
            "annotations": {key: value for key, value in annotations.items() if key.startswith(f"{names.GROUP}/")},
        },
        "spec": {
            **({"nodeName": spec["nodeName"]} if "nodeName" in spec else {}),
            "containers": [{"resources": each.get("resources") or {}} for each in spec.get("containers") or ()],
        },
        "status": {"phase": (obj.get("status") or {}).get("phase")},
    }


def cluster_of(objects: Objects) -> LiveCluster:
    """Join what the API says.

    Raises:
        UsageError: the release's settings cannot be used.
    """
    nodes, pods = objects.nodes, objects.pods
    gpunodes = [GpuNode.from_object(each) for each in objects.gpunodes]
    shares = [GpuShare.from_object(each) for each in objects.gpushares]
    notes: list[str] = []
    if objects.settings is None:
        notes.append("no settings of a gpushare release are here: the chart's defaults are assumed")
    try:
        settings = parse_settings(objects.settings or {})
    except SettingsError as error:
        raise UsageError(f"the settings of the release: {error}") from error
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
        namespace = metadata.get("namespace") or "default"
        request = request_of(pod, by_namespace.get(namespace, ()), settings.defaults)
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
                tuple(GpuSpec(gpu.uuid, gpu.model, gpu.memory_mib or None) for gpu in gpus),
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
    return LiveCluster(tuple(found), tuple(kept), frozenset(unhealthy), tuple(notes), settings, by_namespace)


def request_of(
    pod: Mapping[str, Any], shares: Iterable[GpuShare], defaults: Defaults
) -> PlacementRequest | Rejection:
    """What a pod object asks, merged with the GpuShare that speaks for it and the defaults."""
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    owners = [str(owner["uid"]) for owner in metadata.get("ownerReferences") or () if "uid" in owner]
    if "uid" in metadata:
        owners.append(str(metadata["uid"]))
    share = share_of(metadata.get("labels") or {}, owners, shares)
    limit = sum(
        parse_count(((container.get("resources") or {}).get("limits") or {}).get(names.SHARE_RESOURCE, 0))
        for container in spec.get("containers") or ()
    )
    needs = resolve(metadata.get("annotations") or {}, share, defaults, limit_percent=limit or None)
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
        known=known_of(share, defaults.max_slowdown_ratio) if share is not None else None,
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
    return Placement(node, decision.gpu_uuids, decision.memory_limit_mib, decision.thread_percentage)
