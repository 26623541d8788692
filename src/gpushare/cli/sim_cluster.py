"""`gpushare sim cluster`: fill a cluster with a trace's pods and see how much of its GPUs a policy allocates."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from gpushare.cli.console import bars, notes, out
from gpushare.cli.errors import UsageError
from gpushare.cli.files import read_text
from gpushare.cli.live import LiveCluster, cluster_of
from gpushare.cli.snapshot import believing, read_snapshot
from gpushare.core.admission import Defaults
from gpushare.core.placement import NodeSpec, PlacementRequest, Settings
from gpushare.core.placement.policies import NAMES
from gpushare.sim.cluster import CpuPods, fill
from gpushare.sim.openb import TraceError, parse_nodes, parse_pods

NodesFile = Annotated[
    Path | None,
    typer.Option(
        "--nodes",
        help="CSV: sn, cpu_milli, memory_mib, gpu, model[, gpu_memory_mib]; decided by the chart's defaults",
    ),
]
SnapshotFolder = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        help="instead: a folder of gpushare snapshot, for its nodes, empty, and its release's settings and models",
    ),
]
PodsFile = Annotated[
    Path,
    typer.Option(
        "--pods", help="CSV: name, cpu_milli, memory_mib, num_gpu, gpu_milli[, gpu_spec][, gpu_memory_mib]"
    ),
]


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """The result of one run, as printed."""

    policy: str
    seed: int
    allocated_gpu_percent: float
    fragmented_gpu_percent: float
    placed: int
    rejected: dict[str, int]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object; users rely on its keys."""
        return {
            "policy": self.policy,
            "seed": self.seed,
            "allocated_gpu_percent": round(self.allocated_gpu_percent, 4),
            "fragmented_gpu_percent": round(self.fragmented_gpu_percent, 4),
            "placed": self.placed,
            "rejected": self.rejected,
            "seconds": round(self.seconds, 3),
        }


def register(app: typer.Typer) -> None:
    """Add the command to the group `sim`."""
    app.command("cluster")(cluster_command)


def cluster_command(
    pods: PodsFile,
    nodes: NodesFile = None,
    snapshot: SnapshotFolder = None,
    policy: Annotated[
        str | None,
        typer.Option(help="one of " + ", ".join(NAMES) + "; default: what the snapshot is set to, else gpushare"),
    ] = None,
    demand: Annotated[
        float,
        typer.Option(min=0.01, max=100.0, help="GPU demand of all arrivals, as a multiple of the cluster's GPUs"),
    ] = 1.3,
    seed: Annotated[
        int, typer.Option(min=0, help="of the order of arrivals; run i of several takes seed + i")
    ] = 42,
    runs: Annotated[int, typer.Option(min=1, help="how many seeds to run")] = 1,
    cpu_pods: Annotated[
        CpuPods,
        typer.Option(help="who places pods without a GPU: the policy or kube-scheduler's rule"),
    ] = CpuPods.POLICY,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Fill a cluster with a trace's pods in random order until their demand is a multiple of its GPUs.

    With --json: one object of policy, seed, allocated_gpu_percent, fragmented_gpu_percent, placed, rejected (by
    reason) and seconds. With --runs above 1 the same keys hold means over the runs (seconds their sum, seed the
    first), and `runs` lists one such object for each.
    """
    if policy is not None and policy not in NAMES:
        raise UsageError(f'policy "{policy}" is not known; there are {", ".join(NAMES)}')
    cluster = _read_where(nodes, snapshot)
    settings = replace(cluster.settings, policy=policy or cluster.settings.policy)
    trace = read_trace(pods, settings.defaults)
    if nodes is not None:
        check_memories(nodes, cluster.nodes, trace)
    done = _run_all(cluster, trace, settings, demand, range(seed, seed + runs), cpu_pods)
    if as_json:
        typer.echo(json.dumps(done[0].as_json() if runs == 1 else _summary(done)))
    else:
        _print(done, cluster.nodes, demand)


def read_cluster(path: Path) -> list[NodeSpec]:
    """Read the nodes of a CSV file.

    Raises:
        UsageError: it cannot be read or used; the sentence names file, line and column.
    """
    try:
        return parse_nodes(read_text(path), str(path))
    except TraceError as error:
        raise UsageError(str(error)) from error


def check_memories(path: Path, nodes: Iterable[NodeSpec], asked: Iterable[PlacementRequest]) -> None:
    """Refuse pods that name an amount of GPU memory where a table does not say how much its GPUs have.

    Args:
        path: the table that the nodes are from.

    Raises:
        UsageError: such a pod would be refused on these GPUs as if they had no memory at all.
    """
    asker = next((pod for pod in asked if pod.gpu_count and pod.memory_mib), None)
    silent = next((node for node in nodes for gpu in node.gpus if gpu.memory_mib is None), None)
    if asker is not None and silent is not None:
        raise UsageError(
            f"{path}: pod {asker.pod_uid} asks for {asker.memory_mib} MiB of GPU memory, and how much the GPUs of "
            f"node {silent.name} have is not given: add the column gpu_memory_mib, the memory of one GPU in MiB"
        )


def _read_where(nodes: Path | None, snapshot: Path | None) -> LiveCluster:
    """Return the nodes to fill, with their release's settings (the chart's defaults for nodes from a table)."""
    if nodes is not None and snapshot is None:
        return LiveCluster(tuple(read_cluster(nodes)), ())
    if snapshot is None or nodes is not None:
        raise UsageError("say which nodes: either --nodes or --snapshot")
    objects = read_snapshot(snapshot)
    with believing(snapshot):
        found = cluster_of(objects)
    for note in found.notes:
        notes().print(note)
    if not any(node.gpus for node in found.nodes):
        raise UsageError(f"{snapshot}: no node has a GPU that gpushare manages")
    return found


def read_trace(path: Path, defaults: Defaults) -> list[PlacementRequest]:
    """Read the pods of a CSV file.

    Args:
        defaults: the release's defaults for values that the file lacks.

    Raises:
        UsageError: it cannot be read or used; the sentence names file, line and column.
    """
    try:
        return parse_pods(read_text(path), str(path), defaults)
    except TraceError as error:
        raise UsageError(str(error)) from error


def _run_all(
    cluster: LiveCluster,
    trace: list[PlacementRequest],
    settings: Settings,
    demand: float,
    seeds: range,
    cpu_pods: CpuPods,
) -> list[ClusterRun]:
    console = bars()
    done = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for seed in seeds:
            task = bar.add_task(f"{settings.policy}, seed {seed}", total=None)

            def on_arrival(count: int, total: int, task: Any = task) -> None:
                if count % 256 == 0 or count == total:
                    bar.update(task, completed=count, total=total)

            rng = np.random.default_rng(seed)
            started = time.perf_counter()
            result = fill(
                cluster.nodes,
                trace,
                settings,
                model=cluster.model,
                demand_ratio=demand,
                rng=rng,
                cpu_pods=cpu_pods,
                on_arrival=on_arrival,
            )
            done.append(
                ClusterRun(
                    settings.policy,
                    seed,
                    result.allocated_gpu_percent,
                    result.fragmented_gpu_percent,
                    result.placed,
                    {str(reason): count for reason, count in result.rejected.items()},
                    time.perf_counter() - started,
                )
            )
    return done


def _summary(done: list[ClusterRun]) -> dict[str, Any]:
    """Return the means over the runs, and the list of runs."""
    reasons = sorted({reason for run in done for reason in run.rejected})
    return {
        "policy": done[0].policy,
        "seed": done[0].seed,
        "allocated_gpu_percent": round(fmean(run.allocated_gpu_percent for run in done), 4),
        "fragmented_gpu_percent": round(fmean(run.fragmented_gpu_percent for run in done), 4),
        "placed": round(fmean(run.placed for run in done), 1),
        "rejected": {reason: round(fmean(run.rejected.get(reason, 0) for run in done), 1) for reason in reasons},
        "seconds": round(sum(run.seconds for run in done), 3),
        "runs": [run.as_json() for run in done],
    }


def _print(done: list[ClusterRun], nodes: Sequence[NodeSpec], demand: float) -> None:
    gpus = sum(len(node.gpus) for node in nodes)
    table = Table(title=f"{done[0].policy}: {len(nodes)} nodes, {gpus} GPUs, demand {demand:g}")
    for name in ("seed", "allocated", "fragmented", "placed", "rejected", "seconds"):
        table.add_column(name, justify="right")
    for run in done:
        table.add_row(
            str(run.seed),
            f"{run.allocated_gpu_percent:.2f}%",
            f"{run.fragmented_gpu_percent:.2f}%",
            str(run.placed),
            str(sum(run.rejected.values())),
            f"{run.seconds:.1f}",
        )
    if len(done) > 1:
        table.add_section()
        table.add_row(
            "mean",
            f"{fmean(run.allocated_gpu_percent for run in done):.2f}%",
            f"{fmean(run.fragmented_gpu_percent for run in done):.2f}%",
            f"{fmean(run.placed for run in done):.0f}",
            f"{fmean(sum(run.rejected.values()) for run in done):.0f}",
            f"{sum(run.seconds for run in done):.1f}",
        )
    out().print(table)
    reasons: Counter[str] = Counter()
    for run in done:
        reasons.update(run.rejected)
    for reason, count in reasons.most_common():
        out().print(f"  rejected for {reason}: {count / len(done):.0f}")
