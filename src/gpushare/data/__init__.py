"""Data shipped with the package: the H200's colocation datasets and the interference model fitted to them.

And a table of ten other programs, to which nothing was fitted.

All of it was measured by this project and stands under its licence.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
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
"""Every set of at most four different ones of ten programs, under caps: the truth of `sim jobs --truth table`."""
H200_TABLE_TWICE = "h200-table-twice.jsonl"
"""Sets that hold one of these programs twice or more, of two later sessions; the rows of the last name it."""


_log = logging.getLogger(__name__)


@cache
def default_model() -> InterferenceModel:
    """Return the model for H200-class GPUs; `for_gpu` widens its intervals for another.

    Where `$GPUSHARE_MODELS` names a folder with artefacts of other GPUs, `for_gpu` takes theirs (docs/adr/0159).
    """
    folder = os.environ.get(MODELS_VARIABLE, "")
    return model_beside(usable_models(((path.name, text) for path, text in artefacts(folder)), _log.error))


def model_beside(others: Iterable[InterferenceModel]) -> InterferenceModel:
    """Return the shipped model, for which models of other GPUs stand in on those; no environment counts."""
    return replace(_shipped(), others=tuple(others))


def usable_models(
    named: Iterable[tuple[str, str]], on_problem: Callable[[str], object]
) -> Iterator[InterferenceModel]:
    """Yield the models of artefacts that pass every check.

    Args:
        named: file name and text of each artefact; of two that were fitted on one GPU model the first is used.
        on_problem: called with a sentence on each artefact that is left out.
    """
    for name, text in named:
        try:
            yield model_from_json(text)
        except ArtefactError as error:
            on_problem(f"the model {name} cannot be used: {error}")


@cache
def _shipped() -> InterferenceModel:
    return model_from_json((files(__name__) / H200_MODEL).read_text())
