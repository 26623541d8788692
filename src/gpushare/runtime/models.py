"""Interference models of a cluster's own GPUs, besides the shipped one: artefacts in one folder.

The chart puts the output of `gpushare calibrate` there (its value `models`). The agent reads only which GPUs a
model was fitted on. It does not load models, which needs numpy, but refuses the same files as the other
components.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpushare.core.gpu import ArtefactError, artefact_from_json

MODELS_VARIABLE: Final = "GPUSHARE_MODELS"
_log = logging.getLogger(__name__)


def artefacts(folder: str) -> Iterator[tuple[Path, str]]:
    """Yield each artefact's path and text; unreadable ones are logged and left out.

    Args:
        folder: an empty name yields nothing, and so does a missing folder, which is logged.
    """
    if folder and not Path(folder).exists():
        _log.error(
            "there is no folder %s to read interference models from: the shipped model is used alone", folder
        )
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        try:
            yield path, path.read_text()
        except (OSError, ValueError) as error:
            _log.error("the model %s cannot be read: %s", path.name, error)


def fitted_on(folder: str) -> tuple[str, ...]:
    """Return the GPU models that the folder's artefacts were fitted on, as the driver names them.

    Artefacts that extender and operator refuse are logged and left out.
    """
    found = []
    for path, text in artefacts(folder):
        try:
            found.append(str(artefact_from_json(text)["gpu_model"]))
        except ArtefactError as error:
            _log.error("the model %s cannot be used: %s", path.name, error)
    return tuple(found)
