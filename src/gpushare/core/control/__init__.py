"""Profiles and the life of a GpuShare."""

from gpushare.core.control.lifecycle import (
    Fares,
    OperatorSettings,
    differs_only_in_figures,
    fares_of,
    status_of,
    transitions,
)

__all__ = [
    "Fares",
    "OperatorSettings",
    "differs_only_in_figures",
    "fares_of",
    "status_of",
    "transitions",
]
