"""`python -m gpushare.research.calibration.table OUTPUT`: measure the complete table, resuming OUTPUT."""

import argparse
import sys
import time
from pathlib import Path

from gpushare.research.calibration.collector import Timing, collect, pools_of
from gpushare.research.calibration.counters import DriverCounters
from gpushare.research.calibration.daemon import mps_daemon
from gpushare.research.calibration.table_plan import alone_phase, table_phases, trial_phase
from gpushare.research.calibration.workload import Stage
from gpushare.research.dataset import Mechanism

TIMING = Timing(warm_seconds=0.10, window_seconds=0.36, shared_seconds=0.36)


def measure(output: Path, *, budget_seconds: float, part: str) -> int:
    """Run the plan's phases one after the other until the budget is spent; return how many runs were written."""
    # Imported here: only GPU machines have PyTorch.
    from gpushare.research.calibration.table_suite import TABLE  # noqa: PLC0415

    began = time.monotonic()

    def log(text: str) -> None:
        """Print one event a line, with the seconds since the start."""
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)  # noqa: T201 -- a program

    def progress(done: int, total: int) -> None:
        """Log every fortieth run."""
        if done % 40 == 0:
            log(f"{done} of {total} runs")

    names = list(TABLE)
    parts = {"trial": (trial_phase(names),), "alone": (alone_phase(names, 6),), "table": table_phases(names)}
    written = 0
    counters = DriverCounters()
    with mps_daemon() as environment:
        for phase in parts[part]:
            left = budget_seconds - (time.monotonic() - began)
            if left <= 0:
                break
            written += collect(
                [phase],
                output,
                pools=pools_of(TABLE, Stage(), environment),
                mechanism=Mechanism.MPS,
                timing=TIMING,
                budget_seconds=left,
                counters=counters,
                progress=progress,
                log=log,
            )
    log(f"{written} runs written to {output}")
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gpushare.research.calibration.table")
    parser.add_argument("output", type=Path)
    parser.add_argument("--budget", type=float, default=9.5, help="minutes")
    parser.add_argument("--part", choices=("table", "trial", "alone"), default="table")
    given = parser.parse_args()
    measure(given.output, budget_seconds=given.budget * 60, part=given.part)
