"""Progress of tenants, inferred from the device's counters."""

from gpushare.core.progress.alone import (
    MAX_CAPPED_PROGRESS,
    at_full_threads,
    busy_ratio,
    filled_curve,
    predicted_cap_progress,
    progress_alone,
    progress_under,
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
from gpushare.core.progress.phases import (
    BAD_FIT,
    FAR_FIT,
    PhasedAttribution,
    PhaseSearch,
    attribute_phases,
    misfit,
    shape_misfit,
)
from gpushare.core.progress.promise import NO_LOSS, least_alone, promise_of
from gpushare.core.progress.shown import progress_shown

__all__ = [
    "BAD_FIT",
    "FAR_FIT",
    "MAX_CAPPED_PROGRESS",
    "NO_LOSS",
    "Attribution",
    "PhaseSearch",
    "PhasedAttribution",
    "Predict",
    "Prior",
    "TenantEvidence",
    "TenantLoad",
    "at_clock",
    "at_full_threads",
    "attribute",
    "attribute_phases",
    "busy_ratio",
    "evidence",
    "filled_curve",
    "least_alone",
    "misfit",
    "no_prediction",
    "predicted_cap_progress",
    "progress_alone",
    "progress_shown",
    "progress_under",
    "promise_of",
    "shape_misfit",
]
