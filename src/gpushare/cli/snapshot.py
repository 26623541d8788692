"""`gpushare snapshot`: save a live cluster in files, for `gpushare plan` and `gpushare sim cluster`."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from gpushare.cli.access import EXPLAINER, NO_GPUS, Where, ask
from gpushare.cli.console import notes
from gpushare.cli.errors import AbsentError, UsageError
from gpushare.cli.files import check_named, read_text, write_whole
from gpushare.cli.live import Objects, cluster_of, read_objects
from gpushare.sim.openb import fits_format, format_nodes, format_pods

app = typer.Typer(help=__doc__)

NODES_FILE = "nodes.csv"
PODS_FILE = "pods.csv"
OBJECTS_FILE = "cluster.json"


@app.callback()
def snapshot(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="the folder to write cluster.json, nodes.csv and pods.csv into")
    ],
    kubeconfig: Annotated[str | None, typer.Option(help="default: $KUBECONFIG or ~/.kube/config")] = None,
    context: Annotated[str | None, typer.Option(help="context of the kubeconfig")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Write a live cluster into files: settings, models, nodes, GPUs, GpuShares and pods, without secrets."""
    check_named(output, "a snapshot's folder")
    objects = ask(Where(None, kubeconfig, context), read_objects, role=EXPLAINER)
    cluster = cluster_of(objects)
    remarks = (*cluster.notes, *save(objects, output))
    waiting = sum(placement is None for _, placement in cluster.pods)
    if as_json:
        found = {
            "nodes": len(cluster.nodes),
            "gpus": sum(len(node.gpus) for node in cluster.nodes),
            "pods": len(cluster.pods),
            "waiting": waiting,
            "notes": remarks,
        }
        typer.echo(json.dumps(found))
        return
    console = notes()
    for note in remarks:
        console.print(note)
    if cluster.unhealthy:
        console.print(f"{len(cluster.unhealthy)} unhealthy GPUs are written to {NODES_FILE} like healthy ones")
    typer.echo(
        f"{output}: {len(cluster.nodes)} nodes with {sum(len(node.gpus) for node in cluster.nodes)} GPUs, "
        f"{len(cluster.pods)} pods, {waiting} of them waiting"
    )


def save(objects: Objects, folder: Path) -> tuple[str, ...]:
    """Write all three files, or none; return a sentence on each node that the tables cannot describe.

    `plan` and `sim cluster` read cluster.json, which has every node.

    Raises:
        AbsentError: there is no GPU. UsageError: the folder cannot be written.
    """
    cluster = cluster_of(objects)
    if not any(node.gpus for node in cluster.nodes):
        raise AbsentError(NO_GPUS)
    told = [node for node in cluster.nodes if fits_format(node)]
    untold = [node.name for node in cluster.nodes if not fits_format(node)]
    nodes = format_nodes(told)
    pods = format_pods((pod for pod in cluster.pods if pod[1] is None or pod[1].node not in untold), told)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from error
    write_whole(folder / NODES_FILE, nodes)
    write_whole(folder / PODS_FILE, pods)
    write_whole(folder / OBJECTS_FILE, json.dumps(asdict(objects), indent=1) + "\n")
    return tuple(
        f"{NODES_FILE} and {PODS_FILE} leave out node {name} and its pods: their format has one GPU model and "
        f"memory size for a node; {OBJECTS_FILE} has it"
        for name in untold
    )


@contextmanager
def believing(folder: Path) -> Iterator[None]:
    """Turn errors about a snapshot's objects, which a person may have edited, into one sentence.

    Raises:
        UsageError: an object does not have the form that `gpushare snapshot` writes.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{folder / OBJECTS_FILE}: is not what gpushare snapshot writes: {type(error).__name__}: {error}; "
            "take it again"
        ) from error


def read_snapshot(folder: Path) -> Objects:
    """Read the files written by `save`.

    Raises:
        UsageError: a file is missing, or was not written by `gpushare snapshot`.
    """
    path = folder / OBJECTS_FILE
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if (folder / NODES_FILE).is_file():
            raise UsageError(
                f"{folder} has no {OBJECTS_FILE}: an older gpushare wrote it, so take it again with gpushare "
                f"snapshot, or plan for its nodes without their pods (--nodes {folder / NODES_FILE})"
            ) from None
        raise UsageError(
            f"{folder} holds no {OBJECTS_FILE}: name a folder that gpushare snapshot wrote (its --output)"
        ) from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        found = _objects_of(json.loads(read_text(path)))
        if found.read_at is not None and not math.isfinite(found.read_at):
            raise ValueError(f"read_at {found.read_at} is not a time")
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: is not what gpushare snapshot writes: {error}; take it again") from error


def _objects_of(document: object) -> Objects:
    """Return the objects that a snapshot's JSON holds.

    Raises:
        ValueError: it is no JSON object, lacks a key, or has one that is not known.
    """
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    known = {field.name: field.default for field in fields(Objects)}
    for name, default in known.items():
        if default is MISSING and name not in document:
            raise ValueError(f'"{name}" is missing')
    for name in document:
        if name not in known:
            raise ValueError(f'"{name}" is not known')
    return Objects(**document)
