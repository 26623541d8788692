"""How far measurements on one GPU model apply to another."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

FITTED_ON: Final = "NVIDIA H200"
"""The model of the GPU that the shipped interference model was fitted on."""
# How much wider the model's intervals are on GPUs that it was not fitted on. Ratios of a GPU's own capacities
# carry over; caches, block schedulers and bandwidth per SM do not. Not measured: a precaution until that GPU is
# calibrated.
_HOPPER: Final = frozenset({"h100", "gh200", "h800", "h20"})
_WIDEN_HOPPER: Final = 1.25
_WIDEN_OTHER: Final = 1.75


def interval_widening(gpu_model: str, fitted_on: str = FITTED_ON) -> float:
    """Return the factor by which a prediction's interval is widened on a GPU model; 1 if fitted on it."""
    own, fitted = _words(gpu_model), _words(fitted_on)
    if fitted <= own or own <= fitted:
        return 1.0
    return _WIDEN_HOPPER if own & _HOPPER else _WIDEN_OTHER


def _words(gpu_model: str) -> frozenset[str]:
    """Return the words of a model name, compared as a whole: an H20 is not an H200."""
    return frozenset(re.findall(r"[a-z0-9]+", gpu_model.lower()))


def _least_widening(gpu_model: str, fitted_on: Sequence[str]) -> float:
    """Return the widening of the model that is used on a GPU: its own if there is one, else the shipped one."""
    own = any(interval_widening(gpu_model, each) == 1.0 for each in fitted_on)
    return 1.0 if own else interval_widening(gpu_model)


def calibration_warning(gpu_models: Iterable[str], fitted_on: Sequence[str] = (FITTED_ON,)) -> str:
    """Return a sentence on the GPU models that no interference model was fitted on; empty if there are none.

    Args:
        gpu_models: names from the driver; empty ones are ignored.
        fitted_on: GPU models that an interference model was fitted on, the shipped one's first.
    """
    found = {name: _least_widening(name, fitted_on) for name in gpu_models if name}
    strange = sorted((name, widening) for name, widening in found.items() if widening > 1.0)
    if not strange:
        return ""
    each = ", ".join(f"{name} ({widening:g} times as wide)" for name, widening in strange)
    return (
        f"predictions were fitted on {', '.join(fitted_on)}; elsewhere their intervals are wider, so fewer pods "
        f"share a GPU: {each}. gpushare calibrate measures another model (docs/guide/other-gpus.md)"
    )
