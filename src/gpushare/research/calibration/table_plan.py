"""Plan the complete table: every set of ten programs, each under a few caps. Pure.

Sets of different programs under the caps that a share gives: every pair, triple and four. Pairs and triples come
first, so that a collection that is cut short lacks fours. Solo windows are repeated in each phase, since progress
is relative to them.

Then the sets that hold a program twice or more (`twice_phases`): the members that are the same program are two
processes, and exchangeable, so a pair has no (25, 75) beside (75, 25). They are ordered by how often jobs of all
programs, equally often drawn, form them: pairs and triples, then fours with one double (43% of all fours), then
the others (6%).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

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


def twice_phases(names: Sequence[str]) -> tuple[CalibrationPhase, ...]:
    """Plan every set with a program twice or more; at most 40 workers a phase for ten programs.

    Each phase has its own windows alone under its caps. Where the budget ends, the last phases are lacking; the
    first four hold all pairs, all triples but of one program uncapped, and all fours with one double.
    """
    pairs = {caps: _repeated(names, caps, [(2,)]) for caps in ((100, 100), (75, 25), (50, 50), (100, 50))}
    mixed = {cap: _repeated(names, (cap,) * 3, [(2, 1)]) for cap in TRIPLE_CAPS}
    same = {cap: _repeated(names, (cap,) * 3, [(3,)]) for cap in TRIPLE_CAPS}
    fours = [_repeated(names, (cap,) * 4, [(2, 1, 1)]) for cap in reversed(FOUR_CAPS)]
    by_set = [each for both in zip(*fours, strict=True) for each in both]  # a set that is begun has both caps
    rest = {cap: _repeated(names, (cap,) * 4, [(2, 2), (3, 1), (4,)]) for cap in FOUR_CAPS}
    alone = {cap: [((name, cap),) for name in names] for cap in (100, 75, 50, 33, 25)}
    return (
        _in_order(
            names,
            {100: 2, 75: 1, 25: 1},
            (alone[100], alone[75], alone[25], pairs[100, 100], pairs[75, 25], mixed[100], alone[100]),
        ),
        _in_order(
            names,
            {100: 1, 50: 3},
            (alone[100], alone[50], pairs[50, 50], pairs[100, 50], mixed[50], same[50], alone[50]),
        ),
        _in_order(names, {100: 1, 33: 3}, (alone[100], alone[33], mixed[33], same[33], alone[33])),
        _in_order(names, {50: 2, 25: 2}, (alone[50], alone[25], by_set)),
        _in_order(names, {50: 4}, (alone[50], rest[50])),
        _in_order(names, {25: 4}, (alone[25], rest[25])),
        _in_order(names, {100: 3}, (alone[100], same[100])),
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


def _in_order(
    names: Sequence[str], workers: Mapping[int, int], groups: Iterable[Iterable[Set]]
) -> CalibrationPhase:
    """Return a phase with so many workers of each program under each cap, and the groups' runs in order."""
    cells = [(name, cap) for name in names for cap, count in workers.items() for _ in range(count)]
    return CalibrationPhase(tuple(cells), tuple(each for group in groups for each in group))


def _repeated(names: Sequence[str], caps: tuple[int, ...], shapes: Iterable[tuple[int, ...]]) -> list[Set]:
    """Return the sets in which programs come as often as one of the shapes says, in descending order.

    Args:
        caps: one for each member; unequal ones only where all members are one program.
    """
    kept = set(shapes)
    return [
        tuple(zip(chosen, caps, strict=True))
        for chosen in itertools.combinations_with_replacement(names, len(caps))
        if tuple(sorted(Counter(chosen).values(), reverse=True)) in kept
    ]


def _pairs(names: Sequence[str], caps: tuple[int, int]) -> Iterator[Set]:
    for a, b in itertools.combinations(names, 2):
        yield (a, caps[0]), (b, caps[1])


def _equal(names: Sequence[str], size: int, cap: int) -> Iterator[Set]:
    for chosen in itertools.combinations(names, size):
        yield tuple((name, cap) for name in chosen)
