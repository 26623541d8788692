"""Predictors of how well two training jobs run side by side, from other measured pairs.

Ours has three parts: a Gaussian process over what the workloads are (`pairs_kernel`), a low-rank effect of hidden
traits with heavy-tailed noise (`pairs_completion`), and a classifier of whether the pair fits (`pairs_fit`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.research.pairs.completion import shared_effect
from gpushare.research.pairs.fit import fit_probability
from gpushare.research.pairs.kernel import (
    MeasuredPairs,
    predict_by_tenant,
    predict_smooth,
    weigh_kernels,
    workload_kernels,
)
from gpushare.research.pairs.table import Floats, Indices, PairTable

_LEAST_OBSERVED_FOR_FIT: Final = 1


@dataclass(frozen=True, slots=True)
class PairPrediction:
    """[pairs] predicted summed progress if the pair fits, and the probability that it fits."""

    sum_if_fits: Floats
    fits_probability: Floats

    @property
    def normalized_sum(self) -> Floats:
        """Return the best single guess by pair: 0 for one that probably does not fit."""
        return np.where(self.fits_probability > 0.5, self.sum_if_fits, 0.0)


Predictor = Callable[[PairTable, Indices, Indices, np.random.Generator], PairPrediction]
"""(table, training pairs, pairs to predict, random numbers) -> prediction; reads training pairs' progress only."""


def gaussian_process(table: PairTable, train: Indices, test: Indices, rng: np.random.Generator) -> PairPrediction:
    """Predict by our model: the log of the sum as a smooth part plus a shared effect, weighted by trust.

    The noise is symmetric: a sum is above the gate with probability over a half exactly where the prediction is.
    """
    fits = table.fits
    fitting = train[fits[train]]
    if len(fitting) < 2:
        return PairPrediction(np.ones(len(test)), np.full(len(test), fits[train].mean() if len(train) else 1.0))
    target = np.log(table.normalized_sum[fitting])
    candidates = workload_kernels(table)
    shared = shared_effect(table, candidates, fitting, target, rng)
    smooth = MeasuredPairs(fitting, target - shared.of(table, fitting), shared.trust)
    predicted = shared.of(table, test)
    for chosen in weigh_kernels(table, candidates, smooth):
        predicted += chosen.weight * predict_smooth(table, chosen, smooth, test)
    return PairPrediction(np.exp(predicted), fit_probability(table, train, test))


def progress_by_tenant(table: PairTable, train: Indices, test: Indices) -> Floats:
    """Return [test pairs, 2] predicted progress of each tenant if the pair fits, by the smooth part alone."""
    fitting = train[table.fits[train]]
    observed = MeasuredPairs(fitting, table.normalized_sum[fitting], np.ones(len(fitting)))
    predicted = np.zeros((len(test), 2))
    for chosen in weigh_kernels(table, workload_kernels(table), observed):
        predicted += chosen.weight * predict_by_tenant(table, chosen, fitting, test)
    return predicted


def additive(table: PairTable, train: Indices, test: Indices, _rng: np.random.Generator) -> PairPrediction:
    """Predict by a baseline: a constant and one effect per workload (ridge); it cannot rank perfect matchings."""
    fitting = train[table.fits[train]]
    rows = np.zeros((len(table.first), len(table.workloads)))
    np.add.at(rows, (np.arange(len(rows)), table.first), 1.0)
    np.add.at(rows, (np.arange(len(rows)), table.second), 1.0)
    return _ridge(table, rows, fitting, train, test, strength=0.1)


def linear_on_solo(table: PairTable, train: Indices, test: Indices, _rng: np.random.Generator) -> PairPrediction:
    """Predict by a baseline like KACE: linear regression on summed solo profiles (here: rate, batch size)."""
    fitting = train[table.fits[train]]
    solo = np.stack([table.log2_solo, table.log2_batch], axis=1)
    rows = solo[table.first] + solo[table.second]
    rows = (rows - rows.mean(axis=0)) / np.maximum(rows.std(axis=0), 1e-9)
    return _ridge(table, rows, fitting, train, test, strength=1e-3)


def best_constant(table: PairTable, train: Indices, test: Indices, _rng: np.random.Generator) -> PairPrediction:
    """Predict by a baseline: the median of the training pairs for every pair."""
    value = float(np.median(table.normalized_sum[train])) if len(train) else 1.0
    return PairPrediction(np.full(len(test), value), np.ones(len(test)))


def random_draw(table: PairTable, train: Indices, test: Indices, rng: np.random.Generator) -> PairPrediction:
    """Predict by a baseline: another pair's result, drawn at random."""
    drawn = rng.choice(table.normalized_sum[train], size=len(test)) if len(train) else np.ones(len(test))
    return PairPrediction(drawn, np.ones(len(test)))


PREDICTORS: Final[dict[str, Predictor]] = {
    "gaussian-process": gaussian_process,
    "additive": additive,
    "linear-solo": linear_on_solo,
    "constant": best_constant,
    "random": random_draw,
}


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
