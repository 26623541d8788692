"""The interference model (docs/design.md 4): predicts from solo profiles how tenants slow each other down."""

from gpushare.core.interference.advice import Advice, Wish, auto_share, best_caps, best_number, recommended_number
from gpushare.core.interference.model import ArtefactError, Forecast, InterferenceModel, Prediction, from_json
from gpushare.core.interference.profile import MIN_WINDOW_SECONDS, Profile, ProfileError, cap_progress

__all__ = [
    "MIN_WINDOW_SECONDS",
    "Advice",
    "ArtefactError",
    "Forecast",
    "InterferenceModel",
    "Prediction",
    "Profile",
    "ProfileError",
    "Wish",
    "auto_share",
    "best_caps",
    "best_number",
    "cap_progress",
    "from_json",
    "recommended_number",
]
