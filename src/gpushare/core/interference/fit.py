"""From a dataset to a model: folds over workloads, an ensemble, intervals from workloads never seen."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gpushare.core.dataset import Dataset
from gpushare.core.interference import baselines
from gpushare.core.interference.model import (
    COVERAGE,
    KEPT_EDGES,
    SIZES,
    InterferenceModel,
    standardised,
    with_one,
)
from gpushare.core.interference.profile import (
    CONSERVED,
    FILLED,
    Array,
    Lacking,
    Profile,
    ProfileError,
    cap_progress,
    feature_table,
    profile_of,
    uses,
    vector,
    without,
)
from gpushare.core.interference.training import Cells, batches_of, fit_parameters

MEMBERS: Final = 2
FOLDS: Final = 5  # every fifth workload is never seen in fitting
# Predictions of sets (position, tenants x 3) whose profiles lack something.
Poorer = dict[Lacking, list[tuple[int, Array]]]
_LEAST_BOUND: Final = 0.005  # progress
# Copies on GPUs of any generation reach more than this part of the data sheet's bandwidth: where no program of a
# dataset does, none filled the bus, and the dataset does not show how much it holds.
_LEAST_CAPACITY: Final = 0.8
_FILL_RIDGE: Final = 0.1  # least error on workloads left out, of 0.0001 to 0.3
_FEWEST: Final = 25  # errors in a stratum below which it borrows from all sizes


@dataclass(frozen=True)
class Sets:
    """The shared runs of a dataset whose tenants all have profiles.

    Attributes:
        workloads: names in order, profiles aligned.
        cells: (workload position, thread percentage) of each distinct tenant.
        index: each set's rows of cells; progress: measured, aligned.
        notes: one sentence for each workload or run that was left out.
    """

    workloads: tuple[str, ...]
    profiles: tuple[Profile, ...]
    cells: tuple[tuple[int, int], ...]
    index: tuple[tuple[int, ...], ...]
    progress: tuple[tuple[float, ...], ...]
    notes: tuple[str, ...]

    def names(self, position: int) -> tuple[str, ...]:
        """The workloads of one set."""
        return tuple(self.workloads[self.cells[cell][0]] for cell in self.index[position])

    def caps(self, position: int) -> tuple[int, ...]:
        """The thread percentages of one set."""
        return tuple(self.cells[cell][1] for cell in self.index[position])


def sets_of(dataset: Dataset) -> Sets:
    """Profiles and shared runs of a dataset, with what had to be left out."""
    profiles: dict[str, Profile] = {}
    notes = list(dataset.notes())
    everyone = sorted({tenant.workload for run in dataset.runs for tenant in run.tenants})
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
    return Sets(
        tuple(names),
        tuple(profiles[name] for name in names),
        tuple(cells),
        tuple(index),
        tuple(progress),
        tuple(notes),
    )


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
    poorer: Poorer = {what: [] for what in Lacking if what}
    for fold in range(FOLDS):
        training, held = split_workloads(sets, fold)
        model = fitted(
            bare, sets, training, seed=seed, members=members, done=shifted(progress, fold * members, total)
        )
        predictions += list(zip(held, predicted(model, sets, held), strict=True))
        for what, said in predicted_poorer(model, sets, held).items():
            poorer[what] += said
    everything = range(len(sets.index))
    model = fitted(
        bare, sets, everything, seed=seed, members=members, done=shifted(progress, FOLDS * members, total)
    )
    return with_errors(model, sets, predictions, poorer)


def shifted(progress: Callable[[int, int], None], offset: int, total: int) -> Callable[[int], None]:
    """Progress of a part told as progress of the whole."""
    return lambda count: progress(offset + count, total)


def split_workloads(sets: Sets, fold: int, names: Sequence[str] = ()) -> tuple[list[int], list[int]]:
    """Positions of the sets to fit on and of those that hold a workload of this fold.

    A fold is every fifth workload by name, or of `names`, which is then all of them in another order.
    """
    held_names = set((names or sets.workloads)[fold::FOLDS])
    held = [at for at in range(len(sets.index)) if held_names & set(sets.names(at))]
    kept = set(held)
    return [at for at in range(len(sets.index)) if at not in kept], held


def fitted(
    bare: InterferenceModel,
    sets: Sets,
    training: Sequence[int],
    *,
    seed: int,
    members: int,
    done: Callable[[int], None],
) -> InterferenceModel:
    """The model fitted on some of the sets, intervals left as they are."""
    inputs, alone = feature_table(
        [sets.profiles[who] for who, _ in sets.cells], [cap / 100 for _, cap in sets.cells]
    )
    used = sorted({cell for at in training for cell in sets.index[at]})
    mean, scale = inputs[used].mean(axis=0), inputs[used].std(axis=0) + 0.02
    caps = np.array([cap / 100 for _, cap in sets.cells])
    batches = batches_of([sets.index[at] for at in training], [sets.progress[at] for at in training])
    drawn = uses([sets.profiles[who] for who, _ in sets.cells], caps.tolist()) / np.array(bare.capacity)[:, None]
    cells = Cells(standardised(inputs, mean, scale), caps, alone, drawn)
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
        bare.gpu_model, bare.provenance, mean, scale, tuple(parameters), bare.errors,
        _fill(sets, used, mean, scale), linear, bare.widening,
        capacity=bare.capacity,
    )  # fmt: skip


def _fill(sets: Sets, used: Sequence[int], mean: Array, scale: Array) -> Array:
    """Ridge regression of the features that counters under caps give on those that any profile gives."""
    profiles = [sets.profiles[sets.cells[cell][0]] for cell in used]
    caps = [sets.cells[cell][1] / 100 for cell in used]
    known, _ = feature_table(profiles, caps)
    poorer = [replace(profile, capped={}) for profile in profiles]
    poorest = [without(profile, Lacking.CAP_CURVE) for profile in profiles]
    rows = [standardised(feature_table(each, caps)[0], mean, scale)[:, :-FILLED] for each in (poorer, poorest)]
    x = with_one(np.vstack(rows))
    y = np.vstack([standardised(known, mean, scale)[:, -FILLED:]] * 2)
    ridge = _FILL_RIDGE * len(x) * np.diag([0.0] + [1.0] * (x.shape[1] - 1))
    return np.asarray(np.linalg.solve(x.T @ x + ridge, x.T @ y))


def predicted(model: InterferenceModel, sets: Sets, positions: Sequence[int]) -> list[Array]:
    """Each named set's predicted progress, lower and upper bound: tenants x 3."""
    table = model.table([sets.profiles[who] for who, _ in sets.cells], [cap for _, cap in sets.cells])
    places = max((len(sets.index[at]) for at in positions), default=1)
    index = np.full((len(positions), places), -1, dtype=np.int64)
    for row, at in enumerate(positions):
        index[row, : len(sets.index[at])] = sets.index[at]
    said = model.predict_sets(table, index)
    stacked = np.stack([said.progress, said.lower, said.upper], axis=2)
    return [stacked[row, : len(sets.index[at])] for row, at in enumerate(positions)]


def predicted_poorer(model: InterferenceModel, sets: Sets, positions: Sequence[int]) -> Poorer:
    """What the model says of these sets when their profiles lack something."""
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
        for what in Lacking
        if what
    }


def predicted_linear(model: InterferenceModel, name: str, sets: Sets, at: int) -> Array:
    """What a baseline says of one set."""
    _, alone = feature_table(
        [sets.profiles[sets.cells[cell][0]] for cell in sets.index[at]], [cap / 100 for cap in sets.caps(at)]
    )
    rows = baselines.design(
        name, np.array([vector(sets.profiles[sets.cells[cell][0]].counters) for cell in sets.index[at]]),
        np.array(sets.caps(at)) / 100, alone,
    )  # fmt: skip
    return np.clip(rows @ model.baselines[name], 0.0, 1.0)


def with_errors(
    model: InterferenceModel, sets: Sets, predictions: Sequence[tuple[int, Array]], poorer: Poorer
) -> InterferenceModel:
    """Conformal bounds by stratum from predictions of sets with unseen workloads, and how much wider they must be
    where profiles lack something."""
    rows = _rows(sets, predictions, Lacking.NOTHING)
    errors = np.zeros((len(SIZES), len(KEPT_EDGES) + 1, 2))
    for place, size in enumerate(SIZES):
        for column in range(len(KEPT_EDGES) + 1):
            own = [error for s, which, error in rows if which == column and s == size]
            wide = [error for _, which, error in rows if which == column]
            chosen = own if len(own) >= _FEWEST else wide or [e for _, _, e in rows]
            errors[place, column] = _bounds(chosen, len(sets.workloads))
    wider = [1.0]
    for what in list(Lacking)[1:]:
        ratios = [
            error / min(errors[size - SIZES[0], which, 0], -_LEAST_BOUND) if error < 0
            else error / max(errors[size - SIZES[0], which, 1], _LEAST_BOUND)
            for size, which, error in _rows(sets, poorer.get(what, ()), what)
        ]  # fmt: skip
        wider.append(max(1.0, round(float(np.quantile(ratios, COVERAGE)), 3)) if ratios else 1.0)
    return replace(model, errors=errors, lacking=tuple(wider))


def _rows(sets: Sets, predictions: Iterable[tuple[int, Array]], what: Lacking) -> list[tuple[int, int, float]]:
    """(size, stratum of the progress kept, measured less predicted) of every tenant of these sets."""
    alone = np.array([cap_progress(without(sets.profiles[who], what), cap / 100) for who, cap in sets.cells])
    rows: list[tuple[int, int, float]] = []
    for at, said in predictions:
        size = min(max(len(sets.index[at]), SIZES[0]), SIZES[-1])
        stratum = np.digitize(said[:, 0] / np.maximum(alone[list(sets.index[at])], 1e-6), KEPT_EDGES)
        rows += [
            (size, int(which), float(true - guess))
            for which, true, guess in zip(stratum, sets.progress[at], said[:, 0], strict=True)
        ]
    return rows


def _bounds(errors: Sequence[float], workloads: int) -> tuple[float, float]:
    # Conformal: the new one is one more draw, and what is drawn are workloads, whose errors come in bundles.
    tail = max(0.0, 1 - COVERAGE * (1 + 1 / workloads)) / 2
    return float(np.quantile(errors, tail)), float(np.quantile(errors, 1 - tail))


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
    errors = np.zeros((len(SIZES), len(KEPT_EDGES) + 1, 2))
    return InterferenceModel(
        dataset.gpu_model, provenance, nothing, nothing, (), errors, nothing, capacity=_capacity(dataset)
    )


def _capacity(dataset: Dataset) -> tuple[float, ...]:
    """The highest share of each conserved counter that a run of any size reached."""
    reached = ([getattr(run.counters, name) or 0.0 for run in dataset.runs] for name in CONSERVED)
    return tuple(min(1.0, max(_LEAST_CAPACITY, *shares)) for shares in reached)


def unfitted(dataset: Dataset, sets: Sets, seed: int) -> InterferenceModel:
    """A model without parameters, to be fitted on parts of the dataset."""
    return _bare(dataset, sets, seed, b"")
