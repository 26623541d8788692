"""Whose work a GPU's counters are: each tenant's progress, inferred from the counters and solo signatures.

Nothing tells per-pod compute under MPS (FACTS 20, 21). But work per iteration does not change when a neighbour
comes, so the device's counters over a window are, to a good approximation, the sum of the tenants' solo counters,
each times its progress (DESIGN section 4). The progress is found by least squares within bounds, drawn to
what is expected beforehand where the counters say little.

Plain floats: ten counters by a few tenants are no work for numpy, which would be a fifth of the agent's memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.pipes import Counters

_Vector = Sequence[float]
_Matrix = Sequence[Sequence[float]]

# Noise of each counter's sum, relative to the largest of its values. Counters of work done add up over tenants;
# time-like ones (an SM "was busy") overlap, so they carry less weight, and graphics_util reads 1 under any load.
# Standard deviations and gaps of 545 sets of 2 to 4 programs on an H200 (src/gpushare/data/h200-colocation.jsonl).
_NOISE_RATIO: Final[Mapping[str, float]] = {
    "fp64_util": 0.05, "dfma_tensor_util": 0.05, "fp32_util": 0.05, "fp16_util": 0.05, "hmma_tensor_util": 0.05,
    "imma_tensor_util": 0.05, "integer_util": 0.05, "dram_bw_util": 0.1, "sm_util": 0.12, "sm_occupancy": 0.25,
}  # fmt: skip
# What the device reads above (or below) the sum, for each neighbour, on the same scale: neighbours evict each
# other's cache lines, so there is more traffic; and two tenants on one SM at once count once.
_GAP_PER_NEIGHBOUR: Final[Mapping[str, float]] = {"dram_bw_util": 0.05, "sm_util": -0.07}
_MAX_GAP: Final = 0.15
_OUTLIER: Final = (
    2.0  # noise units from where a counter starts to lose weight (a tenant in another phase than alone)
)
_REWEIGHTINGS: Final = 2
COUNTER_FLOOR: Final = 0.02  # FACTS: counters scaled by 1/(max + 2 percent points)

# Without the interference model's word: what random sets on an H200 reach, very roughly (FACTS, colocation).
UNINFORMED_MEAN: Final = 0.7
UNINFORMED_ERROR: Final = 0.3
# The least squares may go this far beyond the cap's bound, as the counters' noise does, so that one tenant's
# excess is not put on its neighbours; what is said of a tenant stays within the bound.
BOUND_SLACK: Final = 1.05
# A tenant whose progress is not known within this stays unknown: half of the range of possible answers.
MAX_ERROR: Final = 0.25
_MIN_ERROR: Final = 0.01
_SWEEPS: Final = 200
_TOLERANCE: Final = 1e-7


@dataclass(frozen=True, slots=True)
class Prior:
    """What is expected of a tenant before looking: progress and one standard deviation, ratios."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class TenantEvidence:
    """What is known of one tenant of a GPU.

    Attributes:
        signature: its counters alone at 100% threads; None while it has no profile.
        bound: most progress that its cap allows, from its cap curve.
        prior: from the interference model; None without one.
    """

    signature: Counters | None
    bound: float = 1.0
    prior: Prior | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """What was inferred of one tenant.

    Attributes:
        progress_ratio: relative to running alone at 100%, at most what its cap allows; None when the tenants
            cannot be told apart.
        error_ratio: one standard deviation; None with an unknown progress.
        pipes: its own use of each pipe, 0 to 1; empty with an unknown progress.
    """

    progress_ratio: float | None
    error_ratio: float | None
    pipes: Mapping[str, float] = field(default_factory=dict)


UNKNOWN: Final = Attribution(None, None)


@dataclass(frozen=True, slots=True)
class Load:
    """One tenant as a predictor sees it.

    Attributes:
        signature: its counters alone at 100% threads.
        cap_curve: progress alone by thread percentage, where measured; capped: counters alone, likewise.
        iterations_per_s: rate alone at 100%; None when unknown.
    """

    signature: Counters
    thread_percentage: int
    cap_curve: Mapping[int, float] = field(default_factory=dict)
    capped: Mapping[int, Counters] = field(default_factory=dict)
    iterations_per_s: float | None = None


# What the interference model expects of the tenants of one GPU, in their order; None where it is silent.
Predict = Callable[[Sequence[Load]], Sequence[Prior | None]]


def no_prediction(loads: Sequence[Load]) -> Sequence[Prior | None]:
    """Without an interference model."""
    return [None] * len(loads)


def cap_bound(cap_curve: Mapping[int, float], thread_percentage: int) -> float:
    """Most progress under a cap: the measured curve between its points, and no bound where it was not measured.

    Args:
        cap_curve: progress alone by thread percentage, relative to 100%.
    """
    points = {**cap_curve, 100: 1.0}
    above = [cap for cap in points if cap >= thread_percentage]
    high = min(above)
    below = [cap for cap in points if cap < thread_percentage]
    if thread_percentage in points or not below:
        return min(1.0, points[high])
    low = max(below)
    part = (thread_percentage - low) / (high - low)
    return min(1.0, points[low] + part * (points[high] - points[low]))


def attribute(device: Counters, tenants: Sequence[TenantEvidence]) -> tuple[Attribution, ...]:
    """Each tenant's progress from one window of the device's counters.

    Args:
        device: the device's counters over the window.
        tenants: everyone who ran in the window. One without a signature makes everyone unknown who has no prior,
            since its part of the counters cannot be told from theirs.

    Source: DESIGN section 4; FACTS give the error of the same without bounds and prior (pairs 0.052).
    """
    if not tenants:
        return ()
    signatures = [tenant.signature for tenant in tenants]
    rows = _rows(device, [s for s in signatures if s is not None])
    if any(s is None for s in signatures) or not rows:
        return tuple(_from_prior(tenant) for tenant in tenants)
    design, target = _system(rows, device, [s for s in signatures if s is not None])
    upper = [max(0.0, tenant.bound) * BOUND_SLACK for tenant in tenants]
    priors = [_prior(tenant) for tenant in tenants]
    progress = [min(max(prior.mean, 0.0), limit) for prior, limit in zip(priors, upper, strict=True)]
    weights = [1.0] * len(rows)
    hessian: _Matrix = ()
    for _ in range(1 + _REWEIGHTINGS):
        hessian, gradient = _normal_equations(design, target, weights, priors)
        progress = bounded_minimum(hessian, gradient, upper, start=progress)
        misses = [_dot(row, progress) - wanted for row, wanted in zip(design, target, strict=True)]
        weights = [1.0 / (1.0 + (miss / _OUTLIER) ** 2) for miss in misses]
    errors = [math.sqrt(variance) for variance in inverse_diagonal(hessian)]
    return tuple(_attribution(tenant, p, e) for tenant, p, e in zip(tenants, progress, errors, strict=True))


def bounded_minimum(hessian: _Matrix, gradient: _Vector, upper: _Vector, start: _Vector) -> list[float]:
    """The x in [0, upper] that makes x'Hx/2 - g'x least, by coordinate descent.

    Args:
        hessian: positive definite, n x n; gradient, upper, start: n.
    """
    x = list(start)
    for _ in range(_SWEEPS):
        moved = 0.0
        for i, row in enumerate(hessian):
            new = min(max(x[i] + (gradient[i] - _dot(row, x)) / row[i], 0.0), upper[i])
            moved = max(moved, abs(new - x[i]))
            x[i] = new
        if moved < _TOLERANCE:
            break
    return x


def inverse_diagonal(matrix: _Matrix) -> list[float]:
    """The diagonal of a positive definite matrix's inverse, from the inverse of its Cholesky factor."""
    n = len(matrix)
    factor = [[0.0] * n for _ in range(n)]
    inverse = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i][j] - _dot(factor[i][:j], factor[j][:j])
            factor[i][j] = math.sqrt(rest) if i == j else rest / factor[j][j]
        for j in range(i + 1):
            rest = (i == j) - sum(factor[i][k] * inverse[k][j] for k in range(j, i))
            inverse[i][j] = rest / factor[i][i]
    return [sum(row[i] ** 2 for row in inverse[i:]) for i in range(n)]


def _normal_equations(
    design: _Matrix, target: _Vector, weights: _Vector, priors: Sequence[Prior]
) -> tuple[list[list[float]], list[float]]:
    """Hessian and gradient of the weighted least squares, drawn to the priors."""
    columns = list(zip(*design, strict=True))
    weighted = [[w * value for w, value in zip(weights, column, strict=True)] for column in columns]
    hessian = [[_dot(row, column) for column in columns] for row in weighted]
    gradient = [_dot(row, target) for row in weighted]
    for i, prior in enumerate(priors):
        precision = 1.0 / prior.error**2
        hessian[i][i] += precision
        gradient[i] += precision * prior.mean
    return hessian, gradient


def _dot(left: _Vector, right: _Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _rows(device: Counters, signatures: Sequence[Counters]) -> tuple[str, ...]:
    """Counters that the device and every signature have."""
    return tuple(
        name
        for name in _NOISE_RATIO
        if getattr(device, name) is not None and all(getattr(s, name) is not None for s in signatures)
    )


def _system(
    rows: Sequence[str], device: Counters, signatures: Sequence[Counters]
) -> tuple[list[list[float]], list[float]]:
    """Design matrix (counters x tenants) and target, each row scaled to unit noise."""
    design, target = [], []
    for name in rows:
        drawn = [float(getattr(signature, name)) for signature in signatures]
        seen = float(getattr(device, name))
        scale = max(*drawn, seen) + COUNTER_FLOOR
        gap = _GAP_PER_NEIGHBOUR.get(name, 0.0) * (len(signatures) - 1)
        noise = _NOISE_RATIO[name] * scale
        design.append([value / noise for value in drawn])
        target.append((seen - min(max(gap, -_MAX_GAP), _MAX_GAP) * scale) / noise)
    return design, target


def _prior(tenant: TenantEvidence) -> Prior:
    if tenant.prior is not None:
        return Prior(tenant.prior.mean, max(_MIN_ERROR, tenant.prior.error))
    return Prior(UNINFORMED_MEAN * min(1.0, tenant.bound), UNINFORMED_ERROR)


def _from_prior(tenant: TenantEvidence) -> Attribution:
    """Counters cannot tell; what the model expects stands, if it expects anything."""
    if tenant.prior is None:
        return UNKNOWN
    return _attribution(tenant, tenant.prior.mean, tenant.prior.error)


def _attribution(tenant: TenantEvidence, progress: float, error: float) -> Attribution:
    if error > MAX_ERROR:
        return UNKNOWN
    progress = min(progress, max(0.0, tenant.bound), 1.0)
    pipes = tenant.signature.pipes() if tenant.signature is not None else {}
    return Attribution(progress, error, {pipe: min(1.0, use * progress) for pipe, use in pipes.items()})
