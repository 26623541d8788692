"""What one pod requests, for every process that decides about pods of a cluster."""

from collections.abc import Collection

from gpushare.core.admission import Defaults, refuse_undivided, resolve
from gpushare.core.api import GpuShare, PodView, Rejection
from gpushare.core.placement.closed_gpus import unprofiled_of
from gpushare.core.placement.known import KnownWorkload
from gpushare.core.placement.shapes import MILLI_PER_PERCENT, PlacementRequest


def request_of(
    pod: PodView,
    share: GpuShare | None,
    known: KnownWorkload | None,
    defaults: Defaults,
    *,
    queued_at: float,
    gpu_memories_mib: Collection[int] = (),
) -> PlacementRequest | Rejection:
    """Return what a pod requests, merged with its GpuShare and the installation's defaults.

    Args:
        share: the GpuShare that applies to the pod.
        known: what that GpuShare tells about its workload (`known_of`).
        queued_at: since when it could be placed, Unix time; inf if it arrives now.
        gpu_memories_mib: what tenants get of the cluster's GPUs, for a pod that admission has not seen.
    """
    limit = pod.limit_percent or None
    needs = resolve(pod.annotations, share, defaults, limit_percent=limit, gpu_memories_mib=gpu_memories_mib)
    if isinstance(needs, Rejection):
        return needs
    if limit is None and (refusal := refuse_undivided(needs)) is not None:
        return refusal
    return PlacementRequest(
        pod_uid=pod.uid,
        share_milli=needs.share_percent * MILLI_PER_PERCENT,
        gpu_count=needs.gpu_count,
        memory_mib=needs.memory_mib,
        cpu_milli=pod.cpu_milli,
        node_memory_mib=pod.memory_mib,
        job_class=needs.job_class,
        workload=needs.workload,
        fault_domain=needs.fault_domain,
        clients=needs.clients,
        known=known,
        max_slowdown=needs.max_slowdown_ratio,
        unprofiled=unprofiled_of(pod, share),
        priority=pod.priority,
        queued_at=queued_at,
        is_auto=needs.is_auto,
    )
