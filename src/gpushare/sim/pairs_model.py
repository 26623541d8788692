"""Predictors of how well two training jobs run side by side, from other measured pairs.

Ours is a Gaussian process over pairs: how a pair runs is smooth in what its two workloads are (family, batch size,
solo rate), so a pair never measured is drawn from its measured relatives. Whether a pair fits is a question of
memory, which adds up, and gets a classifier of its own whose latent is a sum over the two workloads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from gpushare.sim.pairs_table import Floats, Indices, PairTable

# Candidates that the marginal likelihood of the training pairs weighs; variances relative to the constant's 1.
_LENGTHS_LOG2_BATCH: Final = (1.5, 3.0, 6.0)
_IDENTITY_VARIANCES: Final = (0.02, 0.1, 0.3)
_RATE_VARIANCES: Final = (0.0, 0.5)
_NOISES: Final = (0.02, 0.1, 0.4, 1.0)
_KERNELS_AVERAGED: Final = 8  # gate accuracy of P100's pairs 0.930 with the best one, 0.936 with eight (see docs)
_EVIDENCE_TEMPER: Final = 0.2  # the evidence is overconfident: observations of one workload are not independent
_RATE_LENGTH: Final = 2.0  # in log2 of steps/s
_FIT_LATENT_VARIANCE: Final = 4.0
_LEAST_OBSERVED_FOR_FIT: Final = 1


@dataclass(frozen=True, slots=True)
class PairPrediction:
    """[pairs] predicted summed progress if the pair fits, and the probability that it fits."""

    sum_if_fits: Floats
    fits_probability: Floats

    @property
    def normalized_sum(self) -> Floats:
        """[pairs] the best single guess: 0 for a pair that probably does not fit."""
        return np.where(self.fits_probability > 0.5, self.sum_if_fits, 0.0)


Predictor = Callable[[PairTable, Indices, Indices, np.random.Generator], PairPrediction]
"""(table, training pairs, pairs to predict, random numbers) -> prediction; reads training pairs' progress only."""


def gaussian_process(table: PairTable, train: Indices, test: Indices, _rng: np.random.Generator) -> PairPrediction:
    """Ours: mean of a process over sums and one over each tenant's progress, hyperparameters by evidence."""
    fits = table.fits
    fitting = train[fits[train]]
    if len(fitting) < 2:
        return PairPrediction(np.ones(len(test)), np.full(len(test), fits[train].mean() if len(train) else 1.0))
    predicted = np.zeros(len(test))
    for weight, kernel, noise in _weighted_kernels(table, fitting):
        by_sum = _predict_sum(table, kernel, noise, fitting, test)
        by_tenant = _predict_by_tenant(table, kernel, noise, fitting, test)
        predicted += weight * (by_sum + by_tenant.sum(axis=1)) / 2
    return PairPrediction(predicted, _fit_probability(table, train, test))


def progress_by_tenant(table: PairTable, train: Indices, test: Indices) -> Floats:
    """[test pairs, 2] predicted progress of each tenant if the pair fits, by the same process."""
    fitting = train[table.fits[train]]
    return sum(
        (
            weight * _predict_by_tenant(table, kernel, noise, fitting, test)
            for weight, kernel, noise in _weighted_kernels(table, fitting)
        ),
        start=np.zeros((len(test), 2)),
    )


def additive(table: PairTable, train: Indices, test: Indices, _rng: np.random.Generator) -> PairPrediction:
    """Baseline: a constant and one effect a workload (ridge); cannot rank perfect matchings at all."""
    fitting = train[table.fits[train]]
    rows = np.zeros((len(table.first), len(table.workloads)))
    np.add.at(rows, (np.arange(len(rows)), table.first), 1.0)
    np.add.at(rows, (np.arange(len(rows)), table.second), 1.0)
    return _ridge(table, rows, fitting, train, test, strength=0.1)


def linear_on_solo(table: PairTable, train: Indices, test: Indices, _rng: np.random.Generator) -> PairPrediction:
    """Baseline in the manner of KACE: linear regression on summed solo profiles (here: rate, batch size)."""
    fitting = train[table.fits[train]]
    solo = np.stack([table.log2_solo, table.log2_batch], axis=1)
    rows = solo[table.first] + solo[table.second]
    rows = (rows - rows.mean(axis=0)) / np.maximum(rows.std(axis=0), 1e-9)
    return _ridge(table, rows, fitting, train, test, strength=1e-3)


def best_constant(table: PairTable, train: Indices, test: Indices, _rng: np.random.Generator) -> PairPrediction:
    """Baseline: the median of the training pairs for everyone."""
    value = float(np.median(table.normalized_sum[train])) if len(train) else 1.0
    return PairPrediction(np.full(len(test), value), np.ones(len(test)))


def random_draw(table: PairTable, train: Indices, test: Indices, rng: np.random.Generator) -> PairPrediction:
    """Baseline: another pair's result, drawn at random."""
    drawn = rng.choice(table.normalized_sum[train], size=len(test)) if len(train) else np.ones(len(test))
    return PairPrediction(drawn, np.ones(len(test)))


PREDICTORS: Final[dict[str, Predictor]] = {
    "gaussian-process": gaussian_process,
    "additive": additive,
    "linear-solo": linear_on_solo,
    "constant": best_constant,
    "random": random_draw,
}


def _workload_kernel(table: PairTable, length: float, identity: float, rate: float) -> Floats:
    """[workloads, workloads] 1 + same family and near batch size + near solo rate + same workload."""
    same_family = np.array([[a == b for b in table.families] for a in table.families], dtype=float)
    batch = table.log2_batch[:, None] - table.log2_batch[None, :]
    solo = table.log2_solo[:, None] - table.log2_solo[None, :]
    kernel: Floats = (
        1.0
        + same_family * np.exp(-(batch**2) / (2 * length**2))
        + rate * np.exp(-(solo**2) / (2 * _RATE_LENGTH**2))
        + identity * np.eye(len(table.workloads))
    )
    return kernel


def _pair_kernel(table: PairTable, workload: Floats, left: Indices, right: Indices) -> Floats:
    a, b, c, d = table.first[left], table.second[left], table.first[right], table.second[right]
    kernel: Floats = (
        workload[np.ix_(a, c)] * workload[np.ix_(b, d)] + workload[np.ix_(a, d)] * workload[np.ix_(b, c)]
    )
    return kernel


def _weighted_kernels(table: PairTable, train: Indices) -> list[tuple[float, Floats, float]]:
    """The workload kernels and noises of highest marginal likelihood of the training sums; weights sum to 1."""
    target = table.normalized_sum[train]
    target = target - target.mean()
    found: list[tuple[float, Floats, float]] = []
    for length, identity, rate in product(_LENGTHS_LOG2_BATCH, _IDENTITY_VARIANCES, _RATE_VARIANCES):
        workload = _workload_kernel(table, length, identity, rate)
        values, vectors = np.linalg.eigh(_pair_kernel(table, workload, train, train))
        projected = vectors.T @ target
        for noise in _NOISES:
            spectrum = np.maximum(values, 0) + noise
            scale = float(np.mean(projected**2 / spectrum))
            evidence = -0.5 * len(train) * np.log(max(scale, 1e-300)) - 0.5 * float(np.log(spectrum).sum())
            found.append((evidence, workload, noise))
    found.sort(key=lambda candidate: -candidate[0])
    best = found[:_KERNELS_AVERAGED]
    weights = np.exp(_EVIDENCE_TEMPER * np.array([evidence - best[0][0] for evidence, _, _ in best]))
    weights /= weights.sum()
    return [(float(w), kernel, noise) for w, (_, kernel, noise) in zip(weights, best, strict=True) if w > 1e-3]


def _predict_sum(table: PairTable, workload: Floats, noise: float, train: Indices, test: Indices) -> Floats:
    target = table.normalized_sum[train]
    gram = _pair_kernel(table, workload, train, train) + noise * np.eye(len(train))
    weights = np.linalg.solve(gram, target - target.mean())
    result: Floats = target.mean() + _pair_kernel(table, workload, test, train) @ weights
    return result


def _predict_by_tenant(table: PairTable, workload: Floats, noise: float, train: Indices, test: Indices) -> Floats:
    """[test pairs, 2] from two observations a pair, one a tenant: who is slowed, and by whom."""
    who = np.concatenate([table.first[train], table.second[train]])
    beside = np.concatenate([table.second[train], table.first[train]])
    target = np.concatenate([table.progress[train, 0], table.progress[train, 1]])
    mean, spread = target.mean(), max(float(target.std()), 1e-9)
    gram = workload[np.ix_(who, who)] * workload[np.ix_(beside, beside)] + noise * np.eye(len(who))
    weights = np.linalg.solve(gram, (target - mean) / spread)
    a, b = table.first[test], table.second[test]
    first = (workload[np.ix_(a, who)] * workload[np.ix_(b, beside)]) @ weights
    second = (workload[np.ix_(b, who)] * workload[np.ix_(a, beside)]) @ weights
    result: Floats = mean + spread * np.stack([first, second], axis=1)
    return result


def _fit_probability(table: PairTable, train: Indices, test: Indices) -> Floats:
    """Gaussian process classifier (Laplace) whose latent is the sum of the two workloads' memory need."""
    labels = table.fits[train].astype(float)
    if labels.min() == labels.max():
        return np.full(len(test), labels[0])
    same_family = np.array([[a == b for b in table.families] for a in table.families], dtype=float)
    batch = table.log2_batch[:, None] - table.log2_batch[None, :]
    workload = same_family * np.exp(-(batch**2) / 8) + np.eye(len(table.workloads))

    def kernel(left: Indices, right: Indices) -> Floats:
        a, b, c, d = table.first[left], table.second[left], table.first[right], table.second[right]
        need = workload[np.ix_(a, c)] + workload[np.ix_(a, d)] + workload[np.ix_(b, c)] + workload[np.ix_(b, d)]
        latent: Floats = need + _FIT_LATENT_VARIANCE
        return latent

    gram = kernel(train, train)
    latent = np.zeros(len(train))
    dual = np.zeros(len(train))
    for _ in range(50):  # Newton steps, Rasmussen and Williams, Gaussian Processes for Machine Learning, alg. 3.1
        probability = 1 / (1 + np.exp(-latent))
        weight = probability * (1 - probability) + 1e-9
        root = np.sqrt(weight)
        step = weight * latent + labels - probability
        inner = np.eye(len(train)) + root[:, None] * gram * root[None, :]
        dual = step - root * np.linalg.solve(inner, root * (gram @ step))
        updated = gram @ dual
        if float(np.abs(updated - latent).max()) < 1e-6:
            break
        latent = updated
    result: Floats = 1 / (1 + np.exp(-(kernel(test, train) @ dual)))
    return result


def _ridge(
    table: PairTable, rows: Floats, fitting: Indices, train: Indices, test: Indices, *, strength: float
) -> PairPrediction:
    fits_share = float(table.fits[train].mean()) if len(train) else 1.0
    if len(fitting) < _LEAST_OBSERVED_FOR_FIT:
        return PairPrediction(np.ones(len(test)), np.full(len(test), fits_share))
    target = table.normalized_sum[fitting]
    inner = rows[fitting]
    centre = inner.mean(axis=0)
    inner = inner - centre
    weights = np.linalg.solve(
        inner.T @ inner + strength * np.eye(inner.shape[1]), inner.T @ (target - target.mean())
    )
    predicted = target.mean() + (rows[test] - centre) @ weights
    return PairPrediction(predicted, np.full(len(test), fits_share))
