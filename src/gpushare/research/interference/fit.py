"""Fit a model to a dataset: an ensemble, with intervals from folds over workloads that were left out."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gpushare.core.gpu.pipes import mean_counters
from gpushare.core.interference.model import (
    APART,
    COVERAGE,
    KEPT_EDGES,
    LIKELY,
    LOAD_EDGES,
    SIZES,
    Fill,
    InterferenceModel,
    are_apart,
    errors_shape,
    load_strata,
    loads_of,
    shortfalls_shape,
    standardised,
    with_one,
)
from gpushare.core.interference.profile import (
    CAP_FEATURES,
    CONSERVED,
    LACKINGS,
    PROBE_FEATURES,
    PROBES,
    Array,
    Lacking,
    Profile,
    ProfileError,
    cap_progress,
    feature_table,
    knows_caps,
    knows_probes,
    uses,
    vector,
    without,
)
from gpushare.research.dataset import Dataset
from gpushare.research.interference import baselines
from gpushare.research.interference.training import Cells, batches_of, fit_parameters
from gpushare.research.solo_profiles import profile_of

MEMBERS: Final = 3
FOLDS: Final = 5  # every fifth workload is left out of the fit
# Predictions of sets (position, tenants x 3) whose profiles lack something.
Poorer = dict[Lacking, list[tuple[int, Array]]]
# On every GPU generation, copies reach more than this share of the data sheet's bandwidth. A dataset in which no
# program does never filled the bus, so it does not show the bus's capacity.
_LEAST_CAPACITY: Final = 0.8
_LEAST_SCALE: Final = 0.02
_FILL_RIDGE: Final = 0.1  # of 0.0001 to 0.3, the one with the smallest error on workloads left out
_FEWEST: Final = 25  # fewest errors in a stratum; with fewer, the errors of all sizes are taken


@dataclass(frozen=True)
class Sets:
    """The shared runs of a dataset whose tenants all have profiles.

    Attributes:
        workloads: names in order, profiles aligned.
        cells: (workload position, thread percentage) of each distinct tenant.
        index: each set's rows of cells; progress: measured, aligned.
        notes: one sentence for each workload or run that was left out.
        probes: profiles of the probes themselves.
        beside: (row of cells, row of probes, progress of the workload, of the probe) of each workload and probe.
    """

    workloads: tuple[str, ...]
    profiles: tuple[Profile, ...]
    cells: tuple[tuple[int, int], ...]
    index: tuple[tuple[int, ...], ...]
    progress: tuple[tuple[float, ...], ...]
    notes: tuple[str, ...]
    probes: tuple[Profile, ...] = ()
    beside: tuple[tuple[int, int, float, float], ...] = ()

    def names(self, position: int) -> tuple[str, ...]:
        """Return the workloads of one set."""
        return tuple(self.workloads[self.cells[cell][0]] for cell in self.index[position])

    def probed(self) -> set[int]:
        """Return the positions of the sets whose workloads were all measured beside the probes."""
        known = [knows_probes(profile) for profile in self.profiles]
        return {at for at, cells in enumerate(self.index) if all(known[self.cells[cell][0]] for cell in cells)}

    def caps(self, position: int) -> tuple[int, ...]:
        """Return the thread percentages of one set."""
        return tuple(self.cells[cell][1] for cell in self.index[position])


def sets_of(dataset: Dataset) -> Sets:
    """Extract profiles and shared runs of a dataset, with notes on what was left out."""
    profiles: dict[str, Profile] = {}
    notes = list(dataset.notes())
    everyone = sorted({tenant.workload for run in dataset.runs for tenant in run.tenants if not tenant.probe})
    for name in everyone:
        try:
            profiles[name] = profile_of(dataset, name)
        except ProfileError as error:
            notes.append(f"skipped: {error}")
    names = sorted(profiles)
    place = {name: at for at, name in enumerate(names)}
    cells: dict[tuple[int, int], int] = {}
    index, progress, left = [], [], 0
    for run, measured in dataset.shared_runs():
        if any(tenant.workload not in place for tenant in run.tenants):
            left += 1
            continue
        keys = [(place[tenant.workload], tenant.thread_percentage) for tenant in run.tenants]
        index.append(tuple(cells.setdefault(key, len(cells)) for key in keys))
        progress.append(measured)
    if left:
        notes.append(f"{left} runs skipped: a tenant has no usable profile")
    probes = _probes(dataset)
    beside = [
        (cells.setdefault((place[name], 100), len(cells)), row, *both[probe])
        for name, both in sorted(dataset.probed.items())
        for row, probe in enumerate(probes)
        if name in place and probe in both
    ]
    return Sets(
        tuple(names),
        tuple(profiles[name] for name in names),
        tuple(cells),
        tuple(index),
        tuple(progress),
        tuple(notes),
        tuple(probes.values()),
        tuple(beside),
    )


def _probes(dataset: Dataset) -> dict[str, Profile]:
    """Make the profiles of the probes that were measured alone."""
    found = {}
    for probe in PROBES:
        runs = [run for run in dataset.runs if run.is_solo and run.tenants[0].workload == probe]
        counters = mean_counters([run.counters for run in runs])
        if counters.sm_util is not None:
            rate = sum(run.iterations_per_s[0] for run in runs) / len(runs)
            found[probe] = Profile(counters, rate)
    return found


def fit_model(
    dataset: Dataset, *, seed: int, source: bytes, progress: Callable[[int, int], None], members: int = MEMBERS
) -> InterferenceModel:
    """Fit to a dataset; the same bytes and seed give the same artefact.

    Raises:
        ValueError: too few shared runs or workloads to fit anything; one sentence.
    """
    sets = sets_of(dataset)
    if len(sets.index) < 20 or len(sets.workloads) < FOLDS:
        raise ValueError(
            f"{len(sets.index)} shared runs of {len(sets.workloads)} workloads with profiles are too few to fit; "
            f"20 runs of {FOLDS} workloads are the least"
        )
    total = (FOLDS + 1) * members
    bare = _bare(dataset, sets, seed, source)
    predictions: list[tuple[int, Array]] = []
    poorer: Poorer = {what: [] for what in LACKINGS if what}
    for fold in range(FOLDS):
        training, unseen = split_workloads(sets, fold)
        model = fitted(
            bare, sets, training, seed=seed, members=members, done=shifted(progress, fold * members, total)
        )
        predictions += list(zip(unseen, predicted(model, sets, unseen), strict=True))
        for what, worse in predicted_poorer(model, sets, unseen).items():
            poorer[what] += worse
    everything = range(len(sets.index))
    model = fitted(
        bare, sets, everything, seed=seed, members=members, done=shifted(progress, FOLDS * members, total)
    )
    return with_errors(model, sets, predictions, poorer)


def shifted(progress: Callable[[int, int], None], offset: int, total: int) -> Callable[[int], None]:
    """Report the progress of a part as progress of the whole."""
    return lambda count: progress(offset + count, total)


def split_workloads(sets: Sets, fold: int, names: Sequence[str] = ()) -> tuple[list[int], list[int]]:
    """Return the positions of the sets to fit on, and of those that hold a workload of this fold.

    A fold is every fifth workload by name, or of `names`, which is then all of them in another order.
    """
    left_out = set((names or sets.workloads)[fold::FOLDS])
    unseen = [at for at in range(len(sets.index)) if left_out & set(sets.names(at))]
    return sorted(set(range(len(sets.index))) - set(unseen)), unseen


def fitted(
    bare: InterferenceModel,
    sets: Sets,
    training: Sequence[int],
    *,
    seed: int,
    members: int,
    done: Callable[[int], None],
) -> InterferenceModel:
    """Fit the model on some of the sets and leave the intervals as they are."""
    profiles = [*(sets.profiles[who] for who, _ in sets.cells), *sets.probes]
    programs = [*(who for who, _ in sets.cells), *range(len(sets.profiles), len(sets.profiles) + len(sets.probes))]
    caps = np.array([*(cap / 100 for _, cap in sets.cells), *[1.0] * len(sets.probes)])
    inputs, alone = feature_table(profiles, caps.tolist())
    used = sorted({cell for at in training for cell in sets.index[at]})
    mean, scale = _standard(inputs, used, profiles)
    fill = _fill(inputs[used], [profiles[at] for at in used], caps[used].tolist(), mean, scale)
    completed = fill.complete(standardised(inputs, mean, scale), profiles)
    drawn = uses(profiles, caps.tolist()) / np.array(bare.capacity)[:, None]
    cells = Cells(
        completed, fill.without_probes(completed, range(len(completed))), np.array(programs), caps, alone, drawn
    )
    # Beside a probe only workloads that are in the sets to fit on: the others are unseen.
    seen = {sets.cells[cell][0] for cell in used}
    beside = [each for each in sets.beside if sets.cells[each[0]][0] in seen]
    batches = batches_of(
        [*(sets.index[at] for at in training), *((cell, len(sets.cells) + probe) for cell, probe, _, _ in beside)],
        [*(sets.progress[at] for at in training), *((own, its) for _, _, own, its in beside)],
    )
    parameters = []
    for member in range(members):
        parameters.append(fit_parameters(cells, batches, seed + member))
        done(member + 1)
    linear = {
        name: baselines.fit(
            np.vstack([_design(name, sets, at, alone) for at in training]),
            np.concatenate([sets.progress[at] for at in training]),
        )
        for name in baselines.NAMES
    }
    return InterferenceModel(
        bare.gpu_model,
        bare.provenance,
        mean,
        scale,
        tuple(parameters),
        bare.errors,
        fill,
        linear,
        bare.widening,
        capacity=bare.capacity,
        shortfalls=bare.shortfalls,
    )


def _standard(inputs: Array, used: Sequence[int], profiles: Sequence[Profile]) -> tuple[Array, Array]:
    """Return mean and scale of each feature over the tenants to fit on, of a probe's over those that have it."""
    mean, scale = inputs[used].mean(axis=0), inputs[used].std(axis=0) + _LEAST_SCALE
    probed = inputs[[at for at in used if knows_probes(profiles[at])], -PROBE_FEATURES:]
    if len(probed):
        mean[-PROBE_FEATURES:], scale[-PROBE_FEATURES:] = probed.mean(axis=0), probed.std(axis=0) + _LEAST_SCALE
    return mean, scale


def _fill(inputs: Array, profiles: Sequence[Profile], caps: Sequence[float], mean: Array, scale: Array) -> Fill:
    """Fit ridge regressions of the features that some profiles lack on the features before them."""
    end = inputs.shape[1] - PROBE_FEATURES
    start = end - CAP_FEATURES
    known = standardised(inputs, mean, scale)
    whole = [at for at, profile in enumerate(profiles) if knows_caps(profile)]
    poorer = [replace(profiles[at], capped={}) for at in whole]
    poorest = [without(profiles[at], Lacking.CAP_CURVE) for at in whole]
    rows = [
        standardised(feature_table(each, [caps[at] for at in whole])[0].reshape(-1, len(mean)), mean, scale)[
            :, :start
        ]
        for each in (poorer, poorest)
    ]
    by_caps = _ridge(np.vstack(rows), np.vstack([known[whole, start:end]] * 2))
    probed = [at for at, profile in enumerate(profiles) if knows_probes(profile)]
    return Fill(by_caps, _ridge(known[probed, :end], known[probed, end:]))


def _ridge(x: Array, y: Array) -> Array:
    """Return the coefficients of y on 1 and x; zeros without a row."""
    x = with_one(x)
    if not len(x):
        return np.zeros((x.shape[1], y.shape[1]))
    ridge = _FILL_RIDGE * len(x) * np.diag([0.0] + [1.0] * (x.shape[1] - 1))
    return np.asarray(np.linalg.solve(x.T @ x + ridge, x.T @ y))


def predicted(model: InterferenceModel, sets: Sets, positions: Sequence[int]) -> list[Array]:
    """Predict progress, lower and upper bound, and what is likely, of each named set: tenants x 4."""
    table = model.table([sets.profiles[who] for who, _ in sets.cells], [cap for _, cap in sets.cells])
    places = max((len(sets.index[at]) for at in positions), default=1)
    index = np.full((len(positions), places), -1, dtype=np.int64)
    for row, at in enumerate(positions):
        index[row, : len(sets.index[at])] = sets.index[at]
    prediction = model.predict_sets(table, index)
    stacked = np.stack([prediction.progress, prediction.lower, prediction.upper, prediction.likely], axis=2)
    return [stacked[row, : len(sets.index[at])] for row, at in enumerate(positions)]


def predicted_poorer(model: InterferenceModel, sets: Sets, positions: Sequence[int]) -> Poorer:
    """Predict each set with parts of its profiles removed, keyed by the removed part."""
    return {
        what: list(
            zip(
                positions,
                predicted(
                    model, replace(sets, profiles=tuple(without(p, what) for p in sets.profiles)), positions
                ),
                strict=True,
            )
        )
        for what in LACKINGS
        if what
    }


def predicted_linear(model: InterferenceModel, name: str, sets: Sets, at: int) -> Array:
    """Predict one set by a baseline."""
    _, alone = feature_table(
        [sets.profiles[sets.cells[cell][0]] for cell in sets.index[at]], [cap / 100 for cap in sets.caps(at)]
    )
    rows = baselines.design(
        name,
        np.array([vector(sets.profiles[sets.cells[cell][0]].counters) for cell in sets.index[at]]),
        np.array(sets.caps(at)) / 100,
        alone,
    )
    return np.clip(rows @ model.baselines[name], 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class _TenantResidual:
    """A tenant's measured less predicted progress, relative to the progress alone under its cap; its strata."""

    apart: int
    size: int
    load: int
    kept: int
    error: float


def with_errors(
    model: InterferenceModel, sets: Sets, predictions: Sequence[tuple[int, Array]], poorer: Poorer
) -> InterferenceModel:
    """Set conformal bounds and shortfalls from predictions of unseen workloads under full and poorer profiles.

    A stratum with too few errors takes those of all sizes or loads, then those of all sets.
    """
    errors, shortfalls = np.zeros(errors_shape()), np.zeros(shortfalls_shape())
    everything = {Lacking.NOTHING: predictions, **poorer}
    for what in LACKINGS:
        rows = _rows(sets, everything.get(what) or predictions, what)
        for apart, column in np.ndindex(APART, len(KEPT_EDGES) + 1):
            alike = [each for each in rows if each.kept == column]
            wide = [each for each in alike if each.apart == apart]
            for place, size in enumerate(SIZES):
                own = [each for each in wide if each.size == size]
                errors[what, apart, place, column] = _bounds(_enough(own, wide, alike, rows), len(sets.workloads))
            for load in range(len(LOAD_EDGES) + 1):
                own = [each for each in wide if each.load == load]
                shortfalls[what, apart, load, column] = _shortfall(
                    _enough(own, wide, alike, rows), len(sets.workloads)
                )
    return replace(model, errors=errors, shortfalls=shortfalls)


def _enough(*strata: list[_TenantResidual]) -> Array:
    """Return the errors of the first stratum, narrowest first, that has enough; the last one is everything."""
    *parts, everything = strata
    chosen = next((part for part in parts if len(part) >= _FEWEST), parts[-1] or everything)
    return np.array([each.error for each in chosen])


def _rows(sets: Sets, predictions: Iterable[tuple[int, Array]], what: Lacking) -> list[_TenantResidual]:
    """List every tenant's residual with its strata."""
    profiles = [without(sets.profiles[who], what) for who, _ in sets.cells]
    caps = [cap / 100 for _, cap in sets.cells]
    alone = np.array([cap_progress(profile, cap) for profile, cap in zip(profiles, caps, strict=True)])
    loads = loads_of(profiles, caps)
    rows: list[_TenantResidual] = []
    for at, prediction in predictions:
        cells = list(sets.index[at])
        size = min(max(len(cells), SIZES[0]), SIZES[-1])
        apart = int(are_apart(np.array(sum(sets.caps(at)) / 100)))
        single = np.maximum(alone[cells], 1e-6)
        strata = np.digitize(prediction[:, 0] / single, KEPT_EDGES)
        relative = (np.array(sets.progress[at]) - prediction[:, 0]) / single
        beside = load_strata(loads[cells][None])[0]
        rows += [
            _TenantResidual(apart, size, int(load), int(kept), float(error))
            for load, kept, error in zip(beside, strata, relative, strict=True)
        ]
    return rows


def _bounds(errors: Array, workloads: int) -> tuple[float, float]:
    # Conformal: a new workload is one more draw, and the errors of one workload are drawn at once.
    tail = max(0.0, 1 - COVERAGE * (1 + 1 / workloads)) / 2
    return float(np.quantile(errors, tail)), float(np.quantile(errors, 1 - tail))


def _shortfall(errors: Array, workloads: int) -> float:
    """Return the error, 0 or less, that is missed one time in six; conformal as `_bounds` are."""
    return min(0.0, float(np.quantile(errors, max(0.0, 1 - LIKELY * (1 + 1 / workloads)))))


def _design(name: str, sets: Sets, at: int, alone: Array) -> Array:
    cells = list(sets.index[at])
    vectors = np.array([vector(sets.profiles[sets.cells[cell][0]].counters) for cell in cells])
    return baselines.design(name, vectors, np.array(sets.caps(at)) / 100, alone[cells])


def _bare(dataset: Dataset, sets: Sets, seed: int, source: bytes) -> InterferenceModel:
    provenance = {
        "dataset_sha256": hashlib.sha256(source).hexdigest(),
        "driver": dataset.driver,
        "mechanism": str(dataset.mechanism),
        "workloads": len(sets.workloads),
        "shared_runs": len(sets.index),
        "seed": seed,
    }
    nothing = np.zeros(1)
    return InterferenceModel(
        dataset.gpu_model,
        provenance,
        nothing,
        nothing,
        (),
        np.zeros(errors_shape()),
        Fill(nothing, nothing),
        capacity=_capacity(dataset),
    )


def _capacity(dataset: Dataset) -> tuple[float, ...]:
    """Return the highest share of each conserved counter that a run of any size reached."""
    reached = ([getattr(run.counters, name) or 0.0 for run in dataset.runs] for name in CONSERVED)
    return tuple(min(1.0, max(_LEAST_CAPACITY, *shares)) for shares in reached)


def unfitted(dataset: Dataset, sets: Sets, seed: int) -> InterferenceModel:
    """Make a model without parameters, to be fitted on parts of the dataset."""
    return _bare(dataset, sets, seed, b"")
