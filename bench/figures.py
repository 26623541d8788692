"""Statistics that all benchmarks share: percentile, mean with interval, and memory of a process."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpushare.sim import table_report


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over repetitions, with the half-width of its 95% interval; None for one repetition."""

    mean: float
    half_width: float | None
    number: int


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of some repetitions with its interval (Student's t); None of nothing."""
    if not values:
        return None
    mean, half = table_report.mean_with_interval(values, student(len(values)))
    return Interval(mean, None if math.isnan(half) else half, len(values))


def student(count: int) -> float:
    """Return Student's t for the 95% interval of a mean of so many values: exact with the extra `fit`.

    Without it, the job simulator's table (three digits).
    """
    try:
        from scipy import stats  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError:
        return table_report.student(count)
    return float(stats.t.ppf(0.975, count - 1))


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of the values does not exceed."""
    return float(np.percentile(values, 100 * part, method="inverted_cdf"))


def resident_mib(pid: int, field: str = "VmRSS") -> float:
    """Return the resident memory of a process now; the most so far with `VmHWM`."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"{field}:\s+(\d+)", status)
    assert match is not None
    return int(match[1]) / 1024
