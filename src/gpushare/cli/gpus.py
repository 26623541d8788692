"""`gpushare gpus`: the GPUs that gpushare manages, what is free on each, and how busy it is."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

import typer

from gpushare.cli.access import (
    NO_GPUS,
    ContextOption,
    KubeconfigOption,
    Where,
    ask,
    list_ours,
    version_notes,
)
from gpushare.cli.columns import Column, gibibytes, percent, ratio, show, whole_percent
from gpushare.cli.console import notes, out
from gpushare.cli.errors import AbsentError
from gpushare.cli.last_reports import heard
from gpushare.cli.records import Format, FormatOption, emit
from gpushare.core.api import SHARES_PER_GPU, ConditionStatus, GpuNode, GpuStatus, names
from gpushare.core.gpu import Health
from gpushare.kube import GPUNODES, Api

app = typer.Typer(help=__doc__)

_UNKNOWN: Final = "Unknown"
"""Health and MPS of a GPU whose agent is silent."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU; None for unknown figures.

    Attributes:
        gpu: node and index.
        trouble: why it takes no tenants, or what is wrong with its MPS; empty if nothing is.
        sm_ratio: SM use over the last window.
        dram_ratio: use of memory bandwidth over the last window.
        progress_ratio: sum over its tenants; None while one is unknown.
    """

    gpu: str
    uuid: str
    model: str
    health: str
    mps: str
    trouble: str
    pods: int
    used_percent: int
    free_percent: int
    clients: int
    memory_mib: int | None
    memory_used_mib: int | None
    sm_ratio: float | None
    dram_ratio: float | None
    progress_ratio: float | None
    throttled: int


COLUMNS: Final[tuple[Column[GpuRow], ...]] = (
    Column("GPU", lambda row: row.gpu),
    Column("MODEL", lambda row: row.model, rank=6),
    Column("HEALTH", lambda row: row.health, rank=2),
    Column("MPS", lambda row: row.mps, rank=5),
    Column("PODS", lambda row: str(row.pods), rank=3, is_right=True),
    Column("USED", lambda row: whole_percent(row.used_percent), is_right=True),
    Column("FREE", lambda row: whole_percent(row.free_percent), is_right=True),
    Column("SM", lambda row: percent(row.sm_ratio), rank=4, is_right=True),
    Column("DRAM", lambda row: percent(row.dram_ratio), rank=7, is_right=True),
    Column("MEM USED", lambda row: gibibytes(row.memory_used_mib), rank=8, is_right=True),
    Column("MEMORY", lambda row: gibibytes(row.memory_mib), rank=9, is_right=True),
    Column("PROGRESS", lambda row: ratio(row.progress_ratio), rank=1, is_right=True),
    Column("CLIENTS", lambda row: str(row.clients), rank=10, is_right=True, wide_only=True),
    Column("THROTTLED", lambda row: str(row.throttled), rank=10, is_right=True, wide_only=True),
    Column("UUID", lambda row: row.uuid, rank=10, wide_only=True),
)


def gpu_rows(nodes: Iterable[GpuNode]) -> list[GpuRow]:
    """Return one row per GPU, sorted by node and index."""
    found = [(node, gpu) for node in nodes for gpu in node.status.gpus]
    return [_row(node, gpu) for node, gpu in sorted(found, key=lambda each: (each[0].name, each[1].index))]


def _row(node: GpuNode, gpu: GpuStatus) -> GpuRow:
    used = sum(tenant.share_percent for tenant in gpu.tenants)
    progress = [tenant.work_ratio for tenant in gpu.tenants]
    known = [each for each in progress if each is not None]
    return GpuRow(
        gpu=f"{node.name}/{gpu.index}",
        uuid=gpu.uuid,
        model=gpu.model,
        health=_UNKNOWN if node.silent_since else gpu.health.value,
        mps=_UNKNOWN if node.silent_since else gpu.mps.state.value,
        trouble=gpu.health_reason or gpu.mps.message or "",
        pods=len(gpu.tenants),
        used_percent=used,
        free_percent=max(SHARES_PER_GPU - used, 0) if gpu.health is Health.HEALTHY else 0,
        clients=gpu.mps.clients,
        memory_mib=gpu.memory_mib or None,
        memory_used_mib=gpu.memory_used_mib,
        sm_ratio=gpu.utilization.sm if gpu.utilization else None,
        dram_ratio=gpu.utilization.dram if gpu.utilization else None,
        progress_ratio=sum(known) if progress and len(known) == len(progress) else None,
        throttled=sum(bool(tenant.throttle_ratio) for tenant in gpu.tenants),
    )


def lacking(nodes: Iterable[GpuNode]) -> list[str]:
    """Return a note on each node whose agent cannot read some of its GPUs, or none."""
    return [
        f"{node.name}: {condition.message}"
        for node in sorted(nodes, key=lambda each: each.name)
        for condition in node.status.conditions
        if condition.type == names.DEVICES_READY
        and condition.status is ConditionStatus.FALSE
        and not node.silent_since
    ]


async def read_nodes(api: Api) -> tuple[list[GpuNode], tuple[str, ...]]:
    """Read the GpuNodes, and notes about them.

    Raises:
        CommandError: the cluster has no gpushare, or another version.
        Forbidden: the GpuNodes may not be read.
    """
    now = time.time()
    nodes = await list_ours(api, GPUNODES, lambda obj: heard(GpuNode.from_object(obj), now))
    return nodes, await version_notes(api)


@app.callback()
def gpus(
    output: FormatOption = Format.TABLE, kubeconfig: KubeconfigOption = None, context: ContextOption = None
) -> None:
    """List the GPUs that gpushare manages, what is free on each, and how busy it is. Exit code 3 without a GPU."""
    nodes, remarks = ask(Where(None, kubeconfig, context), read_nodes)
    for note in remarks:
        notes().print(note)
    for note in lacking(nodes):
        notes().print(note)
    found = gpu_rows(nodes)
    if output.is_data:
        emit([asdict(row) for row in found], output)
    if not found:
        raise AbsentError(NO_GPUS)
    if output.is_data:
        return
    show(out(), COLUMNS, found, wide=output is Format.WIDE, style=lambda row: "red" if row.trouble else "")
    for row in found:
        if row.trouble:
            notes().print(f"{row.gpu}: {row.trouble}")
