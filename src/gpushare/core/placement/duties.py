"""Whether promises can be kept by stopping some tenants for part of the time, and everyone's progress then.

While a tenant is stopped the others run as if it were absent. So over time each tenant's progress is a mixture of
its progress in the whole set and in the sets without one of the others (docs/design.md 5).
"""

from typing import Final

import numpy as np

from gpushare.core.placement.state import BoolArray, FloatArray, IntArray

STEP: Final = 0.05
"""Step by which the stopped part of a tenant's time grows."""
MOST_STOPPED: Final = 0.9
"""Largest part of the time for which a tenant is stopped, as in the agent."""
_ROUNDING: Final = 1e-6
_EQUAL: Final = 1e-5
"""Figures that differ by less are equal. Predictions are sums of 32-bit floats, so the prediction of a set
differs by 1e-7 with the sets that are predicted in the same call."""


def with_stops(whole: FloatArray, without: FloatArray, floors: FloatArray, can_stop: BoolArray) -> FloatArray:
    """Return all progress after tenants above their floor are stopped to help those below theirs.

    In each step, the tenant whose stopping helps those below most gives up a step of its time, but never falls
    below its own floor, until no floor is broken or no tenant can help. One tenant is stopped at a time.

    Args:
        whole: progress in the whole set; sets x places.
        without: sets x stopped tenant x places: progress while that one is stopped, its own 0.
        floors: least progress of each place, 0 where there is no tenant; sets x places.
        can_stop: whether a tenant may be stopped; sets x places.
    """
    progress = whole.copy()
    change = STEP * (without - whole[:, None, :])
    helps = np.maximum(change, 0.0)
    for _ in range(round(MOST_STOPPED / STEP)):
        lacking = np.maximum(floors - progress, 0.0)
        able = can_stop & (progress - STEP * whole >= floors - _ROUNDING)
        relief = np.where(able, np.minimum(helps, lacking[:, None, :]).sum(axis=2), 0.0)
        chosen = first_of_least(-relief)
        lines = np.flatnonzero(relief.max(axis=1) > _ROUNDING)
        if not len(lines):
            break
        progress[lines] += change[lines, chosen[lines]]
    return progress


def first_of_least(values: FloatArray) -> IntArray:
    """Return along the last axis where the least value is, of equals the first.

    The extender judges the sets of all nodes together and `plan` those of other nodes. So predictions differ in
    their last digits, but which of two equal tenants is named as worst off must not.
    """
    return np.asarray((values <= values.min(axis=-1, keepdims=True) + _EQUAL).argmax(axis=-1))


def are_kept(progress: FloatArray, floors: FloatArray) -> BoolArray:
    """Return for each set whether every floor is kept."""
    return np.asarray((progress >= floors - _ROUNDING).all(axis=1))
