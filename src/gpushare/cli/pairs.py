"""`gpushare pairs`: score the choice of partners on a table of measured pairs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from gpushare.cli.console import bars, out
from gpushare.cli.errors import UsageError
from gpushare.cli.files import read_lines
from gpushare.research.pairs.evaluate import GATE, PairProtocol, PairScore, evaluate, mean_and_spread, split
from gpushare.research.pairs.model import PREDICTORS
from gpushare.research.pairs.table import PairTable, TableError, parse_pair_table

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
    repeats: Annotated[
        int, typer.Option(help="seeds in a row to average; the spread is their standard deviation", min=1)
    ] = 1,
    protocol: Annotated[list[PairProtocol] | None, typer.Option(help="repeatable; all if left out")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Score predictors of the normalised throughput sum: error, gate at 1.1, best partner, matching."""
    table = _read(solo, pairs, gpu)
    console = bars()
    import numpy as np  # noqa: PLC0415 - keeps `gpushare --help` quick

    protocols = protocol or list(PairProtocol)
    folds = sum(len(split(table, one, np.random.default_rng(seed))) for one in protocols)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("predicting", total=repeats * folds * len(PREDICTORS))
        runs = [
            evaluate(table, seed=each, protocols=protocols, progress=lambda: bar.advance(task))
            for each in range(seed, seed + repeats)
        ]
    scores = mean_and_spread(runs)
    if as_json:
        results = [{**asdict(mean), "spread": spread} for mean, spread in scores]
        typer.echo(json.dumps({"gpu": gpu, "seed": seed, "repeats": repeats, "gate": GATE, "results": results}))
    else:
        _print(scores, gpu)


def _read(solo: Path, pairs: Path, gpu: str) -> PairTable:
    try:
        return parse_pair_table(read_lines(solo), read_lines(pairs), gpu)
    except TableError as error:
        raise UsageError(f"{solo if error.table == 'solo' else pairs}: {error}") from error


def _print(scores: list[tuple[PairScore, dict[str, float]]], gpu: str) -> None:
    table = Table(title=f"Partner choice on measured pairs, {gpu} (among pairs that fit; last two: all pairs)")
    for name in ("protocol", "predictor"):
        table.add_column(name, no_wrap=name == "predictor")
    columns = {
        "error": "mean_absolute_error",
        "gate": "gate_accuracy",
        "best partner": "best_partner",
        "matching": "matching",
        "error (all)": "mean_absolute_error_all",
        "gate (all)": "gate_accuracy_all",
    }
    for name in columns:
        table.add_column(name, justify="right")
    for mean, spread in scores:
        cells = [
            f"{getattr(mean, field):.3f}" + (f" ±{spread[field]:.3f}" if spread[field] else "")
            for field in columns.values()
        ]
        table.add_row(mean.protocol, mean.predictor, *cells)
    out().print(table)
