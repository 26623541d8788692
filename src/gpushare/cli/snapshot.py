"""`gpushare snapshot`: a live cluster in the files that `gpushare sim cluster` and `gpushare plan` take."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gpushare.cli.errors import UsageError
from gpushare.cli.files import write_whole
from gpushare.cli.live import Cluster, read_cluster
from gpushare.kube import ApiError, connect
from gpushare.sim.openb import format_nodes, format_pods

app = typer.Typer(help=__doc__)

NODES_FILE = "nodes.csv"
PODS_FILE = "pods.csv"


@app.callback(invoke_without_command=True)
def snapshot(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the folder to write nodes.csv and pods.csv into")
    ],
    kubeconfig: Annotated[str | None, typer.Option(help="default: $KUBECONFIG or ~/.kube/config")] = None,
    context: Annotated[str | None, typer.Option(help="context of the kubeconfig")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Read nodes, GPUs and annotated pods of a live cluster into nodes.csv and pods.csv."""
    try:
        cluster = asyncio.run(_read(kubeconfig, context))
    except ApiError as error:
        raise UsageError(f"cannot read the cluster: {error}") from error
    save(cluster, output)
    waiting = sum(placement is None for _, placement in cluster.pods)
    if as_json:
        found = {
            "nodes": len(cluster.nodes),
            "gpus": sum(len(node.gpus) for node in cluster.nodes),
            "pods": len(cluster.pods),
            "waiting": waiting,
            "notes": cluster.notes,
        }
        typer.echo(json.dumps(found))
        return
    for note in cluster.notes:
        Console(stderr=True).print(note)
    if cluster.unhealthy:
        Console(stderr=True).print(f"{len(cluster.unhealthy)} unhealthy GPUs are written like healthy ones")
    typer.echo(
        f"{output}: {len(cluster.nodes)} nodes with {sum(len(node.gpus) for node in cluster.nodes)} GPUs, "
        f"{len(cluster.pods)} pods, {waiting} of them waiting"
    )


def save(cluster: Cluster, folder: Path) -> None:
    """Write both files, or neither.

    Raises:
        UsageError: there is nothing to write, or the folder cannot be written.
    """
    if not any(node.gpus for node in cluster.nodes):
        raise UsageError("the cluster has no GPU that gpushare manages (no GpuNode lists one)")
    try:
        nodes = format_nodes(cluster.nodes)
    except ValueError as error:
        raise UsageError(str(error)) from error
    pods = format_pods(cluster.pods, cluster.nodes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from error
    write_whole(folder / NODES_FILE, nodes)
    write_whole(folder / PODS_FILE, pods)


async def _read(kubeconfig: str | None, context: str | None) -> Cluster:
    async with connect(kubeconfig, context=context) as api:
        return await read_cluster(api)
