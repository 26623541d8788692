"""The interference model (docs/design.md 4): predicts from solo profiles how tenants slow each other down."""

from gpushare.core.interference.advice import (
    Advice,
    Wish,
    auto_share,
    best_caps,
    best_number,
    recommended_number,
)
from gpushare.core.interference.learned_effects import (
    NO_EFFECTS,
    PRESSURE_ERROR,
    SENSITIVITY_ERROR,
    UNEXPLAINED,
    Effects,
    effects_of,
    exposure,
)
from gpushare.core.interference.model import (
    Forecast,
    InterferenceModel,
    Prediction,
    TenantTable,
    model_from_json,
)
from gpushare.core.interference.phase_mixtures import MOST_MIXTURES, mixtures, phase_rows, predict_worst
from gpushare.core.interference.prior import expectation
from gpushare.core.interference.profile import Profile, ProfileError, cap_progress
from gpushare.core.interference.profile_promise import promised_progress
from gpushare.core.interference.signature import as_profile, recommended_fraction

__all__ = [
    "MOST_MIXTURES",
    "NO_EFFECTS",
    "PRESSURE_ERROR",
    "SENSITIVITY_ERROR",
    "UNEXPLAINED",
    "Advice",
    "Effects",
    "Forecast",
    "InterferenceModel",
    "Prediction",
    "Profile",
    "ProfileError",
    "TenantTable",
    "Wish",
    "as_profile",
    "auto_share",
    "best_caps",
    "best_number",
    "cap_progress",
    "effects_of",
    "expectation",
    "exposure",
    "mixtures",
    "model_from_json",
    "phase_rows",
    "predict_worst",
    "promised_progress",
    "recommended_fraction",
    "recommended_number",
]
