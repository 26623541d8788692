"""Who runs beside whom while several tenants are throttled: they are frozen one after the other (`mps.duty`)."""

import itertools
from collections.abc import Iterable, Mapping, Sequence


def turns_of(duties: Sequence[float]) -> list[tuple[float, tuple[int, ...]]]:
    """Return the parts of a period, in order, each as its length and the positions of the tenants that run in it.

    Each freeze begins where the one before it ends. So freezes overlap only if their sum exceeds a period; which
    of them overlap then depends on the order of `duties`.

    Args:
        duties: by tenant, the part of the time in which it runs, 0 to 1.
    """
    begins = list(itertools.accumulate((1.0 - duty for duty in duties), initial=0.0))
    edges = sorted({0.0, 1.0, *(at % 1.0 for at in begins)})
    found = []
    for start, end in itertools.pairwise(edges):
        middle = (start + end) / 2
        running = (
            position
            for position, (begin, duty) in enumerate(zip(begins, duties, strict=False))
            if (middle - begin) % 1.0 >= 1.0 - duty
        )
        found.append((end - start, tuple(running)))
    return found


def presence(duties: Mapping[str, float], uid: str) -> dict[str, float]:
    """Return for which part of a tenant's own running time each other tenant runs as well; none if it never runs.

    Args:
        duties: of all tenants; 0 for one that sleeps or is gone.
    """
    own = duties[uid]
    if own <= 0.0:
        return {}
    overlap_factor = freeze_overlap_factor(duties.values())
    return {other: overlap(own, duty, overlap_factor) / own for other, duty in duties.items() if other != uid}


def freeze_overlap_factor(duties: Iterable[float]) -> float:
    """Return the factor by which the product of two tenants' frozen times is multiplied to give their overlap.

    It is 0 while all freezes fit into a period one after the other; what does not fit is spread over the pairs.
    """
    total = squares = 0.0
    for duty in duties:
        if duty > 0.0:
            frozen = 1.0 - duty
            total += frozen
            squares += frozen * frozen
    return 2.0 * (total - 1.0) / (total * total - squares) if total > 1.0 else 0.0


def overlap(one: float, other: float, overlap_factor: float = 0.0) -> float:
    """Return the part of the time in which two tenants with these duties run beside each other."""
    if one <= 0.0 or other <= 0.0:
        return 0.0
    both_frozen = overlap_factor * (1.0 - one) * (1.0 - other)
    return min(one, other, max(0.0, one + other - 1.0 + both_frozen))
