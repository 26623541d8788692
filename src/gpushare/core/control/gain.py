"""The gain from sharing: the total progress of tenants compared with the GPUs that they use."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpushare.core.api import SHARES_PER_GPU, GpuNode, GpuStatus, TenantStatus, TroubleKind


@dataclass(frozen=True, slots=True)
class GpuGain:
    """One GPU with tenants.

    Attributes:
        progress_ratio: sum over its tenants, each relative to running alone, 0 for one without a process; None
            while one is unknown.
        unknown: number of tenants whose progress is unknown.
    """

    node: str
    index: int
    model: str
    pods: int
    share_percent: int
    progress_ratio: float | None
    unknown: int


@dataclass(frozen=True, slots=True)
class NamespaceGain:
    """The tenants of one namespace.

    Attributes:
        asked_gpus: sum of their guaranteed shares, in GPUs.
        progress_ratio: sum over the tenants whose progress is known, 0 for one without a process; None if none is.
        unknown: number of tenants whose progress is unknown.
    """

    namespace: str
    pods: int
    asked_gpus: float
    progress_ratio: float | None
    unknown: int


@dataclass(frozen=True, slots=True)
class Gain:
    """The present gain from sharing on a cluster.

    Attributes:
        gpus: GPUs of all nodes.
        used_gpus: GPUs with tenants.
        alone_gpus: GPUs that the pods would need if each had its GPUs to itself.
        idle_gpus: used GPUs on which no tenant has a process: without sharing, too, they would do nothing.
        known_gpus: the other used GPUs on which every tenant's progress is known.
        progress_ratio: sum over the known GPUs; a GPU without sharing makes 1.
        kept: tenants that reach their promise.
        broken: tenants below their promise.
        unjudged: tenants whose promise or progress is unknown.
        throttled: tenants that are stopped for part of the time.
    """

    gpus: int
    used_gpus: int
    pods: int
    alone_gpus: int
    idle_gpus: int
    known_gpus: int
    progress_ratio: float
    kept: int
    broken: int
    unjudged: int
    throttled: int
    by_gpu: tuple[GpuGain, ...]
    by_namespace: tuple[NamespaceGain, ...]

    @property
    def per_gpu(self) -> float | None:
        """Return the mean progress per known GPU, where 1 is a GPU without sharing; None while none is known."""
        return self.progress_ratio / self.known_gpus if self.known_gpus else None

    @property
    def gained_gpus(self) -> float | None:
        """Return how many more GPUs the same progress would need without sharing; below 0, sharing costs."""
        return self.progress_ratio - self.known_gpus if self.known_gpus else None


def gain_of(nodes: Iterable[GpuNode], namespace: str | None = None) -> Gain:
    """Return the gain from what the nodes' agents measured.

    Args:
        namespace: count only GPUs on which this namespace has a tenant, and report no other namespace.
    """
    gpus = [(node.name, gpu) for node in nodes for gpu in node.status.gpus]
    used = [
        (name, gpu) for name, gpu in gpus if any(namespace in {None, tenant.namespace} for tenant in gpu.tenants)
    ]
    tenants = [tenant for _, gpu in used for tenant in gpu.tenants]
    by_gpu = tuple(_gpu_gain(name, gpu) for name, gpu in used)
    idle = [all(_is_idle(tenant) for tenant in gpu.tenants) for _, gpu in used]
    known = [
        each.progress_ratio
        for each, is_unused in zip(by_gpu, idle, strict=True)
        if each.progress_ratio is not None and not is_unused
    ]
    verdicts = [is_kept(tenant) for tenant in tenants]
    return Gain(
        gpus=len(gpus),
        used_gpus=len(used),
        pods=len({tenant.pod_uid for tenant in tenants}),
        alone_gpus=len(tenants),
        idle_gpus=sum(idle),
        known_gpus=len(known),
        progress_ratio=sum(known),
        kept=verdicts.count(True),
        broken=verdicts.count(False),
        unjudged=verdicts.count(None),
        throttled=sum(bool(tenant.throttle_ratio) for tenant in tenants),
        by_gpu=by_gpu,
        by_namespace=_by_namespace([t for t in tenants if namespace in {None, t.namespace}]),
    )


def is_kept(tenant: TenantStatus) -> bool | None:
    """Return whether a tenant reaches its promised progress; None while either is unknown, or while it sleeps.

    A promise counts as broken only if the progress is below it by more than one standard deviation.
    """
    if tenant.promise_ratio is None or tenant.progress_ratio is None:
        return None
    return tenant.progress_ratio + (tenant.progress_error_ratio or 0.0) >= tenant.promise_ratio


def processes_of(tenant: TenantStatus) -> int | None:
    """Return how many processes of a tenant MPS serves; None, not 0, if all that it has are outside MPS."""
    is_outside = tenant.trouble is not None and tenant.trouble.kind is TroubleKind.OUTSIDE_MPS
    return None if is_outside and not tenant.clients else tenant.clients


def _is_idle(tenant: TenantStatus) -> bool:
    """Return whether a tenant is known to have no process."""
    return processes_of(tenant) == 0 and tenant.progress_ratio is None


def _progress(tenant: TenantStatus) -> float | None:
    return 0.0 if _is_idle(tenant) else tenant.work_ratio


def _gpu_gain(node: str, gpu: GpuStatus) -> GpuGain:
    progress = [_progress(tenant) for tenant in gpu.tenants]
    known = [each for each in progress if each is not None]
    return GpuGain(
        node=node,
        index=gpu.index,
        model=gpu.model,
        pods=len(gpu.tenants),
        share_percent=sum(tenant.share_percent for tenant in gpu.tenants),
        progress_ratio=sum(known) if len(known) == len(progress) else None,
        unknown=len(progress) - len(known),
    )


def _by_namespace(tenants: Iterable[TenantStatus]) -> tuple[NamespaceGain, ...]:
    groups: dict[str, list[TenantStatus]] = {}
    for tenant in tenants:
        groups.setdefault(tenant.namespace or "", []).append(tenant)
    known = {
        name: [progress for t in group if (progress := _progress(t)) is not None] for name, group in groups.items()
    }
    return tuple(
        NamespaceGain(
            namespace=name,
            pods=len({tenant.pod_uid for tenant in group}),
            asked_gpus=sum(tenant.share_percent for tenant in group) / SHARES_PER_GPU,
            progress_ratio=sum(known[name]) if known[name] else None,
            unknown=len(group) - len(known[name]),
        )
        for name, group in sorted(groups.items())
    )
