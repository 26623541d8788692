"""The runs of Pan's comparison, and what all of it takes of the GPU. Pure.

Each part is one pool of workers with its own file of raw results, a colocation dataset v1. Within a part every
arrangement of one set follows the other, and the parts of a round follow each other, so that a slow minute of the
machine meets them all.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bench.papers.programs import (
    BATCHES,
    CAPS,
    CROWD,
    CROWDS,
    DIFFERENT,
    SAME,
    SEVEN,
    TOGETHER,
    batched,
    copy_of,
)
from gpushare.research.calibration.collector import Timing
from gpushare.research.calibration.plan import CalibrationPhase, Cell, expected_seconds
from gpushare.research.dataset import Mechanism

TIMING: Final = Timing(warm_seconds=0.12, window_seconds=0.40, shared_seconds=0.50)
ROUNDS: Final = 2
PART_SECONDS: Final = 2.0  # of a part: its MPS daemon begins and ends
_ALONE_REPEATS: Final = 2
_BATCH_REPEATS: Final = 2

ProgramSet = tuple[str, ...]


class Part(StrEnum):
    """One pool of workers."""

    ALONE = "alone"  # the seven programs under every cap: pipes, and what our caps are chosen by
    PAIRS = "pairs"
    TOGETHER = "together"
    SLICING = "slicing"  # pairs and sets without MPS
    CROWD = "crowd"
    BATCHES = "batches"

    @property
    def mechanism(self) -> Mechanism:
        """Return how its programs share the GPU."""
        return Mechanism.TIME_SLICING if self is Part.SLICING else Mechanism.MPS


class Arrangement(StrEnum):
    """Way a set shares the GPU; FIFO, one after the other, has a sum of 1 by definition and is not run."""

    FIFO = "FIFO"
    WITHOUT_MPS = "without MPS"
    UNCAPPED = "100-100"
    UNEQUAL = "90-10"
    EQUAL = "equal parts"
    OURS = "our caps"


@dataclass(frozen=True, slots=True)
class SetPlan:
    """A set of programs and the caps of each arrangement under MPS."""

    tenants: ProgramSet
    kind: str
    caps: Mapping[Arrangement, tuple[int, ...]]

    def cells(self, arrangement: Arrangement) -> tuple[Cell, ...]:
        """Return who runs together."""
        return tuple(zip(self.tenants, self.caps[arrangement], strict=True))


def sets_of_seven() -> list[tuple[ProgramSet, str]]:
    """Return every set with its kind."""
    joint = [(tuple(itertools.islice(_mixed(), count)), f"{count} together") for count in TOGETHER]
    return [
        *((pair, "different pipes") for pair in DIFFERENT),
        *((pair, "same pipe") for pair in SAME),
        *joint,
    ]


def set_plans(ours: Mapping[ProgramSet, tuple[int, ...]]) -> list[SetPlan]:
    """Return every set with its caps.

    Args:
        ours: the caps that our model chose for a set; a set that is not there has no such arrangement.
    """
    plans = []
    for tenants, kind in sets_of_seven():
        count = len(tenants)
        caps = {Arrangement.UNCAPPED: (100,) * count}
        if "together" in kind:
            caps[Arrangement.EQUAL] = (100 // count,) * count
        else:
            caps[Arrangement.UNEQUAL] = (90, 10)
        if tenants in ours:
            caps[Arrangement.OURS] = ours[tenants]
        plans.append(SetPlan(tenants, kind, caps))
    return plans


def phase_of(part: Part, ours: Mapping[ProgramSet, tuple[int, ...]]) -> CalibrationPhase:
    """Return one pool's workers and runs of one round."""
    if part is Part.ALONE:
        cells = tuple(itertools.product(SEVEN, CAPS))
        return CalibrationPhase(cells, tuple((cell,) for _ in range(_ALONE_REPEATS) for cell in cells))
    if part is Part.CROWD:
        cells = tuple((copy_of(CROWD, number), 100) for number in range(max(CROWDS)))
        # The lone one again at the end: it waits for its host, whose first window was slow once.
        return CalibrationPhase(cells, tuple(cells[:count] for count in (*CROWDS, CROWDS[0])))
    if part is Part.BATCHES:
        names = [batched(program, batch) for program, sizes in BATCHES.items() for batch in sizes]
        cells = tuple(itertools.product(names, CAPS))
        return CalibrationPhase(cells, tuple((cell,) for _ in range(_BATCH_REPEATS) for cell in cells))
    plans = set_plans(ours)
    alone = tuple(((name, 100),) for name in SEVEN)
    if part is Part.SLICING:
        chosen = [plan.cells(Arrangement.UNCAPPED) for plan in plans]
    else:
        wanted = [plan for plan in plans if ("together" in plan.kind) is (part is Part.TOGETHER)]
        chosen = [plan.cells(arrangement) for plan in wanted for arrangement in plan.caps]
    runs = (*alone, *dict.fromkeys(chosen))
    return CalibrationPhase(tuple(dict.fromkeys(cell for run in runs for cell in run)), runs)


def rounds() -> list[tuple[int, Part]]:
    """Return the parts in the order in which they are measured, each with its round."""
    sets = (Part.PAIRS, Part.SLICING, Part.TOGETHER)
    turned = [(number, part) for number in range(ROUNDS) for part in (sets if number % 2 == 0 else sets[::-1])]
    return [(0, Part.ALONE), *turned, (0, Part.BATCHES), (0, Part.CROWD)]


def expected(parts: Sequence[tuple[int, Part]], ours: Mapping[ProgramSet, tuple[int, ...]]) -> float:
    """Return the seconds of the GPU that these take; where caps are not chosen yet, as if all were 50."""
    guess = ours or guessed_caps()
    return PART_SECONDS * len(parts) + expected_seconds(
        [phase_of(part, guess) for _, part in parts],
        warm_seconds=TIMING.warm_seconds,
        window_seconds=TIMING.window_seconds,
        shared_seconds=TIMING.shared_seconds,
    )


def guessed_caps() -> dict[ProgramSet, tuple[int, ...]]:
    """Return placeholders for our caps in a plan until they are chosen."""
    return {tenants: (50,) * len(tenants) for tenants, _ in sets_of_seven()}


def _mixed() -> list[str]:
    """Return the seven so that neighbours in the list lean on different pipes."""
    by_pipe: dict[str, list[str]] = {}
    for name, pipe in SEVEN.items():
        by_pipe.setdefault(pipe, []).append(name)
    return [name for row in itertools.zip_longest(*by_pipe.values()) for name in row if name is not None]
