"""The device's counters attributed to tenants: how fast each of them runs."""

from gpushare.core.progress.attribution import (
    Predict,
    Prior,
    TenantEvidence,
    TenantLoad,
    attribute,
    evidence,
    no_prediction,
)

__all__ = [
    "Predict",
    "Prior",
    "TenantEvidence",
    "TenantLoad",
    "attribute",
    "evidence",
    "no_prediction",
]
