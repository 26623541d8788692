"""What was learnt of a workload beside others: its prediction is moved by it, and its interval becomes its own."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import LearnedEffect

# Standard deviations over workloads before anything was seen, and of what no effect explains of a window's
# logarithm of progress: from ten programs on an H200 (docs/measurements/learning.md).
SENSITIVITY_ERROR: Final = 0.14
PRESSURE_ERROR: Final = 0.045
UNEXPLAINED: Final = 0.12
# How the sensitivity counts by cap: this much at all threads, one more with each halving, then scaled to 1 at half
# of them. Most of what the model does not know of a live profile is what a cap costs (the same page).
_AT_ALL_THREADS: Final = 0.4
_LEAST_THREADS: Final = 0.05
_STEP: Final = 0.02  # what is learnt is used in such steps, so that not every window makes another prediction
_HALF_TRUSTED: Final = 4  # windows after which a workload's own deviation counts as much as the model's interval


@dataclass(frozen=True, slots=True)
class Effects:
    """What a workload does beyond the model's prediction on one GPU model.

    Attributes:
        sensitivity: logarithm of its progress over the predicted one under a cap of half the threads.
        pressure: logarithm of its neighbours' progress over the predicted one; their mean counts.
        deviation: standard deviation of the logarithm of its progress around what these predict.
        trust: 0: its interval is the model's; 1: it is its own, by `deviation`.
    """

    sensitivity: float = 0.0
    pressure: float = 0.0
    deviation: float = 0.0
    trust: float = 0.0


NO_EFFECTS: Final = Effects()


def exposure(thread_percentage: float) -> float:
    """Return how much of a tenant's sensitivity counts under a cap (1 to 100)."""
    halvings = math.log2(1.0 / max(_LEAST_THREADS, thread_percentage / 100))
    return (_AT_ALL_THREADS + halvings) / (_AT_ALL_THREADS + 1.0)


def effects_of(learned: Iterable[LearnedEffect], gpu_model: str) -> Effects:
    """Return what a GpuShare's status says of its workload on a GPU model, as the model uses it."""
    known = next((each for each in learned if each.gpu_model == gpu_model), None)
    if known is None or known.windows == 0:
        return NO_EFFECTS
    deviation = math.hypot(
        _or(known.sensitivity_error, SENSITIVITY_ERROR),
        _or(known.pressure_error, PRESSURE_ERROR),
        _or(known.deviation, UNEXPLAINED),
    )
    return Effects(
        _stepped(known.sensitivity),
        _stepped(known.pressure),
        _stepped(deviation),
        round(known.windows / (known.windows + _HALF_TRUSTED), 1),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stepped(value: float) -> float:
    return round(round(value / _STEP) * _STEP, 6)
