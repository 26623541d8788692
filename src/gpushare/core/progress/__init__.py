"""The device's counters attributed to tenants: how fast each of them runs."""

from gpushare.core.progress.alone import (
    MAX_CAPPED_PROGRESS,
    at_full_threads,
    busy_ratio,
    predicted_cap_progress,
    progress_alone,
    progress_under,
    promise_of,
)
from gpushare.core.progress.attribution import (
    Attribution,
    Predict,
    Prior,
    TenantEvidence,
    TenantLoad,
    attribute,
    evidence,
    no_prediction,
)
from gpushare.core.progress.clock import at_clock

__all__ = [
    "MAX_CAPPED_PROGRESS",
    "Attribution",
    "Predict",
    "Prior",
    "TenantEvidence",
    "TenantLoad",
    "at_clock",
    "at_full_threads",
    "attribute",
    "busy_ratio",
    "evidence",
    "no_prediction",
    "predicted_cap_progress",
    "progress_alone",
    "progress_under",
    "promise_of",
]
