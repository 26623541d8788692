"""Summarise the complete table: `python -m gpushare.research.studies.table_summary DATASET`.

Prints the sets by number of tenants and caps with summed progress and the worst tenant, twice: relative to the
mean window alone at 100%, and to the fastest window alone at any cap. Then the pairs by their kinds,
and the spread of each program's solo windows.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from gpushare.research.dataset import Dataset, Run, parse

KINDS = {
    "wideresnet": "training",
    "seq2seq": "training",
    "ppo": "training",
    "unet3d": "training",
    "retrieval": "serving",
    "chat": "serving",
    "convnext": "serving",
    "lattice": "hpc",
    "cg": "hpc",
    "lu": "hpc",
}


def main(path: str) -> None:
    """Print all of it."""
    data = parse(Path(path).read_bytes().splitlines())
    solo = sum(run.is_solo for run in data.runs)
    print(f"{data.gpu_model}, driver {data.driver}: {len(data.solo)} programs, {solo} windows alone, ", end="")
    print(f"{len(data.runs) - solo} of sets")
    print("tenants  caps%            sets  sum, mean  sum, fastest  worst, mean  worst, fastest  lowest worst")
    for (tenants, caps), sets in sorted(by_caps(data).items()):
        print(f"{tenants:7d}  {'/'.join(map(str, caps)):15s}  {len(sets):4d}  {_row(sets)}")
    print("pairs by kind      caps%      sets  sum, mean  sum, fastest  worst, mean  worst, fastest  lowest worst")
    for (kinds, caps), sets in sorted(pairs_by_kind(data).items()):
        print(f"{'+'.join(kinds):17s}  {'/'.join(map(str, caps)):9s}  {len(sets):4d}  {_row(sets)}")
    print("program alone                 slowest over fastest window, by cap")
    for program, spread in sorted(spreads(data).items()):
        print(f"{program:28s}  " + "  ".join(f"{cap}%: {ratio:.2f}" for cap, ratio in sorted(spread.items())))


# Progress relative to the mean, and to the fastest window alone.
Pair = tuple[tuple[float, ...], tuple[float, ...]]


def progress(data: Dataset, run: Run) -> Pair:
    """Return each tenant's progress, both ways."""
    mean = data.progress(run)
    fastest = tuple(
        rate / max(fast(data, tenant.workload))
        for tenant, rate in zip(run.tenants, run.iterations_per_s, strict=True)
    )
    return mean or fastest, fastest


def fast(data: Dataset, program: str) -> list[float]:
    """Return the rates of the program's windows alone, at any cap."""
    return [run.iterations_per_s[0] for runs in data.solo[program].values() for run in runs]


def by_caps(data: Dataset) -> dict[tuple[int, tuple[int, ...]], list[Pair]]:
    """Group the sets by number of tenants and their sorted caps."""
    found: dict[tuple[int, tuple[int, ...]], list[Pair]] = defaultdict(list)
    for run in data.runs:
        if not run.is_solo:
            caps = tuple(sorted((tenant.thread_percentage for tenant in run.tenants), reverse=True))
            found[len(run.tenants), caps].append(progress(data, run))
    return found


def pairs_by_kind(data: Dataset) -> dict[tuple[tuple[str, ...], tuple[int, ...]], list[Pair]]:
    """Group the pairs under equal caps by the kinds of their programs."""
    found: dict[tuple[tuple[str, ...], tuple[int, ...]], list[Pair]] = defaultdict(list)
    for run in data.runs:
        caps = tuple(tenant.thread_percentage for tenant in run.tenants)
        if len(caps) == 2 and caps[0] == caps[1]:
            kinds = tuple(sorted(KINDS[tenant.workload.split("-")[0]] for tenant in run.tenants))
            found[kinds, caps].append(progress(data, run))
    return found


def spreads(data: Dataset) -> dict[str, dict[int, float]]:
    """Return the slowest over the fastest window of each program alone, by cap."""
    return {
        program: {
            cap: min(rates) / max(rates)
            for cap, runs in caps.items()
            if len(rates := [run.iterations_per_s[0] for run in runs]) > 1
        }
        for program, caps in data.solo.items()
    }


def _row(sets: Sequence[Pair]) -> str:
    sums = [statistics.mean(sum(pair[way]) for pair in sets) for way in (0, 1)]
    worst = [statistics.mean(min(pair[way]) for pair in sets) for way in (0, 1)]
    lowest = min(min(pair[1]) for pair in sets)
    return f"{sums[0]:9.2f}  {sums[1]:12.2f}  {worst[0]:11.2f}  {worst[1]:14.2f}  {lowest:12.2f}"


if __name__ == "__main__":
    main(sys.argv[1])
