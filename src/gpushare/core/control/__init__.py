"""Profiles, the life of a GpuShare, and which processes use a GPU outside MPS."""

from gpushare.core.control.lifecycle import (
    Fares,
    OperatorSettings,
    differs_only_in_figures,
    fares_of,
    status_of,
    transitions,
)
from gpushare.core.control.outside import Found, OutsideProcess, OutsideWatch, look, pids_outside

__all__ = [
    "Fares",
    "Found",
    "OperatorSettings",
    "OutsideProcess",
    "OutsideWatch",
    "differs_only_in_figures",
    "fares_of",
    "look",
    "pids_outside",
    "status_of",
    "transitions",
]
