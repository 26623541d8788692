"""What a silent agent's last report still tells: who has the GPUs, and no longer how they fare (ADR 0147)."""

from collections.abc import Iterable
from dataclasses import replace

from gpushare.core.api import GpuNode, GpuStatus, TenantStatus
from gpushare.core.control import SILENT_SECONDS
from gpushare.core.gpu import Health
from gpushare.runtime.moments import unix_seconds


def heard(node: GpuNode, now: float) -> GpuNode:
    """Return a GpuNode; if its agent is silent, mark it so and leave out all that only a present report can tell.

    Args:
        now: Unix time. Like `plan` and `explain`, a command compares `observedAt` with its own clock, because it
            does not run for long enough to see that nothing is written.
    """
    observed_at = node.status.observed_at
    if not observed_at or now - unix_seconds(observed_at) <= SILENT_SECONDS:
        return node
    reason = f"its agent has not reported since {observed_at}"
    gpus = tuple(_last(gpu, reason) for gpu in node.status.gpus)
    return replace(node, status=replace(node.status, gpus=gpus), silent_since=observed_at)


def silence_notes(nodes: Iterable[GpuNode]) -> tuple[str, ...]:
    """Return a sentence on each node whose agent is silent."""
    return tuple(
        f"the agent of node {node.name} has not reported since {node.silent_since}: how its pods fare is not known"
        for node in nodes
        if node.silent_since
    )


def _last(gpu: GpuStatus, reason: str) -> GpuStatus:
    return replace(
        gpu,
        health=Health.UNHEALTHY,
        health_reason=f"{reason}; before: {gpu.health_reason}" if gpu.health_reason else reason,
        mps=replace(gpu.mps, clients=0),
        utilization=None,
        memory_used_mib=None,
        tenants=tuple(_last_tenant(tenant) for tenant in gpu.tenants),
    )


def _last_tenant(tenant: TenantStatus) -> TenantStatus:
    return replace(
        tenant,
        memory_used_mib=None,
        clients=None,
        progress_ratio=None,
        progress_error_ratio=None,
        slowdown_ratio=None,
        throttle_ratio=None,
        is_asleep=None,
        phase=None,
        thread_percentage_in_force=None,
        retract=None,
        slo=None,
        trouble=None,
    )
