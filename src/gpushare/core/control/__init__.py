"""Profiles, the life of a GpuShare, and the loop that keeps promises."""

from gpushare.core.control.lifecycle import (
    Fares,
    OperatorSettings,
    differs_only_in_figures,
    fares_of,
    status_of,
    transitions,
)
from gpushare.core.control.watch import GpuWatch, watch
from gpushare.core.control.window import (
    FREE,
    WatchActions,
    WatchedTenant,
    WatchNote,
    WatchReason,
    WatchSettings,
    Window,
)

__all__ = [
    "FREE",
    "Fares",
    "GpuWatch",
    "OperatorSettings",
    "WatchActions",
    "WatchNote",
    "WatchReason",
    "WatchSettings",
    "WatchedTenant",
    "Window",
    "differs_only_in_figures",
    "fares_of",
    "status_of",
    "transitions",
    "watch",
]
