"""Learning: what windows say of a workload beside others, beyond what the model predicted (docs/design.md 5).

Two numbers for a workload and a GPU model: its sensitivity, and its pressure on its neighbours. A window moves
them by a Kalman filter that starts at zero, so a workload of which little was seen is predicted as the model does.
Their errors are taken as independent, so a GpuShare's status holds all the state there is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.api import LearnedEffect
from gpushare.core.interference import (
    NO_EFFECTS,
    PRESSURE_ERROR,
    SENSITIVITY_ERROR,
    UNEXPLAINED,
    effects_of,
    exposure,
)

# So many windows' worth of `UNEXPLAINED` is in a workload's own deviation.
_DEVIATION_WINDOWS: Final = 8
_MOST_DEVIATION_WINDOWS: Final = 100
# Workloads change: from window to window the effects may drift by so much, as standard deviations.
_DRIFT: Final = 0.002
_MOST_EFFECT: Final = 0.7  # half or twice the progress; beyond, the profile is another program's
# A tenant below this sleeps, or has finished: no fault of its neighbours.
LEAST_PROGRESS: Final = 0.05
# The counters decide a window where the error of the inference is this much below the prediction's, and small.
_DECISIVE: Final = 0.6
_MOST_ERROR: Final = 0.1
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class SeenTenant:
    """One tenant of an undisturbed set in one window.

    Attributes:
        workload: namespace/name of its GpuShare: a workload of another namespace is another workload.
        thread_percentage: its cap, 1 to 100.
        progress, error: inferred, relative to running alone; ratios.
        predicted, predicted_error: by the model with what was learnt so far.
    """

    workload: str
    thread_percentage: int
    progress: float
    error: float
    predicted: float
    predicted_error: float


def is_decided_by_counters(window: Sequence[SeenTenant]) -> bool:
    """Return whether a window says more than its prediction did: every tenant works, and its error is small."""
    return len(window) > 1 and all(
        tenant.progress >= LEAST_PROGRESS
        and tenant.predicted >= LEAST_PROGRESS
        and tenant.error <= min(_MOST_ERROR, _DECISIVE * tenant.predicted_error)
        for tenant in window
    )


def learnt(
    window: Sequence[SeenTenant], known: Mapping[str, LearnedEffect], gpu_model: str
) -> dict[str, LearnedEffect]:
    """Return what is known of the window's workloads after it.

    Args:
        known: before it, by workload, on this GPU model.
    """
    used = {name: effects_of([effect], gpu_model) for name, effect in known.items()}
    now = {tenant.workload: _drifted(known.get(tenant.workload), gpu_model) for tenant in window}
    share = 1.0 / max(1, len(window) - 1)
    for place, tenant in enumerate(window):
        others = [other.workload for at, other in enumerate(window) if at != place]
        weight = exposure(tenant.thread_percentage)
        noise = (tenant.error / tenant.predicted) ** 2
        # What the prediction did not use yet is taken off: it rounds, and this window's other tenants came before.
        moved = weight * (now[tenant.workload].sensitivity - used.get(tenant.workload, NO_EFFECTS).sensitivity)
        moved += share * sum(now[other].pressure - used.get(other, NO_EFFECTS).pressure for other in others)
        residual = math.log(tenant.progress / tenant.predicted) - moved
        own = weight**2 * _square(now[tenant.workload].sensitivity_error)
        theirs = sum(share**2 * _square(now[other].pressure_error) for other in others)
        total = own + theirs + noise + UNEXPLAINED**2
        left = max(0.0, residual**2 - own - theirs - noise)
        now[tenant.workload] = _sensed(now[tenant.workload], residual, weight, total, left)
        for other in others:
            now[other] = _pressed(now[other], residual, share, total)
    return {workload: _counted(effect) for workload, effect in now.items()}


def _drifted(effect: LearnedEffect | None, gpu_model: str) -> LearnedEffect:
    """Return an effect before a window, a little less certain than after the last one."""
    if effect is None:
        return LearnedEffect(gpu_model, 0.0, 0.0, 0, UNEXPLAINED, SENSITIVITY_ERROR, PRESSURE_ERROR)
    sensitivity = effect.sensitivity_error if effect.sensitivity_error is not None else SENSITIVITY_ERROR
    pressure = effect.pressure_error if effect.pressure_error is not None else PRESSURE_ERROR
    return replace(
        effect,
        sensitivity_error=min(SENSITIVITY_ERROR, math.hypot(sensitivity, _DRIFT)),
        pressure_error=min(PRESSURE_ERROR, math.hypot(pressure, _DRIFT)),
        deviation=effect.deviation if effect.deviation is not None else UNEXPLAINED,
    )


def _sensed(effect: LearnedEffect, residual: float, weight: float, total: float, left: float) -> LearnedEffect:
    """Return an effect after its own tenant's residual, of variance `total`."""
    variance, deviation = _square(effect.sensitivity_error), _square(effect.deviation)
    gain = weight * variance / total
    windows = min(effect.windows, _MOST_DEVIATION_WINDOWS) + _DEVIATION_WINDOWS
    return replace(
        effect,
        sensitivity=_bounded(effect.sensitivity + gain * residual),
        sensitivity_error=math.sqrt(variance * (1.0 - gain * weight)),
        deviation=math.sqrt(deviation + (left - deviation) / (windows + 1)),
    )


def _pressed(effect: LearnedEffect, residual: float, share: float, total: float) -> LearnedEffect:
    """Return an effect after a neighbour's residual."""
    variance = _square(effect.pressure_error)
    gain = share * variance / total
    return replace(
        effect,
        pressure=_bounded(effect.pressure + gain * residual),
        pressure_error=math.sqrt(variance * (1.0 - gain * share)),
    )


def _counted(effect: LearnedEffect) -> LearnedEffect:
    return LearnedEffect(
        effect.gpu_model,
        round(effect.sensitivity, _DIGITS),
        round(effect.pressure, _DIGITS),
        effect.windows + 1,
        *(
            round(value or 0.0, _DIGITS)
            for value in (effect.deviation, effect.sensitivity_error, effect.pressure_error)
        ),
    )


def _square(error: float | None) -> float:
    return (error or 0.0) ** 2


def _bounded(effect: float) -> float:
    return min(_MOST_EFFECT, max(-_MOST_EFFECT, effect))
