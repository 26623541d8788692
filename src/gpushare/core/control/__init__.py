"""Profiles, the life of a GpuShare, the loop that keeps promises, and what sharing gains."""

import importlib
from typing import TYPE_CHECKING, Any

from gpushare.core.control.gain import Gain, GpuGain, NamespaceGain, gain_of, is_kept
from gpushare.core.control.retraction import (
    Resident,
    RetractionAsk,
    RetractionPlan,
    RetractionRecord,
    RetractionSettings,
    RetractionSituation,
    plan_retractions,
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

if TYPE_CHECKING:
    from gpushare.core.control.lifecycle import (
        Fares,
        OperatorSettings,
        Standing,
        differs_only_in_figures,
        fares_of,
        status_of,
        transitions,
    )

__all__ = [
    "FREE",
    "Fares",
    "Gain",
    "GpuGain",
    "GpuWatch",
    "NamespaceGain",
    "OperatorSettings",
    "Resident",
    "RetractionAsk",
    "RetractionPlan",
    "RetractionRecord",
    "RetractionSettings",
    "RetractionSituation",
    "Standing",
    "WatchActions",
    "WatchNote",
    "WatchReason",
    "WatchSettings",
    "WatchedTenant",
    "Window",
    "differs_only_in_figures",
    "fares_of",
    "gain_of",
    "is_kept",
    "plan_retractions",
    "status_of",
    "transitions",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Import the life of a GpuShare at its first use: it loads numpy, and the node agent needs only the loop."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.lifecycle"), name)
