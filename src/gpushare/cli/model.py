"""`gpushare model`: evaluate the interference model and attribution on measured runs."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gpushare.cli import interference
from gpushare.cli.console import out
from gpushare.cli.errors import UsageError
from gpushare.core.interference import InterferenceModel, expectation
from gpushare.core.progress import no_prediction
from gpushare.research.attribution_score import LIVE_PROFILES, LOW_PROGRESS, AttributionScore, score
from gpushare.research.dataset import Dataset, DatasetError, parse

app = typer.Typer(no_args_is_help=True, help="The interference model and attribution on measured runs.")

DatasetFile = Annotated[Path, typer.Option("--dataset", help="A colocation dataset v1 (JSON Lines).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


app.command("fit")(interference.fit)
app.command("evaluate")(interference.evaluation)
app.command("advise")(interference.advise)


def read_dataset(path: Path) -> Dataset:
    """Read a colocation dataset.

    Raises:
        UsageError: the file cannot be read; the sentence names file, line and column.
    """
    try:
        with path.open("rb") as lines:
            return parse(lines)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except DatasetError as error:
        raise UsageError(f"{path}: {error}") from error


@app.command()
def attribute(
    dataset: DatasetFile,
    model: interference.ModelFile = None,
    without_model: Annotated[bool, typer.Option("--without-model", help="No prior: the counters alone.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Score everyone from profiles as a node agent has them, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Infer every tenant's progress from the device's counters and score it against the measured rates.

    Solo runs give the signatures and cap curves, from which the interference model makes its prediction. Of the
    other runs only the counters are used; the measured rates are the truth to score against.

    The second table also scores tenants that would be reported as unknown, by the progress that would be reported
    if their error were not too large, and says how many of those that make less than half are inferred above it.
    """
    data = read_dataset(dataset)
    predict = no_prediction if without_model else expectation(_model(model, data))
    scores = score(data, predict)
    if not scores:
        raise UsageError(f"{dataset}: no run of several tenants whose solo runs at 100% are there too")
    others = {name: score(data, predict, load_of) for name, load_of in LIVE_PROFILES.items()} if live else {}
    notes = data.notes()
    if as_json:
        told = {"gpu_model": data.gpu_model, "by_tenants": _by_tenants(scores), "notes": notes}
        if live:
            told["live"] = {name: _by_tenants(each) for name, each in others.items()}
        typer.echo(json.dumps(told, indent=2))
        return
    console = out()
    console.print(_told_table(data.gpu_model, scores))
    console.print(_everyone_table({"all solo runs": scores, **others}))
    for note in notes:
        console.print(note)


def _told_table(gpu_model: str, scores: Mapping[int, AttributionScore]) -> Table:
    table = Table(title=f"Inferred progress against measured, {gpu_model}")
    for column in ("tenants", "mae", "median", "p90", "n", "unknown", "within 2 sd"):
        table.add_column(column, justify="right")
    for size, each in scores.items():
        table.add_row(
            str(size),
            f"{each.mae:.3f}",
            f"{each.median:.3f}",
            f"{each.p90:.3f}",
            str(each.n),
            str(each.unknown),
            f"{each.within_two_errors:.0%}",
        )
    return table


def _everyone_table(by_profiles: Mapping[str, Mapping[int, AttributionScore]]) -> Table:
    table = Table(title="Everyone, those that would be called unknown too")
    table.add_column("profiles")
    for column in ("tenants", "mae", "n", f"below {LOW_PROGRESS}", "of them inferred above"):
        table.add_column(column, justify="right")
    for name, scores in by_profiles.items():
        for size, each in scores.items():
            table.add_row(
                name,
                str(size),
                f"{each.everyone_mae:.3f}",
                str(each.n + each.unknown),
                str(each.low),
                f"{each.read_above:.1%}" if each.low else "-",
            )
    return table


def _model(path: Path | None, data: Dataset) -> InterferenceModel:
    return interference.load_model(path).for_gpu(data.gpu_model)


def _by_tenants(scores: Mapping[int, AttributionScore]) -> dict[str, dict[str, float | None]]:
    return {str(size): _rounded(each) for size, each in scores.items()}


def _rounded(each: AttributionScore) -> dict[str, float | None]:
    figures = dataclasses.asdict(each).items()
    return {name: None if math.isnan(value) else round(value, 4) for name, value in figures}
