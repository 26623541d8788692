"""Placement: where a pod fits, which promises it would break, how nodes rank, which GPU and which cap it gets."""

from gpushare.core.placement import settings
from gpushare.core.placement.bound import Undecided, bound_request, resize
from gpushare.core.placement.closed_gpus import ProbationTerm, Unprofiled, term_of, unprofiled_of
from gpushare.core.placement.decide import DecisionContext, cap_of, decide, survey
from gpushare.core.placement.demand import request_of
from gpushare.core.placement.explanation import (
    Elsewhere,
    ExplainedGpu,
    ExplainedTenant,
    Explanation,
    Happening,
    PlaceStanding,
    PodAccount,
    account,
    elsewhere_of,
    explain,
)
from gpushare.core.placement.fitting import lost_place, summarize
from gpushare.core.placement.fragmentation import Mix, fragmented_milli
from gpushare.core.placement.judge import Judge, Newcomer
from gpushare.core.placement.keeping import MOST_EXAMINED, KeptGpus, due_changes_at, is_due
from gpushare.core.placement.known import KeptApart, KnownWorkload, known_of, with_joint_profile
from gpushare.core.placement.nominated import NominatedPod, in_order_of_end, nominating, places_on
from gpushare.core.placement.owners import in_order_of_claim, nodes_by_decision
from gpushare.core.placement.preemption import choose_victims
from gpushare.core.placement.probation import (
    NO_PROBATION,
    ProbationSettings,
    clock_time,
    closed_places,
    why_unread,
    window_seconds,
)
from gpushare.core.placement.recap import NewCap, cap_anew
from gpushare.core.placement.search import UNKNOWN_NODE, Candidates, LearningPolicy, NodeList, PlacementPolicy
from gpushare.core.placement.settings import (
    DEFAULT_RESERVE_AFTER_SECONDS,
    MOST_HEADROOM,
    Settings,
    SettingsError,
    parse_settings,
)
from gpushare.core.placement.shapes import (
    GPU_MILLI,
    MILLI_PER_PERCENT,
    GpuSpec,
    NodeSpec,
    Placement,
    PlacementRequest,
    Shape,
)
from gpushare.core.placement.state import AGENT_AWAY, UNLIMITED, ClusterState, FloatArray, IntArray
from gpushare.core.placement.whatif import WaitingPod
from gpushare.core.placement.window_starts import WindowStarts

__all__ = [
    "AGENT_AWAY",
    "DEFAULT_RESERVE_AFTER_SECONDS",
    "GPU_MILLI",
    "MILLI_PER_PERCENT",
    "MOST_EXAMINED",
    "MOST_HEADROOM",
    "NO_PROBATION",
    "UNKNOWN_NODE",
    "UNLIMITED",
    "Candidates",
    "ClusterState",
    "DecisionContext",
    "Elsewhere",
    "ExplainedGpu",
    "ExplainedTenant",
    "Explanation",
    "FloatArray",
    "GpuSpec",
    "Happening",
    "IntArray",
    "Judge",
    "KeptApart",
    "KeptGpus",
    "KnownWorkload",
    "LearningPolicy",
    "Mix",
    "NewCap",
    "Newcomer",
    "NodeList",
    "NodeSpec",
    "NominatedPod",
    "PlaceStanding",
    "Placement",
    "PlacementPolicy",
    "PlacementRequest",
    "PodAccount",
    "ProbationSettings",
    "ProbationTerm",
    "Settings",
    "SettingsError",
    "Shape",
    "Undecided",
    "Unprofiled",
    "WaitingPod",
    "WindowStarts",
    "account",
    "bound_request",
    "cap_anew",
    "cap_of",
    "choose_victims",
    "clock_time",
    "closed_places",
    "decide",
    "due_changes_at",
    "elsewhere_of",
    "explain",
    "fragmented_milli",
    "in_order_of_claim",
    "in_order_of_end",
    "is_due",
    "known_of",
    "lost_place",
    "nodes_by_decision",
    "nominating",
    "parse_settings",
    "places_on",
    "request_of",
    "resize",
    "settings",
    "summarize",
    "survey",
    "term_of",
    "unprofiled_of",
    "why_unread",
    "window_seconds",
    "with_joint_profile",
]
