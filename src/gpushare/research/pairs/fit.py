"""Predict whether a pair fits on the GPU, from other measured pairs.

It is a question of memory, which adds up: a Gaussian process classifier whose latent is a sum over both workloads.
"""

from typing import Final

import numpy as np

from gpushare.research.pairs.table import Floats, Indices, PairTable

# Variances of the latent: of a family along its batch sizes, of a workload, of the capacity. The evidence of the
# training pairs prefers them to (1, 1, 4) on K80 and P100; errors of 351 pairs fall from 15 to 13 and from 9 to 6.
_FAMILY_VARIANCE: Final = 16.0
_IDENTITY_VARIANCE: Final = 4.0
_CAPACITY_VARIANCE: Final = 16.0
_LENGTH_LOG2_BATCH: Final = 2.0
_NEWTON_STEPS: Final = 50


def fit_probability(table: PairTable, train: Indices, test: Indices) -> Floats:
    """Return [test pairs] the probability that both run side by side (Laplace approximation)."""
    labels = table.fits[train].astype(float)
    if not len(train):
        return np.ones(len(test))
    if labels.min() == labels.max():
        return np.full(len(test), labels[0])
    batch = table.log2_batch[:, None] - table.log2_batch[None, :]
    near = np.exp(-(batch**2) / (2 * _LENGTH_LOG2_BATCH**2))
    workload = _FAMILY_VARIANCE * table.same_family * near + _IDENTITY_VARIANCE * np.eye(len(table.workloads))

    def kernel(left: Indices, right: Indices) -> Floats:
        a, b, c, d = table.first[left], table.second[left], table.first[right], table.second[right]
        need = workload[np.ix_(a, c)] + workload[np.ix_(a, d)] + workload[np.ix_(b, c)] + workload[np.ix_(b, d)]
        latent: Floats = need + _CAPACITY_VARIANCE
        return latent

    gram = kernel(train, train)
    latent = np.zeros(len(train))
    dual = np.zeros(len(train))
    for _ in range(_NEWTON_STEPS):  # Rasmussen and Williams, Gaussian Processes for Machine Learning, alg. 3.1
        probability = _logistic(latent)
        weight = probability * (1 - probability) + 1e-9
        root = np.sqrt(weight)
        step = weight * latent + labels - probability
        inner = np.eye(len(train)) + root[:, None] * gram * root[None, :]
        dual = step - root * np.linalg.solve(inner, root * (gram @ step))
        updated = gram @ dual
        if float(np.abs(updated - latent).max()) < 1e-6:
            break
        latent = updated
    return _logistic(kernel(test, train) @ dual)


def _logistic(latent: Floats) -> Floats:
    result: Floats = 0.5 * (1 + np.tanh(latent / 2))
    return result
