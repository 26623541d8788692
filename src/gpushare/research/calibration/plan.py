"""Plan the runs of a collection and their order, the most informative first. Pure.

A *phase* keeps a group of workloads ready under several caps each (one MPS client for each workload and cap, 48 at
most, docs/facts.md 9) and fires sets of them. Pairs show everything that differs between two programs; one set
measured under many caps shows what caps change; the rest of the time goes to random sets of three and more.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Cell = tuple[str, int]  # a workload and its thread percentage
CLIENTS: int = 48  # docs/facts.md 9
BASE_CAPS: tuple[int, ...] = (100, 50, 25)
_EXHAUSTED: int = 500  # draws in a row without a new set, after which a group is taken as exhausted
OTHER_CAPS: tuple[int, ...] = (100, 75, 33)
# What an H200 with 16 cores took for the ten programs' table, 1,210 runs and 120 workers in 13 minutes: see
# docs/measurements/table.md. A run is the warm-up, the window, and the drain after it.
WORKER_SECONDS: float = 0.45
DRAIN_SECONDS: float = 0.14


@dataclass(frozen=True, slots=True)
class CalibrationPhase:
    """Workers that live at the same time and the runs made with them, most informative first.

    Attributes:
        cells: one worker each; at most 48. A program that runs beside itself under one cap has its cell twice.
        runs: sets of cells fired together; a set of one is a solo measurement.
    """

    cells: tuple[Cell, ...]
    runs: tuple[tuple[Cell, ...], ...]


def phases(
    workloads: Sequence[str],
    *,
    count: int,
    runs_per_phase: int,
    seed: int,
    capped: bool = True,
    probes: Sequence[str] = (),
) -> tuple[CalibrationPhase, ...]:
    """Plan `count` phases over the workloads; the same arguments give the same plan.

    With caps, a survey of all workloads without caps comes before them, so that the first minute shows which
    programs start and what they draw. With probes there is none, and every workload is measured beside each probe,
    both uncapped, in the phase that measures it alone. `capped` False plans for time slicing: every worker at 100.
    """
    chance = random.Random(seed)
    seen: Counter[str] = Counter()
    planned = []
    if capped and not probes:
        planned.append(_survey(workloads[:CLIENTS], len(workloads) + runs_per_phase // 2, chance))
    for number in range(count):
        caps = (BASE_CAPS if number % 5 != 4 else OTHER_CAPS) if capped else (100,)
        order = sorted(workloads, key=lambda name: (seen[name], chance.random()))
        group = order[: (CLIENTS - len(probes)) // len(caps)] if capped else order[:16]
        capped_solos = [
            ((name, cap),)
            for name in group
            for cap in caps
            if cap < 100 and (caps == OTHER_CAPS or not seen[name])
        ]
        whole_solos = [((name, 100),) for name in group]
        alone: list[tuple[Cell, ...]] = [((probe, 100),) for probe in probes]
        beside = [((name, 100), (probe, 100)) for name in group if not seen[name] for probe in probes]
        first: list[tuple[Cell, ...]] = [*capped_solos, *(whole_solos if probes else ()), *alone, *beside]
        seen.update(group)
        room = max(0, runs_per_phase - len(first) - len(whole_solos) - len(alone))
        pairs_first = number == 0 and not probes
        shared = list(itertools.islice(_sets(group, caps, chance, pairs_first=pairs_first), room))
        # Solo runs at 100% are repeated between sets: progress is relative to them, so drift must show.
        runs = (*first, *shared[: room // 2], *whole_solos, *alone, *shared[room // 2 :])
        planned.append(
            CalibrationPhase((*itertools.product(group, caps), *((probe, 100) for probe in probes)), runs)
        )
    return tuple(planned)


def left_of(
    planned: Sequence[CalibrationPhase], done: Mapping[tuple[Cell, ...], int]
) -> tuple[CalibrationPhase, ...]:
    """Return the phases less the runs that were made before; a phase without any left is left out.

    Args:
        done: how often each set was measured, its cells in order.
    """
    left = Counter(done)
    found = []
    for phase in planned:
        runs = []
        for run in phase.runs:
            key = tuple(sorted(run))
            if left[key] > 0:
                left[key] -= 1
            else:
                runs.append(run)
        if runs:
            found.append(CalibrationPhase(phase.cells, tuple(runs)))
    return tuple(found)


def expected_seconds(
    planned: Sequence[CalibrationPhase], *, warm_seconds: float, window_seconds: float, shared_seconds: float
) -> float:
    """Return about how long phases take on a machine with 16 cores, their workers' starts included."""
    workers = sum(len(phase.cells) for phase in planned)
    windows = [window_seconds if len(run) == 1 else shared_seconds for phase in planned for run in phase.runs]
    return workers * WORKER_SECONDS + sum(windows) + len(windows) * (warm_seconds + DRAIN_SECONDS)


def _survey(workloads: Sequence[str], runs: int, chance: random.Random) -> CalibrationPhase:
    """Plan every workload alone, then random pairs, triples and fours of all of them, uncapped."""
    solos = [((name, 100),) for name in workloads]
    shared = [
        tuple((name, 100) for name in chance.sample(list(workloads), min(size, len(workloads))))
        for size in itertools.islice(itertools.cycle((2, 3, 2, 4)), max(0, runs - len(solos)))
    ]
    return CalibrationPhase(tuple((name, 100) for name in workloads), (*solos, *shared))


def _sets(
    group: Sequence[str], caps: Sequence[int], chance: random.Random, *, pairs_first: bool
) -> Iterator[tuple[Cell, ...]]:
    """Yield sets without end: every pair of the group at the middle cap, if asked, then a mix of every size."""
    done: set[tuple[Cell, ...]] = set()

    def fresh(cells: Sequence[Cell]) -> tuple[Cell, ...] | None:
        key = tuple(sorted(cells))
        if key in done:
            return None
        done.add(key)
        return tuple(cells)

    first: list[Sequence[Cell]] = []
    if pairs_first:
        middle = caps[len(caps) // 2]
        first = [((a, middle), (b, middle)) for a, b in itertools.combinations(group, 2)]
        chance.shuffle(first)
    families = _families(group, caps, chance)
    mixed = _mixed(group, caps, chance)
    misses = 0
    for step in itertools.count():
        source: Iterator[Sequence[Cell]] = (
            iter(first) if step % 2 and first else families if step % 3 == 2 else mixed
        )
        cells = next(source, None)
        if first and step % 2:
            first = first[1:]
        kept = fresh(cells) if cells is not None else None
        misses = 0 if kept is not None else misses + 1
        if kept is not None:
            yield kept
        if misses > _EXHAUSTED:
            return


def _families(group: Sequence[str], caps: Sequence[int], chance: random.Random) -> Iterator[Sequence[Cell]]:
    """Yield one set under many caps, then the next: the choice of caps is judged on these."""
    if len(caps) == 1:
        return
    for size in itertools.cycle((2, 3, 2, 4, 3)):
        names = chance.sample(list(group), min(size, len(group)))
        choices = list(itertools.product(caps, repeat=len(names)))
        kept = [tuple([cap] * len(names)) for cap in caps]
        rest = [choice for choice in choices if choice not in kept]
        chance.shuffle(rest)
        for choice in [*kept, *rest][: 9 if size == 2 else 8]:
            yield list(zip(names, choice, strict=True))


def _mixed(group: Sequence[str], caps: Sequence[int], chance: random.Random) -> Iterator[Sequence[Cell]]:
    """Yield random sets of up to eight, more pairs than triples, more triples than fours; equal or mixed caps."""
    sizes = (2, 3, 2, 4, 3, 2, 4, 3, 2, 5, 3, 4, 2, 6, 3, 4, 8)
    for size in itertools.cycle(sizes):
        names = chance.sample(list(group), min(size, len(group)))
        if chance.random() < 0.5:
            weights = [1.0] * len(caps) if size == 2 else [0.6, *[1.0] * (len(caps) - 1)]
            cap = chance.choices(list(caps), weights)[0]
            yield [(name, cap) for name in names]
        else:
            yield [(name, chance.choice(list(caps))) for name in names]
