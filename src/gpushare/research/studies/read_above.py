"""Measure how rarely a starving tenant can be reported as not starving, and the cost for the others.

`python -m gpushare.research.studies.read_above DATASET [--threshold 0.5]`

Three ways to report a lower figure, each with its cost, from the profiles that a node agent has:

- lower: the inferred progress less a number of stated errors, for every tenant;
- straddling: the threshold itself, if it lies within that number of errors below the figure;
- silence: no figure, if the threshold lies within that number of errors of it.

For each of 0, 0.5, 1, 1.5 and 2 errors: the share of the tenants truly below the threshold that are reported above
it, the mean absolute error of all reported figures, and the share of tenants with a reported figure.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from gpushare.core.interference import expectation
from gpushare.core.progress.attribution import attribute
from gpushare.data import default_model
from gpushare.research.attribution_score import LIVE_PROFILES, LOW_PROGRESS, LoadOf, evidence_of
from gpushare.research.dataset import Dataset, parse

ERRORS: Final = (0.0, 0.5, 1.0, 1.5, 2.0)
Array = npt.NDArray[np.float64]
Way = Callable[[Array, Array, float, float], Array]
"""Reported figures, NaN for none: from inferred progress, its errors, the threshold and the number of errors."""


def lower(inferred: Array, errors: Array, _threshold: float, count: float) -> Array:
    """Report every figure less a number of errors."""
    return np.maximum(0.0, inferred - count * errors)


def straddling(inferred: Array, errors: Array, threshold: float, count: float) -> Array:
    """Report the threshold if it lies within a number of errors below the figure."""
    return np.where((inferred > threshold) & (inferred - count * errors <= threshold), threshold, inferred)


def silence(inferred: Array, errors: Array, threshold: float, count: float) -> Array:
    """Report no figure if the threshold lies within a number of errors of it."""
    return np.where(np.abs(inferred - threshold) <= count * errors, np.nan, inferred)


WAYS: Final[dict[str, Way]] = {"lower": lower, "straddling": straddling, "silence": silence}


@dataclass(frozen=True, slots=True)
class ToldScore:
    """Score of one way over all tenants.

    Attributes:
        above: of those truly below the threshold, the share reported above it; error: mean absolute error of the
            reported figures; told: share of tenants with a reported figure. Ratios.
    """

    above: float
    error: float
    told: float


def inferred(data: Dataset, load_of: LoadOf) -> dict[int, tuple[Array, Array, Array]]:
    """Return truth, inferred progress and stated error of every tenant, by the number of tenants of its set."""
    predict = expectation(default_model())
    rows: dict[int, list[tuple[float, float, float]]] = {}
    for run, truths in data.shared_runs():
        guesses = attribute(run.counters, evidence_of(data, run, predict, load_of), most_error=math.inf)
        for guess, truth in zip(guesses, truths, strict=True):
            assert guess.progress_ratio is not None
            assert guess.error_ratio is not None
            rows.setdefault(len(run.tenants), []).append((truth, guess.progress_ratio, guess.error_ratio))
    return {size: tuple(np.array(found).T) for size, found in sorted(rows.items())}


def score(truth: Array, told: Array, threshold: float) -> ToldScore:
    """Score the reported figures."""
    is_low, is_told = truth < threshold, ~np.isnan(told)
    return ToldScore(
        float(np.mean(told[is_low] > threshold)) if is_low.any() else math.nan,
        float(np.mean(np.abs(told - truth)[is_told])),
        float(np.mean(is_told)),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="read_above", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--threshold", type=float, default=LOW_PROGRESS)
    asked = parser.parse_args(arguments)
    data = parse(asked.dataset.read_text(encoding="utf-8").splitlines())
    print("profiles; way; tenants: told above, error, told, for each of", *ERRORS, "errors")
    for name, load_of in LIVE_PROFILES.items():
        for size, (truth, guess, errors) in inferred(data, load_of).items():
            for way, tell in WAYS.items():
                scores = [
                    score(truth, tell(guess, errors, asked.threshold, count), asked.threshold) for count in ERRORS
                ]
                cells = " | ".join(f"{each.above:.1%} {each.error:.3f} {each.told:.0%}" for each in scores)
                print(f"{name}; {way}; {size}: {cells}")


if __name__ == "__main__":
    main()
