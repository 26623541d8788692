"""`gpushare top`: who shares which GPU, at what cap, what each may count on, and how it fares."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from gpushare.cli.console import out
from gpushare.cli.errors import UsageError
from gpushare.core.admission import ShareIndex
from gpushare.core.api import GpuNode, GpuShare, GpuStatus, JobClass, PodView, TenantStatus, names
from gpushare.kube import GPUNODES, GPUSHARES, PODS, Api, ApiError, Json, connect

app = typer.Typer(help=__doc__)

REFRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class TopRow:
    """One pod as the table shows it; None where nothing is known yet, never a guess.

    Attributes:
        state: the pod's phase, or why it waits.
        gpu: node and index of its GPU, several joined by a comma.
        share_percent: of each of its GPUs, guaranteed.
        thread_percentage: its cap.
        promise_ratio: progress that it may count on.
        progress_ratio: relative to running alone, the worst of its GPUs.
        throttle_ratio: part of the time that it is kept stopped for a neighbour's promise.
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
    throttle_ratio: float | None
    slowdown_ratio: float | None


def rows(pods: Iterable[Json], nodes: Iterable[GpuNode], shares: Iterable[GpuShare] = ()) -> list[TopRow]:
    """Join pods with what the agents and their GpuShares say about them; sorted by GPU, waiting pods last."""
    index = ShareIndex(shares)
    tenants: dict[str, list[tuple[str, GpuStatus, TenantStatus]]] = {}
    gpu_names: dict[str, str] = {}
    for node in nodes:
        for gpu in node.status.gpus:
            gpu_names[gpu.uuid] = f"{node.name}/{gpu.index}"
            for tenant in gpu.tenants:
                tenants.setdefault(tenant.pod_uid, []).append((node.name, gpu, tenant))
    found = [
        _row(view, _state(pod), tenants.get(view.uid, []), gpu_names, index)
        for pod, view in ((pod, PodView.from_object(pod)) for pod in pods)
        if not view.finished
    ]
    return sorted(found, key=lambda row: (row.gpu is None, row.gpu or "", row.namespace, row.pod))


def _row(
    pod: PodView,
    state: str,
    seen: list[tuple[str, GpuStatus, TenantStatus]],
    gpu_names: Mapping[str, str],
    shares: ShareIndex,
) -> TopRow:
    decision = pod.decision
    uuids = decision.gpu_uuids if decision else tuple(gpu.uuid for _, gpu, _ in seen)
    progress = [t.progress_ratio for _, _, t in seen if t.progress_ratio is not None]
    slowdown = [t.slowdown_ratio for _, _, t in seen if t.slowdown_ratio is not None]
    throttle = [t.throttle_ratio for _, _, t in seen if t.throttle_ratio]
    used = [t.memory_used_mib for _, _, t in seen if t.memory_used_mib is not None]
    limits = [t.memory_limit_mib for _, _, t in seen if t.memory_limit_mib is not None]
    share = shares.of(pod.namespace, pod.labels, (*pod.owner_uids, pod.uid))
    return TopRow(
        namespace=pod.namespace,
        pod=pod.name,
        workload=pod.annotations.get(names.WORKLOAD) or (pod.controller[1] if pod.controller else pod.name),
        job_class=pod.annotations.get(names.CLASS) or _class_of(share) or JobClass.THROUGHPUT.value,
        state=state,
        gpu=", ".join(gpu_names.get(uuid, uuid) for uuid in uuids) or None,
        share_percent=seen[0][2].share_percent if seen else (pod.limit_percent // max(len(uuids), 1) or None),
        thread_percentage=decision.thread_percentage if decision else None,
        memory_limit_mib=decision.memory_limit_mib if decision else min(limits, default=None),
        memory_used_mib=sum(used) if seen and len(used) == len(seen) else None,  # a part is no sum
        promise_ratio=_promise_of(pod, share, [t for _, _, t in seen]),
        progress_ratio=min(progress, default=None),
        throttle_ratio=max(throttle, default=None),
        slowdown_ratio=max(slowdown, default=None),
    )


def _class_of(share: GpuShare | None) -> str | None:
    """What the pod's GpuShare says; its status knows the chart's default too."""
    return (share.spec.job_class or share.status.job_class) if share is not None else None


def _promise_of(pod: PodView, share: GpuShare | None, seen: Iterable[TenantStatus]) -> float | None:
    """What its GpuShare says it may count on, else its agent."""
    placements = share.status.placements if share is not None else ()
    promised = [placement.promise_ratio for placement in placements if placement.pod_uid == pod.uid]
    if not any(promised):
        promised = [tenant.promise_ratio for tenant in seen]
    return min((each for each in promised if each is not None), default=None)


def _state(pod: Json) -> str:
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    for container in status.get("containerStatuses") or []:
        if reason := ((container.get("state") or {}).get("waiting") or {}).get("reason"):
            return str(reason)
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or "Pending")
    return str(status.get("phase") or "Pending")


async def _read(api: Api, namespace: str | None) -> list[TopRow]:
    def whole(obj: Json) -> Json:
        return obj

    pods = await api.list(PODS, whole, namespace=namespace, label_selector=names.MANAGED_SELECTOR)
    nodes = await api.list(GPUNODES, GpuNode.from_object)
    shares = await api.list(GPUSHARES, GpuShare.from_object, namespace=namespace)
    return rows(pods.items, nodes.items, shares.items)


def render(found: Iterable[TopRow]) -> Table:
    """The table for people."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (
        ("POD", "left"),
        ("WORKLOAD", "left"),
        ("CLASS", "left"),
        ("STATE", "left"),
        ("GPU", "left"),
        ("SHARE", "right"),
        ("CAP", "right"),
        ("MEM LIMIT", "right"),
        ("MEM USED", "right"),
        ("PROMISE", "right"),
        ("PROGRESS", "right"),
        ("STOPPED", "right"),
        ("SLOWDOWN", "right"),
    ):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # a Literal, as above
    for row in found:
        table.add_row(
            f"{row.namespace}/{row.pod}",
            row.workload,
            row.job_class,
            row.state,
            row.gpu or "-",
            _shown(row.share_percent, "{}%"),
            _shown(row.thread_percentage, "{}%"),
            _shown(row.memory_limit_mib, "{} MiB"),
            _shown(row.memory_used_mib, "{} MiB"),
            _shown(row.promise_ratio, "{:.2f}"),
            _shown(row.progress_ratio, "{:.2f}"),
            _shown(row.throttle_ratio, "{:.0%}"),
            _shown(row.slowdown_ratio, "{:.2f}x"),
        )
    return table


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


@app.callback(invoke_without_command=True)
def top(
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="only this namespace")] = None,
    kubeconfig: Annotated[str | None, typer.Option(help="default: $KUBECONFIG or ~/.kube/config")] = None,
    context: Annotated[str | None, typer.Option(help="context of the kubeconfig")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="print anew every 2 s")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show who shares which GPU, at what cap, what each one may count on, and how it fares beside the others."""
    try:
        asyncio.run(_top(namespace, kubeconfig, context, watch=watch, as_json=as_json))
    except ApiError as error:
        raise UsageError(f"cannot read the cluster: {error}") from error
    except KeyboardInterrupt:
        return


async def _top(
    namespace: str | None, kubeconfig: str | None, context: str | None, *, watch: bool, as_json: bool
) -> None:
    console = out()
    async with connect(kubeconfig, context=context) as api:
        while True:
            found = await _read(api, namespace)
            if as_json:
                typer.echo(json.dumps([asdict(row) for row in found]))
            else:
                if watch and console.is_terminal:
                    console.clear()
                console.print(render(found) if found else "no pod shares a GPU yet")
            if not watch:
                return
            await asyncio.sleep(REFRESH_SECONDS)
