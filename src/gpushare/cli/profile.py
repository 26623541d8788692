"""`gpushare profile`: how much of a GPU a program uses alone, pipe by pipe, beside what nvidia-smi says."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

from gpushare.cli.columns import Column, show
from gpushare.cli.console import out
from gpushare.cli.errors import UsageError
from gpushare.cli.files import read_lines
from gpushare.cli.profile_show import show_profiles
from gpushare.core.gpu import Counters, Devices, DevicesError, GpuInfo, GpuSample, mean_counters
from gpushare.research.nvprof import NvprofError, parse_metrics, parse_summary, utilization

app = typer.Typer(no_args_is_help=True, help="How much of a GPU a workload or a program uses alone, pipe by pipe.")
app.command("show")(show_profiles)

MIN_INTERVAL_SECONDS: Final = 0.2  # counters need 0.1 s between readings (docs/facts.md 21)
ACTIVE_RATIO: Final = 0.001  # an idle GPU reads 0
EDGES: Final = 2
T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Use:
    """Means over a period.

    Attributes:
        nvml_utilization_ratio: utilisation as nvidia-smi shows it; None if the driver has none.
    """

    seconds: float
    counters: Counters
    nvml_utilization_ratio: float | None


@dataclass(frozen=True, slots=True)
class ProgramProfile:
    """A command's use of one GPU.

    Attributes:
        active: from the first to the last reading in which the GPU was used; zero seconds if it never was.
        whole: from the command's start to its end, including the start of an interpreter and its imports.
        memory_peak_mib: of the whole device.
        is_alone: whether no other process was seen on the GPU when the command started.
    """

    gpu: GpuInfo
    active: Use
    whole: Use
    memory_peak_mib: int | None
    is_alone: bool
    exit_code: int


def is_active(sample: GpuSample) -> bool:
    """Return whether the GPU was used in a window, by its counters or else by NVML's utilisation, which lags."""
    busy = (sample.counters.graphics_util, sample.counters.sm_util)
    known = [value for value in busy if value is not None] or [sample.gpu_utilization_ratio or 0.0]
    return max(known) >= ACTIVE_RATIO


def active_windows(samples: Sequence[GpuSample]) -> Sequence[GpuSample]:
    """Return the windows from the first to the last one with activity, pauses included.

    The first and the last are only partly active, and are left out if two or more remain.
    """
    busy = [i for i, sample in enumerate(samples) if is_active(sample)]
    if not busy:
        return ()
    active = samples[busy[0] : busy[-1] + 1]
    return active[1:-1] if len(active) >= EDGES + 2 else active


def time_weighted(samples: Sequence[GpuSample]) -> Use:
    """Average counters and NVML utilisation, each window weighted by its length."""
    total = sum(sample.window_seconds for sample in samples)
    if not total:
        return Use(0.0, Counters(), None)
    sums: dict[str, float] = {}
    for sample in samples:
        for name, value in sample.counters.as_dict().items():
            sums[name] = sums.get(name, 0.0) + value * sample.window_seconds
    measured = mean_counters(sample.counters for sample in samples).as_dict()
    counters = Counters(**{name: sums[name] / total for name in measured})
    busy = [(s.gpu_utilization_ratio, s.window_seconds) for s in samples if s.gpu_utilization_ratio is not None]
    nvml = sum(ratio * seconds for ratio, seconds in busy) / sum(s for _, s in busy) if busy else None
    return Use(total, counters, nvml)


def profile_command(
    devices: Devices,
    gpu: GpuInfo,
    command: Sequence[str],
    interval_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> ProgramProfile:
    """Run a command on one GPU and sample the GPU until it ends.

    Raises:
        UsageError: the command cannot be started, or the GPU cannot be sampled at all.
    """
    samples: list[GpuSample] = []
    is_alone = all(each.is_named_server or each.is_graphics for each in devices.processes(gpu.uuid))
    devices.sample(gpu.uuid)  # the first window begins with the command
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        process = subprocess.Popen(list(command), env=environment)
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror or error}") from error
    trouble = ""
    try:
        while process.poll() is None:
            sleep(interval_seconds)
            try:
                sample = devices.sample(gpu.uuid)
            except DevicesError as error:
                trouble = str(error)
                continue
            if sample is not None:
                samples.append(sample)
    except KeyboardInterrupt:
        process.terminate()
    exit_code = process.wait()
    if not samples:
        raise UsageError(trouble or "the command ended before one window was measured; run it for some seconds")
    return ProgramProfile(
        gpu=gpu,
        active=time_weighted(active_windows(samples)),
        whole=time_weighted(samples),
        memory_peak_mib=max(sample.memory_used_mib for sample in samples),
        is_alone=is_alone,
        exit_code=exit_code,
    )


def choose_gpu(gpus: Sequence[GpuInfo], wanted: str) -> GpuInfo:
    """Find a GPU by index or UUID.

    Raises:
        UsageError: there is no such GPU; the sentence lists the GPUs.
    """
    for gpu in gpus:
        if wanted in (str(gpu.index), gpu.uuid):
            return gpu
    names = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise UsageError(f'--gpu "{wanted}" is not on this machine; there are: {names}')


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --.")],
    gpu: Annotated[str, typer.Option(help="GPU by index or UUID.")] = "0",
    interval: Annotated[float, typer.Option(max=3600.0, help="Seconds between readings.")] = 0.5,
    as_json: AsJson = False,
) -> None:
    """Run a program alone on a GPU and print NVML's utilisation beside that of each pipe."""
    if not interval >= MIN_INTERVAL_SECONDS:
        raise UsageError(f"--interval {interval:g} is too short; counters need {MIN_INTERVAL_SECONDS} s or more")
    from gpushare.devices.nvml import NvmlDevices  # noqa: PLC0415 - the driver's library, only where it is used

    try:
        devices = NvmlDevices.open(time.monotonic)
    except DevicesError as error:
        raise UsageError(str(error)) from error
    try:
        profile = profile_command(devices, choose_gpu(devices.list(), gpu), command, interval)
    except DevicesError as error:
        raise UsageError(str(error)) from error
    finally:
        devices.close()
    if as_json:
        typer.echo(json.dumps(profile_json(profile, command), indent=2))
    else:
        _print_profile(profile, command)
    raise typer.Exit(profile.exit_code)


def profile_json(profile: ProgramProfile, command: Sequence[str]) -> dict[str, Any]:
    """Return the profile as JSON values; figures that were not measured are null or absent.

    The figures at the top are means over `active_seconds`, those in `whole_run` over all `seconds`.
    """
    return {
        "command": list(command),
        "gpu": {"uuid": profile.gpu.uuid, "model": profile.gpu.model},
        "seconds": round(profile.whole.seconds, 3),
        "active_seconds": round(profile.active.seconds, 3),
        **_use_json(profile.active),
        "whole_run": _use_json(profile.whole),
        "memory_peak_mib": profile.memory_peak_mib,
        "alone": profile.is_alone,
        "exit_code": profile.exit_code,
    }


def _use_json(use: Use) -> dict[str, Any]:
    return {
        "nvml_utilization": _rounded(use.nvml_utilization_ratio),
        "pipes": {pipe: round(ratio, 4) for pipe, ratio in use.counters.pipes().items()},
        "sm_activity": _rounded(use.counters.sm_util),
        "sm_occupancy": _rounded(use.counters.sm_occupancy),
        "counters": {name: round(value, 5) for name, value in use.counters.as_dict().items()},
    }


def _print_profile(profile: ProgramProfile, command: Sequence[str]) -> None:
    active, whole = profile.active, profile.whole
    columns = [("WHOLE RUN", whole)]
    if active.seconds:
        columns.insert(0, ("IN USE", active))
    figures = [_figures(use) for _, use in columns]
    console = out()
    what = f"{' '.join(command)[:60]} on {profile.gpu.model}"
    console.print(f"{what}: {active.seconds:.1f} s in use of {whole.seconds:.1f} s", highlight=False)
    rows = [(name, *(_exact_percent(each.get(name)) for each in figures)) for name in figures[-1]]
    titles = [Column("", itemgetter(0))]
    titles += [Column(title, itemgetter(at), is_right=True) for at, (title, _) in enumerate(columns, 1)]
    show(console, titles, rows)
    if not active.seconds:
        console.print("The command never used this GPU.")
    if not profile.is_alone:
        console.print("Other processes were on this GPU: the figures are theirs too.")
    if not whole.counters.as_dict():
        console.print("This GPU has no counters by GPM (Hopper and later have); see `gpushare profile nvprof`.")


def _figures(use: Use) -> dict[str, float | None]:
    return {
        "NVML": use.nvml_utilization_ratio,
        **use.counters.pipes(),
        "SM activity": use.counters.sm_util,
        "SM occupancy": use.counters.sm_occupancy,
    }


def _exact_percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


@app.command()
def nvprof(
    summary: Annotated[Path, typer.Option(help="Output of nvprof --csv --print-gpu-summary.")],
    metrics: Annotated[Path, typer.Option(help="Output of nvprof --csv --metrics ..._fu_utilization.")],
    as_json: AsJson = False,
) -> None:
    """Compute the utilisation of each function unit from nvprof's CSV output of older GPUs.

    The level (0 to 10) of each kernel is weighted by its time, relative to the time of all GPU activities, copies
    included.
    """
    seconds = _parse(summary, parse_summary)
    levels = _parse(metrics, parse_metrics)
    found = utilization(seconds, levels)
    if as_json:
        pipes = {
            pipe: {
                "utilization": round(ratio, 6),
                "level": round(10 * ratio, 5),
                "coverage": round(found.coverage[pipe], 6),
            }
            for pipe, ratio in found.pipes.items()
        }
        answer = {
            "pipes": pipes,
            "gpu_seconds": found.gpu_seconds,
            "kernel_seconds": found.kernel_seconds,
            "kernels_without_metrics": list(found.without_metrics),
        }
        typer.echo(json.dumps(answer, indent=2))
        return
    console = out()
    console.print(f"Function units over {found.gpu_seconds:.3f} s of GPU activities", highlight=False)
    show(
        console,
        [
            Column("PIPE", lambda each: each[0]),
            Column("UTILISATION", lambda each: _exact_percent(each[1]), is_right=True),
            Column("LEVEL OF 10", lambda each: f"{10 * each[1]:.2f}", is_right=True),
            Column("COVERAGE", lambda each: _exact_percent(found.coverage[each[0]]), is_right=True),
        ],
        list(found.pipes.items()),
    )
    if found.without_metrics:
        names = ", ".join(name[:40] for name in found.without_metrics[:3])
        count = len(found.without_metrics)
        unread = (
            "1 kernel has no metrics and counts" if count == 1 else f"{count} kernels have no metrics and count"
        )
        console.print(f"{unread} as idle, such as {names}", highlight=False)


def _parse(path: Path, parse: Callable[[Sequence[str]], T]) -> T:
    try:
        return parse(read_lines(path))
    except NvprofError as error:
        raise UsageError(f"{path}: {error}") from error


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
