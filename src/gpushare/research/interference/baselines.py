"""Baselines of the model: KACE's linear regression on summed solo profiles, and the additive model."""

from typing import Final

import numpy as np

from gpushare.core.interference.profile import Array

NAMES: Final = ("kace", "additive")
_RIDGE: Final = 1e-2


def design(name: str, vectors: Array, caps: Array, alone: Array) -> Array:
    """Return the features of each tenant of one set (tenants x features).

    vectors: tenants x counters at 100%; caps, alone: tenants. `kace` sees the sum of all tenants' solo counters
    (KACE, linear regression on summed profiles) with the cap; `additive` its own counters and the neighbours' sum.
    """
    ones = np.ones((len(caps), 1))
    total = np.repeat(vectors.sum(axis=0, keepdims=True), len(caps), axis=0)
    sums = np.full((len(caps), 1), caps.sum())
    if name == "kace":
        return np.hstack([ones, total, caps[:, None], sums])
    return np.hstack([ones, vectors, total - vectors, caps[:, None], sums, alone[:, None]])


def fit(rows: Array, progress: Array) -> Array:
    """Return the coefficients of a ridge regression."""
    gram = rows.T @ rows + _RIDGE * len(rows) / 100 * np.eye(rows.shape[1])
    return np.asarray(np.linalg.solve(gram, rows.T @ progress))
