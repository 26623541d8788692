"""Summarise a colocation dataset: summed progress and the worst tenant by number of tenants and caps.

    python -m gpushare.research.studies.colocation_summary DATASET

Prints a row for each number of tenants and cap that all of them had (100 is uncapped), with the means over the
sets, and how far the prediction of cap curves errs on the programs' measured ones.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from gpushare.core.progress import predicted_cap_progress
from gpushare.research.dataset import Dataset, parse
from gpushare.research.interference.fit import sets_of

FEWEST_SETS = 3


def shared(data: Dataset) -> None:
    """Print the rows of sets whose tenants have the same cap."""
    found: dict[tuple[int, int], list[tuple[float, ...]]] = defaultdict(list)
    for run, progress in data.shared_runs():
        caps = {tenant.thread_percentage for tenant in run.tenants}
        if len(caps) == 1:
            found[len(run.tenants), caps.pop()].append(tuple(progress))
    print("tenants  cap%  sets  sum of progress  worst tenant")
    for (tenants, cap), sets in sorted(found.items()):
        if len(sets) >= FEWEST_SETS:
            total, worst = np.mean([sum(each) for each in sets]), np.mean([min(each) for each in sets])
            print(f"{tenants:7d}  {cap:4d}  {len(sets):4d}  {total:15.2f}  {worst:12.2f}")


def capped(data: Dataset) -> None:
    """Print the mean absolute error of predicted cap curves, by the session that measured the program first."""
    first = min((run.session for run in data.runs), default="")
    early = {tenant.workload for run in data.runs if run.session == first for tenant in run.tenants}
    sets = sets_of(data)
    errors: dict[str, list[float]] = defaultdict(list)
    for workload, profile in zip(sets.workloads, sets.profiles, strict=True):
        for cap, measured in profile.cap_curve.items():
            if cap == 100:
                continue
            error = abs(predicted_cap_progress(profile.counters, cap / 100) - measured)
            errors["first session" if workload in early else "later sessions only"].append(error)
    for session, values in sorted(errors.items()):
        print(f"cap curves of programs of the {session}: {np.mean(values):.3f} over {len(values)} points")


def main(path: str) -> None:
    """Print all of it."""
    data = parse(Path(path).read_bytes().splitlines())
    shared(data)
    capped(data)


if __name__ == "__main__":
    main(sys.argv[1])
