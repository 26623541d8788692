"""Score attribution on measured runs: solo runs give signatures, measured rates serve only to score."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.progress import at_full_threads, progress_shown
from gpushare.core.progress.attribution import (
    MAX_ERROR,
    Predict,
    TenantEvidence,
    TenantLoad,
    attribute,
    evidence,
    no_prediction,
)
from gpushare.research.dataset import Dataset, Run, RunTenant

LOW_PROGRESS: Final = 0.5  # a tenant below it starves, and must not be read above it


@dataclass(frozen=True, slots=True)
class AttributionScore:
    """Errors of inferred progress over the runs of one number of tenants.

    Attributes:
        mae, median, p90: of |inferred - measured| progress, ratios; no score at all for 0 tenants.
        n: tenants scored; unknown: tenants that attribution reported as unknown, not scored; runs: runs.
        within_two_errors: share of the scored within two of their stated standard deviations.
        everyone_mae: over all tenants; for unknown ones, the value that would be reported if no error were too
            large.
        low: tenants whose measured progress is below `LOW_PROGRESS`.
        read_above: share of these that is inferred above it, unknown ones included; NaN without any.
    """

    mae: float
    median: float
    p90: float
    n: int
    unknown: int
    runs: int
    within_two_errors: float
    everyone_mae: float
    low: int
    read_above: float


LoadOf = Callable[[Dataset, RunTenant], TenantLoad | None]
"""What is known about a tenant before the run, from the dataset's solo runs."""


def evidence_of(
    dataset: Dataset, run: Run, predict: Predict = no_prediction, load_of: LoadOf | None = None
) -> list[TenantEvidence]:
    """Collect what attribution may know of a run's tenants: their solo runs, and the prediction from these."""
    loads = [(load_of or measured)(dataset, tenant) for tenant in run.tenants]
    known = [load for load in loads if load is not None]
    priors = predict(known) if len(known) == len(loads) else [None] * len(loads)
    return [
        TenantEvidence(None) if load is None else evidence(load, prior)
        for load, prior in zip(loads, priors, strict=True)
    ]


def measured(dataset: Dataset, tenant: RunTenant) -> TenantLoad | None:
    """Return all that the dataset's solo runs say of a program: its cap curve, counters under caps, and rate."""
    signature = dataset.solo_counters(tenant.workload)
    if signature is None:
        return None
    curve = dataset.cap_curve(tenant.workload)
    counters = {cap: dataset.solo_counters(tenant.workload, cap) for cap in curve}
    capped = {cap: each for cap, each in counters.items() if each is not None and each.sm_util is not None}
    rate = dataset.solo_rate(tenant.workload)
    return TenantLoad(signature, tenant.thread_percentage, curve, capped, rate)


def with_all_threads(dataset: Dataset, tenant: RunTenant) -> TenantLoad | None:
    """Return what an agent's signature with all threads says: no cap curve, no rate."""
    whole = dataset.solo_counters(tenant.workload)
    return None if whole is None else TenantLoad(whole, tenant.thread_percentage)


def read_in_place(dataset: Dataset, tenant: RunTenant) -> TenantLoad | None:
    """Return what an agent's signature under the cap in force says of a program."""
    cap = tenant.thread_percentage
    seen = dataset.solo_counters(tenant.workload, cap)
    if seen is None:
        return None
    whole, progress = at_full_threads(seen, cap / 100)
    return TenantLoad(whole, cap, {cap: progress} if cap < 100 else {})


def seen_under_both(dataset: Dataset, tenant: RunTenant) -> TenantLoad | None:
    """Return what an agent knows of a program that it saw with all threads and under the cap in force."""
    cap = tenant.thread_percentage
    whole, seen = dataset.solo_counters(tenant.workload), dataset.solo_counters(tenant.workload, cap)
    if whole is None or seen is None:
        return None
    return TenantLoad(whole, cap, {cap: progress_shown(whole, seen, cap / 100)} if cap < 100 else {})


LIVE_PROFILES: Final[Mapping[str, LoadOf]] = {
    "one signature with all threads": with_all_threads,
    "one signature under its cap": read_in_place,
    "with all threads and under its cap": seen_under_both,
}
"""Kinds of profile that a node agent can have, by description."""


@dataclass(frozen=True, slots=True)
class _ScoredTenant:
    truth: float
    inferred: float  # however large its error is
    stated_error: float | None  # None: told as unknown

    @property
    def miss(self) -> float:
        return abs(self.inferred - self.truth)


def score(
    dataset: Dataset, predict: Predict = no_prediction, load_of: LoadOf = measured
) -> dict[int, AttributionScore]:
    """Score every run with several tenants, by their number; runs without solo rates are left out."""
    found: dict[int, list[_ScoredTenant]] = {}
    runs: dict[int, int] = {}
    for run, truths in dataset.shared_runs():
        size = len(run.tenants)
        runs[size] = runs.get(size, 0) + 1
        guesses = attribute(run.counters, evidence_of(dataset, run, predict, load_of), most_error=math.inf)
        for guess, truth in zip(guesses, truths, strict=True):
            assert guess.progress_ratio is not None
            assert guess.error_ratio is not None
            stated = guess.error_ratio if guess.error_ratio <= MAX_ERROR else None
            found.setdefault(size, []).append(_ScoredTenant(truth, guess.progress_ratio, stated))
    return {size: _score(found[size], runs[size]) for size in sorted(found)}


def _score(everyone: Sequence[_ScoredTenant], runs: int) -> AttributionScore:
    told = [(each.miss, each.stated_error) for each in everyone if each.stated_error is not None]
    misses, errors = np.array(told).reshape(-1, 2).T
    low = [each for each in everyone if each.truth < LOW_PROGRESS]
    return AttributionScore(
        mae=float(misses.mean()) if told else math.nan,
        median=float(np.median(misses)) if told else math.nan,
        p90=float(np.quantile(misses, 0.9)) if told else math.nan,
        n=len(told),
        unknown=len(everyone) - len(told),
        runs=runs,
        within_two_errors=float((misses <= 2 * errors).mean()) if told else math.nan,
        everyone_mae=float(np.mean([each.miss for each in everyone])),
        low=len(low),
        read_above=float(np.mean([each.inferred > LOW_PROGRESS for each in low])) if low else math.nan,
    )
