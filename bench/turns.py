"""Compare three ways of freezing two neighbours of a job on the H200's table: in turn, together, and by chance.

For each triple of uncapped programs and each member it searches the least throttle, one duty for both others, with
which that member makes a goal's progress. What the two others then make tells which way costs less.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence

from bench.table_plant import MeasuredSet, measured_sets, read_table

GOALS = (0.3, 0.4, 0.5, 0.6, 0.7)
DUTIES = [step / 200 for step in range(200, 19, -1)]
WHOLE = 100


def in_turn(programs: MeasuredSet, duties: Sequence[float]) -> list[float]:
    """Return everyone's progress with the throttled frozen one after the other."""
    return programs.at(duties)


def at_once(programs: MeasuredSet, duties: Sequence[float]) -> list[float]:
    """Return everyone's progress with the freezes of all throttled beginning together."""
    edges = sorted({0.0, *duties})
    found = [0.0] * len(duties)
    for start, end in itertools.pairwise(edges):
        running = frozenset(position for position, duty in enumerate(duties) if duty >= end)
        for position, rate in programs.progress[running].items():
            found[position] += (end - start) * rate
    return found


def independently(programs: MeasuredSet, duties: Sequence[float]) -> list[float]:
    """Return everyone's progress with every freeze in a cycle of its own."""
    found = [0.0] * len(duties)
    for running, rates in programs.progress.items():
        weight = 1.0
        for position, duty in enumerate(duties):
            weight *= duty if position in running else 1.0 - duty
        for position, rate in rates.items():
            found[position] += weight * rate
    return found


WAYS = {"in turn": in_turn, "together": at_once, "independently": independently}


def others_make(programs: MeasuredSet, member: int, goal: float, way: str) -> float | None:
    """Return what the others make once this member makes its goal; None if no duty suffices or none is needed."""
    for duty in DUTIES:
        duties = [1.0 if position == member else duty for position in range(len(programs.members))]
        progress = WAYS[way](programs, duties)
        if progress[member] >= goal:
            return None if duty == 1.0 else sum(progress) - progress[member]
    return None


def main(arguments: Sequence[str]) -> None:
    """Print a line for each goal."""
    argparse.ArgumentParser("python -m bench turns", description=__doc__).parse_args(arguments)
    triples = [each for each in measured_sets(read_table(), 3) if all(cap == WHOLE for _, cap in each.members)]
    for goal in GOALS:
        cases = [
            found
            for triple in triples
            for member in range(3)
            if None not in (found := [others_make(triple, member, goal, way) for way in WAYS])
        ]
        means = ", ".join(
            f"{way} {statistics.fmean(case[at] or 0.0 for case in cases):.3f}" for at, way in enumerate(WAYS)
        )
        better = sum((case[0] or 0.0) > (case[1] or 0.0) for case in cases) / len(cases)
        print(f"{goal:.1f} of its speed alone, {len(cases)} cases: the two others make {means}", end="")
        print(f"; in turn more than together in {better:.0%}")
