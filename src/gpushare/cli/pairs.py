"""`gpushare pairs`: how well partners are chosen on a table of measured pairs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gpushare.cli.errors import UsageError
from gpushare.cli.files import read_lines
from gpushare.sim.pairs_evaluate import GATE, PairScore, Protocol, evaluate, split
from gpushare.sim.pairs_model import PREDICTORS
from gpushare.sim.pairs_table import PairTable, TableError, parse_pair_table

app = typer.Typer(no_args_is_help=True, help=__doc__)


@app.callback()
def group() -> None:
    """Measured pairs of jobs: predictors and partner choice."""


@app.command("evaluate")
def evaluate_command(
    solo: Annotated[Path, typer.Option(help="CSV: gpu, workload, steps_per_s")],
    pairs: Annotated[Path, typer.Option(help="CSV: gpu, workload_a, workload_b, steps_per_s_a, steps_per_s_b")],
    gpu: Annotated[str, typer.Option(help="which GPU of the tables")],
    seed: Annotated[int, typer.Option(help="of folds, groups and random baselines", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Score predictors of the normalised throughput sum: error, gate at 1.1, best partner, matching."""
    table = _read(solo, pairs, gpu)
    console = Console(stderr=True)
    import numpy as np  # noqa: PLC0415 - keeps `gpushare --help` quick

    folds = sum(len(split(table, protocol, np.random.default_rng(seed))) for protocol in Protocol)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("predicting", total=folds * len(PREDICTORS))
        scores = evaluate(table, seed=seed, progress=lambda: bar.advance(task))
    if as_json:
        results = [asdict(score) for score in scores]
        typer.echo(json.dumps({"gpu": gpu, "seed": seed, "gate": GATE, "results": results}))
    else:
        _print(scores, gpu)


def _read(solo: Path, pairs: Path, gpu: str) -> PairTable:
    try:
        return parse_pair_table(read_lines(solo), read_lines(pairs), gpu)
    except TableError as error:
        raise UsageError(f"{solo if error.table == 'solo' else pairs}: {error}") from error


def _print(scores: list[PairScore], gpu: str) -> None:
    table = Table(title=f"Partner choice on measured pairs, {gpu} (among pairs that fit; last two: all pairs)")
    for name in (
        "protocol",
        "predictor",
        "error",
        "gate",
        "error (fitting)",
        "gate (fitting)",
        "best partner",
        "matching",
    ):
        table.add_column(
            name, justify="left" if name in ("protocol", "predictor") else "right", no_wrap=name == "predictor"
        )
    for score in scores:
        table.add_row(
            score.protocol, score.predictor, f"{score.mean_absolute_error:.3f}", f"{score.gate_accuracy:.3f}",
            f"{score.best_partner:.3f}", f"{score.matching:.3f}",
            f"{score.mean_absolute_error_all:.3f}", f"{score.gate_accuracy_all:.3f}",
        )  # fmt: skip
    Console().print(table)
