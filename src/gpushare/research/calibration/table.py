"""`python -m gpushare.research.calibration.table OUTPUT`: measure the complete table, resuming OUTPUT."""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpushare.research.calibration.collector import PoolMaker, Timing, collect, pools_of
from gpushare.research.calibration.counters import DriverCounters, RunCounters
from gpushare.research.calibration.daemon import mps_daemon
from gpushare.research.calibration.plan import CalibrationPhase, expected_seconds, left_of
from gpushare.research.calibration.resume import earlier_runs
from gpushare.research.calibration.table_plan import alone_phase, table_phases, trial_phase, twice_phases
from gpushare.research.calibration.workload import Stage
from gpushare.research.dataset import Mechanism

TIMING = Timing(warm_seconds=0.10, window_seconds=0.36, shared_seconds=0.36)
PARTS = ("table", "twice", "trial", "alone")


def phases_of(part: str, names: Sequence[str]) -> tuple[CalibrationPhase, ...]:
    """Return the phases of one of `PARTS`."""
    match part:
        case "trial":
            return (trial_phase(names),)
        case "alone":
            return (alone_phase(names, 6),)
        case "twice":
            return twice_phases(names)
        case _:
            return table_phases(names)


def measure(
    output: Path, *, budget_seconds: float, part: str, simulated: str = "", programs: int | None = None
) -> int:
    """Run the plan's phases one after the other until the budget is spent; return how many runs were written.

    Args:
        simulated: the name of a GPU to simulate; empty: measure on the GPU that is there.
        programs: how many of the ten programs take part; None: all.
    """
    began = time.monotonic()

    def log(text: str) -> None:
        """Print one event a line, with the seconds since the start."""
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)  # noqa: T201 -- a program

    def progress(done: int, total: int) -> None:
        """Log every fortieth run."""
        if done % 40 == 0:
            log(f"{done} of {total} runs")

    with contextlib.ExitStack() as stack:
        names, pools, counters = _sides(simulated, stack)
        phases = phases_of(part, names[:programs])
        left = left_of(phases, earlier_runs(output).runs)
        seconds = expected_seconds(
            left,
            warm_seconds=TIMING.warm_seconds,
            window_seconds=TIMING.window_seconds,
            shared_seconds=TIMING.shared_seconds,
        )
        log(
            f"{sum(len(phase.runs) for phase in left)} runs are left of the plan, about {seconds:.0f} s on an H200"
        )
        written = collect(
            phases,
            output,
            pools=pools,
            mechanism=Mechanism.MPS,
            timing=TIMING,
            budget_seconds=budget_seconds - (time.monotonic() - began),
            counters=counters,
            progress=progress,
            log=log,
            in_turn=True,
        )
    log(f"{written} runs written to {output}")
    return written


def _sides(simulated: str, stack: contextlib.ExitStack) -> tuple[list[str], PoolMaker, RunCounters]:
    """Return the programs' names, what runs them and what reads the counters."""
    if simulated:
        from gpushare.research.calibration import simulated as simulation  # noqa: PLC0415 -- megabytes of JSON
        from gpushare.research.shipped_table import different_programs  # noqa: PLC0415

        names = sorted(different_programs().solo)
        stand_ins = dict(zip(names, sorted(simulation.known_programs().solo), strict=False))
        return (
            names,
            simulation.simulated_pools(Mechanism.MPS, known_as=stand_ins.__getitem__),
            simulation.SimulatedCounters(simulated),
        )
    # Imported here: only GPU machines have PyTorch.
    from gpushare.research.calibration.table_suite import TABLE  # noqa: PLC0415

    counters = DriverCounters()
    return list(TABLE), pools_of(TABLE, Stage(), stack.enter_context(mps_daemon())), counters


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(prog="gpushare.research.calibration.table")
    parser.add_argument("output", type=Path)
    parser.add_argument("--budget", type=float, default=9.5, help="minutes")
    parser.add_argument("--part", choices=PARTS, default="table")
    parser.add_argument("--simulated", default="", metavar="GPU", help="simulate this GPU: a dry run of all of it")
    parser.add_argument("--programs", type=int, help="take only the first so many of the ten programs")
    given = parser.parse_args(arguments)
    measure(
        given.output,
        budget_seconds=given.budget * 60,
        part=given.part,
        simulated=given.simulated,
        programs=given.programs,
    )


if __name__ == "__main__":
    main()
