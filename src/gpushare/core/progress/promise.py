"""The promise of progress to a pod, and what its own share may cost it if that is `auto` (docs/design.md 5).

A share costs its workload progress even alone, and neighbours cost it more. For a pod that names its fraction,
`maxSlowdown` is what neighbours may cost beyond the cost of the fraction (docs/adr/0142). For a pod with `auto` it
is both together, relative to a whole GPU: share and neighbours may each cost its square root (docs/adr/0154).

Plain floats: the agent, which loads no numpy, keeps the same promises as the decision makes.
"""

import math
from typing import Final

NO_LOSS: Final = 0.98
"""Progress that counts as undisturbed: the cap curves' noise is 2 to 3% (docs/measurements/signatures.md)."""


def own_part(max_slowdown: float) -> float:
    """Return the slowdown that the share of `auto` may cause, which is as much as neighbours may cause."""
    return math.sqrt(max(1.0, max_slowdown))


def least_alone(max_slowdown: float) -> float:
    """Return the least progress alone that the share of `auto` must leave, 0 to `NO_LOSS`."""
    return min(NO_LOSS, 1.0 / own_part(max_slowdown))


def promise_of(alone: float | None, share_percent: int, max_slowdown: float, *, is_auto: bool = False) -> float:
    """Return the progress that a pod is promised on each of its GPUs, relative to running alone, 0 to 1.

    The promise is the workload's progress alone under a cap of its share, divided by the slowdown that neighbours
    may cause. For `auto` it is 1 / `max_slowdown`, or less if the share was not chosen from the profile and is too
    small. An unknown workload is assumed to make progress in proportion to its share (a quarter under a cap of a
    quarter of the threads), and `auto` is then a fraction like any other.

    Args:
        alone: progress alone under a cap of its share; None for an unknown workload.
        share_percent: percent of each of its GPUs, 1 to 100.
        max_slowdown: tolerated slowdown, 1 or more.
        is_auto: whether the share was chosen by `auto`.

    Raises:
        ValueError: the share or the slowdown is out of range.
    """
    if not 1 <= share_percent <= 100 or not max_slowdown >= 1:
        raise ValueError(f"no promise for {share_percent}% and a slowdown of {max_slowdown}")
    if alone is None:
        return share_percent / 100 / max_slowdown
    if is_auto:
        return min(1.0 / max_slowdown, alone / own_part(max_slowdown))
    return min(1.0, alone) / max_slowdown
