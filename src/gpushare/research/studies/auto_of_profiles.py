"""Compare `gpushare.io/fraction: auto` by an agent's profiles with `auto` by measured cap curves.

`python -m gpushare.research.studies.auto_of_profiles DATASET [--max-slowdown M] [--class latency]`

One row a program, in percent of a GPU: by the measured cap curve (the truth), by a signature with all threads, by
signatures under 50 and 25% of them, by the cap curve that grew from both of these, and by the one that grew from
the signature with all threads and the one under 50%. Then, of each kind of
profile, how many programs are within 5% of the truth, the mean and the largest distance, and how many get less.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from gpushare.core.api import JobClass
from gpushare.core.interference import Profile, auto_share
from gpushare.core.progress import at_full_threads, progress_shown
from gpushare.research.dataset import Dataset, parse

BAR_PERCENT: Final = 5
CAPS: Final = (50, 25)  # of signatures that are read in place
KINDS: Final = ("all threads", *(f"under {cap}%" for cap in CAPS), "grown of these", "all threads and 50%")


def shares_of(
    data: Dataset, program: str, max_slowdown: float, job_class: JobClass = JobClass.THROUGHPUT
) -> tuple[int, ...] | None:
    """Return `auto` by the measured cap curve, then by each of `KINDS`; None for a program without these runs."""
    whole = data.solo_counters(program)
    under = {cap: data.solo_counters(program, cap) for cap in CAPS}
    measured = {cap: progress for cap, progress in data.cap_curve(program).items() if cap < 100}
    if whole is None or not measured:
        return None
    profiles = [Profile(whole, cap_curve=measured), Profile(whole)]
    points: dict[int, float] = {}
    best = whole
    for cap in CAPS:
        seen = under[cap]
        if seen is None:
            return None
        at_full, progress = at_full_threads(seen, cap / 100)
        profiles.append(Profile(at_full, cap_curve={cap: progress}))
        if not points:
            best = at_full
        else:
            progress = progress_shown(best, seen, cap / 100)
        points[cap] = min(progress, *points.values(), 1.0)
    profiles.append(Profile(best, cap_curve=points))
    first = under[CAPS[0]]
    assert first is not None
    profiles.append(Profile(whole, cap_curve={CAPS[0]: progress_shown(whole, first, CAPS[0] / 100)}))
    return tuple(auto_share(each, max_slowdown=max_slowdown, job_class=job_class) for each in profiles)


def summary(rows: Sequence[Sequence[int]], kind: int) -> tuple[int, float, int, int]:
    """Return of one kind: programs within the bar, mean and largest distance, programs that get too little."""
    missed = np.array([row[1 + kind] - row[0] for row in rows])
    away = np.abs(missed)
    return int((away <= BAR_PERCENT).sum()), float(away.mean()), int(away.max()), int((missed < 0).sum())


def main() -> None:
    """Print the rows and their summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--max-slowdown", type=float, default=1.5)
    parser.add_argument("--class", dest="job_class", type=JobClass, default=JobClass.THROUGHPUT)
    read = parser.parse_args()
    data = parse(read.dataset.read_bytes().splitlines())
    rows = []
    print("program | truth |", " | ".join(KINDS))
    for program in sorted(data.solo):
        row = shares_of(data, program, read.max_slowdown, read.job_class)
        if row is not None:
            rows.append(row)
            print(program, *row, sep=" | ")
    for kind, name in enumerate(KINDS):
        within, mean, worst, less = summary(rows, kind)
        print(f"{name}: {within} of {len(rows)} within {BAR_PERCENT}, mean {mean:.1f}, worst {worst}, less {less}")


if __name__ == "__main__":
    main()
