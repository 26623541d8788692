"""Policies that predict pairs from solo profiles: KACE and its baselines, and Xu et al.'s random forest."""

from typing import Final

import numpy as np

from gpushare.research.dataset import Mechanism
from gpushare.research.pairs.table import Floats
from gpushare.sim.job_policies import Pairing, ScorePair, equal_kinds
from gpushare.sim.jobs import SimulationError
from gpushare.sim.truth import Truth

SHARING_PAYS: Final = 1.0  # summed progress above which sharing beats taking turns


def kace(truth: Truth) -> Pairing:
    """Return KACE: linear regression from two summed solo profiles to summed progress, fitted to real pairs."""
    rows, target = _training(truth)
    centre = rows.mean(axis=0)
    inner = rows - centre
    weights = np.linalg.solve(inner.T @ inner + 1e-3 * np.eye(inner.shape[1]), inner.T @ (target - target.mean()))

    def score(one: str, other: str) -> float:
        return float(target.mean() + (truth.profile(one) + truth.profile(other) - centre) @ weights)

    return Pairing("kace", score, SHARING_PAYS)


def kace_oracle(truth: Truth) -> Pairing:
    """Return KACE's upper bound: the true summed progress of every pair."""

    def score(one: str, other: str) -> float:
        return sum(truth.progress(equal_kinds((one, other)), Mechanism.MPS))

    return Pairing("oracle", score, SHARING_PAYS)


def kace_random(seed: int) -> Pairing:
    """Return KACE's lower bound: a random partner."""
    rng = np.random.default_rng(seed)
    return Pairing("random", lambda _one, _other: float(rng.random()))


def kace_by_memory(truth: Truth) -> Pairing:
    """Return KACE's baseline by the least summed memory."""
    return Pairing("by-memory", lambda one, other: -float(truth.memory_mib(one) + truth.memory_mib(other)))


def kace_by_sm(truth: Truth) -> Pairing:
    """Return KACE's baseline by the least summed SM use."""
    return Pairing("by-sm", lambda one, other: -(truth.busy_ratio(one) + truth.busy_ratio(other)))


def kace_best_rule(truth: Truth) -> Pairing:
    """Return KACE's best simple rule: the solo feature whose sum (or its negative) ranks real pairs best."""
    rows, target = _training(truth)
    ranks = _ranks(target)
    correlation = [
        float(np.corrcoef(_ranks(column), ranks)[0, 1]) if np.ptp(column) > 0 else 0.0 for column in rows.T
    ]
    feature = int(np.argmax(np.abs(correlation)))
    sign = 1.0 if correlation[feature] > 0 else -1.0

    def score(one: str, other: str) -> float:
        return sign * float(truth.profile(one)[feature] + truth.profile(other)[feature])

    return Pairing("best-rule", score)


def xu_random_forest(truth: Truth, seed: int) -> Pairing:
    """Return the policy of Xu et al. (2019): a random forest of 100 trees on both solo profiles.

    Raises:
        SimulationError: scikit-learn, of the extra `fit`, is not installed.
    """
    try:
        from sklearn.ensemble import RandomForestRegressor  # noqa: PLC0415 - an extra, needed by this policy alone
    except ImportError:
        raise SimulationError(
            'policy xu needs scikit-learn: pip install ".[fit]" in gpushare\'s repository'
        ) from None
    pairs = truth.measured_pairs()
    _require_pairs(len(pairs))
    rows = np.array([_both(truth, one, other) for one, other, _ in pairs])
    forest = RandomForestRegressor(n_estimators=100, random_state=seed, n_jobs=1)
    forest.fit(rows, np.array([total for _, _, total in pairs]))
    names = list(truth.workloads)
    grid = forest.predict(np.array([_both(truth, one, other) for one in names for other in names]))
    table = dict(zip(((one, other) for one in names for other in names), grid.tolist(), strict=True))
    score: ScorePair = lambda one, other: table[one, other]  # noqa: E731 - a typed closure over the table
    return Pairing("xu", score, SHARING_PAYS)


def _both(truth: Truth, one: str, other: str) -> Floats:
    """Return a pair's features, the same for both orders of its workloads."""
    a, b = truth.profile(one), truth.profile(other)
    return np.concatenate([a + b, np.minimum(a, b), np.maximum(a, b)])


def _training(truth: Truth) -> tuple[Floats, Floats]:
    pairs = truth.measured_pairs()
    _require_pairs(len(pairs))
    rows = np.array([truth.profile(one) + truth.profile(other) for one, other, _ in pairs])
    return rows, np.array([total for _, _, total in pairs])


def _require_pairs(count: int) -> None:
    if count < 3:
        raise SimulationError(f"the colocation data has {count} uncapped pairs; a predictor needs at least 3")


def _ranks(values: Floats) -> Floats:
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    return ranks
