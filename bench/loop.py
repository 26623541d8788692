"""Test how the loop keeps promises on the H200's table: every measured pair, triple and four with a broken one.

The plant is the table (bench/table_plant.py); windows carry noise, and a change of duties shows after a delay.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.table_plant import MeasuredSet, measured_sets, read_table
from gpushare.core.api import JobClass
from gpushare.core.control import FREE, GpuWatch, WatchActions, WatchedTenant, WatchSettings, WatchWindow, watch

TOLERANCE = 0.01  # shortfall with which a promise still counts as kept
ROOM = 0.05  # sets whose promises can all be kept by so much have room for the noise
SIZES = {2: "pairs", 3: "triples", 4: "fours"}


@dataclass
class Trace:
    """One run, window by window: true progress and duties in force (0 for absent tenants), and the actions."""

    true: list[list[float]] = field(default_factory=list)
    duties: list[list[float]] = field(default_factory=list)
    actions: list[WatchActions] = field(default_factory=list)


def uid_of(position: int) -> str:
    return "abcdefgh"[position]


def run(
    programs: MeasuredSet,
    windows: int,
    rng: np.random.Generator,
    *,
    noise: float = 0.05,
    constant_noise: float = 0.0,
    delay: float = 0.4,
    arrivals: Sequence[int] = (),
    leaves_after: int | None = None,
    settings: WatchSettings | None = None,
) -> Trace:
    """Run the loop on one set for some windows of one second.

    Args:
        noise, constant_noise: standard deviations of what a window says, drawn anew each time and once.
        delay: seconds until a change of duties shows.
        arrivals: the window before which each member comes; everyone is there from the start where none is given.
        leaves_after: windows until a tenant leaves that is asked to; None: it stays.
    """
    settings = settings or WatchSettings()
    state, trace = GpuWatch(), Trace()
    size = len(programs.members)
    alone = [programs.progress[frozenset([position])][position] for position in range(size)]
    offset = rng.normal(0.0, constant_noise, size)
    comes = list(arrivals) or [0] * size
    asked: dict[int, int] = {}
    before = duties = [FREE if window <= 1 else 0.0 for window in comes]
    for number in range(1, windows + 1):
        old, new = programs.at(before), programs.at(duties)
        true = [delay * one + (1 - delay) * other for one, other in zip(old, new, strict=True)]
        seen = [max(0.0, float(rate)) for rate in np.array(true) + offset + rng.normal(0.0, noise, size)]
        tenants = tuple(
            WatchedTenant(
                uid_of(position),
                JobClass.LATENCY if position in programs.latency else JobClass.THROUGHPUT,
                programs.promises[position],
                seen[position],
                max(0.02, (noise**2 + constant_noise**2) ** 0.5),
                order=float(comes[position]) + position / size,
                alone=min(1.0, alone[position]),
            )
            for position in range(size)
            if duties[position] > 0
        )
        state, actions = watch(state, WatchWindow(float(number), tenants), float(number), settings)
        trace.true.append(true)
        trace.duties.append(duties)
        trace.actions.append(actions)
        left = {
            position
            for position, when in asked.items()
            if leaves_after is not None and number >= when + leaves_after
        }
        asked |= {p: number for p in range(size) if uid_of(p) == actions.retract and p not in asked}
        before, duties = (
            duties,
            [
                0.0
                if comes[position] > number + 1 or position in left
                else actions.duties.get(uid_of(position), FREE)
                for position in range(size)
            ],
        )
    return trace


def kept(programs: MeasuredSet, trace: Trace, tolerance: float = TOLERANCE) -> list[bool]:
    """Return for every window whether the promise of everyone who was there was kept."""
    return [
        all(
            rate >= promise - tolerance or duty == 0
            for rate, promise, duty in zip(true, programs.promises, duties, strict=True)
        )
        for true, duties in zip(trace.true, trace.duties, strict=True)
    ]


def first_kept(programs: MeasuredSet, trace: Trace) -> int | None:
    """Return the number of the first window in which every promise was kept, from 1; None: never."""
    return next((number for number, is_kept in enumerate(kept(programs, trace), start=1) if is_kept), None)


def direction_changes(trace: Trace, position: int, after: int = 0) -> int:
    """Return how often a tenant's duty went the other way than the time before."""
    duties = [each[position] for each in trace.duties[after:]]
    steps = [b - a for a, b in itertools.pairwise(duties) if a != b]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


@dataclass(frozen=True)
class Trial:
    """Settings of the trial of each set.

    Attributes:
        windows: of one second each.
        newcomer: the last program comes so many windows after the others, which then count from its arrival.
        leaves_after: windows until a tenant leaves that is asked to.
    """

    windows: int = 240
    seed: int = 0
    noise: float = 0.05
    newcomer: int = 0
    leaves_after: int = 5


def measure(trial: Trial, sizes: Sequence[int]) -> list[dict[str, object]]:
    table, rows = read_table(), []
    for size in sizes:
        sets = [each for each in measured_sets(table, size) if each.broken]
        rooms = [each.best_room(step=0.05 if size < 4 else 0.15) for each in sets]
        for name, least, most in (
            (f"by {ROOM:g} or more", ROOM, np.inf),
            (f"by less than {ROOM:g}", 0.0, ROOM),
            ("not at all", -np.inf, 0.0),
        ):
            chosen = [each for each, room in zip(sets, rooms, strict=True) if least <= room < most]
            rows.append({"sets": SIZES[size], "can_be_kept": name, **_summary(chosen, trial)})
    return rows


def _run(programs: MeasuredSet, trial: Trial, number: int) -> Trace:
    trace = run(
        programs,
        trial.windows + trial.newcomer,
        np.random.default_rng([trial.seed, number]),
        noise=trial.noise,
        arrivals=[0] * (len(programs.members) - 1) + [trial.newcomer + 1 if trial.newcomer else 0],
        leaves_after=trial.leaves_after,
    )
    start = trial.newcomer
    return Trace(trace.true[start:], trace.duties[start:], trace.actions[start:])


def _summary(sets: Sequence[MeasuredSet], trial: Trial) -> dict[str, object]:
    traces = [_run(each, trial, number) for number, each in enumerate(sets)]
    firsts = [first_kept(each, trace) for each, trace in zip(sets, traces, strict=True)]
    restored = [first for first in firsts if first is not None]
    deep = [
        first for each, first in zip(sets, firsts, strict=True) if first is not None and each.depth >= trial.noise
    ]
    later = [
        is_kept
        for each, trace, first in zip(sets, traces, firsts, strict=True)
        if first is not None
        for is_kept in kept(each, trace)[first:]
    ]
    bests = [each.best_sum(step=0.05 if len(each.members) < 4 else 0.15) for each in sets]
    half = trial.windows // 2
    parts = [
        sum(map(sum, trace.true[half:])) / (trial.windows - half) / best
        for trace, best in zip(traces, bests, strict=True)
        if best is not None
    ]
    return {
        "number": len(sets),
        "part_of_best_sum": sum(parts) / len(parts) if parts else None,
        "restored": len(restored),
        "windows_median": statistics.median(restored) if restored else None,
        "windows_p90": float(np.quantile(restored, 0.9)) if restored else None,
        "windows_p90_deep": float(np.quantile(deep, 0.9)) if deep else None,
        "kept_afterwards": sum(later) / len(later) if later else None,
        "turns_per_100_s": _turns(traces, trial.windows),
        "retraction_asked": sum(any(a.retract for a in trace.actions) for trace in traces),
    }


def _turns(traces: Sequence[Trace], windows: int) -> float | None:
    if not traces:
        return None
    half = windows // 2
    return float(
        np.mean(
            [
                sum(direction_changes(trace, p, half) for p in range(len(trace.true[0]))) * 100 / (windows - half)
                for trace in traces
            ]
        )
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench loop", description=__doc__)
    parser.add_argument("--windows", type=int, default=240, help="of one second each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of a window's progress")
    parser.add_argument("--newcomer", type=int, default=0, help="windows before the last program comes")
    parser.add_argument("--leaves-after", type=int, default=5, help="windows from a retraction asked to the end")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4], choices=SIZES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    trial = Trial(options.windows, options.seed, options.noise, options.newcomer, options.leaves_after)
    rows = measure(trial, options.sizes)
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"sets of the H200's table with a broken promise, {options.windows} windows of 1 s, "
        f"noise {options.noise:g}, seed {options.seed}\n"
        "sets     promises can be kept  number  restored  windows: median  p90  p90 beyond noise  "
        "kept after  of best sum  turns/100 s  retraction"
    )
    for row in rows:
        print(
            f"{row['sets']:8} {row['can_be_kept']:20} {row['number']:7} {row['restored']:9} "
            f"{_text(row['windows_median'], '.0f'):>16} {_text(row['windows_p90'], '.0f'):>4} "
            f"{_text(row['windows_p90_deep'], '.0f'):>17} "
            f"{_text(row['kept_afterwards'], '.1%'):>11} "
            f"{_text(row['part_of_best_sum'], '.3f'):>12} {_text(row['turns_per_100_s'], '.1f'):>12} "
            f"{row['retraction_asked']:11}"
        )


def _text(figure: object, form: str) -> str:
    return format(figure, form) if isinstance(figure, int | float) else "-"
