"""Run a whole collection: `gpushare calibrate` and `python -m gpushare.research.calibration`."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from gpushare.research.calibration.collector import Timing, collect
from gpushare.research.calibration.counters import DriverCounters, NoCounters
from gpushare.research.calibration.daemon import mps_daemon
from gpushare.research.calibration.plan import phases
from gpushare.research.calibration.workload import Stage


def calibrate(
    output: Path,
    *,
    budget_seconds: float,
    phase_count: int,
    runs_per_phase: int,
    workloads: Sequence[str],
    seed: int,
    skip_phases: int,
    stop_phases: int | None,
    time_slicing: bool,
    dry_run: bool,
    probes: bool,
    progress: Callable[[int, int], None],
    log: Callable[[str], None],
) -> int:
    """Measure the suite (or the named workloads) into `output`; returns the number of runs written.

    Of the planned phases those from `skip_phases` to before `stop_phases` are made. With `probes`, every workload
    is measured beside each probe too.

    Raises:
        RuntimeError: no PyTorch, no GPU, no MPS, or an unknown workload; one sentence.
    """
    try:
        from gpushare.research.calibration.suite import PROBES, SUITE  # noqa: PLC0415 -- PyTorch is there on GPU machines only
    except ImportError as error:
        raise RuntimeError(f"calibrating needs PyTorch on this machine ({error})") from None
    stage = Stage("cpu" if dry_run else "cuda", dry_run)
    usable = {name: each for name, each in SUITE.items() if not (dry_run and each.needs_cuda)}
    if unknown := [name for name in workloads if name not in usable]:
        raise RuntimeError(f"no workload is called {', '.join(unknown)}; known are {', '.join(usable)}")
    chosen = list(workloads) or list(usable)
    beside = list(PROBES) if probes and not dry_run and not time_slicing else []
    planned = phases(
        chosen, count=phase_count, runs_per_phase=runs_per_phase, seed=seed, capped=not time_slicing, probes=beside
    )
    counters = NoCounters() if dry_run else DriverCounters()
    with contextlib.ExitStack() as stack:
        environment = None if time_slicing else {} if dry_run else stack.enter_context(mps_daemon())
        return collect(
            usable | PROBES,
            planned[skip_phases:stop_phases],
            output,
            stage=stage,
            timing=Timing(),
            budget_seconds=budget_seconds,
            counters=counters,
            environment=environment,
            progress=progress,
            log=log,
            probes=beside,
        )
