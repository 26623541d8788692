"""Score how well predictors choose partners on a table of measured pairs, under three protocols."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import combinations_with_replacement
from typing import Final

import numpy as np

from gpushare.research.pairs.model import PREDICTORS, PairPrediction
from gpushare.research.pairs.table import Floats, Indices, PairTable

GATE: Final = 1.1  # a pair is worth it when its summed progress is above this (Gandiva's margin)
FOLDS: Final = 10
WORKLOAD_GROUPS: Final = 6
_MATCHING_DRAWS: Final = 10

Fold = tuple[Indices, Indices]


class PairProtocol(StrEnum):
    """Data that the predictor must not have seen of the pair that it predicts."""

    PAIRS = "leave-pairs-out"
    WORKLOADS = "both-workloads-unseen"
    FAMILIES = "both-families-unseen"


@dataclass(frozen=True, slots=True)
class PairScore:
    """One predictor under one protocol.

    Whether a pair fits is a question of memory, which every pod declares, so partner choice is scored among the
    pairs that fit; error and gate are given with and without the others.

    Attributes:
        mean_absolute_error: of the summed progress, over pairs that fit.
        gate_accuracy: share of the pairs that fit put on the right side of a sum of 1.1.
        best_partner: mean over workloads of (sum with the chosen partner / with the best), 1 is the oracle.
        matching: sum of the matching that maximises the prediction / that of the oracle's matching.
        mean_absolute_error_all, gate_accuracy_all: over all pairs, 0 being the truth for one that did not fit.
        pairs, pairs_fitting: how many were predicted.
    """

    protocol: PairProtocol
    predictor: str
    mean_absolute_error: float
    gate_accuracy: float
    best_partner: float
    matching: float
    mean_absolute_error_all: float
    gate_accuracy_all: float
    pairs: int
    pairs_fitting: int


def evaluate(
    table: PairTable,
    *,
    seed: int = 0,
    protocols: Sequence[PairProtocol] = tuple(PairProtocol),
    predictors: Sequence[str] = tuple(PREDICTORS),
    progress: Callable[[], None] = lambda: None,
) -> list[PairScore]:
    """Score every predictor under every protocol; `progress` is called once a fold and predictor."""
    scores = []
    for protocol in protocols:
        folds = split(table, protocol, np.random.default_rng(seed))
        for name in predictors:
            rng = np.random.default_rng([seed, 1])
            predicted = np.full(len(table.first), np.nan)
            if_fits = predicted.copy()
            for train, test in folds:
                prediction: PairPrediction = PREDICTORS[name](table, train, test, rng)
                predicted[test], if_fits[test] = prediction.normalized_sum, prediction.sum_if_fits
                progress()
            scores.append(_score(table, protocol, name, predicted, if_fits, seed=seed))
    return scores


def mean_and_spread(runs: Sequence[Sequence[PairScore]]) -> list[tuple[PairScore, dict[str, float]]]:
    """Return means and standard deviations of `evaluate`'s results over several seeds."""
    summary = []
    for scores in zip(*runs, strict=True):
        measured = {
            field.name: np.array([getattr(score, field.name) for score in scores])
            for field in fields(PairScore)
            if isinstance(getattr(scores[0], field.name), float)
        }
        mean = replace(scores[0], **{name: float(values.mean()) for name, values in measured.items()})
        summary.append((mean, {name: float(values.std()) for name, values in measured.items()}))
    return summary


def split(table: PairTable, protocol: PairProtocol, rng: np.random.Generator) -> list[Fold]:
    """Return (training pairs, pairs to predict); each pair is predicted once, unseen as the protocol says."""
    if protocol is PairProtocol.PAIRS:
        order = rng.permutation(len(table.first))
        everything = np.arange(len(table.first))
        parts = [np.sort(order[start::FOLDS]) for start in range(FOLDS)]
        return [(np.setdiff1d(everything, part), part) for part in parts if len(part)]
    if protocol is PairProtocol.WORKLOADS:
        groups = np.empty(len(table.workloads), dtype=np.intp)
        groups[rng.permutation(len(groups))] = np.arange(len(groups)) % WORKLOAD_GROUPS
    else:
        names = sorted(set(table.families))
        groups = np.array([names.index(family) for family in table.families], dtype=np.intp)
    first, second = groups[table.first], groups[table.second]
    folds = []
    for one, other in combinations_with_replacement(range(int(groups.max()) + 1), 2):
        test = np.flatnonzero(((first == one) & (second == other)) | ((first == other) & (second == one)))
        unseen = np.isin(first, (one, other)) | np.isin(second, (one, other))
        train = np.flatnonzero(~unseen)
        if len(test) and len(train):
            folds.append((train, test))
    return folds


def _score(
    table: PairTable, protocol: PairProtocol, name: str, predicted: Floats, if_fits: Floats, *, seed: int
) -> PairScore:
    truth = table.normalized_sum
    known = ~np.isnan(predicted)
    fitting = known & table.fits
    draws = np.random.default_rng([seed, 2])
    return PairScore(
        protocol=protocol,
        predictor=name,
        mean_absolute_error=float(np.abs(if_fits - truth)[fitting].mean()),
        gate_accuracy=float(((if_fits > GATE) == (truth > GATE))[fitting].mean()),
        best_partner=_best_partner(table, np.flatnonzero(fitting), if_fits, truth),
        matching=_matching(table, np.flatnonzero(fitting), if_fits, truth, draws, redraw=name == "random"),
        mean_absolute_error_all=float(np.abs(predicted - truth)[known].mean()),
        gate_accuracy_all=float(((predicted > GATE) == (truth > GATE))[known].mean()),
        pairs=int(known.sum()),
        pairs_fitting=int(fitting.sum()),
    )


def _best_partner(table: PairTable, pairs: Indices, predicted: Floats, truth: Floats) -> float:
    ratios = []
    for workload in range(len(table.workloads)):
        mine = pairs[(table.first[pairs] == workload) | (table.second[pairs] == workload)]
        if len(mine):
            chosen = mine[predicted[mine] == predicted[mine].max()]
            ratios.append(float(truth[chosen].mean() / truth[mine].max()))  # a tie counts as chance would
    return float(np.mean(ratios))


def _matching(
    table: PairTable, pairs: Indices, predicted: Floats, truth: Floats, rng: np.random.Generator, *, redraw: bool
) -> float:
    """Return the true sum of the predicted matching, relative to the oracle's.

    The order of the pairs is shuffled a few times, so that a predictor that cannot tell matchings apart scores as
    chance would, not as the table's order would; a random one is drawn anew each time.
    """
    different = pairs[table.first[pairs] != table.second[pairs]]
    oracle = truth[_best_matching(table, different, truth)].sum()
    chosen = []
    for _ in range(_MATCHING_DRAWS):
        weight = rng.permutation(np.nan_to_num(predicted)) if redraw else predicted
        chosen.append(_best_matching(table, rng.permutation(different), weight))
    return float(np.mean([truth[matched].sum() for matched in chosen]) / oracle)


def _best_matching(table: PairTable, pairs: Indices, weight: Floats) -> list[int]:
    """Return the indices of a maximum-weight matching of maximum cardinality (Edmonds' blossom)."""
    import networkx as nx  # noqa: PLC0415 - of the extra `fit`; `gpushare sim` reads this module without it

    graph = nx.Graph()
    for index in pairs.tolist():
        graph.add_edge(int(table.first[index]), int(table.second[index]), weight=float(weight[index]), index=index)
    return [graph[a][b]["index"] for a, b in nx.max_weight_matching(graph, maxcardinality=True)]
