"""`gpushare model fit`, `evaluate` and `advise`: the interference model on measured runs and given programs."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpushare.cli.console import bars, beside, out
from gpushare.cli.errors import UsageError
from gpushare.cli.files import check_writable, read_text, write_whole
from gpushare.core.api import JobClass
from gpushare.core.gpu import ArtefactError, artefact_from_json
from gpushare.core.interference import (
    Advice,
    InterferenceModel,
    ProfileError,
    Wish,
    auto_share,
    best_number,
    model_from_json,
    recommended_number,
)
from gpushare.data import default_model
from gpushare.research.dataset import Dataset, DatasetError, Mechanism, parse
from gpushare.research.interference.evaluate import Evaluation, EvaluationProtocol, evaluate
from gpushare.research.interference.fit import MEMBERS, fit_model, sets_of, unfitted
from gpushare.research.solo_profiles import profile_of

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelFile = Annotated[Path | None, typer.Option("--model", help="A model artefact; default: the one shipped.")]
DatasetOption = Annotated[Path, typer.Option("--dataset", help="A colocation dataset v1 (JSON Lines).")]


def load_model(path: Path | None) -> InterferenceModel:
    """Return a model from an artefact, or the shipped one.

    Raises:
        UsageError: the file cannot be read, is damaged, or of a newer version.
    """
    try:
        return default_model() if path is None else model_from_json(read_text(path))
    except ArtefactError as error:
        raise UsageError(f"{path or 'the shipped model'}: {error}") from error


def _read(path: Path) -> tuple[Dataset, bytes]:
    try:
        source = path.read_bytes()
        return parse(source.splitlines()), source
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except DatasetError as error:
        raise UsageError(f"{path}: {error}") from error


def _bar(text: str) -> Progress:
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=bars(), transient=True)


def fit(
    dataset: Annotated[Path, typer.Argument(help="A colocation dataset v1 (JSON Lines).")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the model artefact; - for standard output.")
    ],
    seed: Annotated[
        int, typer.Option(min=0, help="The same dataset and seed give the same artefact, bit for bit.")
    ] = 1,
) -> None:
    """Fit the interference model to a dataset and write a versioned artefact with its provenance."""
    check_writable(output)
    data, source = _read(dataset)
    with _bar("fitting") as bar:
        task = bar.add_task("fitting")
        try:
            model = fit_model(
                data,
                seed=seed,
                source=source,
                progress=lambda n, total: bar.update(task, completed=n, total=total),
            )
        except ValueError as error:
            raise UsageError(f"{dataset}: {error}") from error
    text = model.to_json()
    try:
        artefact_from_json(text)
    except ArtefactError as error:
        raise UsageError(f"{dataset}: what was fitted to it is of no use, nothing is written: {error}") from error
    write_whole(output, text + "\n")
    console = beside(output)
    console.print(
        f"{output}: fitted to {model.provenance['shared_runs']} shared runs of "
        f"{model.provenance['workloads']} workloads on {model.gpu_model}, seed {seed}"
    )
    for note in sets_of(data).notes:
        console.print(note)


def evaluation(
    dataset: DatasetOption,
    protocol: Annotated[
        EvaluationProtocol,
        typer.Option(help="as-is: the model as it is; the others fit anew on parts of the dataset, five times."),
    ] = EvaluationProtocol.AS_IS,
    model: ModelFile = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds, the fits and the random matchings.")] = 1,
    probed: Annotated[
        bool,
        typer.Option("--probed", help="Judge only sets of workloads that were all measured beside the probes."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict measured runs and print the errors by number of tenants, beside the baselines."""
    data, _ = _read(dataset)
    sets = sets_of(data)
    if not sets.index:
        why = "; ".join(sets.notes[:3])
        raise UsageError(
            f"{dataset}: no run of several tenants with usable solo runs at 100% ({why or 'none at all'})"
        )
    if probed and not sets.probed():
        raise UsageError(f"{dataset}: in no run of several tenants were all measured beside the probes")
    notes = list(sets.notes)
    if data.mechanism is not Mechanism.MPS:
        notes.append(f"the runs shared the GPU by {data.mechanism}, the model is of MPS")
    if protocol is EvaluationProtocol.AS_IS:
        fitted = load_model(model)
        chosen = fitted.for_gpu(data.gpu_model)
        if chosen.widening > 1:
            notes.append(
                f"the model is of {fitted.gpu_model}: on {data.gpu_model} its intervals are "
                f"{chosen.widening:g} times as wide"
            )
    else:
        chosen = unfitted(data, sets, seed)
    with _bar("fitting") as bar:
        task = bar.add_task("fitting", visible=protocol is not EvaluationProtocol.AS_IS)
        result = evaluate(
            sets,
            chosen,
            protocol,
            seed=seed,
            members=MEMBERS,
            done=lambda n, total: bar.update(task, completed=n, total=total),
            probed=probed,
        )
    by_size = result.by_tenants
    if as_json:
        value = {
            "protocol": str(protocol),
            "gpu_model": data.gpu_model,
            "workloads": len(sets.workloads),
            "by_tenants": {str(size): _plain(dataclasses.asdict(each)) for size, each in by_size.items()},
            **_plain(dataclasses.asdict(result.choices)),
            "by_progress_alone": [_plain(dataclasses.asdict(each)) for each in result.by_progress_alone],
            "notes": notes,
        }
        typer.echo(json.dumps(value, indent=2))
        return
    _print_evaluation(result, f"Predicted progress against measured, {data.gpu_model}, {protocol}", notes)


def _print_evaluation(result: Evaluation, title: str, notes: list[str]) -> None:
    table = Table(title=title)
    for column in (
        "tenants",
        "sets",
        "mae",
        "median",
        "in 90% interval",
        "rank correlation",
        "kace mae",
        "additive mae",
    ):
        table.add_column(column, justify="right")
    for size, each in result.by_tenants.items():
        table.add_row(
            str(size),
            str(each.sets),
            f"{each.mae:.3f}",
            f"{each.median:.3f}",
            f"{each.coverage:.0%}",
            f"{each.rank_correlation:.2f}",
            *(f"{each.baseline_mae.get(name, math.nan):.3f}" for name in ("kace", "additive")),
        )
    console = out()
    console.print(table)
    for some in result.by_progress_alone:
        console.print(
            f"progress alone above {some.above:.1f}, to {some.to:.1f}: of {some.n} tenants {some.inside:.1%} in "
            f"the interval, {some.below:.1%} below; mean width {some.width:.3f}"
        )
    made = result.choices
    console.print(
        f"matching, of the oracle's: ours {made.matching:.3f}, KACE {made.matching_kace:.3f}, "
        f"random {made.matching_random:.3f}"
    )
    console.print(
        f"caps chosen, of the best measured: {made.caps:.3f} over {made.caps_sets} sets, "
        f"{made.caps_broken} tolerances broken that the best keeps"
    )
    for note in notes:
        console.print(note)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


def advise(
    dataset: Annotated[Path, typer.Option("--profiles", help="A dataset whose solo runs are the profiles.")],
    tenants: Annotated[
        list[str],
        typer.Argument(
            help='Each "workload", "workload:latency", or with a tolerated slowdown (default 2) '
            '"workload:throughput:1.5".'
        ),
    ],
    model: ModelFile = None,
    as_json: AsJson = False,
) -> None:
    """Say under which caps the given programs run best together, and how many of them belong on one GPU."""
    data, _ = _read(dataset)
    wishes = [_wish(data, text) for text in tenants]
    predictor = load_model(model).for_gpu(data.gpu_model)
    advices = best_number(predictor, wishes)
    number = recommended_number(advices)
    if as_json:
        value = {
            "recommended_number": number,
            "auto_share_percent": [_auto(wish) for wish in wishes],
            "advice": [_advice(each, tenants) for each in advices],
        }
        typer.echo(json.dumps(_plain(value), indent=2))
        return
    console = out()
    for each in advices:
        state = "within tolerance" if each.within_tolerance else "breaks a tolerance"
        table = Table(
            title=f"{len(each.forecasts)} on one GPU: {each.summed_progress:.2f} times one alone, {state}"
        )
        for column in ("tenant", "cap", "progress", "90% interval", "slowdown", "auto share"):
            table.add_column(column, justify="left" if column == "tenant" else "right")
        for name, wish, cap, forecast in zip(
            tenants, wishes, each.thread_percentages, each.forecasts, strict=False
        ):
            table.add_row(
                name,
                f"{cap}%",
                f"{forecast.progress:.2f}",
                f"{forecast.lower:.2f} to {forecast.upper:.2f}",
                f"{forecast.slowdown:.2f}",
                f"{_auto(wish)}%",
            )
        console.print(table)
    console.print(f"best: the first {number} together" if number > 1 else "best: one alone")


def _auto(wish: Wish) -> int:
    return auto_share(wish.profile, max_slowdown=wish.max_slowdown, job_class=wish.job_class)


def _advice(advice: Advice, tenants: list[str]) -> dict[str, Any]:
    return {
        "tenants": [
            {
                "tenant": name,
                "thread_percentage": cap,
                "progress": forecast.progress,
                "lower": forecast.lower,
                "upper": forecast.upper,
            }
            for name, cap, forecast in zip(tenants, advice.thread_percentages, advice.forecasts, strict=False)
        ],
        "summed_progress": advice.summed_progress,
        "within_tolerance": advice.within_tolerance,
    }


def _wish(data: Dataset, text: str) -> Wish:
    name, _, rest = text.partition(":")
    kind, _, slowdown = rest.partition(":")
    try:
        job_class = JobClass(kind or "throughput")
        tolerated = float(slowdown or 2.0)
    except ValueError:
        raise UsageError(f'tenant "{text}" is not of the form workload[:throughput|latency[:slowdown]]') from None
    if not tolerated >= 1 or not math.isfinite(tolerated):
        raise UsageError(f'tenant "{text}": a tolerated slowdown is 1 or more')
    if name not in data.solo:
        raise UsageError(f'the profiles have no program "{name}", only {", ".join(sorted(data.solo)) or "none"}')
    try:
        return Wish(profile_of(data, name), job_class, tolerated)
    except ProfileError as error:
        raise UsageError(str(error)) from error
