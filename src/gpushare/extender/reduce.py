"""Nodes and GpuNodes reduced to the fields that placement needs; pure functions for the watches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Final

from gpushare.core.api import Ceilings, MpsState, Taint, names, parse_bytes, parse_cpu_milli, taints_of
from gpushare.core.gpu import Health
from gpushare.core.placement import GpuSpec

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class GpuNodeView:
    """One GpuNode.

    Attributes:
        gpus: its GPUs in order.
        unhealthy: UUIDs of unhealthy GPUs.
        allocated: GPUs of the pods allocated on it, by pod uid.
        observed_at: when its agent looked, by the agent's clock; only compared with itself.
        reads: whether workloads can be profiled in place there, as far as its agent says.
        idle: uids of pods without a process at MPS, as far as its agent knows, on GPUs where the gate sets caps.
    """

    name: str
    gpus: tuple[GpuSpec, ...]
    unhealthy: frozenset[str]
    allocated: Mapping[str, tuple[str, ...]]
    created_at: str = ""
    observed_at: str = ""
    reads: bool = True
    idle: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's capacity besides GPUs, and the properties that pods select nodes by.

    Attributes:
        is_second_choice: a taint asks pods to prefer other nodes.
        taints: those that keep pods out.
    """

    name: str
    cpu_milli: int
    memory_mib: int
    is_second_choice: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


def reduce_gpunode(obj: Mapping[str, Any]) -> GpuNodeView:
    """Return the needed fields of a GpuNode; GPUs without a uuid are left out."""
    gpus: list[GpuSpec] = []
    unhealthy: list[str] = []
    allocated: dict[str, tuple[str, ...]] = {}
    idle: set[str] = set()
    for gpu in sorted((obj.get("status") or {}).get("gpus") or (), key=lambda one: one.get("index") or 0):
        uuid = gpu.get("uuid")
        if not uuid:
            continue
        gpus.append(GpuSpec(intern(uuid), intern(gpu.get("model") or ""), gpu.get("memoryMiB") or None))
        if gpu.get("health", Health.HEALTHY) != Health.HEALTHY:
            unhealthy.append(uuid)
        mps = gpu.get("mps") or {}
        caps_bind = mps.get("state") == MpsState.ACTIVE and mps.get("ceilings") == Ceilings.ENFORCED
        for tenant in gpu.get("tenants") or ():
            allocated[tenant["podUid"]] = (*allocated.get(tenant["podUid"], ()), gpus[-1].uuid)
            if tenant.get("clients") == 0 and caps_bind:
                idle.add(tenant["podUid"])
    metadata = obj["metadata"]
    created_at = metadata.get("creationTimestamp") or ""
    observed_at = (obj.get("status") or {}).get("observedAt") or ""
    name = intern(metadata["name"])
    reads = _can_read((obj.get("status") or {}).get("conditions") or ())
    return GpuNodeView(
        name, tuple(gpus), frozenset(unhealthy), allocated, created_at, observed_at, reads, frozenset(idle)
    )


def _can_read(conditions: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether workloads can be profiled in place, as far as a GpuNode's conditions say."""
    return not any(
        one.get("type") in names.READING_CONDITIONS and one.get("status") == "False" for one in conditions
    )


def reduce_node(obj: Mapping[str, Any]) -> NodeView | None:
    """Return the needed fields of a node; None for a node without GPU shares."""
    allocatable = (obj.get("status") or {}).get("allocatable") or {}
    if not allocatable.get(names.SHARE_RESOURCE):
        return None
    return NodeView(
        name=intern(obj["metadata"]["name"]),
        cpu_milli=parse_cpu_milli(allocatable.get("cpu", "0")),
        memory_mib=parse_bytes(allocatable.get("memory", "0")) // _MIB,
        is_second_choice=any(
            taint.get("effect") == "PreferNoSchedule" for taint in (obj.get("spec") or {}).get("taints") or ()
        ),
        labels={intern(key): intern(value) for key, value in (obj["metadata"].get("labels") or {}).items()},
        taints=taints_of(obj.get("spec") or {}),
    )
