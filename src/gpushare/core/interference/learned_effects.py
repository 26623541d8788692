"""Learned effects of a workload beside others: they correct its predictions and its interval."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import LearnedEffect

# Prior standard deviations over workloads, and the standard deviation that no effect explains, all of the
# logarithm of progress: from ten programs on an H200 (docs/measurements/learning.md).
SENSITIVITY_ERROR: Final = 0.14
PRESSURE_ERROR: Final = 0.045
UNEXPLAINED: Final = 0.12
# Weight of the sensitivity by cap: this much at all threads, plus one with each halving, scaled to 1 at half of
# them. Most of the model's error on a live profile is in what a cap costs (same page).
_AT_ALL_THREADS: Final = 0.4
_LEAST_THREADS: Final = 0.05
_STEP: Final = 0.02  # effects are rounded to such steps, so that not every window changes the prediction
_HALF_TRUSTED: Final = 4  # windows after which a workload's own deviation counts as much as the model's interval


@dataclass(frozen=True, slots=True)
class Effects:
    """Deviation of a workload from the model's predictions on one GPU model.

    Attributes:
        sensitivity: logarithm of its measured over predicted progress, under a cap of half the threads.
        pressure: logarithm of its neighbours' measured over predicted progress; a set uses the neighbours' mean.
        deviation: standard deviation of the logarithm of its progress around the corrected prediction, without
            what the sensitivity's own error adds under a cap (`deviation_under`).
        trust: 0 if its interval is the model's, 1 if it follows the deviation, or between.
        sensitivity_error: standard error of the sensitivity.
    """

    sensitivity: float = 0.0
    pressure: float = 0.0
    deviation: float = 0.0
    trust: float = 0.0
    sensitivity_error: float = 0.0

    def deviation_under(self, thread_percentage: float) -> float:
        """Return the standard deviation under a cap (1 to 100).

        The sensitivity counts by its exposure, and so does its error: windows under mild caps teach little about
        strict ones.
        """
        return math.hypot(exposure(thread_percentage) * self.sensitivity_error, self.deviation)


NO_EFFECTS: Final = Effects()


def exposure(thread_percentage: float) -> float:
    """Return the weight of a tenant's sensitivity under a cap (1 to 100)."""
    halvings = math.log2(1.0 / max(_LEAST_THREADS, thread_percentage / 100))
    return (_AT_ALL_THREADS + halvings) / (_AT_ALL_THREADS + 1.0)


def effects_of(learned: Iterable[LearnedEffect], gpu_model: str) -> Effects:
    """Return the effects of a GpuShare's workload on a GPU model, in the form that the model uses."""
    known = next((each for each in learned if each.gpu_model == gpu_model), None)
    if known is None or known.windows == 0:
        return NO_EFFECTS
    deviation = math.hypot(_or(known.pressure_error, PRESSURE_ERROR), _or(known.deviation, UNEXPLAINED))
    return Effects(
        _stepped(known.sensitivity),
        _stepped(known.pressure),
        _stepped(deviation),
        round(known.windows / (known.windows + _HALF_TRUSTED), 1),
        _stepped(_or(known.sensitivity_error, SENSITIVITY_ERROR)),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stepped(value: float) -> float:
    return round(round(value / _STEP) * _STEP, 6)
