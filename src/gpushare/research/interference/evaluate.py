"""Evaluate the model on measured runs: errors by number of tenants, baselines, and what it would choose."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np

from gpushare.core.interference.advice import preferred
from gpushare.core.interference.model import InterferenceModel
from gpushare.core.interference.profile import LACKINGS, Array, cap_progress
from gpushare.core.progress import MAX_CAPPED_PROGRESS
from gpushare.research.interference import baselines
from gpushare.research.interference.fit import (
    FOLDS,
    Sets,
    fitted,
    predicted,
    predicted_linear,
    predicted_poorer,
    shifted,
    split_workloads,
    with_errors,
)

ALONE_EDGES: Final = (0.3, 0.6, 0.9)  # of the progress alone, by which intervals are counted
_MATCHINGS: Final = 200  # random matchings that are averaged
_ROUNDING: Final = 1e-9
_CHOICES: Final = 3  # fewest cap combinations of one set for which the choice of caps is judged
TOLERATED_SLOWDOWN: Final = 2.0  # for judging the choice of caps: every tenant keeps half of its speed


class EvaluationProtocol(StrEnum):
    """Runs that the model may be fitted to before it is judged."""

    UNSEEN_WORKLOAD = "unseen-workload"
    UNSEEN_SETS = "unseen-sets"
    AS_IS = "as-is"


@dataclass(frozen=True, slots=True)
class Score:
    """Errors over the tenants of the sets of one size.

    Attributes:
        n: tenants judged; sets: runs. mae, median: of |predicted - measured progress|.
        coverage: share of tenants whose measured progress lies inside the 90% interval.
        rank_correlation: Spearman's, of the sets' summed progress. baseline_mae: by baseline.
    """

    n: int
    sets: int
    mae: float
    median: float
    coverage: float
    rank_correlation: float
    baseline_mae: dict[str, float]


@dataclass(frozen=True, slots=True)
class Choices:
    """Result of choosing by the prediction, relative to choosing by the measurements.

    Attributes:
        matching, matching_random, matching_kace: summed progress of the workloads' best partition into measured
            pairs by prediction, at random and by KACE, each over the oracle's; NaN where pairs are too few.
        caps: summed progress under the caps chosen by the prediction over the best measured; caps_sets: sets
            judged; caps_broken: how often the choice breaks a tolerance that the best measured one keeps. Caps are
            chosen cautiously, as by `gpushare.core.interference.advice.best_caps`.
    """

    matching: float
    matching_random: float
    matching_kace: float
    caps: float
    caps_sets: int
    caps_broken: int


@dataclass(frozen=True, slots=True)
class IntervalCount:
    """Measured progress relative to the interval, for tenants that make about as much alone under their caps.

    Attributes:
        above, to: limits of the progress alone. n: tenants.
        inside, below: share of them inside the 90% interval and below it.
        width: mean width of the interval, in progress.
    """

    above: float
    to: float
    n: int
    inside: float
    below: float
    width: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation."""

    by_tenants: dict[int, Score]
    choices: Choices
    by_progress_alone: list[IntervalCount]


@dataclass(frozen=True, slots=True)
class _PredictedSet:
    at: int
    prediction: Array
    linear: dict[str, Array]


def evaluate(
    sets: Sets,
    model: InterferenceModel,
    protocol: EvaluationProtocol,
    *,
    seed: int,
    members: int,
    done: Callable[[int, int], None],
    probed: bool = False,
) -> Evaluation:
    """Judge a model on sets; with `probed` only on those whose workloads were measured beside the probes.

    `as-is` takes the model as it is; the others fit five models, each on four fifths, and judge it on the rest;
    its intervals then come from the other four.
    """
    judged = _judged(sets, model, protocol, seed=seed, members=members, done=done)
    if probed:
        chosen = sets.probed()
        judged = [each for each in judged if each.at in chosen]
    return Evaluation(_scores(sets, judged), _choices(sets, judged, seed), _intervals(sets, judged))


def judged_tenants(
    sets: Sets,
    model: InterferenceModel,
    protocol: EvaluationProtocol,
    *,
    seed: int,
    members: int,
    done: Callable[[int, int], None],
) -> Array:
    """Return every judged tenant for plotting: rows of set size, measured progress, predicted, lower, upper."""
    rows = [
        (len(judged.prediction), true, *each)
        for judged in _judged(sets, model, protocol, seed=seed, members=members, done=done)
        for true, each in zip(sets.progress[judged.at], judged.prediction.tolist(), strict=True)
    ]
    return np.array(rows)


def _judged(
    sets: Sets,
    model: InterferenceModel,
    protocol: EvaluationProtocol,
    *,
    seed: int,
    members: int,
    done: Callable[[int, int], None],
) -> list[_PredictedSet]:
    if protocol is not EvaluationProtocol.AS_IS:
        return _crossed(sets, model, protocol, seed=seed, members=members, done=done)
    everything = list(range(len(sets.index)))
    predictions = predicted(model, sets, everything)
    return [_judge(model, sets, at, each) for at, each in zip(everything, predictions, strict=True)]


def _judge(model: InterferenceModel, sets: Sets, at: int, prediction: Array) -> _PredictedSet:
    return _PredictedSet(
        at, prediction, {name: predicted_linear(model, name, sets, at) for name in model.baselines}
    )


def _crossed(
    sets: Sets,
    bare: InterferenceModel,
    protocol: EvaluationProtocol,
    *,
    seed: int,
    members: int,
    done: Callable[[int, int], None],
) -> list[_PredictedSet]:
    shuffled = np.random.default_rng(seed).permutation(len(sets.index))
    folds = []
    for fold in range(FOLDS):
        if protocol is EvaluationProtocol.UNSEEN_WORKLOAD:
            training, unseen = split_workloads(sets, fold)
        else:
            unseen = sorted(int(at) for at in shuffled[fold::FOLDS])
            training = sorted(set(range(len(sets.index))) - set(unseen))
        report = shifted(done, fold * members, FOLDS * members)
        model = fitted(bare, sets, training, seed=seed, members=members, done=report)
        folds.append((model, unseen, predicted(model, sets, unseen), predicted_poorer(model, sets, unseen)))
    judged: list[_PredictedSet] = []
    for fold, (model, unseen, _, _) in enumerate(folds):
        others = [each for other, each in enumerate(folds) if other != fold]
        known = [pair for _, positions, each, _ in others for pair in zip(positions, each, strict=True)]
        poorer = {what: [pair for *_, less in others for pair in less[what]] for what in LACKINGS if what}
        calibrated = with_errors(model, sets, known, poorer)
        judged += [
            _judge(calibrated, sets, at, prediction)
            for at, prediction in zip(unseen, predicted(calibrated, sets, unseen), strict=True)
        ]
    return judged


def _scores(sets: Sets, judged: Sequence[_PredictedSet]) -> dict[int, Score]:
    by_size: dict[int, list[_PredictedSet]] = defaultdict(list)
    for each in judged:
        by_size[len(sets.index[each.at])].append(each)
    scores = {}
    for size, group in sorted(by_size.items()):
        prediction = np.concatenate([each.prediction for each in group])
        true = np.concatenate([sets.progress[each.at] for each in group])
        error = np.abs(prediction[:, 0] - true)
        inside = (true >= prediction[:, 1] - _ROUNDING) & (true <= prediction[:, 2] + _ROUNDING)
        scores[size] = Score(
            n=len(true),
            sets=len(group),
            mae=float(error.mean()),
            median=float(np.median(error)),
            coverage=float(inside.mean()),
            rank_correlation=spearman(
                [float(each.prediction[:, 0].sum()) for each in group],
                [sum(sets.progress[each.at]) for each in group],
            ),
            baseline_mae={
                name: float(np.abs(np.concatenate([each.linear[name] for each in group]) - true).mean())
                for name in baselines.NAMES
                if all(name in each.linear for each in group)
            },
        )
    return scores


def _intervals(sets: Sets, judged: Sequence[_PredictedSet]) -> list[IntervalCount]:
    """Count who is inside the interval, by the progress that tenants make alone under their caps."""
    single = np.array([cap_progress(sets.profiles[who], cap / 100) for who, cap in sets.cells])
    alone = np.concatenate([single[list(sets.index[each.at])] for each in judged])
    true = np.concatenate([sets.progress[each.at] for each in judged])
    lower, upper = np.concatenate([each.prediction[:, 1:3] for each in judged]).T
    limits = (0.0, *ALONE_EDGES, MAX_CAPPED_PROGRESS)
    found = []
    for above, to in pairwise(limits):
        some = (alone > above) & (alone <= to)
        if some.any():
            below = true[some] < lower[some] - _ROUNDING
            inside = ~below & (true[some] <= upper[some] + _ROUNDING)
            width = float((upper - lower)[some].mean())
            found.append(
                IntervalCount(above, to, int(some.sum()), float(inside.mean()), float(below.mean()), width)
            )
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation; NaN for fewer than three values or constant ones."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    from scipy.stats import spearmanr  # noqa: PLC0415 - the command line loads this module without the extra

    return float(spearmanr(a, b).statistic)


def _choices(sets: Sets, judged: Sequence[_PredictedSet], seed: int) -> Choices:
    ours: dict[int, list[float]] = defaultdict(list)
    kace: dict[int, list[float]] = defaultdict(list)
    tenants: dict[int, list[Array]] = defaultdict(list)
    for each in judged:
        ours[each.at].append(float(each.prediction[:, 0].sum()))
        tenants[each.at].append(each.prediction)
        if "kace" in each.linear:
            kace[each.at].append(float(each.linear["kace"].sum()))
    mean = {at: float(np.mean(values)) for at, values in ours.items()}
    truth = {at: float(sum(sets.progress[at])) for at in mean}
    by_kace = {at: float(np.mean(values)) for at, values in kace.items()}
    chance = np.random.default_rng(seed)
    oracle = _matched(sets, truth, truth)
    ratio = [
        _matched(sets, weights, truth) / oracle if oracle and weights else float("nan")
        for weights in (mean, by_kace)
    ]
    drawn = [_matched(sets, {at: chance.random() for at in truth}, truth) for _ in range(_MATCHINGS)]
    random = float(np.mean(drawn)) / oracle if oracle else float("nan")
    caps, judged_sets, broken = chosen_caps(sets, {at: np.mean(each, axis=0) for at, each in tenants.items()})
    return Choices(ratio[0], random, ratio[1], caps, judged_sets, broken)


def _matched(sets: Sets, weights: dict[int, float], truth: dict[int, float]) -> float:
    """Return the measured summed progress of the heaviest matching among the measured pairs; 0 without pairs."""
    import networkx as nx  # noqa: PLC0415 - of the extra `fit`; `gpushare model advise` reads this module without it

    graph = nx.Graph()
    for at, weight in weights.items():
        names = sets.names(at)
        if len(names) != 2 or names[0] == names[1]:
            continue
        known = graph.get_edge_data(*names)
        if known is None or weight > known["weight"]:
            graph.add_edge(*names, weight=weight, at=at)
    pairs = nx.max_weight_matching(graph, maxcardinality=True)
    return float(sum(truth[graph.edges[pair]["at"]] for pair in pairs))


def chosen_caps(sets: Sets, predictions: dict[int, Array]) -> tuple[float, int, int]:
    """Choose among the measured cap combinations of each set; return (score, sets, tolerances broken)."""
    families: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at in predictions:
        families[tuple(sorted(sets.names(at)))].append(at)
    got = best = 0.0
    count = broken = 0
    floor = 1 / TOLERATED_SLOWDOWN
    for family in families.values():
        if len({sets.caps(at) for at in family}) < _CHOICES:
            continue
        count += 1
        expected = np.array([predictions[at] for at in family])
        floors = np.full(expected.shape[1], 1 / TOLERATED_SLOWDOWN)
        chosen = family[preferred(expected[:, :, 0], expected[:, :, 3], floors)]
        ideal = max(family, key=lambda at: _rank(sets.progress[at]))
        got += sum(sets.progress[chosen])
        best += sum(sets.progress[ideal])
        broken += min(sets.progress[ideal]) >= floor > min(sets.progress[chosen]) + 0.02
    return (got / best if best else float("nan")), count, broken


def _rank(progress: Sequence[float]) -> tuple[bool, float]:
    """Rank by whether the tolerance is kept, then by summed progress."""
    return min(progress) >= 1 / TOLERATED_SLOWDOWN, float(sum(progress))
