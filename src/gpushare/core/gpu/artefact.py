"""Which files are interference models that this gpushare reads: without numpy, as the agent asks it too."""

from collections.abc import Mapping
from typing import Final

ARTEFACT: Final = "gpushare.io/interference-model"
ARTEFACT_VERSION: Final = 3
_FIELDS: Final = frozenset(
    {"gpu_model", "provenance", "mean", "scale", "members", "errors", "fill", "baselines", "capacity"}
)


def artefact_problem(value: object) -> str:
    """Return why a file's content cannot be used as a model, one sentence; empty where nothing speaks against it.

    Only its numbers are left to be looked at then.
    """
    if not isinstance(value, Mapping) or "artefact" not in value:
        return "the model artefact is damaged (it does not say that it is one)"
    if value["artefact"] != ARTEFACT:
        return "this file is not an interference model"
    version = value.get("version")
    if not isinstance(version, int):
        return "the model artefact is damaged (its version is no number)"
    if version > ARTEFACT_VERSION:
        return (
            f"the model is of artefact version {version}, this gpushare reads up to {ARTEFACT_VERSION}; "
            "upgrade gpushare"
        )
    if version < ARTEFACT_VERSION:
        return (
            f"the model is of artefact version {version}, whose law this gpushare no longer computes; fit it "
            "again with gpushare model fit"
        )
    if missing := sorted(_FIELDS - value.keys()):
        return f"the model artefact is damaged (it lacks {', '.join(missing)})"
    if not isinstance(value["gpu_model"], str):
        return "the model artefact is damaged (its GPU model is no name)"
    return ""
