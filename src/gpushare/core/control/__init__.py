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
    count_replacement,
    lately_replaced,
    plan_replacement,
)
from gpushare.core.control.neighbours import ended_lately, with_ended
from gpushare.core.control.profiling import ProfilingView
from gpushare.core.control.rate_belief import RateBelief, believed
from gpushare.core.control.rate_reading import RateSign, rate_sign, read_target
from gpushare.core.control.retraction import (
    SILENT_SECONDS,
    Resident,
    RetractionAsk,
    RetractionPlan,
    RetractionRecord,
    RetractionSettings,
    RetractionSituation,
    fails_with_next,
    plan_retractions,
)
from gpushare.core.control.signatures import choose_signature, grown_curve, learnt_with, merged_phases, usual_work
from gpushare.core.control.slo_reading import (
    LONGEST_WINDOW_SECONDS,
    SLO_TROUBLES,
    CounterReading,
    QuantileSample,
    RateSample,
    RequestCounts,
    SloReading,
    SloReason,
    SloRecord,
    SloSign,
    SloTrouble,
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
    from gpushare.core.control.conditions import why_unknown
    from gpushare.core.control.learning import SeenTenant, is_decided_by_counters, learnt
    from gpushare.core.control.lifecycle import (
        OperatorSettings,
        PodReport,
        Standing,
        differs_only_in_figures,
        pod_reports_of,
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
    "LONGEST_WINDOW_SECONDS",
    "SILENT_SECONDS",
    "SLO_TROUBLES",
    "CounterReading",
    "DriftWatch",
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
    "PodReport",
    "Priors",
    "ProfilingView",
    "QuantileSample",
    "Question",
    "RateBelief",
    "RateSample",
    "RateSign",
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
    "believed",
    "choose_signature",
    "count_replacement",
    "differs_only_in_figures",
    "ended_lately",
    "explain",
    "fails_with_next",
    "gain_of",
    "grown_curve",
    "inferred",
    "is_asleep",
    "is_decided_by_counters",
    "is_kept",
    "lately_replaced",
    "learnt",
    "learnt_with",
    "merged_phases",
    "next_reading",
    "next_turn",
    "plan_replacement",
    "plan_retractions",
    "pod_reports_of",
    "processes_of",
    "rate_sign",
    "read_target",
    "reports_only_figures",
    "status_of",
    "throttled_bound",
    "transitions",
    "turns_of",
    "usual_work",
    "watch",
    "why_unknown",
    "with_ended",
]


_LATE = {
    "conditions": ("why_unknown",),
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
