"""Data shipped with the package: the H200's colocation datasets and the interference model fitted to them.

And a table of ten other programs, to which nothing was fitted.

All of it was measured by this project and stands under its licence.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files

from gpushare.core.gpu import ArtefactError
from gpushare.core.interference import InterferenceModel, model_from_json
from gpushare.runtime.models import MODELS_VARIABLE, artefacts

H200_COLOCATION = "h200-colocation.jsonl"
H200_TIME_SLICING = "h200-time-slicing.jsonl"
H200_MODEL = "h200-model.json"
H200_TABLE = "h200-table.jsonl"
"""Every set of at most four of ten programs, under caps: what `sim jobs --truth table` is judged by."""


_log = logging.getLogger(__name__)


@cache
def default_model() -> InterferenceModel:
    """Return the model for H200-class GPUs; `for_gpu` widens its intervals for another.

    Where `$GPUSHARE_MODELS` names a folder with artefacts of other GPUs, `for_gpu` takes theirs (docs/adr/0159).
    """
    shipped = model_from_json((files(__name__) / H200_MODEL).read_text())
    return replace(shipped, others=tuple(_others(os.environ.get(MODELS_VARIABLE, ""))))


def _others(folder: str) -> Iterator[InterferenceModel]:
    for path, text in artefacts(folder):
        try:
            yield model_from_json(text)
        except ArtefactError as error:
            _log.error("the model %s cannot be used: %s", path.name, error)
