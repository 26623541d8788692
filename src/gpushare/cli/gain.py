"""`gpushare gain`: what sharing gains now, as progress against the GPUs that are used."""

from dataclasses import asdict
from typing import Any, Final

import typer

from gpushare.cli.access import (
    NO_GPUS,
    AllOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    Where,
    ask,
)
from gpushare.cli.columns import Column, ratio, show, whole_percent
from gpushare.cli.console import notes, out
from gpushare.cli.errors import AbsentError
from gpushare.cli.gpus import read_nodes
from gpushare.cli.last_reports import silence_notes
from gpushare.cli.records import Format, FormatOption, emit
from gpushare.core.control import Gain, GpuGain, NamespaceGain, gain_of

app = typer.Typer(help=__doc__)

NAMESPACE_COLUMNS: Final[tuple[Column[NamespaceGain], ...]] = (
    Column("NAMESPACE", lambda row: row.namespace),
    Column("PODS", lambda row: str(row.pods), rank=1, is_right=True),
    Column("ASKED", lambda row: f"{row.asked_gpus:.2f}", is_right=True),
    Column("PROGRESS", lambda row: ratio(row.progress_ratio), is_right=True),
    Column("UNKNOWN", lambda row: str(row.unknown), rank=2, is_right=True),
)
GPU_COLUMNS: Final[tuple[Column[GpuGain], ...]] = (
    Column("GPU", lambda row: f"{row.node}/{row.index}"),
    Column("MODEL", lambda row: row.model, rank=3),
    Column("PODS", lambda row: str(row.pods), rank=1, is_right=True),
    Column("SHARE", lambda row: whole_percent(row.share_percent), rank=2, is_right=True),
    Column("PROGRESS", lambda row: ratio(row.progress_ratio), is_right=True),
    Column("UNKNOWN", lambda row: str(row.unknown), rank=4, is_right=True),
)


def sentences(gain: Gain) -> list[str]:
    """Say in sentences what sharing gains."""
    if not gain.used_gpus:
        return [f"No pod shares a GPU now; {_gpus(gain.gpus)} {_are(gain.gpus)} free."]
    on = f"{gain.used_gpus} of {_gpus(gain.gpus)}"
    lines = [f"{_pods(gain.pods)} {_are(gain.pods)} on {on}; each alone, they would take {gain.alone_gpus}."]
    if gain.idle_gpus:
        lines.append(f"On {_gpus(gain.idle_gpus)} no pod has a process now.")
    if gain.per_gpu is not None and gain.gained_gpus is not None:
        on = "them" if gain.known_gpus == gain.used_gpus else f"{_gpus(gain.known_gpus)} whose pods are all known"
        more = gain.gained_gpus
        verdict = f"{more:.2f} GPUs more than without sharing" if more >= 0 else f"sharing costs {-more:.2f} GPUs"
        progress = f"the progress of {gain.progress_ratio:.2f} GPUs"
        lines.append(f"On {on} they make {progress}: {gain.per_gpu:.2f} a GPU, {verdict}.")
    elif gain.idle_gpus < gain.used_gpus:
        on = "every other GPU" if gain.idle_gpus else "every GPU"
        why = "a workload has no profile, several GPUs or processes outside MPS, or the node's agent is silent"
        lines.append(f"How fast they are is not known yet: on {on} {why}.")
    judged = gain.kept + gain.broken
    if judged:
        lines.append(f"{gain.kept} of {judged} promises are kept, {gain.broken} broken.")
    if gain.throttled:
        lines.append(f"{_pods(gain.throttled)} {_are(gain.throttled)} slowed down for a neighbour's promise.")
    return lines


def as_record(gain: Gain) -> dict[str, Any]:
    """Return one object for programs."""
    return {**asdict(gain), "per_gpu": gain.per_gpu, "gained_gpus": gain.gained_gpus}


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


@app.callback()
def gain(
    namespace: NamespaceOption = None,
    every: AllOption = False,
    output: FormatOption = Format.TABLE,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Say what sharing gains now: summed progress against the GPUs in use, promises, and each namespace's part.

    Exit code 3 without a GPU.
    """
    where = Where(None if every else namespace, kubeconfig, context)
    nodes, remarks = ask(where, read_nodes)
    for note in (*remarks, *silence_notes(nodes)):
        notes().print(note)
    found = gain_of(nodes, where.namespace)
    if output.is_data:
        emit(as_record(found), output)
    if not found.gpus:
        raise AbsentError(NO_GPUS)
    if output.is_data:
        return
    console = out()
    for sentence in sentences(found):
        console.print(sentence, highlight=False)
    if found.by_namespace:
        console.print()
        show(console, NAMESPACE_COLUMNS, found.by_namespace)
    if output is Format.WIDE and found.by_gpu:
        console.print()
        show(console, GPU_COLUMNS, found.by_gpu)
