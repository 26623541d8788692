"""Low-rank completion of the matrix of pairs: effects that the workloads' known features do not explain.

After the smooth part, sums of pairs still carry an effect that is a product of hidden traits of the two workloads
(on gavel's K80 it looks like which machines measured them: blocks of pairs that are some 5% faster or slower), and
noise with heavy tails (single pairs off by 0.2). Both are sampled jointly by Gibbs sampling:

    log sum(a, b) = smooth(a, b) + sum over r of sign_r u_ar u_br + noise_ab,

after Salakhutdinov and Mnih, "Bayesian probabilistic matrix factorization" (ICML'08), the noise Student's t as a
Gaussian of unknown scale per pair (Geweke 1993). Where pairs carry no such effect, the factors' variance shrinks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.research.pairs.kernel import MeasuredPairs, pair_kernel, weigh_kernels
from gpushare.research.pairs.table import Floats, Indices, PairTable

# Traits may attract or repel; two of each: an effect of (trait a + trait b) modulo anything needs one of each.
_SIGNS: Final = np.array([1.0, -1.0, 1.0, -1.0])
_NOISE_DEGREES_OF_FREEDOM: Final = 4.0
_FACTOR_VARIANCE_PRIOR: Final = (2.0, 0.1)  # inverse gamma: shape, scale, in variances of the target
_NOISE_VARIANCE_PRIOR: Final = (1.0, 0.05)
_BURN_IN_DRAWS: Final = 60
_FIRST_DRAWS: Final = 80  # with the kernel chosen before the effect is known; it is chosen again after
_KEPT_DRAWS: Final = 200
_DRAWS_A_NOISE: Final = 4  # a draw of the noise costs an inverse, a draw of the factors does not
_LEAST_PAIRS: Final = 10
_JITTER: Final = 1e-6


@dataclass(frozen=True, slots=True)
class SharedEffect:
    """Deviation of pairs from the smooth part.

    Attributes:
        effect: [workloads, workloads] expected addition to a pair's target; symmetric.
        trust: [training pairs] expected inverse noise variance of each, relative to their mean.
    """

    effect: Floats
    trust: Floats

    def of(self, table: PairTable, pairs: Indices) -> Floats:
        """Return [pairs] the expected addition to each one's target."""
        result: Floats = self.effect[table.first[pairs], table.second[pairs]]
        return result


def shared_effect(
    table: PairTable, candidates: Sequence[Floats], train: Indices, target: Floats, rng: np.random.Generator
) -> SharedEffect:
    """Return the low-rank effect and trust of the training pairs.

    Args:
        table: the pairs; only workloads, families and rates alone are read.
        candidates: kernels between workloads for the smooth part, each [workloads, workloads].
        train, target: [pairs] which were measured, and what (log of the summed progress).
        rng: random numbers of the sampler.
    """
    nothing = SharedEffect(np.zeros((len(table.workloads),) * 2), np.ones(len(train)))
    spread = float(target.std())
    if len(train) < _LEAST_PAIRS or spread < 1e-6:
        return nothing
    chain = _Chain(table, train, (target - target.mean()) / spread, rng)
    chain.choose_kernel(candidates, nothing)
    chain.draw(_BURN_IN_DRAWS)
    chain.choose_kernel(candidates, chain.draw(_FIRST_DRAWS))
    chain.draw(_BURN_IN_DRAWS)
    shared = chain.draw(_KEPT_DRAWS)
    return SharedEffect(spread * shared.effect, shared.trust)


class _Chain:
    """State of the sampler over one set of training pairs, target standardised."""

    def __init__(self, table: PairTable, train: Indices, target: Floats, rng: np.random.Generator) -> None:
        self._table, self._train, self._target, self._rng = table, train, target, rng
        self._first, self._second = table.first[train], table.second[train]
        self._partners = [self._partners_of(workload) for workload in range(len(table.workloads))]
        self._beside_itself = {
            int(self._first[row]): int(row) for row in np.flatnonzero(self._first == self._second)
        }
        self._factors = rng.normal(0, 0.3, (len(table.workloads), len(_SIGNS)))
        self._factor_variance = np.full(len(_SIGNS), 0.1)
        self._tail = np.ones(len(train))  # [pairs] noise variance is the common one over this
        self._noise_variance = float("nan")
        self._gram: Floats = np.eye(len(train))
        self._gram_root: Floats = self._gram

    def choose_kernel(self, candidates: Sequence[Floats], shared: SharedEffect) -> None:
        """Take the smooth part's kernel of highest evidence, given what is known of the rest."""
        smooth, trust = self._target - shared.of(self._table, self._train), shared.trust
        chosen = weigh_kernels(self._table, candidates, MeasuredPairs(self._train, smooth, trust))[0]
        gram = pair_kernel(self._table, chosen.workload, self._train, self._train)
        # Scaled to the whole target: what is left beside an estimated effect looks smoother than it is.
        dual = np.linalg.solve(gram + chosen.noise * np.eye(len(gram)), self._target)
        scale = max(float(self._target @ dual) / len(gram), 1e-9)
        self._gram = scale * gram
        jitter = _JITTER * np.eye(len(gram))
        self._gram_root = np.asarray(np.linalg.cholesky(self._gram + jitter), dtype=np.float64)
        self._noise_variance = scale * chosen.noise * float(self._tail.mean())

    def draw(self, draws: int) -> SharedEffect:
        """Go on by so many draws; means over them."""
        workloads = len(self._factors)
        effect: Floats = np.zeros((workloads, workloads))
        precision: Floats = np.zeros(len(self._train))
        noise, inverse = self._noise_and_inverse()
        for index in range(draws):
            if index % _DRAWS_A_NOISE == 0:
                noise, inverse = self._noise_and_inverse()
            residual = self._target - self._draw_smooth(noise, inverse)
            self._draw_factors(residual, noise)
            if index % _DRAWS_A_NOISE == _DRAWS_A_NOISE - 1:
                self._draw_noise(residual - self._effect_of_pairs())
            effect += (self._factors * _SIGNS) @ self._factors.T
            precision += 1 / noise
        return SharedEffect(effect / draws, precision / precision.mean())

    def _partners_of(self, workload: int) -> tuple[Indices, Indices]:
        rows = np.flatnonzero((self._first == workload) ^ (self._second == workload))
        return rows, np.where(self._first[rows] == workload, self._second[rows], self._first[rows])

    def _effect_of_pairs(self) -> Floats:
        result: Floats = (self._factors[self._first] * self._factors[self._second]) @ _SIGNS
        return result

    def _noise_and_inverse(self) -> tuple[Floats, Floats]:
        noise = self._noise_variance / self._tail
        return noise, np.asarray(np.linalg.inv(self._gram + np.diag(noise)), dtype=np.float64)

    def _draw_smooth(self, noise: Floats, inverse: Floats) -> Floats:
        """Draw the process given factors and noise: a draw of the prior, corrected (Matheron's rule)."""
        prior = self._gram_root @ self._rng.normal(size=len(noise))
        observed = prior + np.sqrt(noise) * self._rng.normal(size=len(noise))
        result: Floats = prior + self._gram @ (inverse @ (self._target - self._effect_of_pairs() - observed))
        return result

    def _draw_factors(self, residual: Floats, noise: Floats) -> None:
        rank = len(_SIGNS)
        for workload, (rows, others) in enumerate(self._partners):
            inputs = self._factors[others] * _SIGNS
            weighted = inputs / noise[rows, None]
            precision = weighted.T @ inputs + np.diag(1 / self._factor_variance)
            root = np.linalg.inv(np.linalg.cholesky(precision))
            proposed = root.T @ (root @ (weighted.T @ residual[rows]) + self._rng.normal(size=rank))
            itself = self._beside_itself.get(workload)
            if itself is None or self._accepts(workload, proposed, residual[itself], noise[itself]):
                self._factors[workload] = proposed
        shape, scale = _FACTOR_VARIANCE_PRIOR
        drawn = self._rng.gamma(shape + len(self._factors) / 2, size=rank)
        self._factor_variance = (scale + 0.5 * (self._factors**2).sum(axis=0)) / drawn

    def _accepts(self, workload: int, proposed: Floats, residual: float, noise: float) -> bool:
        """Apply Metropolis' rule to a workload paired with itself: its effect is not linear in its factors."""
        now, then = (float(factors**2 @ _SIGNS) for factors in (self._factors[workload], proposed))
        gain = ((residual - now) ** 2 - (residual - then) ** 2) / (2 * noise)
        return bool(np.log(self._rng.uniform()) < gain)

    def _draw_noise(self, error: Floats) -> None:
        degrees, count = _NOISE_DEGREES_OF_FREEDOM, len(error)
        rate = (degrees + error**2 / self._noise_variance) / 2
        self._tail = self._rng.gamma((degrees + 1) / 2, size=count) / rate
        shape, scale = _NOISE_VARIANCE_PRIOR
        drawn = float(self._rng.gamma(shape + count / 2))
        self._noise_variance = (scale + 0.5 * float((self._tail * error**2).sum())) / drawn
