"""`python -m gpushare.research.calibration`: a collection that needs only PyTorch and NVML."""

import argparse
import sys
import time
from pathlib import Path

from gpushare.research.calibration.run import CalibrationOrder, calibrate

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="gpushare.research.calibration")
    parser.add_argument("output", type=Path)
    parser.add_argument("--budget", type=float, default=9.0, help="minutes")
    parser.add_argument("--phases", type=int, default=5)
    parser.add_argument("--runs-per-phase", type=int, default=150)
    parser.add_argument("--workloads", default="", help="comma-separated names; default all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip-phases", type=int, default=0)
    parser.add_argument("--stop-phases", type=int, help="leave out the phases from this one on")
    parser.add_argument("--no-probes", action="store_true")
    parser.add_argument("--time-slicing", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--simulated", default="", help="a GPU model to make up")
    given = parser.parse_args()
    began = time.monotonic()

    def log(text: str) -> None:
        """Print one event a line, with the seconds since the start."""
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)  # noqa: T201 -- a program

    def progress(done: int, total: int) -> None:
        """Log every twentieth run."""
        if done % 20 == 0:
            log(f"{done} of {total} runs")

    order = CalibrationOrder(
        phase_count=given.phases,
        runs_per_phase=given.runs_per_phase,
        workloads=tuple(name for name in given.workloads.split(",") if name),
        seed=given.seed,
        skip_phases=given.skip_phases,
        stop_phases=given.stop_phases,
        time_slicing=given.time_slicing,
        dry_run=given.dry_run,
        probes=not given.no_probes,
        simulated=given.simulated,
    )
    written = calibrate(given.output, order, budget_seconds=given.budget * 60, progress=progress, log=log)
    log(f"{written} runs written to {given.output}")
