"""`gpushare sim jobs`, `sim compare` and `sim trace`: jobs that share GPUs under many policies."""

import json
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gpushare.cli.console import bars, beside, notes, out
from gpushare.cli.errors import UsageError
from gpushare.cli.files import check_writable, is_standard_output, read_lines, write_whole
from gpushare.cli.report.jobs_page import render_jobs
from gpushare.cli.report.simulated import JobRecorder
from gpushare.cli.report.usage_page import render_usage
from gpushare.cli.sim_table import processes_by_default, table_jobs
from gpushare.core.placement import DEFAULT_RESERVE_AFTER_SECONDS, MOST_HEADROOM, Settings
from gpushare.data import default_model
from gpushare.research.dataset import Dataset, DatasetError, Mechanism, parse
from gpushare.research.pairs.table import TableError, parse_pair_table
from gpushare.sim.gpu_memory import gpu_memory_mib
from gpushare.sim.job_catalog import POLICIES
from gpushare.sim.job_report import Report, report
from gpushare.sim.job_trace import JobTraceError, draw_jobs, format_jobs, parse_jobs
from gpushare.sim.jobs import Job, OnSpan, Outcome, SimulationError, StuckPolicyError, simulate
from gpushare.sim.table_catalog import TABLE_POLICIES
from gpushare.sim.truth import DatasetTruth, PairsTruth, Truth

TABLE_GPUS: Final = 16
_MOST_MEAN: Final = 1e7  # seconds, four months; keeps drawn values below a trace's limit
TABLE_LOADS: Final = (0.8, 1.2, 2.0)
_OF_TABLES: Final = ("table", "jobs", "load", "seeds", "processes", "reserve_after", "slowdown_headroom")

_TRACE = typer.Option(
    "--trace",
    help="CSV: job, workload, submit_seconds, solo_seconds[, max_slowdown][, fraction][, class][, start_seconds]",
)
_COLOCATION = typer.Option(
    "--colocation", help="colocation dataset v1 (JSON Lines), or a CSV of measured pairs with --solo"
)
TraceFile = Annotated[Path, _TRACE]
ColocationFile = Annotated[Path, _COLOCATION]
SoloFile = Annotated[
    Path | None, typer.Option("--solo", help="CSV of solo rates, where --colocation is a CSV of pairs")
]
GpuName = Annotated[str | None, typer.Option("--gpu", help="which GPU of the CSV tables")]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory-mib",
        min=1,
        max=2**30,
        help="device memory of a GPU; default: what the name of the dataset's GPU model says",
    ),
]
SlicingFile = Annotated[Path | None, typer.Option("--time-slicing", help="dataset v1 measured under time slicing")]
GpuCount = Annotated[int, typer.Option("--gpus", min=1, max=100_000, help="how many GPUs")]
Seed = Annotated[int, typer.Option(min=0, help="of everything drawn at random")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def register(app: typer.Typer) -> None:
    """Add the commands to the group `sim`."""
    app.command("jobs")(jobs_command)
    app.command("compare")(compare_command)
    app.command("trace")(trace_command)


class TruthSource(StrEnum):
    """Source of the true rates."""

    TRACE = "colocation"
    TABLE = "table"


def jobs_command(
    context: typer.Context,
    trace: Annotated[Path | None, _TRACE] = None,
    colocation: Annotated[Path | None, _COLOCATION] = None,
    gpus: GpuCount = TABLE_GPUS,
    policy: Annotated[
        str,
        typer.Option(
            help=f"one of {', '.join(POLICIES)}; with --truth table any of {', '.join(TABLE_POLICIES)}, "
            "separated by commas (default: all)"
        ),
    ] = "",
    solo: SoloFile = None,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    time_slicing: SlicingFile = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    truth_from: Annotated[
        TruthSource,
        typer.Option(
            "--truth",
            help="colocation: a trace on --colocation; table: drawn jobs of ten programs, every set measured",
        ),
    ] = TruthSource.TRACE,
    table: Annotated[
        Path | None, typer.Option(help="with --truth table: another complete table, a colocation dataset v1")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1_000_000, help="with --truth table: how many jobs")] = 500,
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            max=100.0,
            help="with --truth table: work offered, relative to what exclusive GPUs do; repeatable",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="with --truth table: how many seeds, from --seed on")] = 10,
    processes: Annotated[
        int | None, typer.Option(min=1, help="with --truth table: how many processes; default: one for each CPU")
    ] = None,
    reserve_after: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=604800.0,
            help="with --truth table: policy.reserveAfterSeconds of the release by which ours decides",
        ),
    ] = DEFAULT_RESERVE_AFTER_SECONDS,
    slowdown_headroom: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=MOST_HEADROOM,
            help="with --truth table: policy.slowdownHeadroom of the release by which ours decides",
        ),
    ] = 0.0,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="write the page that gpushare report makes of a cluster, of this simulation; - for standard "
            "output",
        ),
    ] = None,
) -> None:
    """Run a trace of jobs under one policy, or with --truth table jobs of ten measured programs under many."""
    if truth_from is TruthSource.TABLE:
        if colocation or solo or time_slicing or gpu_memory:
            raise UsageError("--truth table has its own data: give no colocation data")
        if page is not None:
            raise UsageError("--report is of one simulation: give --trace, --colocation and one --policy")
        table_jobs(
            table=table,
            policies=[name.strip() for name in policy.split(",") if name.strip()],
            jobs=_read_jobs(trace) if trace else jobs,
            gpus=gpus,
            loads=load or (TABLE_LOADS if trace is None else (1.0,)),
            seeds=seeds,
            first_seed=seed,
            processes=processes or processes_by_default(),
            as_json=as_json,
            release=Settings(reserve_after_seconds=reserve_after, slowdown_headroom_ratio=slowdown_headroom),
        )
        return
    _refuse_options_of_tables(context)
    if trace is None or colocation is None:
        raise UsageError("give --trace and --colocation, or --truth table")
    truth = partial(_read_truth, colocation, solo, gpu, time_slicing, seed, gpu_memory)
    _one_policy(trace, truth, gpus, policy, seed, as_json=as_json, page=page)


def _refuse_options_of_tables(context: typer.Context) -> None:
    """Refuse options that would change nothing without --truth table.

    Raises:
        UsageError: one is on the command line.
    """
    for name in _OF_TABLES:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name.replace('_', '-')} is for --truth table alone: give that, or leave it out")


def _one_policy(
    trace: Path,
    read_truth: Callable[[], Truth],
    gpus: int,
    policy: str,
    seed: int,
    *,
    as_json: bool,
    page: Path | None,
) -> None:
    if not policy:
        raise UsageError(f"say which policy, by --policy: one of {', '.join(POLICIES)}")
    if policy not in POLICIES:
        raise UsageError(f'policy "{policy}" is not known; there are {", ".join(POLICIES)}')
    if page is not None:
        check_writable(page, as_json=as_json)
    jobs = _read_jobs(trace)
    truth = read_truth()
    recorder = JobRecorder(jobs)
    outcomes = _run(
        jobs, gpus, [policy], truth, seed, source=trace, skip_impossible=False, on_span=recorder.on_span
    )
    reports = [report(outcome) for outcome in outcomes]
    if page is not None:
        write_whole(page, render_usage(recorder.history(outcomes[0], f"{trace.name} under {policy}, simulated")))
    if as_json:
        typer.echo(json.dumps({"gpus": gpus, "seed": seed, **asdict(reports[0])}))
    else:
        _print(reports, gpus, out() if page is None else beside(page))


def compare_command(
    trace: TraceFile,
    colocation: ColocationFile,
    gpus: GpuCount,
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML report; - for standard output")] = Path(
        "compare.html"
    ),
    solo: SoloFile = None,
    gpu: GpuName = None,
    gpu_memory: GpuMemory = None,
    time_slicing: SlicingFile = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Run a trace under every policy and write one HTML page with plots that needs nothing beside itself."""
    check_writable(output, as_json=as_json)
    jobs = _read_jobs(trace)
    truth = _read_truth(colocation, solo, gpu, time_slicing, seed, gpu_memory)
    outcomes = _run(jobs, gpus, list(POLICIES), truth, seed, source=trace, skip_impossible=True)
    reports = [report(outcome) for outcome in outcomes]
    write_whole(
        output, render_jobs(outcomes, reports, trace=trace.name, colocation=colocation.name, gpus=gpus, seed=seed)
    )
    if as_json:
        typer.echo(json.dumps({"gpus": gpus, "seed": seed, "results": [asdict(each) for each in reports]}))
    else:
        _print(reports, gpus, beside(output))
        if not is_standard_output(output):
            notes().print(f"report: {output}")


def trace_command(
    colocation: ColocationFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="the CSV to write; - for standard output")],
    jobs: Annotated[int, typer.Option(min=1, max=1_000_000, help="how many jobs")] = 200,
    interarrival: Annotated[
        float, typer.Option(min=0.0, max=_MOST_MEAN, help="mean seconds between arrivals; 0: all at once")
    ] = 60.0,
    length: Annotated[
        float, typer.Option(min=1.0, max=_MOST_MEAN, help="mean seconds that a job runs alone")
    ] = 1800.0,
    solo: SoloFile = None,
    gpu: GpuName = None,
    seed: Seed = 0,
) -> None:
    """Draw a trace of the colocation data's workloads: Poisson arrivals, log-normal lengths."""
    truth = _read_truth(colocation, solo, gpu, None, seed, None, needs_memory=False)
    drawn = draw_jobs(
        truth.workloads, jobs, mean_interarrival_seconds=interarrival, mean_solo_seconds=length, seed=seed
    )
    write_whole(output, format_jobs(drawn))


def _read_jobs(path: Path) -> list[Job]:
    try:
        return parse_jobs(read_lines(path))
    except JobTraceError as error:
        raise UsageError(f"{path}: {error}") from error


def _read_truth(
    colocation: Path,
    solo: Path | None,
    gpu: str | None,
    time_slicing: Path | None,
    seed: int,
    gpu_memory: int | None,
    *,
    needs_memory: bool = True,
) -> Truth:
    if colocation.suffix == ".csv":
        if solo is None or gpu is None:
            raise UsageError(f"{colocation}: a table of pairs needs --solo FILE and --gpu NAME")
        if gpu_memory is not None:
            raise UsageError(f"{colocation}: a table of pairs says itself what fits: leave out --gpu-memory-mib")
        try:
            table = parse_pair_table(read_lines(solo), read_lines(colocation), gpu)
        except TableError as error:
            raise UsageError(f"{solo if error.table == 'solo' else colocation}: {error}") from error
        return PairsTruth(table)
    if solo is not None or gpu is not None:
        given = "--solo" if solo is not None else "--gpu"
        raise UsageError(f"{colocation}: {given} is for a table of pairs (.csv), and this is none: leave it out")
    dataset = _read_dataset(colocation)
    memory = gpu_memory or gpu_memory_mib(dataset.gpu_model) or 0
    if needs_memory and not memory:
        raise UsageError(
            f'{colocation}: the name of its GPU model, "{dataset.gpu_model}", does not say how much memory it '
            "has: give --gpu-memory-mib"
        )
    sliced = _read_dataset(time_slicing) if time_slicing else None
    if sliced is not None and sliced.mechanism is not Mechanism.TIME_SLICING:
        raise UsageError(f"{time_slicing}: was measured under {sliced.mechanism}, not time-slicing")
    forecaster = default_model().for_gpu(dataset.gpu_model).predict
    truth = DatasetTruth(dataset, forecaster, gpu_memory_mib=memory, time_slicing=sliced, seed=seed)
    if not truth.workloads:
        raise UsageError(f"{colocation}: has no usable solo run at 100%, so no progress can be computed")
    return truth


def _read_dataset(path: Path) -> Dataset:
    try:
        dataset = parse(read_lines(path))
    except DatasetError as error:
        raise UsageError(f"{path}: {error}") from error
    for note in dataset.notes():
        notes().print(f"{path}: {note}")
    return dataset


def _run(
    jobs: list[Job],
    gpus: int,
    names: list[str],
    truth: Truth,
    seed: int,
    *,
    source: Path,
    skip_impossible: bool,
    on_span: OnSpan = lambda _cluster, _rates, _until: None,
) -> list[Outcome]:
    console = bars()
    outcomes = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulating", total=len(names) * len(jobs))
        for done, name in enumerate(names):
            bar.update(task, description=name, completed=done * len(jobs))
            try:
                policy = POLICIES[name](truth, default_model(), seed)
            except SimulationError as error:
                if not skip_impossible:
                    raise UsageError(str(error)) from error
                console.print(f"left out: {error}")
                continue
            try:
                outcomes.append(
                    simulate(jobs, gpus, policy, truth, on_end=lambda: bar.advance(task), on_span=on_span)
                )
            except SimulationError as error:
                if not (skip_impossible and isinstance(error, StuckPolicyError)):
                    raise UsageError(f"{source}: {error}") from error
                console.print(f"left out: {error}")
    return outcomes


def _print(reports: list[Report], gpus: int, console: Console) -> None:
    table = Table(title=f"{reports[0].jobs} jobs on {gpus} GPUs" if reports else "no policy ran")
    table.add_column("policy", no_wrap=True)
    columns = (
        "makespan h",
        "mean h",
        "p95 h",
        "throughput",
        "slowdown",
        "worst",
        "late",
        "in use",
        "Jain",
        "retracted",
        "modelled",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for r in reports:
        table.add_row(
            r.policy,
            f"{r.makespan_seconds / 3600:.2f}",
            f"{r.mean_completion_seconds / 3600:.2f}",
            f"{r.p95_completion_seconds / 3600:.2f}",
            f"{r.throughput_ratio:.2f}",
            f"{r.mean_slowdown:.2f}",
            f"{r.worst_slowdown:.2f}",
            f"{r.late_share:.1%}",
            f"{r.utilization_ratio:.0%}",
            f"{r.jain_index:.3f}",
            str(r.retractions),
            "-" if r.modelled_ratio is None else f"{r.modelled_ratio:.0%}",
        )
    console.print(table)
