"""How much a signature taken under a cap is worth, on programs that nothing was fitted to.

`python -m gpushare.research.studies.signatures_under_caps FITTED TABLE`

FITTED: the dataset that the law's constants are fitted to (`gpushare.core.progress.alone`); prints the fit, and
its error on programs left out one at a time. TABLE: a dataset of other programs; prints the law's error there, and
how well the shipped model predicts, and attribution infers, the table's sets of two to four tenants when all that
is known of a tenant is what its counters showed under its cap in the set, as an agent reads it in place.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from gpushare.core.gpu import Counters
from gpushare.core.interference import expectation
from gpushare.core.progress import (
    TenantLoad,
    attribute,
    busy_ratio,
    evidence,
    predicted_cap_progress,
    progress_under,
)
from gpushare.data import default_model
from gpushare.research.attribution_score import LoadOf, read_in_place, with_all_threads
from gpushare.research.dataset import Dataset, RunTenant, parse

_RIDGE: Final = 0.3
_LEAST_PROGRESS: Final = 0.02  # a rate below this is a counting error
SIZES: Final = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class CappedRun:
    """One program alone under a cap (0 to 1), its counters there and with all threads, and its progress."""

    program: str
    cap: float
    seen: Counters
    whole: Counters
    progress: float


@dataclass(frozen=True, slots=True)
class SetErrors:
    """Mean absolute errors over the tenants of sets of one size, of the prediction and of what is inferred."""

    tenants: int
    predicted: float
    inferred: float


def capped_runs(data: Dataset) -> list[CappedRun]:
    """Return every program's solo runs under caps below 100%."""
    found = []
    for program in data.solo:
        whole = data.solo_counters(program)
        for percent, progress in data.cap_curve(program).items():
            seen = data.solo_counters(program, percent)
            usable = whole is not None and seen is not None and seen.sm_util is not None
            if percent < 100 and progress >= _LEAST_PROGRESS and usable:
                assert whole is not None
                assert seen is not None
                found.append(CappedRun(program, percent / 100, seen, whole, progress))
    return found


def fitted(runs: Sequence[CappedRun]) -> npt.NDArray[np.float64]:
    """Fit the exponent of the cap: constants of SM activity, busy time and memory bandwidth."""
    rows = np.array([_terms(run) for run in runs])
    target = np.log([min(1.0, run.progress) for run in runs])
    return np.linalg.solve(rows.T @ rows + _RIDGE * np.eye(rows.shape[1]), rows.T @ target)


def left_out_error(runs: Sequence[CappedRun]) -> float:
    """Return the mean absolute error of progress on each program, fitted to the others."""
    misses: list[float] = []
    for program in {run.program for run in runs}:
        constants = fitted([run for run in runs if run.program != program])
        for run in runs:
            if run.program == program:
                progress = float(np.exp(min(0.0, float(_terms(run) @ constants))))
                misses.append(abs(progress - run.progress))
    return float(np.mean(misses))


def law_error(runs: Sequence[CappedRun]) -> float:
    """Return the mean absolute error of `progress_under`."""
    return float(np.mean([abs(progress_under(run.seen, run.cap) - run.progress) for run in runs]))


def set_errors(data: Dataset, load_of: LoadOf) -> dict[int, SetErrors]:
    """Predict and infer every shared run, from what `load_of` says of a program under its cap in the run."""
    predict = expectation(default_model())
    predicted: dict[int, list[float]] = {size: [] for size in SIZES}
    inferred: dict[int, list[float]] = {size: [] for size in SIZES}
    for run, measured in data.shared_runs():
        loads = [load_of(data, tenant) for tenant in run.tenants]
        known = [load for load in loads if load is not None]
        if len(known) < len(loads) or len(loads) not in predicted:
            continue
        priors = predict(known)
        found = attribute(run.counters, [evidence(load, prior) for load, prior in zip(known, priors, strict=True)])
        for prior, each, truth in zip(priors, found, measured, strict=True):
            if prior is not None:
                predicted[len(loads)].append(abs(prior.mean - truth))
            if each.progress_ratio is not None:
                inferred[len(loads)].append(abs(each.progress_ratio - truth))
    return {
        size: SetErrors(len(predicted[size]), float(np.mean(predicted[size])), float(np.mean(inferred[size])))
        for size in SIZES
    }


def taken_as_whole(data: Dataset, tenant: RunTenant) -> TenantLoad | None:
    """Return what counters under the cap would say if they were taken for those with all threads."""
    seen = data.solo_counters(tenant.workload, tenant.thread_percentage)
    return None if seen is None else TenantLoad(seen, tenant.thread_percentage)


def _terms(run: CappedRun) -> npt.NDArray[np.float64]:
    seen, slope = run.seen, np.log(run.cap)
    activity = min(1.0, (seen.sm_util or 0.0) / run.cap)
    return np.array([slope * activity, slope * busy_ratio(seen), slope * (seen.dram_bw_util or 0.0)])


def main() -> None:
    """Print the fit and its worth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fitted", type=Path)
    parser.add_argument("table", type=Path)
    read = parser.parse_args()
    data, table = (parse(path.read_bytes().splitlines()) for path in (read.fitted, read.table))
    runs, others = capped_runs(data), capped_runs(table)
    print("constants", *(f"{each:.2f}" for each in fitted(runs)), f"from {len(runs)} runs")
    print(f"programs left out {left_out_error(runs):.3f}")
    print(f"the table's {len(others)} runs {law_error(others):.3f}")
    from_whole = [abs(predicted_cap_progress(run.whole, run.cap) - run.progress) for run in others]
    print(f"the same from the counters with all threads {np.mean(from_whole):.3f}")
    for name, load_of in (
        ("with all threads", with_all_threads),
        ("read in place, under the cap in force", read_in_place),
        ("read in place, taken for all threads", taken_as_whole),
    ):
        cells = [
            f"{size}: {each.predicted:.3f} {each.inferred:.3f}"
            for size, each in set_errors(table, load_of).items()
        ]
        print(name, *cells, sep="  ")


if __name__ == "__main__":
    main()
