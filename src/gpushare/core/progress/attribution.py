"""Infer each tenant's progress from the GPU's counters and the tenants' solo signatures.

Nothing reports compute per pod under MPS (docs/facts.md 20, 21). But work per iteration does not change when a
neighbour arrives, so the device's counters over a window are, to a good approximation, the sum of the tenants'
solo counters, each times its progress (docs/design.md 4). The progress is found by least squares within bounds;
where the counters carry little information, the interference model's prediction decides.

Plain floats, not numpy: the matrices are ten counters by a few tenants, and numpy would add a fifth to the agent's
memory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Final

from gpushare.core.gpu import Counters
from gpushare.core.progress.alone import filled_curve
from gpushare.core.progress.clock import at_clock
from gpushare.core.progress.counter_errors import CounterRow, counters_of

_Vector = Sequence[float]
_Matrix = Sequence[Sequence[float]]

# Residual, in standard deviations, from which a counter loses weight: a tenant may be in another phase than in its
# signature, or do other work. Readings below the sum are seldom wrong, so a deficit keeps more weight.
_OUTLIER: Final = 1.2
_DEFICIT_OUTLIER: Final = 2 * _OUTLIER
# Degrees of freedom of Student's t for the model's errors, whose tails are fatter than a normal distribution's
# (kurtosis 9 to 90 on unseen programs). So counters that all contradict the model overrule it.
_PRIOR_FREEDOM: Final = 4.0
# Weight of the model in the first round: low, so that a certain but wrong model does not discredit the counters.
_FIRST_TRUST: Final = 0.25
_REWEIGHTINGS: Final = 3

# Prior without an interference model: roughly what random sets on an H200 reach (docs/facts.md 30).
UNINFORMED_MEAN: Final = 0.7
UNINFORMED_ERROR: Final = 0.3
# The least squares may exceed the cap's bound by this factor, as the counters' noise does, so that one tenant's
# excess is not attributed to its neighbours; the reported progress stays within the bound.
BOUND_SLACK: Final = 1.05
# A tenant whose error is larger than this is reported as unknown; twice the error is half of the possible range.
MAX_ERROR: Final = 0.25
_MIN_ERROR: Final = 0.02
# The model is too certain about tenants that hardly use the GPU. With less SM activity alone than this, 69 to 89%
# of the true values were within two errors in sets of unseen programs; with up to twice the error, 84 to 95%.
_LIGHT_ACTIVITY: Final = 0.1
# Least error reported: rates differ from window to window, and errors of counters are correlated. With it, 95% of
# the true values are within two errors (docs/measurements/attribution.md).
_LEAST_ERROR: Final = 0.03
_SWEEPS: Final = 200
_TOLERANCE: Final = 1e-5
_LEAST_PROGRESS: Final = 0.02  # a smaller progress alone under a cap is a counting error


@dataclass(frozen=True, slots=True)
class Prior:
    """A tenant's expected progress before the counters are read, and its standard deviation; ratios."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class TenantEvidence:
    """Knowledge about one tenant of a GPU.

    Attributes:
        signature: its counters alone at 100% threads; None while it has no profile.
        bound: most progress that its cap allows, from its cap curve.
        prior: from the interference model; None without one.
        capped_work: counters per unit of progress under its cap; None if not measured.
        is_capped: whether it runs under a cap.
        sm_clock_mhz: mean SM clock while its counters were taken; None if unknown.
    """

    signature: Counters | None
    bound: float = 1.0
    prior: Prior | None = None
    capped_work: Counters | None = None
    is_capped: bool = False
    sm_clock_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """The inferred progress of one tenant.

    Attributes:
        progress_ratio: relative to running alone at 100%, at most what its cap allows; None if the tenants cannot
            be told apart.
        error_ratio: one standard deviation; None if the progress is unknown.
        pipes: its own use of each pipe, 0 to 1; empty if the progress is unknown.
    """

    progress_ratio: float | None
    error_ratio: float | None
    pipes: Mapping[str, float] = field(default_factory=dict)


UNKNOWN: Final = Attribution(None, None)


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant, as input of a prediction.

    Attributes:
        signature: its counters alone at 100% threads.
        cap_curve: measured progress alone, by thread percentage.
        capped: measured counters alone, by thread percentage.
        iterations_per_s: rate alone at 100%; None if unknown.
        sm_clock_mhz: mean SM clock while the signature was taken; None if unknown.
    """

    signature: Counters
    thread_percentage: int
    cap_curve: Mapping[int, float] = field(default_factory=dict)
    capped: Mapping[int, Counters] = field(default_factory=dict)
    iterations_per_s: float | None = None
    sm_clock_mhz: float | None = None


# Returns the expected progress of the tenants of one GPU, in their order; None where the model cannot predict.
Predict = Callable[[Sequence[TenantLoad]], Sequence[Prior | None]]


def no_prediction(loads: Sequence[TenantLoad]) -> Sequence[Prior | None]:
    """Return None for every tenant: there is no interference model."""
    return [None] * len(loads)


def cap_bound(cap_curve: Mapping[int, float], thread_percentage: int) -> float:
    """Return the most progress that a cap allows: interpolated on the measured curve, or 1 without one.

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


def capped_work(load: TenantLoad) -> Counters | None:
    """Return the counters per unit of progress under a load's cap, interpolated between measured caps.

    A program does not do the same work under every cap: libraries choose kernels by the number of SMs (a 4096 fp32
    matrix product on half of an H200 has 10 times the DRAM traffic), and clocks rise with fewer SMs at work (an
    8192 fp16 product shows 0.68 of the tensor activity for each iteration). None if no cap was measured.
    """
    measured = {cap: each for cap, each in load.capped.items() if load.cap_curve.get(cap, 0.0) >= _LEAST_PROGRESS}
    measured[100] = load.signature
    cap = load.thread_percentage
    if cap >= 100 or len(measured) == 1:
        return None
    high = min(each for each in measured if each >= cap)
    low = max((each for each in measured if each <= cap), default=high)
    part = (cap - low) / (high - low) if high > low else 0.0
    ends = [(measured[end].as_dict(), load.cap_curve[end] if end < 100 else 1.0) for end in (low, high)]
    (below, slow), (above, fast) = ends
    return Counters(
        **{
            name: (1 - part) * value / slow + part * above[name] / fast
            for name, value in below.items()
            if name in above
        }
    )


def evidence(load: TenantLoad, prior: Prior | None = None) -> TenantEvidence:
    """Return the evidence for attribution from a load and the model's prediction."""
    bound = cap_bound(load.cap_curve, load.thread_percentage)
    if load.cap_curve and load.thread_percentage >= min(load.cap_curve):  # below these caps nothing is known
        bound = max(bound, cap_bound(filled_curve(load.signature, load.cap_curve), load.thread_percentage))
    return TenantEvidence(
        load.signature, bound, prior, capped_work(load), load.thread_percentage < 100, load.sm_clock_mhz
    )


def attribute(
    device: Counters,
    tenants: Sequence[TenantEvidence],
    sm_clock_mhz: float | None = None,
    most_error: float = MAX_ERROR,
) -> tuple[Attribution, ...]:
    """Infer each tenant's progress from one window of the device's counters.

    Args:
        device: the device's counters over the window.
        tenants: all tenants that ran in the window. If one has no signature, each gets its prior or is
            unknown, since its part of the counters cannot be told from the others'.
        sm_clock_mhz: mean SM clock over the window; None if unknown, and assumed to be that of the signatures.
        most_error: a tenant whose error is larger is unknown; infinity returns a guess for every tenant.

    Source: docs/design.md 4; docs/facts.md 31 has the error without bounds and prior (pairs 0.052).
    """
    if not tenants:
        return ()
    tenants = [_at_clock(tenant, sm_clock_mhz) for tenant in tenants]
    works = [tenant.capped_work or tenant.signature for tenant in tenants]
    known = [work for work in works if work is not None]
    names = counters_of(device, known)
    if len(known) < len(works) or not names:
        return tuple(_from_prior(tenant, most_error) for tenant in tenants)
    is_guessed = [tenant.is_capped and tenant.capped_work is None for tenant in tenants]
    rows = [CounterRow.of(name, device, known, is_guessed) for name in names]
    upper = [max(0.0, tenant.bound) * BOUND_SLACK for tenant in tenants]
    priors = [_prior(tenant) for tenant in tenants]
    trusts = [1.0 if tenant.prior is None else _FIRST_TRUST for tenant in tenants]
    progress = [min(max(prior.mean, 0.0), limit) for prior, limit in zip(priors, upper, strict=True)]
    weights = [1.0 / row.variance(progress) for row in rows]
    for _ in range(1 + _REWEIGHTINGS):
        hessian, gradient = _normal_equations(rows, weights, priors, trusts)
        progress = bounded_minimum(hessian, gradient, upper, start=progress)
        weights = [_weight(row, progress) for row in rows]
        trusts = [_trust(tenant, prior, p) for tenant, prior, p in zip(tenants, priors, progress, strict=True)]
    hessian, _ = _normal_equations(rows, weights, priors, [min(1.0, trust) for trust in trusts])
    errors = [math.sqrt(variance + _LEAST_ERROR**2) for variance in inverse_diagonal(hessian)]
    return tuple(
        _attribution(tenant, p, e, most_error) for tenant, p, e in zip(tenants, progress, errors, strict=True)
    )


def _at_clock(tenant: TenantEvidence, now_mhz: float | None) -> TenantEvidence:
    taken_mhz = tenant.sm_clock_mhz
    if taken_mhz is None or now_mhz is None or tenant.signature is None:
        return tenant
    signature = at_clock(tenant.signature, taken_mhz, now_mhz)
    capped = tenant.capped_work and at_clock(tenant.capped_work, taken_mhz, now_mhz)
    return replace(tenant, signature=signature, capped_work=capped)


def bounded_minimum(hessian: _Matrix, gradient: _Vector, upper: _Vector, start: _Vector) -> list[float]:
    """Return the x in [0, upper] that minimises x'Hx/2 - g'x, by coordinate descent.

    Args:
        hessian: positive definite, n x n.
        gradient: n.
        upper: upper bounds, n.
        start: first guess, n.
    """
    x = list(start)
    for _ in range(_SWEEPS):
        moved = 0.0
        for i, row in enumerate(hessian):  # nearly all of the inference's time, so no calls of min and max
            old = x[i]
            new = old + (gradient[i] - sum(map(mul, row, x))) / row[i]
            if new < 0.0:
                new = 0.0
            elif new > upper[i]:
                new = upper[i]
            x[i] = new
            moved = max(moved, abs(new - old))
        if moved < _TOLERANCE:
            break
    return x


def inverse_diagonal(matrix: _Matrix) -> list[float]:
    """Return the diagonal of a positive definite matrix's inverse, from the inverse of its Cholesky factor."""
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


def _weight(row: CounterRow, progress: _Vector) -> float:
    """Return the weight of a counter, lower the larger its residual is in standard deviations."""
    variance = row.variance(progress)
    miss = (_dot(row.design, progress) - row.seen) / math.sqrt(variance)
    return 1.0 / (variance * (1.0 + (miss / (_DEFICIT_OUTLIER if miss > 0 else _OUTLIER)) ** 2))


def _trust(tenant: TenantEvidence, prior: Prior, progress: float) -> float:
    """Return the weight of the model's prediction, lower the further it is from the present progress."""
    if tenant.prior is None:
        return 1.0
    return (_PRIOR_FREEDOM + 1.0) / (_PRIOR_FREEDOM + ((progress - prior.mean) / prior.error) ** 2)


def _normal_equations(
    rows: Sequence[CounterRow], weights: _Vector, priors: Sequence[Prior], trusts: _Vector
) -> tuple[list[list[float]], list[float]]:
    """Return Hessian and gradient of the weighted least squares with the priors."""
    columns = list(zip(*(row.design for row in rows), strict=True))
    seen = [row.seen for row in rows]
    weighted = [[w * value for w, value in zip(weights, column, strict=True)] for column in columns]
    hessian = [[_dot(row, column) for column in columns] for row in weighted]
    gradient = [_dot(row, seen) for row in weighted]
    for i, (prior, trust) in enumerate(zip(priors, trusts, strict=True)):
        precision = trust / prior.error**2
        hessian[i][i] += precision
        gradient[i] += precision * prior.mean
    return hessian, gradient


def _dot(left: _Vector, right: _Vector) -> float:
    total: float = sum(map(mul, left, right))  # takes half the time of a generator
    return total


def _prior(tenant: TenantEvidence) -> Prior:
    if tenant.prior is not None:
        activity = tenant.signature.sm_util if tenant.signature is not None else None
        widening = 1.0 if activity is None else 1.0 + max(0.0, 1.0 - activity / _LIGHT_ACTIVITY)
        return Prior(tenant.prior.mean, widening * max(_MIN_ERROR, tenant.prior.error))
    return Prior(UNINFORMED_MEAN * min(1.0, tenant.bound), UNINFORMED_ERROR)


def _from_prior(tenant: TenantEvidence, most_error: float) -> Attribution:
    """Return the model's prediction, if there is one, for tenants that the counters cannot tell apart."""
    prior = tenant.prior or _prior(tenant)
    return _attribution(tenant, prior.mean, prior.error, most_error)


def _attribution(tenant: TenantEvidence, progress: float, error: float, most_error: float) -> Attribution:
    if error > most_error:
        return UNKNOWN
    progress = min(progress, max(0.0, tenant.bound), 1.0)
    work = tenant.capped_work or tenant.signature
    pipes = work.pipes() if work is not None else {}
    return Attribution(progress, error, {pipe: min(1.0, use * progress) for pipe, use in pipes.items()})
