"""How much of what was measured on one GPU model may be said of another."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

FITTED_ON: Final = "NVIDIA H200"
"""The model of the GPU that the shipped interference model was fitted on."""
# How far its errors reach on GPUs not fitted on. Ratios of a GPU's own capacities carry over; caches, block
# schedulers and bandwidth per SM do not. Not measured: a caution until that GPU is calibrated.
_HOPPER: Final = frozenset({"h100", "gh200", "h800", "h20"})
_WIDEN_HOPPER: Final = 1.25
_WIDEN_OTHER: Final = 1.75


def interval_widening(gpu_model: str, fitted_on: str = FITTED_ON) -> float:
    """Return how many times as wide a prediction's interval has to be on a GPU; 1 where it was fitted."""
    own, fitted = _words(gpu_model), _words(fitted_on)
    if fitted <= own or own <= fitted:
        return 1.0
    return _WIDEN_HOPPER if own & _HOPPER else _WIDEN_OTHER


def _words(gpu_model: str) -> frozenset[str]:
    """Return the words of a name: an H20 is no H200."""
    return frozenset(re.findall(r"[a-z0-9]+", gpu_model.lower()))


def _least_widening(gpu_model: str, fitted_on: Sequence[str]) -> float:
    """Return the widening of the model that is used: that of its own GPU, else the shipped one's."""
    own = any(interval_widening(gpu_model, each) == 1.0 for each in fitted_on)
    return 1.0 if own else interval_widening(gpu_model)


def calibration_warning(gpu_models: Iterable[str], fitted_on: Sequence[str] = (FITTED_ON,)) -> str:
    """Return a sentence on the GPU models that no model was fitted on; empty where all are known.

    Args:
        gpu_models: as the driver names them; an empty name is no model.
        fitted_on: the GPU models that models were fitted on, the shipped one's first.
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
