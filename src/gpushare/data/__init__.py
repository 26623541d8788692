"""Data shipped with the package: the H200's colocation datasets and the interference model fitted to them."""

from functools import cache
from importlib.resources import files

from gpushare.core.interference import InterferenceModel, model_from_json

H200_COLOCATION = "h200-colocation.jsonl"
H200_TIME_SLICING = "h200-time-slicing.jsonl"
H200_MODEL = "h200-model.json"


@cache
def default_model() -> InterferenceModel:
    """Return the model for H200-class GPUs; `for_gpu` widens its intervals for another."""
    return model_from_json((files(__name__) / H200_MODEL).read_text())
