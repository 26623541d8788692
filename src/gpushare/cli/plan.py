"""`gpushare plan`: where pods would go on a cluster, and why not elsewhere, without touching it.

The mix of pods to expect is learnt from the pods of this moment. The extender learns a change of it within half a
minute; until then it may rank GPUs that all fit in another order. Nodes that kube-scheduler would not ask the
extender about are refused with kube-scheduler's reason.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from gpushare.cli.access import EXPLAINER, Where, ask
from gpushare.cli.console import bars, notes, out
from gpushare.cli.errors import UsageError
from gpushare.cli.live import LiveCluster, cluster_of, read_cluster
from gpushare.cli.manifests import read_manifests
from gpushare.cli.scheduler_filters import SchedulerFilters
from gpushare.cli.sim_cluster import check_memories, read_trace
from gpushare.cli.sim_cluster import read_cluster as read_nodes
from gpushare.cli.snapshot import believing, read_snapshot
from gpushare.core.api import Rejection
from gpushare.core.placement import (
    GPU_MILLI,
    Candidates,
    ClusterState,
    DecisionContext,
    Judge,
    Placement,
    PlacementRequest,
    Undecided,
    decide,
    elsewhere_of,
    nominating,
    survey,
)
from gpushare.core.placement.policies import NAMES

app = typer.Typer(help=__doc__)

SHOWN_REASONS = 3  # sentences of refused nodes in the table; JSON has all


@dataclass(frozen=True, slots=True)
class Line:
    """The plan for one pod.

    Attributes:
        decided: where it would go, or why nowhere.
        fits_on: number of nodes on which it fits, the chosen one included.
        refused: for each refusal (reason, sentence, number of nodes, one of them).
    """

    request: PlacementRequest
    decided: Placement | Rejection
    fits_on: int
    refused: tuple[tuple[str, str, int, str], ...]

    def as_json(self) -> dict[str, Any]:
        """Return one object for a pod."""
        found: dict[str, Any] = {"pod": self.request.pod_uid}
        if isinstance(self.decided, Rejection):
            found |= {"node": None, "reason": str(self.decided.reason), "detail": self.decided.detail}
        else:
            found |= {
                "node": self.decided.node,
                "gpus": list(self.decided.gpu_uuids),
                "memory_mib": self.decided.memory_mib or (None if self.decided.gpu_uuids else 0),
                "thread_percentage": self.decided.thread_percentage,
            }
        found["fits_on"] = self.fits_on
        found["elsewhere"] = [
            {"reason": reason, "detail": detail, "nodes": count, "example": node}
            for reason, detail, count, node in self.refused
        ]
        return found


@app.callback()
def plan(
    pods: Annotated[
        Path, typer.Option("--pods", help="manifests (YAML or JSON), or a CSV (.csv) as of gpushare sim cluster")
    ],
    snapshot: Annotated[
        Path | None,
        typer.Option("--snapshot", help="folder written by gpushare snapshot; default: the live cluster"),
    ] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            "--nodes",
            help="plan for an empty cluster of these nodes (CSV: sn, cpu_milli, memory_mib, gpu, model"
            "[, gpu_memory_mib])",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="one of " + ", ".join(NAMES) + "; default: what the cluster is set to"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the policy random")] = 0,
    kubeconfig: Annotated[str | None, typer.Option(help="default: $KUBECONFIG or ~/.kube/config")] = None,
    context: Annotated[str | None, typer.Option(help="context of the kubeconfig")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say where pods would go one after the other, and why not elsewhere. Exit code 1 when one fits nowhere."""
    if policy is not None and policy not in NAMES:
        raise UsageError(f'policy "{policy}" is not known; there are {", ".join(NAMES)}')
    if snapshot is not None and nodes is not None:
        raise UsageError("--snapshot and --nodes exclude each other")
    cluster = _cluster(snapshot, nodes, kubeconfig, context)
    asked = (
        read_trace(pods, cluster.settings.defaults)
        if pods.suffix.lower() == ".csv"
        else read_manifests(pods, cluster.request_of, notes().print)
    )
    if nodes is not None:
        check_memories(nodes, cluster.nodes, asked)
    console = bars()
    for note in cluster.notes:
        notes().print(note)
    packing = context_of(cluster, asked, policy=policy, seed=seed)
    filters = SchedulerFilters(cluster.scheduler_nodes)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        lines = [plan_one(request, packing, filters) for request in bar.track(asked, description="placing")]
    if as_json:
        typer.echo(json.dumps({"policy": packing.policy.name, "pods": [line.as_json() for line in lines]}))
    else:
        out().print(_table(lines))
    if any(isinstance(line.decided, Rejection) for line in lines):
        raise typer.Exit(1)


def plan_one(request: PlacementRequest, context: DecisionContext, filters: SchedulerFilters) -> Line:
    """Place one pod and reserve its place for the pods after it; a running pod of the same name stays."""
    excluded = filters.excluded(request, context)
    found = survey(request, context, excluded=excluded)
    decided = decide(request, context, excluded=excluded)
    if isinstance(decided, Placement):
        uid = f"plan-{len(context.state.reservations)}/{request.pod_uid}"
        context.state.reserve(uid, decided, replace(request, pod_uid=uid), context.now)
    return Line(request, decided, len(found.rows), _refused(found))


def context_of(
    cluster: LiveCluster, asked: Iterable[PlacementRequest], *, policy: str | None = None, seed: int = 0
) -> DecisionContext:
    """Return the context of decisions on a cluster, as the extender had it when the cluster was read.

    Args:
        asked: requests to decide about; policies that know the mix in advance expect them too.
        policy: instead of the one that the cluster is set to.
        seed: of the policy random.
    """
    state = state_of(cluster)
    context = DecisionContext.of(
        state,
        replace(cluster.settings, policy=policy or cluster.settings.policy),
        Judge(cluster.model, headroom_ratio=cluster.settings.slowdown_headroom_ratio),
        now=time.time() if cluster.read_at is None else cluster.read_at,
        history=Counter(state.reserved_shapes) + Counter(request.shape for request in asked),
        rng=np.random.default_rng(seed),
    ).keeping(cluster.waiting)
    if cluster.nominated:
        context = nominating(context, cluster.nominated, cluster.leaving).keeping(cluster.waiting, goes_on=True)
    return context


def state_of(cluster: LiveCluster) -> ClusterState:
    """Return the engine's state of a cluster, with the pods that run there."""
    state = ClusterState(cluster.nodes, gpu_memory_reserve_mib=cluster.settings.gpu_memory_reserve_mib)
    for uuid in cluster.unhealthy:
        state.set_health(uuid, healthy=False)
    for node in cluster.unreadable:
        state.set_reading(node, works=False)
    for node, seconds in cluster.silent.items():
        state.set_silence(node, seconds)
    for request, placement in cluster.pods:
        if placement is not None:
            state.reserve(request.pod_uid, placement, request, cluster.since.get(request.pod_uid, 0.0))
    undecided = Undecided(state)
    for pod in cluster.undecided:
        undecided.hold(pod.key, pod.node, pod.limit_percent)
        undecided.place(pod.key, pod.gpu_uuids)
    return state


def _cluster(
    snapshot: Path | None, nodes: Path | None, kubeconfig: str | None, context: str | None
) -> LiveCluster:
    if nodes is not None:
        return LiveCluster(tuple(read_nodes(nodes)), ())
    if snapshot is not None:
        objects = read_snapshot(snapshot)
        with believing(snapshot):
            cluster = cluster_of(objects)
            state_of(cluster)
        return cluster
    where = Where(None, kubeconfig, context)
    return ask(where, read_cluster, role=EXPLAINER, instead="--snapshot or --nodes")


def _refused(found: Candidates) -> tuple[tuple[str, str, int, str], ...]:
    """Return refusals grouped by sentence, the most frequent first."""
    return tuple(
        (str(each.rejection.reason), each.rejection.detail, each.nodes, each.example)
        for each in elsewhere_of(found)
    )


def _table(lines: list[Line]) -> Table:
    table = Table()
    for title in ("pod", "asks", "goes to", "why not elsewhere"):
        table.add_column(title, overflow="fold")
    for line in lines:
        if isinstance(line.decided, Placement):
            cap = line.decided.thread_percentage
            where = "\n".join([line.decided.node, *line.decided.gpu_uuids, *([f"at {cap}%"] if cap else [])])
        else:
            where = f"nowhere: {line.decided.reason}"
        why = []
        if line.fits_on > 1:
            why.append(f"{line.fits_on - 1} more fit, not better ranked")
        for _, detail, count, example in line.refused[:SHOWN_REASONS]:
            why.append(f"{example}: {detail}" if count == 1 else f"{count} nodes such as {example}: {detail}")
        if len(line.refused) > SHOWN_REASONS:
            why.append(f"and {len(line.refused) - SHOWN_REASONS} more reasons (--json has them)")
        table.add_row(line.request.pod_uid, _asks(line.request), where, "\n".join(why) or "there is no other node")
    return table


def _asks(request: PlacementRequest) -> str:
    if not request.gpu_count:
        return "no GPU"
    if request.share_milli == GPU_MILLI:
        return f"{request.gpu_count} GPU{'s' * (request.gpu_count > 1)}"
    return f"{request.share_milli / 10:g}%"
