"""Data shipped with the package: the H200's colocation datasets and the interference model fitted to them.

And a table of ten other programs, to which nothing was fitted.

All of it was measured by this project and stands under its licence.
"""

from functools import cache
from importlib.resources import files

from gpushare.core.interference import InterferenceModel, model_from_json

H200_COLOCATION = "h200-colocation.jsonl"
H200_TIME_SLICING = "h200-time-slicing.jsonl"
H200_MODEL = "h200-model.json"
H200_TABLE = "h200-table.jsonl"
"""Every set of at most four of ten programs, under caps: what `sim jobs --truth table` is judged by."""


@cache
def default_model() -> InterferenceModel:
    """Return the model for H200-class GPUs; `for_gpu` widens its intervals for another."""
    return model_from_json((files(__name__) / H200_MODEL).read_text())
