"""Measure how useful a signature taken under a cap is, on programs that nothing was fitted to.

`python -m gpushare.research.studies.signatures_under_caps FITTED TABLE`

FITTED: the dataset that the law's constants are fitted to (`gpushare.core.progress.alone`); prints the fit, and
its error on programs left out one at a time. TABLE: a dataset of other programs; prints the law's error there, and
how well the shipped model predicts, and attribution infers, the table's sets of two to four tenants when all that
is known of a tenant is what its counters showed under its cap in the set, as an agent reads it in place.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from gpushare.core.gpu import Counters
from gpushare.core.interference import expectation
from gpushare.core.progress import (
    TenantLoad,
    at_full_threads,
    attribute,
    busy_ratio,
    evidence,
    predicted_cap_progress,
    progress_alone,
    progress_shown,
    progress_under,
)
from gpushare.data import default_model
from gpushare.research.attribution_score import LoadOf, read_in_place, seen_under_both, with_all_threads
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


def shown_error(runs: Sequence[CappedRun]) -> float:
    """Return the mean absolute error of `progress_shown`, which knows the counters with all threads too."""
    return float(np.mean([abs(progress_shown(run.whole, run.seen, run.cap) - run.progress) for run in runs]))


def law_error(runs: Sequence[CappedRun]) -> float:
    """Return the mean absolute error of `progress_under`."""
    return float(np.mean([abs(progress_under(run.seen, run.cap) - run.progress) for run in runs]))


def grown_errors(data: Dataset, caps: int, *, is_whole: bool) -> tuple[float, float]:
    """Return the mean absolute errors of progress alone under caps, before and after a cap curve grows.

    Before: from the signature under the most of so many caps. After: with what the others show in its curve.

    Args:
        is_whole: whether that signature is one with all threads.
    """
    misses: list[tuple[float, float]] = []
    for program in data.solo:
        curve = data.cap_curve(program)
        seen = {cap: data.solo_counters(program, cap) for cap, each in curve.items() if each >= _LEAST_PROGRESS}
        usable = {cap: each for cap, each in seen.items() if each is not None and each.sm_util is not None}
        for chosen in itertools.combinations(sorted(usable), caps):
            best = chosen[-1]
            if (best == 100) != is_whole:
                continue
            whole, _ = at_full_threads(usable[best], best / 100)
            points, most = {}, 1.0
            for cap in reversed(chosen):
                if cap < 100:
                    is_own = cap == best
                    shown = progress_under if is_own else partial(progress_shown, whole)
                    most = points[cap] = min(most, shown(usable[cap], cap / 100))
            before = {cap: progress for cap, progress in points.items() if cap == best}
            for cap in usable:
                if cap < 100:
                    told = (progress_alone(whole, each, cap / 100) for each in (before, points))
                    first, second = (abs(each - curve[cap]) for each in told)
                    misses.append((first, second))
    first, second = np.array(misses).mean(axis=0)
    return float(first), float(second)


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
    print(f"the same from both {shown_error(others):.3f}, of the fitted {shown_error(runs):.3f}")
    from_whole = [abs(predicted_cap_progress(run.whole, run.cap) - run.progress) for run in others]
    print(f"the same from the counters with all threads {np.mean(from_whole):.3f}")
    for name, each in (("fitted", data), ("table", table)):
        for caps in (2, 3):
            for is_whole in (False, True):
                before, after = grown_errors(each, caps, is_whole=is_whole)
                kind = "all threads among them" if is_whole else "all below 100%"
                print(f"{name}, {caps} caps seen, {kind}: {before:.3f} grown {after:.3f}")
    for name, load_of in (
        ("with all threads", with_all_threads),
        ("read in place, under the cap in force", read_in_place),
        ("read in place, taken for all threads", taken_as_whole),
        ("with all threads and under the cap in force", seen_under_both),
    ):
        cells = [
            f"{size}: {each.predicted:.3f} {each.inferred:.3f}"
            for size, each in set_errors(table, load_of).items()
        ]
        print(name, *cells, sep="  ")


if __name__ == "__main__":
    main()
