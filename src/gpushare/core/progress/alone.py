"""A workload alone under a cap: its progress, and its counters extrapolated to all threads.

Plain floats, as in `attribution`: the agent, which loads no numpy, and the interference model use the same law.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gpushare.core.gpu import Counters

# What `busy_ratio` estimates from; how they were chosen is not recorded. Over the shipped dataset's 53 programs
# alone with all threads the mean error is 0.06. Under caps the estimate is 0.25 too low in the mean of 138 runs
# (tests/core/interference/test_estimated_counters.py).
_BUSY_SLOPE: Final = 0.9
_BUSY_OFFSET: Final = 0.35
# Those of `predicted_cap_progress` and `progress_under` are fitted; their docstrings say to what.
_CAP_EXPONENT: Final = 1.01
_CAP_EXPONENT_DRAM: Final = 0.63
_REACH_SLOPE: Final = 1.32
_REACH_EXPONENT: Final = 0.68
_HOST_SHARE: Final = 0.46  # counted part of the time without a kernel; the rest overlaps with running kernels
_UNDER_ACTIVITY: Final = 1.13
_UNDER_BUSY: Final = -0.25
_UNDER_DRAM: Final = -0.78
MAX_CAPPED_PROGRESS: Final = 1.1  # a cap never speeds a program up; values above this are noise
# Where two measured caps, or the lowest one and 0, are further apart than this factor, points at these caps are
# added by the law. The datasets' curves (25, 50 and 100%, some with 33 and 75%) have no such gap above 25%.
_WIDE_GAP: Final = 2.0
_FILLED_CAPS: Final = (25, 33, 50, 75)
_LEAST_PROGRESS: Final = 0.02  # a smaller progress alone under a cap is a counting error


def busy_ratio(counters: Counters) -> float:
    """Return the part of the time in which a kernel runs; estimated from the SM activity if not measured."""
    if counters.graphics_util is not None:
        return counters.graphics_util
    return min(1.0, _BUSY_SLOPE * (counters.sm_util or 0.0) + _BUSY_OFFSET)


def predicted_cap_progress(counters: Counters, cap: float) -> float:
    """Predict progress alone under a cap (0 to 1) for a program whose cap curve was not measured.

    A program keeps its speed until the cap falls below the SMs that its kernels cover; it loses less if it waits
    for memory, and the time in which it waits for the host does not get longer. Constants fitted to 120 capped
    solo runs of 44 programs (docs/interference.md gives the error on other programs).

    Args:
        counters: alone with all threads.
        cap: 0 to 1.
    """
    busy = busy_ratio(counters)
    covered = max(0.0, min(1.0, (counters.sm_util or 0.0) / max(busy, 0.05)))
    reach: float = max(0.05, 1.0 - _REACH_SLOPE * (1.0 - covered**_REACH_EXPONENT))
    exponent = _CAP_EXPONENT - _CAP_EXPONENT_DRAM * min(1.0, counters.dram_bw_util or 0.0)
    stretch: float = max(1.0, (reach / max(cap, 0.01)) ** exponent)
    return min(1.0, 1.0 / ((1.0 - busy) * _HOST_SHARE + busy * stretch))


def filled_curve(counters: Counters, cap_curve: Mapping[int, float]) -> Mapping[int, float]:
    """Return a cap curve with added points between measured ones that are far apart; an empty curve is unchanged.

    An added point is the law's value, corrected by the law's error at the measured points beside it (interpolated
    in the logarithm). It is bounded by progress in proportion to the cap: at least as from the next point above,
    at most as from the one below, and never beyond either.

    Args:
        counters: alone with all threads.
        cap_curve: progress by thread percentage, relative to all threads.
    """
    known = sorted({100: 1.0, **cap_curve}.items())
    if len(known) == 1:
        return cap_curve
    found = dict(cap_curve)
    for (low, slow), (high, fast) in itertools.pairwise([(0, 0.0), *known]):
        if high <= _WIDE_GAP * low:
            continue
        over = _beyond_law(counters, high, fast)
        under = _beyond_law(counters, low, slow) if low else over
        for cap in _FILLED_CAPS:
            if low < cap < high:
                part = math.log(high / cap) / math.log(high / low) if low else 0.0
                told = predicted_cap_progress(counters, cap / 100) * math.exp(over + part * (under - over))
                most = min(fast, slow * cap / low) if low else fast
                found[cap] = min(max(told, fast * cap / high, slow), max(most, slow))
    return found


def _beyond_law(counters: Counters, percent: int, progress: float) -> float:
    law = predicted_cap_progress(counters, percent / 100)
    return math.log(max(progress, _LEAST_PROGRESS) / max(law, _LEAST_PROGRESS))


def progress_alone(counters: Counters, cap_curve: Mapping[int, float], cap: float) -> float:
    """Return progress alone under a cap (0 to 1): interpolated if measured, else predicted.

    Args:
        counters: alone with all threads.
        cap_curve: progress by thread percentage, relative to all threads.
    """
    known = {100: 1.0, **filled_curve(counters, cap_curve)}
    if len(known) == 1:
        return predicted_cap_progress(counters, cap)
    points = [(0, 0.0), *((at, min(MAX_CAPPED_PROGRESS, known[at])) for at in sorted(known))]
    percent = 100 * cap
    for (low, slow), (high, fast) in itertools.pairwise(points):
        if percent <= high:
            between = slow + (fast - slow) * max(0.0, percent - low) / (high - low)
            return min(max(between, min(slow, fast)), max(slow, fast))  # rounding may lead past either end
    return points[-1][1]


def progress_under(seen: Counters, cap: float) -> float:
    """Estimate progress alone under a cap (0 to 1), relative to all threads, from the counters under that cap.

    A program that keeps its remaining SMs busy all the time loses nearly as much as the cap takes away; one that
    waits for memory loses less. Constants fitted to 138 capped solo runs of 53 programs of the shipped dataset;
    errors on other programs are in docs/measurements/signatures.md.
    """
    if cap >= 1.0:
        return 1.0
    exponent = (
        _UNDER_ACTIVITY * min(1.0, (seen.sm_util or 0.0) / cap)
        + _UNDER_BUSY * busy_ratio(seen)
        + _UNDER_DRAM * (seen.dram_bw_util or 0.0)
    )
    progress: float = cap ** min(1.0, max(0.0, exponent))
    return progress


def at_full_threads(seen: Counters, cap: float) -> tuple[Counters, float]:
    """Extrapolate counters measured alone under a cap (0 to 1) to all threads; return them and the progress.

    The work per unit of progress hardly depends on the cap, so all counters are divided by the progress, except
    `graphics_util`, the part of the time with a kernel.
    """
    progress = progress_under(seen, cap)
    scaled = {name: min(1.0, value / progress) for name, value in seen.as_dict().items()}
    return replace(Counters(**scaled), graphics_util=seen.graphics_util), progress
