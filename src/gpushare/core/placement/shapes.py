"""Values of the packing engine: what nodes offer, what pods request and what they get.

Unit of share: thousandths of one GPU ("milli-GPU", 1000 per GPU). Production traces use thousandths (460), users
whole percents (46); both are exact integers. Live code converts by `share_milli = MILLI_PER_PERCENT *
share_percent`.
"""

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpushare.core.admission import Defaults
from gpushare.core.api import MAX_GPUS_PER_POD, FaultDomain, JobClass, NodeRules, names
from gpushare.core.placement.caps import thread_percentage
from gpushare.core.placement.closed_gpus import ProbationTerm, Unprofiled
from gpushare.core.placement.known import KnownWorkload

GPU_MILLI: Final = 1000
"""Share of one whole GPU."""
MILLI_PER_PERCENT: Final = GPU_MILLI // names.SHARES_PER_GPU


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU as a node reports it; `memory_mib` is None if its memory is unknown."""

    uuid: str
    model: str
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node; `cpu_milli` and `memory_mib` are what our pods may use there; None if not counted here."""

    name: str
    gpus: tuple[GpuSpec, ...]
    cpu_milli: int | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Requirements of one pod on a node.

    Attributes:
        share_milli: share of each of its GPUs, 1 to 1000; ignored if gpu_count is 0.
        gpu_count: number of GPUs; above 1 only with whole GPUs. 0 is a pod without GPUs (the simulator's traces).
        memory_mib: GPU memory on each GPU; None means share x the GPU's usable memory.
        cpu_milli: CPU request on the node.
        node_memory_mib: memory request on the node.
        models: GPU models that the pod accepts; empty for any.
        clients: MPS clients that it may have on each GPU, at least 1.
        known: knowledge about its workload; None if nothing is known.
        max_slowdown: tolerated slowdown, 1 or more, if its workload does not say.
        unprofiled: its workload, if it has no profile and may get one.
        priority: priority of its pod; only decides which pods it must stand back for (keeping.py).
        queued_at: since when it could be placed, in seconds of the caller's clock; inf if it arrives now. Only
            decides which pods it must stand back for.
        is_auto: whether its share was chosen by `auto` (`gpushare.core.progress.promise_of`).
        rules: the pod's own rules on nodes, for views that kube-scheduler has not asked; None if not known.
    """

    pod_uid: str
    share_milli: int
    gpu_count: int = 1
    memory_mib: int | None = None
    cpu_milli: int = 0
    node_memory_mib: int = 0
    models: frozenset[str] = frozenset()
    job_class: JobClass = JobClass.THROUGHPUT
    workload: str | None = None
    fault_domain: FaultDomain = FaultDomain.SHARED
    clients: int = 1
    known: KnownWorkload | None = field(default=None, compare=False)
    max_slowdown: float | None = field(default=None, compare=False)
    unprofiled: Unprofiled | None = field(default=None, compare=False, repr=False)
    priority: int = field(default=0, compare=False)
    queued_at: float = field(default=math.inf, compare=False)
    is_auto: bool = field(default=False, compare=False)
    rules: NodeRules | None = field(default=None, compare=False, repr=False)
    shape: "Shape" = field(init=False, repr=False, compare=False)
    """The part that decides where it can go; requests of one shape are interchangeable to the engine."""

    def __post_init__(self) -> None:
        if self.gpu_count < 0 or (self.gpu_count and not 1 <= self.share_milli <= GPU_MILLI):
            raise ValueError(f"share {self.share_milli} milli on {self.gpu_count} GPUs is not a request")
        if self.gpu_count > 1 and self.share_milli != GPU_MILLI:
            raise ValueError("more than one GPU only in whole GPUs")
        if min(self.cpu_milli, self.node_memory_mib, self.memory_mib or 0) < 0 or self.clients < 1:
            raise ValueError("amounts are not negative, and a tenant holds at least one client")

        shape = Shape(
            self.share_milli,
            self.gpu_count,
            self.memory_mib,
            self.cpu_milli,
            self.node_memory_mib,
            self.models,
            self.job_class,
            self.workload,
            self.fault_domain,
            self.clients,
        )
        object.__setattr__(self, "shape", shape)  # the class is frozen, and every decision reads the shape

    @property
    def rank(self) -> tuple[int, float, str]:
        """Return the sort key of waiting pods: priority, then waiting time."""
        return -self.priority, self.queued_at, self.pod_uid

    def as_tenant(self, memory_mib: int, cap: int | None = None) -> "Tenant":
        """Return the tenant that it would be under a cap; None: its smallest."""
        return Tenant(
            self.pod_uid,
            self.share_milli,
            memory_mib,
            self.job_class,
            self.workload,
            self.fault_domain,
            0,
            cap or thread_percentage(max(1, self.share_milli // MILLI_PER_PERCENT), self.job_class),
            self.known,
            tolerated(self, None),
        )


def tolerated(request: PlacementRequest, known: KnownWorkload | None, defaults: Defaults | None = None) -> float:
    """Return the slowdown that a pod tolerates, as set by its workload, its request, or its class's default."""
    if known is not None and known.max_slowdown is not None:
        return max(1.0, known.max_slowdown)
    if request.max_slowdown is not None:
        return max(1.0, request.max_slowdown)
    return (defaults or Defaults()).max_slowdown_of(request.job_class)


def tenancy_kind(share_milli: int, gpu_count: int) -> int:
    """Return the pod's line in `ClusterState.kinds`: 0 for a part of one GPU, else its number of whole GPUs."""
    return min(gpu_count, MAX_GPUS_PER_POD) if share_milli == GPU_MILLI else 0


class Shape(NamedTuple):
    """A request without its pod: the key of results that all pods with equal requests share."""

    share_milli: int
    gpu_count: int
    memory_mib: int | None
    cpu_milli: int
    node_memory_mib: int
    models: frozenset[str]
    job_class: JobClass
    workload: str | None
    fault_domain: FaultDomain
    clients: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a pod, and its limits.

    Attributes:
        gpu_uuids: in the order the container sees them; empty for a pod without GPUs.
        memory_mib: GPU memory it gets on each (the least, if a default share differs by GPU).
        thread_percentage: its cap, 1 to 100; None while it is not decided. Ignored in comparisons: a changed cap
            moves no pod.
        probation: the term during which the pod has the GPU to itself; None if it is not on probation.
    """

    node: str
    gpu_uuids: tuple[str, ...]
    memory_mib: int = 0
    thread_percentage: int | None = field(default=None, compare=False)
    probation: ProbationTerm | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Tenant:
    """One pod on one GPU; `order` rises with arrival, so the newest tenant has the highest."""

    pod_uid: str
    share_milli: int
    memory_mib: int
    job_class: JobClass
    workload: str | None
    fault_domain: FaultDomain
    order: float
    thread_percentage: int
    known: KnownWorkload | None = field(default=None, compare=False)
    max_slowdown: float = field(default=1.0, compare=False)
    """Tolerated slowdown, if its workload does not say."""
    is_auto: bool = field(default=False, compare=False)
