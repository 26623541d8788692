"""Whether promises can be kept by stopping some tenants for part of the time, and what everyone makes then.

While a tenant is stopped the others run as if it were not there, so that over time each makes the mixture of what
it makes in the whole set and in the sets without one of the others (docs/design.md 5).
"""

from typing import Final

import numpy as np

from gpushare.core.placement.state import BoolArray, FloatArray

STEP: Final = 0.05
"""Part of the time by which somebody is stopped more."""
MOST_STOPPED: Final = 0.9
"""Part of the time in which somebody is stopped at most, as the agent has it."""
_ROUNDING: Final = 1e-6


def with_stops(whole: FloatArray, without: FloatArray, floors: FloatArray, can_stop: BoolArray) -> FloatArray:
    """Return everyone's progress after tenants above their floor were stopped for those below theirs.

    In steps: the tenant whose stopping helps those below most gives a step more of its time, never below its own
    floor, until no floor is broken or nobody can help. One tenant is stopped at a time.

    Args:
        whole: progress in the whole set; sets x places.
        without: sets x stopped tenant x places: progress while that one is stopped, its own 0.
        floors: least progress that each place is to keep, 0 where there is no tenant; sets x places.
        can_stop: whether a tenant may be stopped; sets x places.
    """
    progress = whole.copy()
    change = STEP * (without - whole[:, None, :])
    helps = np.maximum(change, 0.0)
    for _ in range(round(MOST_STOPPED / STEP)):
        lacking = np.maximum(floors - progress, 0.0)
        able = can_stop & (progress - STEP * whole >= floors - _ROUNDING)
        relief = np.where(able, np.minimum(helps, lacking[:, None, :]).sum(axis=2), 0.0)
        chosen = relief.argmax(axis=1)
        lines = np.flatnonzero(relief.max(axis=1) > _ROUNDING)
        if not len(lines):
            break
        progress[lines] += change[lines, chosen[lines]]
    return progress


def are_kept(progress: FloatArray, floors: FloatArray) -> BoolArray:
    """Return which sets keep every floor, sets."""
    return np.asarray((progress >= floors - _ROUNDING).all(axis=1))
