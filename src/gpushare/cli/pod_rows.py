"""Pods that share GPUs, one row each: request, place, promise, and present progress."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from gpushare.cli.columns import Column, gibibytes, percent, ratio, whole_percent
from gpushare.cli.targets import PodTarget, figures_of, target_of
from gpushare.core.admission import ShareIndex
from gpushare.core.api import (
    GpuNode,
    GpuShare,
    GpuStatus,
    JobClass,
    PodPlacement,
    PodView,
    TenantStatus,
    deletion_of,
    gates_of,
    names,
    not_scheduled,
    waiting_reason,
)
from gpushare.kube import Json


@dataclass(frozen=True, slots=True)
class TopRow:
    """One pod as the table shows it; None for unknown figures, never a guess.

    Attributes:
        state: the pod's phase, or why it waits.
        gpu: node and index of its GPU; several are separated by commas.
        share_percent: guaranteed percent of each of its GPUs.
        thread_percentage: its cap.
        promise_ratio: promised progress, relative to running alone.
        progress_ratio: relative to running alone, the worst of its GPUs.
        throttle_ratio: part of the time that it is stopped to keep a neighbour's promise.
        target: its own target and how it fares against it; None if it names none.
    """

    namespace: str
    pod: str
    workload: str
    job_class: str
    state: str
    gpu: str | None
    share_percent: int | None
    thread_percentage: int | None
    memory_limit_mib: int | None
    memory_used_mib: int | None
    promise_ratio: float | None
    progress_ratio: float | None
    slowdown_ratio: float | None
    throttle_ratio: float | None
    target: PodTarget | None

    @property
    def slack_ratio(self) -> float | None:
        """Return the progress above the promise; below 0 it is broken; None while either is unknown."""
        if self.progress_ratio is None or self.promise_ratio is None:
            return None
        return self.progress_ratio - self.promise_ratio


COLUMNS: Final[tuple[Column[TopRow], ...]] = (
    Column("NAMESPACE", lambda row: row.namespace, rank=7),
    Column("POD", lambda row: row.pod),
    Column("WORKLOAD", lambda row: row.workload, rank=8),
    Column("CLASS", lambda row: row.job_class, rank=9),
    Column("STATE", lambda row: row.state, rank=3),
    Column("GPU", lambda row: row.gpu, rank=2),
    Column("SHARE", lambda row: whole_percent(row.share_percent), rank=1, is_right=True),
    Column("CAP", lambda row: whole_percent(row.thread_percentage), rank=5, is_right=True),
    Column("MEM LIMIT", lambda row: gibibytes(row.memory_limit_mib), rank=10, is_right=True),
    Column("MEM USED", lambda row: gibibytes(row.memory_used_mib), rank=6, is_right=True),
    Column("PROMISE", lambda row: ratio(row.promise_ratio), rank=4, is_right=True),
    Column("PROGRESS", lambda row: ratio(row.progress_ratio), is_right=True),
    Column("TARGET", lambda row: figures_of(row.target) if row.target else None, rank=2, where_known=True),
    Column("STOPPED", lambda row: percent(row.throttle_ratio), rank=5, is_right=True),
    Column("SLOWDOWN", lambda row: _times(row.slowdown_ratio), rank=11, is_right=True),
)


def rows(pods: Iterable[Json], nodes: Iterable[GpuNode], shares: Iterable[GpuShare] = ()) -> list[TopRow]:
    """Return the rows of pods from the agents' and GpuShares' reports, sorted by GPU, waiting pods last.

    If the GpuNodes may not be read, most figures come from the GpuShares.
    """
    listed, reports = tuple(shares), tuple(nodes)
    index = ShareIndex(listed)
    by_share = {placement.pod_uid: placement for share in listed for placement in share.status.placements}
    tenants: dict[str, list[tuple[GpuStatus, TenantStatus]]] = {}
    gpu_names: dict[str, str] = {}
    for node in reports:
        for gpu in node.status.gpus:
            gpu_names[gpu.uuid] = f"{node.name}/{gpu.index}"
            for tenant in gpu.tenants:
                tenants.setdefault(tenant.pod_uid, []).append((gpu, tenant))
    found = [
        _row(
            view,
            _state(pod),
            tenants.get(view.uid, []),
            by_share.get(view.uid),
            gpu_names,
            index,
            was_read=bool(reports),
        )
        for pod, view in ((pod, PodView.from_object(pod)) for pod in pods)
        if not view.finished
    ]
    return sorted(found, key=lambda row: (row.gpu is None, row.gpu or "", row.namespace, row.pod))


def _row(
    pod: PodView,
    state: str,
    seen: Sequence[tuple[GpuStatus, TenantStatus]],
    placement: PodPlacement | None,
    gpu_names: Mapping[str, str],
    shares: ShareIndex,
    *,
    was_read: bool,
) -> TopRow:
    decision = pod.decision
    uuids = decision.gpu_uuids if decision else tuple(gpu.uuid for gpu, _ in seen)
    figures: Sequence[TenantStatus | PodPlacement] = [tenant for _, tenant in seen]
    if not figures and placement is not None:
        figures = [placement]
    progress = [each.progress_ratio for each in figures if each.progress_ratio is not None]
    slowdown = [each.slowdown_ratio for each in figures if each.slowdown_ratio is not None]
    # the promise comes from its GpuShare, or from its agent while the GpuShare has none
    promised = [placement] if placement is not None and placement.promise_ratio is not None else figures
    promise = [each.promise_ratio for each in promised if each.promise_ratio is not None]
    throttle = [each.throttle_ratio for each in figures if each.throttle_ratio]
    used = [tenant.memory_used_mib for _, tenant in seen if tenant.memory_used_mib is not None]
    limits = [each.memory_limit_mib for each in figures if each.memory_limit_mib is not None]
    return TopRow(
        namespace=pod.namespace,
        pod=pod.name,
        workload=pod.annotations.get(names.WORKLOAD) or (pod.controller[1] if pod.controller else pod.name),
        job_class=pod.annotations.get(names.CLASS) or _class_of(pod, shares) or JobClass.THROUGHPUT.value,
        state=state,
        gpu=", ".join(gpu_names.get(uuid) or _unnamed(pod.node, uuid) for uuid in uuids) or None,
        share_percent=seen[0][1].share_percent if seen else (pod.limit_percent // max(len(uuids), 1) or None),
        thread_percentage=decision.thread_percentage if decision else None,
        memory_limit_mib=decision.memory_limit_mib if decision else min(limits, default=None),
        memory_used_mib=sum(used) if seen and len(used) == len(seen) else None,  # a partial sum would be wrong
        promise_ratio=min(promise, default=None),
        progress_ratio=min(progress, default=None),
        slowdown_ratio=max(slowdown, default=None),
        throttle_ratio=max(throttle, default=None),
        target=target_of(pod, (tenant.slo for _, tenant in seen), was_read=was_read),
    )


def _unnamed(node: str | None, uuid: str) -> str:
    """Return a name for a GPU that no GpuNode lists."""
    return f"{node}/{uuid}" if node else uuid


def _class_of(pod: PodView, shares: ShareIndex) -> str | None:
    """Return the class from the pod's GpuShare, whose status includes the chart's default."""
    share = shares.of(pod.namespace, pod.labels, (*pod.owner_uids, pod.uid))
    return (share.spec.job_class or share.status.job_class) if share is not None else None


def _state(pod: Json) -> str:
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if deletion_of(pod["metadata"])[0]:
        return "Terminating"
    if reason := waiting_reason(status):
        return reason
    if gates_of(spec):
        return "SchedulingGated"
    if (condition := not_scheduled(status)) is not None:
        return str(condition.get("reason") or "Pending")
    return str(status.get("phase") or "Pending")


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


class SortKey(StrEnum):
    """Sort keys of a list of pods."""

    GPU = "gpu"
    NAME = "name"
    PROGRESS = "progress"
    SHARE = "share"
    MEMORY = "memory"
    BROKEN = "broken"


def _unknown_last(value: float | None, *, descending: bool = False) -> tuple[bool, float]:
    return value is None, 0.0 if value is None else -value if descending else value


_KEYS: Final[Mapping[SortKey, Callable[[TopRow], Any]]] = {
    SortKey.GPU: lambda row: (row.gpu is None, row.gpu or ""),
    SortKey.NAME: lambda row: (row.namespace, row.pod),
    SortKey.PROGRESS: lambda row: _unknown_last(row.progress_ratio),
    SortKey.SHARE: lambda row: _unknown_last(row.share_percent, descending=True),
    SortKey.MEMORY: lambda row: _unknown_last(row.memory_used_mib, descending=True),
    SortKey.BROKEN: lambda row: _unknown_last(row.slack_ratio),
}


def ordered(found: Iterable[TopRow], key: SortKey, *, is_reversed: bool = False) -> list[TopRow]:
    """Sort rows: those that need attention first, unknown values last, equal ones by name."""
    by_name = sorted(found, key=lambda row: (row.namespace, row.pod))
    return sorted(by_name, key=_KEYS[key], reverse=is_reversed)


def style_of(row: TopRow) -> str:
    """Return the colour of a row: red below its promise or its target, yellow while it waits or is throttled."""
    if (row.slack_ratio is not None and row.slack_ratio < 0) or (row.target is not None and row.target.is_missed):
        return "red"
    return "yellow" if row.gpu is None or row.throttle_ratio else ""
