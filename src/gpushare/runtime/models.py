"""Interference models of a cluster's own GPUs, beside the one that is shipped: artefacts in one folder.

The chart puts there what `gpushare calibrate` wrote (its value `models`). Names alone are read here: the agent
tells which GPUs a model was fitted on, and loads none.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
    """Return the GPU models that the folder's artefacts were fitted on, as the driver names them."""
    found = []
    for path, text in artefacts(folder):
        try:
            written = json.loads(text)["gpu_model"]
        except (ValueError, KeyError, TypeError):
            _log.error("the model %s names no GPU model", path.name)
            continue
        if isinstance(written, str):
            found.append(written)
    return tuple(found)
