"""Control: profiles, a GpuShare's life, the loop that keeps promises, and the gain from sharing."""

import importlib
from typing import TYPE_CHECKING, Any

from gpushare.core.control.drift import DriftWatch
from gpushare.core.control.freeze_turns import turns_of
from gpushare.core.control.gain import Gain, GpuGain, NamespaceGain, gain_of, is_kept, processes_of
from gpushare.core.control.hygiene import (
    IDLE_SM_RATIO,
    HygieneAction,
    HygieneLook,
    HygieneSettings,
    HygieneWatch,
    ReplacementAsk,
    ReplacementPlan,
    Replacements,
    counted,
    plan_replacement,
    remembered,
)
from gpushare.core.control.neighbours import ended_lately, with_ended
from gpushare.core.control.profiling import ProfilingView
from gpushare.core.control.retraction import (
    SILENT_SECONDS,
    Resident,
    RetractionAsk,
    RetractionPlan,
    RetractionRecord,
    RetractionSettings,
    RetractionSituation,
    plan_retractions,
)
from gpushare.core.control.signatures import grown_curve, learnt_with, merged_phases, taken, usual_work
from gpushare.core.control.slo_reading import (
    SLO_TROUBLES,
    QuantileSample,
    RequestCounts,
    SloReading,
    SloReason,
    SloRecord,
    SloSign,
    SloTrouble,
    read_slo,
)
from gpushare.core.control.watch import watch
from gpushare.core.control.watch_state import GpuWatch
from gpushare.core.control.watch_step import LooseningRule, StepRule, TenantStep, WatchStep, explain
from gpushare.core.control.window import (
    FREE,
    WatchActions,
    WatchedTenant,
    WatchNote,
    WatchReason,
    WatchSettings,
    WatchWindow,
)

if TYPE_CHECKING:
    from gpushare.core.control.learning import SeenTenant, is_decided_by_counters, learnt
    from gpushare.core.control.lifecycle import (
        Fares,
        OperatorSettings,
        Standing,
        differs_only_in_figures,
        fares_of,
        reports_only_figures,
        status_of,
        transitions,
    )
    from gpushare.core.control.model_answers import ModelAnswer, Priors, Question
    from gpushare.core.control.node_signatures import NodeSignatures
    from gpushare.core.control.reading_rules import PastReadings, ReadingTenant, next_reading, next_turn
    from gpushare.core.control.sharing import (
        ASLEEP_RATIO,
        KeptProfile,
        ReadPod,
        SharingTenant,
        SoloSignature,
        inferred,
        is_asleep,
        throttled_bound,
    )

__all__ = [
    "ASLEEP_RATIO",
    "FREE",
    "IDLE_SM_RATIO",
    "SILENT_SECONDS",
    "SLO_TROUBLES",
    "DriftWatch",
    "Fares",
    "Gain",
    "GpuGain",
    "GpuWatch",
    "HygieneAction",
    "HygieneLook",
    "HygieneSettings",
    "HygieneWatch",
    "KeptProfile",
    "LooseningRule",
    "ModelAnswer",
    "NamespaceGain",
    "NodeSignatures",
    "OperatorSettings",
    "PastReadings",
    "Priors",
    "ProfilingView",
    "QuantileSample",
    "Question",
    "ReadPod",
    "ReadingTenant",
    "ReplacementAsk",
    "ReplacementPlan",
    "Replacements",
    "RequestCounts",
    "Resident",
    "RetractionAsk",
    "RetractionPlan",
    "RetractionRecord",
    "RetractionSettings",
    "RetractionSituation",
    "SeenTenant",
    "SharingTenant",
    "SloReading",
    "SloReason",
    "SloRecord",
    "SloSign",
    "SloTrouble",
    "SoloSignature",
    "Standing",
    "StepRule",
    "TenantStep",
    "WatchActions",
    "WatchNote",
    "WatchReason",
    "WatchSettings",
    "WatchStep",
    "WatchWindow",
    "WatchedTenant",
    "counted",
    "differs_only_in_figures",
    "ended_lately",
    "explain",
    "fares_of",
    "gain_of",
    "grown_curve",
    "inferred",
    "is_asleep",
    "is_decided_by_counters",
    "is_kept",
    "learnt",
    "learnt_with",
    "merged_phases",
    "next_reading",
    "next_turn",
    "plan_replacement",
    "plan_retractions",
    "processes_of",
    "read_slo",
    "remembered",
    "reports_only_figures",
    "status_of",
    "taken",
    "throttled_bound",
    "transitions",
    "turns_of",
    "usual_work",
    "watch",
    "with_ended",
]


_LATE = {
    "learning": ("SeenTenant", "is_decided_by_counters", "learnt"),
    "model_answers": ("ModelAnswer", "Priors", "Question"),
    "node_signatures": ("NodeSignatures",),
    "reading_rules": ("PastReadings", "ReadingTenant", "next_reading", "next_turn"),
    "sharing": (
        "ASLEEP_RATIO",
        "KeptProfile",
        "ReadPod",
        "SharingTenant",
        "SoloSignature",
        "inferred",
        "is_asleep",
        "throttled_bound",
    ),
}
"""Modules that are imported at first use, with the names that they hold; `lifecycle` holds the others."""


def __getattr__(name: str) -> Any:
    """Import at first use what loads numpy, which the agent does not need, or what only the agent needs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _LATE.items() if name in names), "lifecycle")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
