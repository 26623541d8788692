"""Merge a pod's annotations, its GpuShare and the chart's defaults; all processes use it (docs/design.md 1)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from gpushare.core.api import (
    FaultDomain,
    GpuShare,
    GpuShareSpec,
    JobClass,
    Reason,
    Rejection,
    clients_of,
    names,
    parse_fraction,
    parse_memory_mib,
    parse_request,
    percent_of_clients,
    percent_of_parts,
    refuse_parts,
    shown,
)

AUTO_FRACTION: Final = "0.5"
"""What "auto" means without a profile: pairs at 50% reach 1.50 in sum, worst 0.63 (docs/facts.md 30)."""

GPU_TAINTS: Final = ("nvidia.com/gpu", f"{names.GROUP}/gpus")
"""Keys of the taints that keep other pods off GPU nodes, as GKE and most node groups of EKS have them."""

DEFAULT_GPU_MEMORY_RESERVE_MIB: Final = 512
"""MiB of each GPU that tenants do not get, for the MPS server's own context."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Defaults:
    """The chart's defaults for values that neither the pod nor its GpuShare sets.

    Attributes:
        auto_fraction: what "auto" means while there is no profile.
        max_slowdown_ratio: tolerated slowdown of class throughput; 1 means undisturbed.
        latency_max_slowdown_ratio: tolerated slowdown of class latency.
        charge_memory: whether a pod's share is at least its part of the GPU's memory.
        charge_threads: whether a throughput pod's share is at least the smallest part that MPS gives a process.
        taints: keys of the taints of GPU nodes, which a pod without tolerations of its own tolerates.
    """

    auto_fraction: str = AUTO_FRACTION
    job_class: JobClass = JobClass.THROUGHPUT
    max_slowdown_ratio: float = 1.5
    fault_domain: FaultDomain = FaultDomain.SHARED
    latency_max_slowdown_ratio: float = 1.1
    charge_memory: bool = True
    charge_threads: bool = True
    taints: tuple[str, ...] = GPU_TAINTS

    def max_slowdown_of(self, job_class: JobClass) -> float:
        """Return the tolerated slowdown of a job class."""
        return self.latency_max_slowdown_ratio if job_class is JobClass.LATENCY else self.max_slowdown_ratio


@dataclass(frozen=True, slots=True)
class Needs:
    """A pod's request with every value filled in.

    Attributes:
        share_percent: percent of each of its `gpu_count` GPUs.
        memory_mib: GPU memory on each GPU; None means share x the GPU's usable memory.
        workload: key that links pods of one kind; None means the pod's owner.
        is_auto: whether the fraction is `auto`, so that its promise is relative to a whole GPU.
        processes: number of CUDA processes that the pod declares.
    """

    share_percent: int
    gpu_count: int
    memory_mib: int | None
    job_class: JobClass
    max_slowdown_ratio: float
    fault_domain: FaultDomain
    workload: str | None
    is_auto: bool = False
    processes: int = 1

    @property
    def clients(self) -> int:
        """Return how many MPS clients the pod may have on each of its GPUs."""
        return clients_of(self.share_percent)

    @property
    def limit_percent(self) -> int:
        """Return the pod's limit `gpushare.io/share`: percent of one GPU, summed over its GPUs."""
        return self.share_percent * self.gpu_count


def resolve(
    annotations: Mapping[str, str],
    share: GpuShare | None = None,
    defaults: Defaults | None = None,
    *,
    limit_percent: int | None = None,
    gpu_memories_mib: Collection[int] = (),
) -> Needs | Rejection:
    """Merge a request: the pod's annotation overrides its GpuShare's spec, which overrides the defaults.

    Args:
        limit_percent: the pod's limit `gpushare.io/share`, if any: what it is charged, fixed at admission. For
            "auto" this is the recommendation at that time, for an isolated pod the whole GPU.
        gpu_memories_mib: what tenants get of the cluster's GPUs, to charge a pod without a limit for its memory.
    """
    asked = parse_request(annotations)
    if isinstance(asked, Rejection):
        return asked
    spec = share.spec if share is not None else GpuShareSpec()
    defaults = defaults or Defaults()

    share_percent, gpu_count = asked.share_percent, asked.gpu_count
    is_charged = limit_percent is not None and limit_percent > 0
    if limit_percent is not None and is_charged:
        share_percent, gpu_count = _spread(limit_percent)
    if share_percent is None:
        recommended = share.status.recommended_fraction if share is not None else None
        for source in (recommended, spec.fraction, defaults.auto_fraction, AUTO_FRACTION):
            parsed = parse_fraction(source) if source else None
            if parsed is not None and not isinstance(parsed, Rejection) and parsed[0] is not None:
                share_percent, gpu_count = parsed
                break
    if share_percent is None:  # AUTO_FRACTION always parses; this tells the type checker
        return Rejection(Reason.INVALID_ANNOTATION, f"annotation {names.FRACTION}: auto has no value")

    memory_mib = asked.memory_mib
    if memory_mib is None and spec.memory is not None:
        memory = parse_memory_mib(spec.memory)
        if isinstance(memory, Rejection):
            name = f"{share.namespace}/{share.name}" if share is not None else ""
            return Rejection(
                Reason.INVALID_ANNOTATION, f"GpuShare {name}: memory {shown(spec.memory)} is not an amount"
            )
        memory_mib = memory
    job_class = _first(asked.job_class, spec.job_class, default=defaults.job_class)
    fault_domain = _first(spec.fault_domain, default=defaults.fault_domain)
    if share is not None and share.status.ends_neighbours:
        fault_domain = FaultDomain.ISOLATED
    if is_charged and share_percent < names.SHARES_PER_GPU:
        fault_domain = FaultDomain.SHARED  # an isolated pod is charged the whole GPU; this one was not
    needs = Needs(
        share_percent=share_percent,
        gpu_count=gpu_count,
        memory_mib=memory_mib,
        job_class=job_class,
        max_slowdown_ratio=_first(spec.max_slowdown, default=defaults.max_slowdown_of(job_class)),
        fault_domain=fault_domain,
        workload=asked.workload,
        is_auto=asked.is_auto,
        processes=asked.processes,
    )
    if is_charged:
        return needs
    return replace(needs, share_percent=max(share_percent, least_percent(needs, defaults, gpu_memories_mib)))


def least_percent(needs: Needs, defaults: Defaults, gpu_memories_mib: Collection[int]) -> int:
    """Return the smallest share that a pod is charged, whatever its fraction, in percent.

    It covers isolation (a whole GPU), the pod's memory, and one of two minima. Class throughput gets the SMs that
    MPS gives a process under the smallest cap (ADR 0172): for `auto` those of each process, where a fraction that
    is too small is refused (`refuse_undivided`). Class latency has no cap; it gets its part of the GPU's MPS
    clients (ADR 0184), of which the SMs above leave throughput enough.
    """
    if needs.fault_domain is FaultDomain.ISOLATED:
        return names.SHARES_PER_GPU
    if needs.job_class is JobClass.LATENCY:
        least = percent_of_clients(needs.processes)
    else:
        parts = needs.processes if needs.is_auto else 1
        least = percent_of_parts(parts) if parts > 1 or defaults.charge_threads else 0
    if not defaults.charge_memory or needs.memory_mib is None:
        return least
    return max(least, memory_percent(needs.memory_mib, gpu_memories_mib))


def refuse_undivided(needs: Needs) -> Rejection | None:
    """Return the refusal of a pod whose cap cannot be divided among its processes (ADR 0115); None if it can.

    Class latency and whole GPUs have no cap.
    """
    is_capped = needs.job_class is JobClass.THROUGHPUT
    if not is_capped or needs.processes <= 1 or needs.share_percent >= percent_of_parts(needs.processes):
        return None
    return refuse_parts(needs.processes, needs.share_percent)


def tenant_memories_mib(sizes_mib: Iterable[int | None], reserve_mib: int) -> frozenset[int]:
    """Return the distinct amounts of memory that tenants get of GPUs of these sizes; None and 0 are unknown sizes.

    Args:
        reserve_mib: memory of each GPU that no tenant gets.
    """
    return frozenset(size - reserve_mib for size in sizes_mib if size is not None and size > reserve_mib)


def memory_percent(memory_mib: int, gpu_memories_mib: Collection[int]) -> int:
    """Return the percentage of a GPU's memory that an amount takes, rounded up; 0 if no known GPU has that much.

    It is the percentage of what tenants get of the smallest GPU that has enough: the pod's GPU is not known yet,
    and on a larger GPU the percentage is smaller.
    """
    smallest = min((gpu for gpu in gpu_memories_mib if gpu >= memory_mib), default=None)
    return 0 if smallest is None else -(-names.SHARES_PER_GPU * memory_mib // smallest)


def _spread(limit_percent: int) -> tuple[int, int]:
    """Split a limit over all GPUs into (percent of each, number of GPUs)."""
    if limit_percent <= names.SHARES_PER_GPU:
        return limit_percent, 1
    return names.SHARES_PER_GPU, -(-limit_percent // names.SHARES_PER_GPU)


def _first(*values: T | None, default: T) -> T:
    return next((value for value in values if value is not None), default)
