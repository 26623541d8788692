"""What a pod may count on, and what its own share may cost it where that is `auto` (docs/design.md 5).

A share costs its workload something even alone, and neighbours cost it more. To a pod that names its fraction,
`maxSlowdown` is what neighbours may cost beyond what the fraction does (docs/adr/0142). To a pod that says `auto`
it is both together, against a whole GPU: share and neighbours may each cost its square root (docs/adr/0154).

Plain floats: the agent, which loads no numpy, keeps the same promises as the decision makes.
"""

import math
from typing import Final

NO_LOSS: Final = 0.98
"""Progress that counts as undisturbed: the cap curves' noise is 2 to 3% (docs/measurements/signatures.md)."""


def own_part(max_slowdown: float) -> float:
    """Return the part of a tolerated slowdown that the share of `auto` may cost; neighbours may cost as much."""
    return math.sqrt(max(1.0, max_slowdown))


def least_alone(max_slowdown: float) -> float:
    """Return the least progress alone that the share of `auto` is to leave, 0 to `NO_LOSS`."""
    return min(NO_LOSS, 1.0 / own_part(max_slowdown))


def promise_of(alone: float | None, share_percent: int, max_slowdown: float, *, is_auto: bool = False) -> float:
    """Return the progress that a pod is promised on each of its GPUs, relative to running alone, 0 to 1.

    It is what its workload makes alone under a cap of its share, divided by what neighbours may cost it. For
    `auto` that is 1 / `max_slowdown`, or less where the share was not chosen by the workload's profile and is too
    small. A workload that is not known is taken to make its share (a quarter of the progress under a cap of a
    quarter of the threads), and `auto` is then a fraction like any other.

    Args:
        alone: progress alone under a cap of its share; None for a workload that is not known.
        share_percent: of each of its GPUs, 1 to 100.
        max_slowdown: tolerated, 1 or more.
        is_auto: whether the share is what `auto` stands for.

    Raises:
        ValueError: a share or a slowdown out of range.
    """
    if not 1 <= share_percent <= 100 or not max_slowdown >= 1:
        raise ValueError(f"no promise for {share_percent}% and a slowdown of {max_slowdown}")
    if alone is None:
        return share_percent / 100 / max_slowdown
    if is_auto:
        return min(1.0 / max_slowdown, alone / own_part(max_slowdown))
    return min(1.0, alone) / max_slowdown
