"""Plan the complete table: every set of ten programs, each under a few caps. Pure.

Sets of different programs under the caps that a share gives: every pair, triple and four. Pairs and triples come
first, so that a collection that is cut short lacks fours. Solo windows are repeated in each phase, since progress
is relative to them.
"""

import itertools
from collections.abc import Iterator, Sequence

from gpushare.research.calibration.plan import CalibrationPhase, Cell

PAIR_CAPS: tuple[tuple[int, int], ...] = ((100, 100), (50, 50), (75, 25), (25, 75), (100, 50), (50, 100))
TRIPLE_CAPS: tuple[int, ...] = (33, 50, 100)
FOUR_CAPS: tuple[int, ...] = (25, 50)

Set = tuple[Cell, ...]


def table_phases(names: Sequence[str]) -> tuple[CalibrationPhase, ...]:
    """Plan the table of these programs; at most 48 cells a phase for up to twelve programs."""
    pairs = {caps: list(_pairs(names, caps)) for caps in PAIR_CAPS}
    triples = {cap: list(_equal(names, 3, cap)) for cap in TRIPLE_CAPS}
    fours = {cap: list(_equal(names, 4, cap)) for cap in FOUR_CAPS}
    return (
        _phase(
            names,
            (100, 50),
            [pairs[100, 100], pairs[50, 50], pairs[100, 50], pairs[50, 100]],
            [triples[100], triples[50]],
        ),
        _phase(names, (100, 75, 33, 25), [pairs[75, 25], pairs[25, 75]], [triples[33]]),
        _phase(names, (100, 50, 25), [fours[25]], [fours[50]]),
    )


def trial_phase(names: Sequence[str]) -> CalibrationPhase:
    """Plan a first look: every program alone, and one pair."""
    alone = tuple(((name, 100),) for name in names)
    return CalibrationPhase(tuple((name, 100) for name in names), (*alone, ((names[0], 100), (names[1], 100))))


def alone_phase(names: Sequence[str], rounds: int) -> CalibrationPhase:
    """Plan rounds of every program alone under most sets' caps: a slow moment of the host then shows."""
    cells = tuple(itertools.product(names, (100, 50, 33, 25)))
    return CalibrationPhase(cells, tuple((cell,) for _ in range(rounds) for cell in cells))


def _phase(
    names: Sequence[str], caps: Sequence[int], early: Sequence[Sequence[Set]], late: Sequence[Sequence[Set]]
) -> CalibrationPhase:
    alone = [((name, cap),) for cap in caps for name in names]
    sets = [each for group in early for each in group]
    return CalibrationPhase(
        tuple((name, cap) for name in names for cap in caps),
        (*alone, *sets, *alone, *(each for group in late for each in group)),
    )


def _pairs(names: Sequence[str], caps: tuple[int, int]) -> Iterator[Set]:
    for a, b in itertools.combinations(names, 2):
        yield (a, caps[0]), (b, caps[1])


def _equal(names: Sequence[str], size: int, cap: int) -> Iterator[Set]:
    for chosen in itertools.combinations(names, size):
        yield tuple((name, cap) for name in chosen)
