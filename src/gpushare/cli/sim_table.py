"""`gpushare sim jobs --truth table`: jobs of ten measured programs under every policy, scored by measurements."""

import json
import math
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import cache
from pathlib import Path

import typer
from rich.progress import Progress
from rich.table import Table

from gpushare.cli.console import bars, out
from gpushare.cli.errors import UsageError
from gpushare.cli.files import read_lines
from gpushare.cli.interruption import PendingInterrupt, end_children
from gpushare.core.placement import Settings
from gpushare.data import H200_TABLE, default_model
from gpushare.research.dataset import DatasetError, parse
from gpushare.research.shipped_table import complete_table
from gpushare.sim.jobs import Job, SimulationError
from gpushare.sim.table_catalog import TABLE_POLICIES, TableWorld, run_on_table
from gpushare.sim.table_report import TableFigures, mean_with_interval, pooled_throughput, throughput_ratio
from gpushare.sim.table_truth import TableTruth

_GPU_MEMORY_MIB = 143771  # of an H200, as NVML reports it
_OURS, _HINDSIGHT = "gpushare", "hindsight"

TableRun = tuple[float, int, dict[str, TableFigures]]


def table_jobs(
    *,
    table: Path | None,
    policies: Sequence[str],
    jobs: int | Sequence[Job],
    gpus: int,
    loads: Sequence[float],
    seeds: int,
    first_seed: int,
    processes: int,
    as_json: bool,
    release: Settings,
) -> None:
    """Run every policy on every load and seed, and print their means with 95% intervals over the seeds.

    Args:
        jobs: number of jobs to draw for each load, or the jobs of a trace, which has its own load.
        release: settings by which ours decides.
    """
    for name in policies:
        if name not in TABLE_POLICIES:
            raise UsageError(
                f'policy "{name}" is not known; with --truth table there are {", ".join(TABLE_POLICIES)}'
            )
    names = list(policies) or list(TABLE_POLICIES)
    _world(table, release)  # reports an unusable table here, not in a worker process
    tasks = [
        (table, names, jobs, gpus, load, first_seed + seed, release) for load in loads for seed in range(seeds)
    ]
    runs: list[TableRun] = []
    console = bars()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        running = bar.add_task("simulating", total=len(tasks))
        try:
            if processes > 1:
                with (
                    PendingInterrupt() as interruption,
                    ProcessPoolExecutor(processes, initializer=_end_at_once) as pool,
                ):
                    try:
                        futures = []
                        for task in tasks:
                            futures.append(pool.submit(_run, task))
                            interruption.check()
                        for each in futures:
                            runs.append(each.result())
                            bar.advance(running)
                    except KeyboardInterrupt:  # the pool would wait for running work, which may take minutes
                        end_children()
                        raise
                    except SimulationError:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise
            else:
                for task in tasks:
                    runs.append(_run(task))
                    bar.advance(running)
        except SimulationError as error:
            raise UsageError(str(error)) from error
        except BrokenProcessPool as error:
            raise UsageError(
                "a process of the simulation was ended from outside, by lack of memory perhaps: fewer --processes "
                "need less"
            ) from error
    if as_json:
        for load, seed, found in runs:
            for name, figures in found.items():
                typer.echo(json.dumps({"load": load, "seed": seed, "policy": name, **asdict(figures)}))
        return
    for load in loads:
        what = f"{jobs} jobs" if isinstance(jobs, int) else f"{len(jobs)} jobs of a trace"
        title = f"{what} on {gpus} GPUs" + (f", load {load:g}" if isinstance(jobs, int) else "")
        _print(title, [found for each, _, found in runs if each == load], names)


def processes_by_default() -> int:
    """Return how many processes to run: one per CPU."""
    return os.cpu_count() or 1


def _end_at_once() -> None:
    """Let ctrl-c, which a terminal sends to all processes, end this one silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(task: tuple[Path | None, list[str], int | Sequence[Job], int, float, int, Settings]) -> TableRun:
    table, names, jobs, gpus, load, seed, release = task
    world = _world(table, release)
    return load, seed, run_on_table(world, names, jobs=jobs, gpus=gpus, load=load, seed=seed)


@cache
def _world(table: Path | None, release: Settings) -> TableWorld:
    source = str(table or H200_TABLE)
    try:
        dataset = parse(read_lines(table)) if table else complete_table()
        truth = TableTruth(dataset, gpu_memory_mib=_GPU_MEMORY_MIB)
    except (DatasetError, SimulationError) as error:
        raise UsageError(f"{source}: {error}") from error
    return TableWorld(truth, default_model().for_gpu(dataset.gpu_model), release)


def _print(title: str, runs: Sequence[dict[str, TableFigures]], names: Sequence[str]) -> None:
    table = Table(title=f"{title}, {len(runs)} seeds (mean ± 95%)")
    table.add_column("policy", no_wrap=True)
    columns = (
        "throughput",
        f"of {_HINDSIGHT}",
        "waiting",
        "wait s",
        "99th",
        "longest",
        "mean s",
        "below promise",
        "latency p99",
        "whole",
        "retracted",
        "needless",
        "between",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for name in names:
        seeds = [run[name] for run in runs]
        others = [run[_HINDSIGHT] for run in runs] if _HINDSIGHT in names else []
        table.add_row(
            name,
            _figure(*pooled_throughput(seeds), ".3f"),
            _figure(*throughput_ratio(seeds, others), ".3f") if others else "",
            _figure(*mean_with_interval([each.waiting_ratio for each in seeds]), ".0%"),
            _figure(*mean_with_interval([each.waits["all"].mean for each in seeds]), ".0f"),
            _figure(*mean_with_interval([each.waits["all"].p99 for each in seeds]), ".0f"),
            _figure(*mean_with_interval([each.waits["all"].longest for each in seeds]), ".0f"),
            _figure(*mean_with_interval([each.mean_completion_seconds for each in seeds]), ".0f"),
            _figure(*mean_with_interval([each.late_ratio for each in seeds]), ".2%"),
            _figure(*mean_with_interval([each.latency_p99 for each in seeds if each.latency_p99]), ".2f"),
            _figure(
                *mean_with_interval([each.latency_p99_whole for each in seeds if each.latency_p99_whole]), ".2f"
            ),
            _figure(*mean_with_interval([float(each.retractions) for each in seeds]), ".1f"),
            _figure(*mean_with_interval([float(each.needless) for each in seeds]), ".1f"),
            _figure(
                *mean_with_interval([v for each in seeds if (v := each.interpolated_ratio) is not None]), ".0%"
            ),
        )
    out().print(table)


def _figure(mean: float, half: float, how: str) -> str:
    if math.isnan(mean):
        return "-"
    return f"{mean:{how}}" if math.isnan(half) else f"{mean:{how}} ± {half:{how}}"
