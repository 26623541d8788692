"""`gpushare calibrate`: measure programs alone and together on this machine's GPU, and fit the model of it."""

import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gpushare.cli.console import bars, out
from gpushare.cli.errors import UsageError
from gpushare.cli.files import check_named, check_writable
from gpushare.cli.interference import fit
from gpushare.research.calibration.run import CalibrationOrder, plan_of
from gpushare.research.calibration.run import calibrate as measure

app = typer.Typer()


@app.callback()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The dataset; an existing one is resumed.")],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="Then fit the interference model and write it here (minutes of one CPU core)."
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Minutes to measure at most.", min=0.1, max=1440.0)] = 10.0,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be measured, and how long.")] = False,
    workloads: Annotated[str, typer.Option(help="Comma-separated names of the suite; default all.")] = "",
    phases: Annotated[int, typer.Option(help="Groups of workers that live together.", min=1, max=100)] = 3,
    runs_per_phase: Annotated[int, typer.Option(help="Runs in each group.", min=1, max=10_000)] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the plan: which sets are measured.")] = 1,
    probes: Annotated[bool, typer.Option(help="Measure every workload beside the standard probes too.")] = True,
    time_slicing: Annotated[bool, typer.Option("--time-slicing", help="Without MPS, for comparison.")] = False,
    dcgm_url: Annotated[
        str, typer.Option(help="dcgm-exporter's metrics, for a GPU without GPM (before Hopper).")
    ] = "",
    dcgm_seconds: Annotated[
        float, typer.Option(help="The exporter's interval, in seconds.", min=0.1, max=300.0)
    ] = 1.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run tiny programs on the CPU, to try the procedure.")
    ] = False,
    simulated: Annotated[
        str,
        typer.Option(
            help='Simulate a GPU of this model, such as "NVIDIA L4"; the shipped model makes up the figures.'
        ),
    ] = "",
) -> None:
    """Measure solo runs, pairs, triples, fours and more under MPS caps; writes a colocation dataset v1.

    Needs PyTorch (CuPy for four of the programs) and an idle GPU with GPM (Hopper or later) or a dcgm-exporter.
    Starts an MPS daemon of its own and ends it; changes no setting of the GPU. With --model, one command of about
    a quarter of an hour gives what the chart takes: helm upgrade ... --set-file models.NAME=MODEL.
    """
    if dcgm_url and not re.match(r"https?://[^/]", dcgm_url):
        raise UsageError(f'--dcgm-url "{dcgm_url}" is no address; write it as http://127.0.0.1:9400/metrics')
    for file, what in ((output, "a dataset, which is resumed,"), (model, "a model for the chart")):
        if file is not None:
            check_named(file, what)
            check_writable(file)
    order = CalibrationOrder(
        phases,
        runs_per_phase,
        seed,
        tuple(name for name in workloads.split(",") if name),
        probes=probes,
        time_slicing=time_slicing,
        dry_run=dry_run,
        simulated=simulated,
        dcgm_url=dcgm_url,
        dcgm_seconds=dcgm_seconds,
    )
    try:
        if plan:
            out().print(plan_of(order, output).words(budget * 60))
            return
        _measure(output, order, budget)
    except RuntimeError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename or output}: {error.strerror or error}") from error
    if model is not None:
        began = time.monotonic()
        fit(output, model, seed)
        out().print(
            f"fitted in {time.monotonic() - began:.0f} s; the chart takes it: helm upgrade ... "
            f"--set-file models.{_name_of(model)}={model}",
            soft_wrap=True,
        )


def _measure(output: Path, order: CalibrationOrder, budget: float) -> None:
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = bars()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring")
        written = measure(
            output,
            order,
            budget_seconds=budget * 60,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            log=console.log,
        )
    console.print(f"{written} runs written to {output}")


def _name_of(model: Path) -> str:
    """Return a name for the chart: the lower-case letters and digits of the file's name."""
    kept = "".join(each for each in model.stem.lower() if each.isascii() and each.isalnum())
    return kept or "own"
