"""What our policy believes beforehand: the live system's predictor, asked with what it would know."""

from typing import Final

import numpy as np

from gpushare.research.pairs.evaluate import PairProtocol, split
from gpushare.research.pairs.model import progress_by_tenant
from gpushare.research.pairs.table import PairTable
from gpushare.sim.job_policy_gpushare import PredictKinds
from gpushare.sim.truth import DatasetTruth, Forecaster, TenantKind

# Half width of the 90% interval of a predictor that gives none: 1.645 x 1.25 x its mean absolute error.
PAIRS_MARGIN: Final = 0.07  # Gaussian process on P100's pairs, error 0.024 of the sum


def from_model(truth: DatasetTruth, forecaster: Forecaster) -> PredictKinds:
    """Predict sets by the interference model on solo profiles; its interval's lower end is the cautious bound."""

    def predict(kinds: tuple[TenantKind, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if len(kinds) == 1:
            rate = truth.alone(*kinds[0])
            return (rate,), (rate,)
        said = forecaster([(truth.profiles[kind.workload], kind.thread_percentage) for kind in kinds])
        return tuple(each.progress for each in said), tuple(max(0.01, each.lower) for each in said)

    return predict


def from_pairs(table: PairTable, seed: int, margin: float = PAIRS_MARGIN) -> PredictKinds:
    """Predict a pair from the other folds of the table: the pair itself is never seen."""
    expected: dict[tuple[str, str], tuple[float, float]] = {}
    for train, test in split(table, PairProtocol.PAIRS, np.random.default_rng(seed)):
        for row, (one, other) in zip(test.tolist(), progress_by_tenant(table, train, test).tolist(), strict=True):
            a, b = table.workloads[table.first[row]], table.workloads[table.second[row]]
            if table.fits[row]:
                expected[a, b], expected[b, a] = (one, other), (other, one)

    def predict(kinds: tuple[TenantKind, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if len(kinds) == 1:
            return (1.0,), (1.0,)
        rates = expected.get((kinds[0].workload, kinds[1].workload), (0.0, 0.0))
        return rates, (max(0.01, rates[0] - margin), max(0.01, rates[1] - margin))

    return predict
