"""Interference models of a cluster's own GPUs, beside the one that is shipped: artefacts in one folder.

The chart puts there what `gpushare calibrate` wrote (its value `models`). The agent tells which GPUs a model was
fitted on; it loads none, which takes numpy, and looks only at what the others refuse without reading the numbers.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpushare.core.gpu import artefact_problem

MODELS_VARIABLE: Final = "GPUSHARE_MODELS"
_log = logging.getLogger(__name__)


def artefacts(folder: str) -> Iterator[tuple[Path, str]]:
    """Yield each artefact's path and text; what cannot be read is logged and left out.

    Args:
        folder: empty, or one that is not there, holds none.
    """
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        try:
            yield path, path.read_text()
        except (OSError, ValueError) as error:
            _log.error("the model %s cannot be read: %s", path.name, error)


def fitted_on(folder: str) -> tuple[str, ...]:
    """Return the GPU models that the folder's artefacts were fitted on, as the driver names them.

    Those that extender and operator refuse are logged and left out; only their numbers are not looked at here.
    """
    found = []
    for path, text in artefacts(folder):
        try:
            value = json.loads(text)
        except ValueError as error:
            _log.error("the model %s cannot be used: %s", path.name, error)
            continue
        if problem := artefact_problem(value):
            _log.error("the model %s cannot be used: %s", path.name, problem)
            continue
        found.append(str(value["gpu_model"]))
    return tuple(found)
