"""Learning: how a workload beside others deviates from the model's predictions (docs/design.md 5).

Each workload has two numbers for each GPU model: its sensitivity, and its pressure on its neighbours. Each window
updates them by a Kalman filter that starts at zero, so a workload with few windows is predicted as the model does.
Their errors are treated as independent, so a GpuShare's status contains the whole state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.api import LearnedEffect
from gpushare.core.control.sharing import is_decided
from gpushare.core.interference import (
    NO_EFFECTS,
    PRESSURE_ERROR,
    SENSITIVITY_ERROR,
    UNEXPLAINED,
    effects_of,
    exposure,
)

# A workload's own deviation starts with `UNEXPLAINED` at the weight of this many windows.
_DEVIATION_WINDOWS: Final = 8
_MOST_DEVIATION_WINDOWS: Final = 100
# Workloads change: drift of the effects from window to window, as a standard deviation.
_DRIFT: Final = 0.002
_MOST_EFFECT: Final = 0.7  # half or twice the progress; beyond that, the profile belongs to another program
# A tenant below this sleeps or has finished; its neighbours are not the reason.
LEAST_PROGRESS: Final = 0.05
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True)
class SeenTenant:
    """One tenant of an undisturbed set in one window.

    Attributes:
        workload: namespace/name of its GpuShare, so workloads of different namespaces are different.
        thread_percentage: its cap, 1 to 100.
        progress: inferred, relative to running alone.
        error: standard error of `progress`.
        predicted: progress predicted by the model with the effects learnt so far.
        predicted_error: standard error of `predicted`.
    """

    workload: str
    thread_percentage: int
    progress: float
    error: float
    predicted: float
    predicted_error: float


def is_decided_by_counters(window: Sequence[SeenTenant]) -> bool:
    """Return whether a window tells more than its prediction: every tenant works, with a small error."""
    return len(window) > 1 and all(
        tenant.progress >= LEAST_PROGRESS
        and tenant.predicted >= LEAST_PROGRESS
        and is_decided(tenant.error, tenant.predicted_error)
        for tenant in window
    )


def learnt(
    window: Sequence[SeenTenant], known: Mapping[str, LearnedEffect], gpu_model: str
) -> dict[str, LearnedEffect]:
    """Return the learnt effects of the window's workloads after this window.

    Args:
        known: the effects before it, by workload, on this GPU model.
    """
    used = {name: effects_of([effect], gpu_model) for name, effect in known.items()}
    now = {tenant.workload: _drifted(known.get(tenant.workload), gpu_model) for tenant in window}
    share = 1.0 / max(1, len(window) - 1)
    for place, tenant in enumerate(window):
        others = [other.workload for at, other in enumerate(window) if at != place]
        weight = exposure(tenant.thread_percentage)
        noise = (tenant.error / tenant.predicted) ** 2
        # Subtract what the prediction did not include yet: this window's earlier tenants have changed the effects.
        moved = weight * (now[tenant.workload].sensitivity - used.get(tenant.workload, NO_EFFECTS).sensitivity)
        moved += share * sum(now[other].pressure - used.get(other, NO_EFFECTS).pressure for other in others)
        residual = math.log(tenant.progress / tenant.predicted) - moved
        own = weight**2 * _square(now[tenant.workload].sensitivity_error)
        theirs = sum(share**2 * _square(now[other].pressure_error) for other in others)
        total = own + theirs + noise + UNEXPLAINED**2
        left = max(0.0, residual**2 - own - theirs - noise)
        now[tenant.workload] = _with_sensitivity(now[tenant.workload], residual, weight, total, left)
        for other in others:
            now[other] = _with_pressure(now[other], residual, share, total)
    return {workload: _counted(effect) for workload, effect in now.items()}


def _drifted(effect: LearnedEffect | None, gpu_model: str) -> LearnedEffect:
    """Return an effect at the start of a window: slightly less certain than after the previous one."""
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


def _with_sensitivity(
    effect: LearnedEffect, residual: float, weight: float, total: float, left: float
) -> LearnedEffect:
    """Return a tenant's effect, updated by its own residual of variance `total`."""
    variance, deviation = _square(effect.sensitivity_error), _square(effect.deviation)
    gain = weight * variance / total
    windows = min(effect.windows, _MOST_DEVIATION_WINDOWS) + _DEVIATION_WINDOWS
    return replace(
        effect,
        sensitivity=_bounded(effect.sensitivity + gain * residual),
        sensitivity_error=math.sqrt(variance * (1.0 - gain * weight)),
        deviation=math.sqrt(deviation + (left - deviation) / (windows + 1)),
    )


def _with_pressure(effect: LearnedEffect, residual: float, share: float, total: float) -> LearnedEffect:
    """Return a neighbour's effect, updated by a tenant's residual of variance `total`."""
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
