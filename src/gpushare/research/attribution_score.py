"""How well attribution does on measured runs: solo runs give signatures, measured rates only score."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpushare.core.progress.attribution import (
    Predict,
    TenantEvidence,
    TenantLoad,
    attribute,
    evidence,
    no_prediction,
)
from gpushare.research.dataset import Dataset, Run, RunTenant


@dataclass(frozen=True, slots=True)
class AttributionScore:
    """Errors of inferred progress over the runs of one number of tenants.

    Attributes:
        mae, median, p90: of |inferred - measured| progress, ratios; no score at all for 0 tenants.
        n: tenants scored; unknown: tenants that attribution reported as unknown, not scored; runs: runs.
        within_two_errors: share of the scored within two of their stated standard deviations.
    """

    mae: float
    median: float
    p90: float
    n: int
    unknown: int
    runs: int
    within_two_errors: float


def evidence_of(dataset: Dataset, run: Run, predict: Predict = no_prediction) -> list[TenantEvidence]:
    """Collect what attribution may know of a run's tenants: their solo runs, and the prediction from these."""
    loads = [_load(dataset, tenant) for tenant in run.tenants]
    known = [load for load in loads if load is not None]
    priors = predict(known) if len(known) == len(loads) else [None] * len(loads)
    return [
        TenantEvidence(None) if load is None else evidence(load, prior)
        for load, prior in zip(loads, priors, strict=True)
    ]


def _load(dataset: Dataset, tenant: RunTenant) -> TenantLoad | None:
    signature = dataset.solo_counters(tenant.workload)
    if signature is None:
        return None
    curve = dataset.cap_curve(tenant.workload)
    counters = {cap: dataset.solo_counters(tenant.workload, cap) for cap in curve}
    capped = {cap: each for cap, each in counters.items() if each is not None and each.sm_util is not None}
    rate = dataset.solo_rate(tenant.workload)
    return TenantLoad(signature, tenant.thread_percentage, curve, capped, rate)


def score(dataset: Dataset, predict: Predict = no_prediction) -> dict[int, AttributionScore]:
    """Score every run with several tenants, by their number; runs without solo rates are left out."""
    found: dict[int, list[tuple[float, float]]] = {}
    unknown: dict[int, int] = {}
    runs: dict[int, int] = {}
    for run, measured in dataset.shared_runs():
        size = len(run.tenants)
        runs[size] = runs.get(size, 0) + 1
        inferred = attribute(run.counters, evidence_of(dataset, run, predict))
        for each, truth in zip(inferred, measured, strict=True):
            if each.progress_ratio is None or each.error_ratio is None:
                unknown[size] = unknown.get(size, 0) + 1
            else:
                found.setdefault(size, []).append((abs(each.progress_ratio - truth), each.error_ratio))
    return {size: _score(found[size], unknown.get(size, 0), runs[size]) for size in sorted(found)}


def _score(pairs: Sequence[tuple[float, float]], unknown: int, runs: int) -> AttributionScore:
    misses, errors = np.array(pairs).T
    return AttributionScore(
        mae=float(misses.mean()),
        median=float(np.median(misses)),
        p90=float(np.quantile(misses, 0.9)),
        n=len(pairs),
        unknown=unknown,
        runs=runs,
        within_two_errors=float((misses <= 2 * errors).mean()),
    )
