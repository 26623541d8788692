"""`gpushare calibrate`: measure programs alone and together on this machine's GPU."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gpushare.cli.errors import UsageError
from gpushare.research.calibration.run import calibrate as measure

app = typer.Typer(invoke_without_command=True)


@app.callback()
def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The dataset; an existing one is resumed.")],
    budget: Annotated[float, typer.Option(help="Minutes to measure at most.", min=0.1)] = 10.0,
    workloads: Annotated[str, typer.Option(help="Comma-separated names of the suite; default all.")] = "",
    phases: Annotated[int, typer.Option(help="Groups of workers that live together.", min=1)] = 5,
    runs_per_phase: Annotated[int, typer.Option(help="Runs in each group.", min=1)] = 140,
    seed: Annotated[int, typer.Option(help="Of the plan: which sets are measured.")] = 1,
    probes: Annotated[bool, typer.Option(help="Measure every workload beside the standard probes too.")] = True,
    time_slicing: Annotated[bool, typer.Option("--time-slicing", help="Without MPS, for comparison.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tiny sizes on the CPU, to try the machinery.")
    ] = False,
) -> None:
    """Measure solo runs, pairs, triples, fours and more under MPS caps; writes a colocation dataset v1.

    Needs PyTorch (CuPy for four of the programs) and an idle GPU with GPM (Hopper or later). Starts an MPS daemon
    of its own and ends it; changes no setting of the GPU.
    """
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("measuring")
        try:
            written = measure(
                output,
                budget_seconds=budget * 60,
                phase_count=phases,
                runs_per_phase=runs_per_phase,
                workloads=[name for name in workloads.split(",") if name],
                seed=seed,
                skip_phases=0,
                stop_phases=None,
                time_slicing=time_slicing,
                dry_run=dry_run,
                probes=probes,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                log=console.log,
            )
        except (RuntimeError, OSError) as error:
            raise UsageError(str(error)) from error
    console.print(f"{written} runs written to {output}")
