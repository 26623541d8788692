"""The smooth part of the prediction: a Gaussian process over pairs of workloads, its kernels weighted by evidence.

How a pair runs is smooth in what its two workloads are (family, batch size, solo rate), so a pair never measured
is drawn from its measured relatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np

from gpushare.research.pairs.table import Floats, Indices, PairTable

# Candidates that the marginal likelihood of the training pairs weighs; variances relative to the constant's 1.
_LENGTHS_LOG2_BATCH: Final = (1.5, 3.0, 6.0)
_IDENTITY_VARIANCES: Final = (0.02, 0.1, 0.3)
_RATE_VARIANCES: Final = (0.0, 0.5)
_NOISES: Final = (0.02, 0.1, 0.4, 1.0)
# Gate accuracy of P100's pairs 0.930 with the best one, 0.936 with eight (docs/measurements/pairs.md).
_KERNELS_AVERAGED: Final = 8
_EVIDENCE_TEMPER: Final = 0.2  # the evidence is overconfident: observations of one workload are not independent
_RATE_LENGTH: Final = 2.0  # in log2 of steps/s


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """Measured pairs.

    Attributes:
        pairs: indices into the table.
        target: [pairs] what was measured.
        trust: [pairs] inverse noise variance of each, relative to the common noise.
    """

    pairs: Indices
    target: Floats
    trust: Floats

    @property
    def mean(self) -> float:
        """Return the mean of the targets, weighted by trust."""
        return float(np.average(self.target, weights=self.trust))


@dataclass(frozen=True, slots=True)
class WeighedKernel:
    """One candidate: its weight in the average, kernel [workloads, workloads], noise variance relative to it."""

    weight: float
    workload: Floats
    noise: float


def workload_kernels(table: PairTable) -> list[Floats]:
    """Return every candidate kernel between workloads, each [workloads, workloads]."""
    return [
        _workload_kernel(table, length, identity, rate)
        for length, identity, rate in product(_LENGTHS_LOG2_BATCH, _IDENTITY_VARIANCES, _RATE_VARIANCES)
    ]


def pair_kernel(table: PairTable, workload: Floats, left: Indices, right: Indices) -> Floats:
    """Return [left, right] covariances of two pairs' sums: products over workloads, matched either way round."""
    a, b, c, d = table.first[left], table.second[left], table.first[right], table.second[right]
    kernel: Floats = (
        workload[np.ix_(a, c)] * workload[np.ix_(b, d)] + workload[np.ix_(a, d)] * workload[np.ix_(b, c)]
    )
    return kernel


def weigh_kernels(table: PairTable, candidates: Sequence[Floats], observed: MeasuredPairs) -> list[WeighedKernel]:
    """Return the kernels and noises of highest marginal likelihood; weights sum to 1, best first.

    Args:
        table: the pairs; only workloads, families and rates alone are read.
        candidates: kernels between workloads, each [workloads, workloads].
        observed: the training pairs.
    """
    count, root = len(observed.pairs), np.sqrt(observed.trust)
    whitened = root * (observed.target - observed.mean)
    found: list[tuple[float, Floats, float]] = []
    for workload in candidates:
        bordered = np.zeros((count + 1, count + 1))
        bordered[:count, :count] = (
            root[:, None] * pair_kernel(table, workload, observed.pairs, observed.pairs) * root
        )
        bordered[count, :count] = whitened
        diagonal = np.diag(bordered)[:count].copy()
        for noise in _NOISES:
            bordered[np.arange(count), np.arange(count)] = diagonal + noise
            bordered[count, count] = 1 + float(whitened @ whitened) / noise
            factor = np.linalg.cholesky(bordered)  # its last row is the solution of the rest for the target
            scale = float(np.mean(factor[count, :count] ** 2))
            log_determinant = 2 * float(np.log(np.diag(factor)[:count]).sum())
            found.append((-0.5 * (count * np.log(max(scale, 1e-300)) + log_determinant), workload, noise))
    found.sort(key=lambda candidate: -candidate[0])
    best = found[:_KERNELS_AVERAGED]
    weights = np.exp(_EVIDENCE_TEMPER * np.array([evidence - best[0][0] for evidence, _, _ in best]))
    weights /= weights.sum()
    return [
        WeighedKernel(float(w), workload, noise)
        for w, (_, workload, noise) in zip(weights, best, strict=True)
        if w > 1e-3
    ]


def predict_smooth(table: PairTable, chosen: WeighedKernel, observed: MeasuredPairs, test: Indices) -> Floats:
    """Return [test pairs] the posterior mean of the process under one candidate."""
    gram = pair_kernel(table, chosen.workload, observed.pairs, observed.pairs)
    dual = np.linalg.solve(gram + np.diag(chosen.noise / observed.trust), observed.target - observed.mean)
    result: Floats = observed.mean + pair_kernel(table, chosen.workload, test, observed.pairs) @ dual
    return result


def predict_by_tenant(table: PairTable, chosen: WeighedKernel, train: Indices, test: Indices) -> Floats:
    """Return [test pairs, 2] predictions from two observations per pair: which tenant is slowed, and by which."""
    workload = chosen.workload
    who = np.concatenate([table.first[train], table.second[train]])
    beside = np.concatenate([table.second[train], table.first[train]])
    target = np.concatenate([table.progress[train, 0], table.progress[train, 1]])
    mean, spread = target.mean(), max(float(target.std()), 1e-9)
    gram = workload[np.ix_(who, who)] * workload[np.ix_(beside, beside)] + chosen.noise * np.eye(len(who))
    weights = np.linalg.solve(gram, (target - mean) / spread)
    a, b = table.first[test], table.second[test]
    first = (workload[np.ix_(a, who)] * workload[np.ix_(b, beside)]) @ weights
    second = (workload[np.ix_(b, who)] * workload[np.ix_(a, beside)]) @ weights
    result: Floats = mean + spread * np.stack([first, second], axis=1)
    return result


def _workload_kernel(table: PairTable, length: float, identity: float, rate: float) -> Floats:
    """Return [workloads, workloads] 1 + same family and near batch size + near solo rate + same workload."""
    batch = table.log2_batch[:, None] - table.log2_batch[None, :]
    solo = table.log2_solo[:, None] - table.log2_solo[None, :]
    kernel: Floats = (
        1.0
        + table.same_family * np.exp(-(batch**2) / (2 * length**2))
        + rate * np.exp(-(solo**2) / (2 * _RATE_LENGTH**2))
        + identity * np.eye(len(table.workloads))
    )
    return kernel
