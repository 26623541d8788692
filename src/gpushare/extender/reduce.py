"""Raw API objects reduced to the few fields that placement needs; pure functions for the watches."""

from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, Final

from gpushare.core.api import names
from gpushare.core.api.decision import Decision
from gpushare.core.api.pod_resources import requests_of, share_limit_of
from gpushare.core.api.quantity import parse_quantity
from gpushare.core.gpu.devices import Health
from gpushare.core.placement.state import GpuSpec

_TERMINAL_PHASES: Final = frozenset({"Succeeded", "Failed"})
_KEPT_ANNOTATIONS: Final = frozenset(names.USER_ANNOTATIONS)
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod.

    Attributes:
        annotations: the user's gpushare annotations only.
        node: where it is bound; None while it is pending.
        finished: its containers have ended for good.
        admitted: kubelet has taken it, so its devices are allocated (kubelet allocates before it sets startTime).
        limit_percent: its limit `gpushare.io/share`, 100 a GPU; 0 when it has none.
        decision: its decision annotations; None without any or when malformed.
        has_preferences: it says which of the nodes it may run on it would rather have, in affinity or spreading.
        short_of_shares: kube-scheduler's own count found too few shares on some node and left it waiting.
    """

    uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    owner_uids: tuple[str, ...]
    node: str | None
    finished: bool
    admitted: bool
    limit_percent: int
    cpu_milli: int
    memory_mib: int
    priority: int
    decision: Decision | None
    has_preferences: bool = False
    short_of_shares: bool = False

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class GpuNodeView:
    """One GpuNode: its GPUs in order, which of them are unhealthy, and the pods allocated there (uid, GPUs)."""

    name: str
    gpus: tuple[GpuSpec, ...]
    unhealthy: frozenset[str]
    allocated: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a node offers to pods, beside GPUs; `is_second_choice`: a taint asks pods to go elsewhere."""

    name: str
    cpu_milli: int
    memory_mib: int
    is_second_choice: bool = False


def reduce_pod(obj: Mapping[str, Any]) -> PodView:
    """One pod, from a watch or from kube-scheduler.

    Raises:
        KeyError: it has no uid or name. Malformed decision annotations count as none.
    """
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    try:
        decision = Decision.from_annotations(annotations)
    except ValueError:
        decision = None
    cpu_milli, memory_mib = requests_of(spec)
    return PodView(
        uid=metadata["uid"],
        namespace=intern(metadata.get("namespace") or "default"),
        name=metadata["name"],
        annotations={key: value for key, value in annotations.items() if key in _KEPT_ANNOTATIONS},
        labels=metadata.get("labels") or {},
        owner_uids=tuple(owner["uid"] for owner in metadata.get("ownerReferences") or ()),
        node=intern(spec["nodeName"]) if spec.get("nodeName") else None,
        finished=status.get("phase") in _TERMINAL_PHASES,
        admitted="startTime" in status,
        limit_percent=share_limit_of(spec),
        cpu_milli=cpu_milli,
        memory_mib=memory_mib,
        priority=spec.get("priority") or 0,
        decision=decision,
        has_preferences=_has_preferences(spec),
        short_of_shares=any(
            one.get("type") == "PodScheduled"
            and one.get("status") == "False"
            and names.SHARE_RESOURCE in (one.get("message") or "")
            for one in status.get("conditions") or ()
        ),
    )


def reduce_gpunode(obj: Mapping[str, Any]) -> GpuNodeView:
    """One GpuNode; GPUs without a uuid are left out."""
    gpus: list[GpuSpec] = []
    unhealthy: list[str] = []
    allocated: dict[str, tuple[str, ...]] = {}
    for gpu in sorted((obj.get("status") or {}).get("gpus") or (), key=lambda one: one.get("index") or 0):
        uuid = gpu.get("uuid")
        if not uuid:
            continue
        gpus.append(GpuSpec(intern(uuid), intern(gpu.get("model") or ""), gpu.get("memoryMiB") or None))
        if gpu.get("health", Health.HEALTHY) != Health.HEALTHY:
            unhealthy.append(uuid)
        for tenant in gpu.get("tenants") or ():
            allocated[tenant["podUid"]] = (*allocated.get(tenant["podUid"], ()), gpus[-1].uuid)
    return GpuNodeView(intern(obj["metadata"]["name"]), tuple(gpus), frozenset(unhealthy), allocated)


def reduce_node(obj: Mapping[str, Any]) -> NodeView | None:
    """One node; None for those that offer no share of a GPU."""
    allocatable = (obj.get("status") or {}).get("allocatable") or {}
    if not allocatable.get(names.SHARE_RESOURCE):
        return None
    return NodeView(
        name=intern(obj["metadata"]["name"]),
        cpu_milli=int(parse_quantity(allocatable.get("cpu", "0")) * 1000),
        memory_mib=int(parse_quantity(allocatable.get("memory", "0")) / _MIB),
        is_second_choice=any(
            taint.get("effect") == "PreferNoSchedule" for taint in (obj.get("spec") or {}).get("taints") or ()
        ),
    )


def _has_preferences(spec: Mapping[str, Any]) -> bool:
    return any(
        kind.get("preferredDuringSchedulingIgnoredDuringExecution")
        for kind in (spec.get("affinity") or {}).values()
        if kind
    ) or any(
        one.get("whenUnsatisfiable") == "ScheduleAnyway" for one in spec.get("topologySpreadConstraints") or ()
    )
