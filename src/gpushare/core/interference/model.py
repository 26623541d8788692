"""The fitted model: from profiles and caps to each tenant's progress with a 90% interval."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpushare.core.gpu import (
    ARTEFACT,
    ARTEFACT_VERSION,
    CHECKSUM,
    SHORTFALLS,
    artefact_from_json,
    checksum,
    interval_widening,
)
from gpushare.core.interference import network
from gpushare.core.interference.learned_effects import NO_EFFECTS, exposure
from gpushare.core.interference.profile import (
    CAP_FEATURES,
    CONSERVED,
    LACKINGS,
    PROBE_FEATURES,
    Array,
    Lacking,
    Profile,
    cap_progress,
    feature_table,
    knows_caps,
    knows_probes,
    lacking,
    uses,
)

COVERAGE: Final = 0.9
LIKELY: Final = 5 / 6  # how often a tenant makes `Prediction.likely` or more
# Error of a lone tenant's progress under a cap, relative to that progress: interpolated on a measured curve, and
# by the law for counters with all threads (docs/adr/0207).
_ALONE_ERROR: Final = 0.1
_ALONE_ERROR_BY_LAW: Final = 0.3
_MOST_PROGRESS: Final = 1.1
_ERRORS_IN_BOUND: Final = 1.645  # half the width of a normal distribution's 90% interval, in standard deviations
_FULL: Final = 1.001  # the whole GPU, with tolerance for rounding
_AT_ONCE: Final = 2048  # sets per batch; larger batches do not fit a core's cache and take 1.5 times as long
# Intervals are stratified by what profiles lack, whether the caps keep the tenants' SMs apart, the number of
# tenants, and the predicted part of the progress alone.
APART: Final = 2
SIZES: Final = (2, 3, 4, 5)
KEPT_EDGES: Final = (0.15, 0.35, 0.6, 0.8, 0.93)
_EDGES: Final = np.array(KEPT_EDGES, dtype=np.float32)
# Shortfalls are stratified by the SMs that the other tenants keep busy, in whole GPUs, instead of their number.
LOAD_EDGES: Final = (0.3, 0.6, 1.0, 1.5)
_LOAD_EDGES: Final = np.array(LOAD_EDGES)


@dataclass(frozen=True, slots=True)
class Forecast:
    """One tenant's predicted progress relative to alone at 100%, with the bounds of its 90% interval; ratios."""

    progress: float
    lower: float
    upper: float

    @property
    def slowdown(self) -> float:
        """Return the predicted slowdown, 1 / progress."""
        return 1.0 / max(self.progress, 1e-3)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predictions of many sets: arrays of sets x places; a place without a tenant is 0.

    Attributes:
        progress: relative to alone at 100%. lower, upper: bounds of its 90% interval.
        likely: what is reached five times out of six (`LIKELY`), at most the progress: what places and caps are
            chosen by.
    """

    progress: Array
    lower: Array
    upper: Array
    likely: Array


@dataclass(frozen=True, slots=True)
class TenantTable:
    """Tenants under their caps, prepared for predictions of any number of sets.

    Attributes:
        pressures: one for each member of the ensemble.
        alone: progress alone.
        caps: 0 to 1.
        lacks: `Lacking` of each profile.
        loads: SMs that each keeps busy under its cap, in whole GPUs (`loads_of`).
        learned: sensitivity under the cap, pressure, deviation under the cap, trust: 4 x tenants; None if nothing
            was learnt.
    """

    pressures: tuple[network.Pressure, ...]
    alone: Array
    caps: Array
    lacks: npt.NDArray[np.int64]
    loads: Array
    learned: Array | None = None

    def with_more(self, more: "TenantTable") -> "TenantTable":
        """Return this table with the tenants of another table of the same model appended."""
        return TenantTable(
            tuple(a.with_more(b) for a, b in zip(self.pressures, more.pressures, strict=True)),
            np.concatenate([self.alone, more.alone]),
            np.concatenate([self.caps, more.caps]),
            np.concatenate([self.lacks, more.lacks]),
            np.concatenate([self.loads, more.loads]),
            _joined(self, more),
        )


@dataclass(frozen=True, slots=True)
class Fill:
    """Linear maps that estimate the features a profile lacks from a constant 1 and the features before them.

    Attributes:
        caps: 1 + features before them x `CAP_FEATURES`.
        probes: 1 + features before them x `PROBE_FEATURES`.
    """

    caps: Array
    probes: Array

    def complete(self, standard: Array, profiles: Sequence[Profile]) -> Array:
        """Return the features (tenants x features, standardised) with estimates for those that profiles lack."""
        filled = standard.copy()
        probed = standard.shape[1] - PROBE_FEATURES
        capped = probed - CAP_FEATURES
        poor = [at for at, profile in enumerate(profiles) if not knows_caps(profile)]
        filled[poor, capped:probed] = with_one(filled[poor, :capped]) @ self.caps
        return self.without_probes(filled, [at for at, each in enumerate(profiles) if not knows_probes(each)])

    def without_probes(self, standard: Array, rows: Sequence[int]) -> Array:
        """Return the features of these rows as if no probe had been measured."""
        filled = standard.copy()
        filled[rows, -PROBE_FEATURES:] = with_one(filled[rows, :-PROBE_FEATURES]) @ self.probes
        return filled


@dataclass(frozen=True)
class InterferenceModel:
    """A fitted model: standardisation, an ensemble of the law's parameters, intervals and provenance.

    Attributes:
        errors: lower and upper bound of measured minus predicted progress, relative to the progress alone under
            the cap (docs/adr/0207), by `Lacking`, caps apart or not, set size and stratum of kept progress; see
            `errors_shape`.
        shortfalls: measured minus predicted progress that one tenant in six falls below, 0 or less, relative to
            the progress alone under the cap, by `Lacking`, caps apart or not, stratum of the others' loads and
            stratum of kept progress; see `shortfalls_shape`. None in an artefact that lacks them: then by a normal
            distribution whose 90% interval is the model's.
        fill: estimates the standardised features that a profile lacks.
        baselines: coefficients of the linear models that are reported for comparison.
        widening: factor on the intervals, for a GPU that the model was not fitted on.
        capacity: for each counter in `CONSERVED`, the highest value that any run of the dataset reached, 0 to 1.
        others: models fitted on other GPUs, which `for_gpu` returns for those.
    """

    gpu_model: str
    provenance: Mapping[str, Any]
    mean: Array
    scale: Array
    members: tuple[Mapping[str, Array], ...]
    errors: Array
    fill: Fill
    baselines: Mapping[str, Array] = field(default_factory=dict)
    widening: float = 1.0
    capacity: tuple[float, ...] = (1.0,) * len(CONSERVED)
    others: tuple["InterferenceModel", ...] = ()
    shortfalls: Array | None = None

    def table(self, profiles: Sequence[Profile], thread_percentages: Sequence[int]) -> TenantTable:
        """Return the table of tenants with these profiles and caps (1 to 100), in the same order."""
        caps = [percentage / 100 for percentage in thread_percentages]
        inputs, alone = feature_table(profiles, caps)
        standard = self.fill.complete(standardised(inputs, self.mean, self.scale), profiles).astype(np.float32)
        row = np.asarray(caps, dtype=np.float32)
        members = [{name: each.astype(np.float32) for name, each in member.items()} for member in self.members]
        lacks = np.array([int(lacking(profile)) for profile in profiles], dtype=np.int64)
        drawn = (uses(profiles, caps) / np.array(self.capacity)[:, None]).astype(np.float32)
        pressures = tuple(network.pressure(member, standard, row, drawn) for member in members)
        loads, learned = loads_of(profiles, caps), _learned(profiles, thread_percentages)
        return TenantTable(pressures, alone, np.asarray(caps), lacks, loads, learned)

    def predict_sets(self, table: TenantTable, index: npt.NDArray[np.int64]) -> Prediction:
        """Predict sets of tenants.

        Args:
            index: sets x places, rows of the table; -1 for an empty place.
        """
        stands = index >= 0
        rows = np.ascontiguousarray(np.where(stands, index, 0).T)
        present = np.ascontiguousarray(stands.T, dtype=np.float32)
        kept = np.empty(rows.shape, dtype=np.float32)
        for begin in range(0, rows.shape[1], _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            each = [network.stretch(member, rows[:, part], present[:, part]) for member in table.pressures]
            kept[:, part] = sum(each) / len(each)
        alone = table.alone[rows].T
        progress = kept.T * alone
        sizes = stands.sum(axis=1)
        strata = np.searchsorted(_EDGES, kept.T, side="right")
        lacks = np.bitwise_or.reduce(np.where(stands, table.lacks[rows.T], 0), axis=1)
        apart = are_apart(np.where(stands, table.caps[rows.T], 0.0).sum(axis=1))
        place = np.clip(sizes, SIZES[0], SIZES[-1]) - SIZES[0]
        bounds = np.empty((*index.shape, 3))
        bounds[:, :, :2] = self.errors[lacks[:, None], apart[:, None], place[:, None], strata]
        if self.shortfalls is None:
            bounds[:, :, 2] = bounds[:, :, 0] / _ERRORS_IN_BOUND
        else:
            beside = load_strata(np.where(stands, table.loads[rows.T], 0.0))
            at = lacks[:, None], apart[:, None], beside, strata
            # No less is likely of a tenant that is predicted to keep more, however wide the intervals are.
            below = likely_below(self.widening * self.shortfalls)[at] - kept.T
            bounds[:, :, 2] = np.maximum(self.shortfalls[at], below / self.widening)
        bounds[sizes == 1] = _alone_bounds(table, rows.T[sizes == 1])
        bounds = bounds * alone[:, :, None]
        if table.learned is not None:
            above = _alone_bounds(table, np.arange(len(table.alone)))[:, 1]
            highest = np.minimum(1.0, table.alone * (1.0 + self.widening * above))[rows.T]
            progress, bounds = _moved(progress, bounds, table.learned[:, rows.T], highest, stands)
        lower, upper, likely = np.moveaxis(progress[:, :, None] + self.widening * bounds, 2, 0)
        lower = np.minimum(np.clip(lower, 0.0, None) * stands, progress)
        return Prediction(
            progress,
            lower,
            np.maximum(np.minimum(upper, _MOST_PROGRESS) * stands, progress),
            np.clip(likely, lower, progress),
        )

    def predict(self, tenants: Sequence[tuple[Profile, int]]) -> tuple[Forecast, ...]:
        """Predict one set: (profile, thread percentage) of each tenant, in order."""
        if not tenants:
            return ()
        table = self.table([profile for profile, _ in tenants], [percentage for _, percentage in tenants])
        prediction = self.predict_sets(table, np.arange(len(tenants))[None])
        return tuple(
            Forecast(float(p), float(low), float(high))
            for p, low, high in zip(prediction.progress[0], prediction.lower[0], prediction.upper[0], strict=True)
        )

    def conserved(self, tenants: Sequence[tuple[Profile, int]], progress: Sequence[float]) -> tuple[float, ...]:
        """Lower a set's progress until it uses no more of a conserved counter than the GPU has.

        Predictions satisfy this already; predictions with added noise may not.

        Args:
            tenants: (profile, thread percentage) of each.
            progress: of each tenant.
        """
        profiles, caps = [profile for profile, _ in tenants], [percentage / 100 for _, percentage in tenants]
        alone = np.array([cap_progress(profile, cap) for profile, cap in zip(profiles, caps, strict=True)])
        kept = np.array(progress)[:, None] / np.maximum(alone, 1e-9)[:, None]
        for used in uses(profiles, caps) / np.array(self.capacity)[:, None]:
            kept = network.conserved(kept, used[:, None])
        return tuple((kept[:, 0] * alone).tolist())

    def for_gpu(self, gpu_model: str) -> "InterferenceModel":
        """Return the model fitted on that GPU model, else this one with wider intervals."""
        for each in self.others:
            if interval_widening(gpu_model, each.gpu_model) == 1.0:
                return each
        widening = interval_widening(gpu_model, self.gpu_model)
        return self if widening == 1.0 else replace(self, widening=widening)

    def to_json(self) -> str:
        """Return the artefact as JSON; the same model gives the same bytes."""
        value = {
            "artefact": ARTEFACT,
            "version": ARTEFACT_VERSION,
            "gpu_model": self.gpu_model,
            "provenance": dict(self.provenance),
            "mean": _rounded(self.mean),
            "scale": _rounded(self.scale),
            "members": [{name: _rounded(each) for name, each in member.items()} for member in self.members],
            "errors": _rounded(self.errors),
            "fill": {"caps": _rounded(self.fill.caps), "probes": _rounded(self.fill.probes)},
            "capacity": dict(zip(CONSERVED, self.capacity, strict=True)),
            **({} if self.shortfalls is None else {SHORTFALLS: _rounded(self.shortfalls)}),
            "baselines": {name: _rounded(each) for name, each in self.baselines.items()},
        }
        return json.dumps({**value, CHECKSUM: checksum(value)}, separators=(",", ":"))


def model_from_json(text: str) -> InterferenceModel:
    """Read an artefact.

    Raises:
        ArtefactError: not an artefact, of another version, or damaged.
    """
    value = artefact_from_json(text)
    return InterferenceModel(
        gpu_model=value["gpu_model"],
        provenance=value["provenance"],
        mean=np.array(value["mean"], dtype=float),
        scale=np.array(value["scale"], dtype=float),
        members=tuple({k: np.array(v, dtype=float) for k, v in member.items()} for member in value["members"]),
        errors=np.array(value["errors"], dtype=float),
        fill=Fill(*(np.array(value["fill"][name], dtype=float) for name in ("caps", "probes"))),
        baselines={name: np.array(each, dtype=float) for name, each in value["baselines"].items()},
        capacity=tuple(float(value["capacity"][name]) for name in CONSERVED),
        shortfalls=np.array(value[SHORTFALLS], dtype=float) if SHORTFALLS in value else None,
    )


def _alone_bounds(table: TenantTable, rows: npt.NDArray[np.int64]) -> Array:
    """Return lone tenants' relative bounds: lower, upper, and what is likely, for each entry of `rows`."""
    by_law = (table.lacks[rows] & Lacking.CAP_CURVE > 0) & (table.caps[rows] < 1.0)
    error = np.where(by_law, _ALONE_ERROR_BY_LAW, _ALONE_ERROR)
    return np.stack([-error, error, -error / _ERRORS_IN_BOUND], axis=-1)


def _learned(profiles: Sequence[Profile], thread_percentages: Sequence[int]) -> Array | None:
    if all(profile.effects == NO_EFFECTS for profile in profiles):
        return None
    each = [
        (each.sensitivity * exposure(cap), each.pressure, each.deviation_under(cap), each.trust)
        for each, cap in zip([profile.effects for profile in profiles], thread_percentages, strict=True)
    ]
    return np.array(each).T


def _joined(one: TenantTable, other: TenantTable) -> Array | None:
    if one.learned is None and other.learned is None:
        return None
    both = [each.learned if each.learned is not None else np.zeros((4, len(each.alone))) for each in (one, other)]
    return np.concatenate(both, axis=1)


def _moved(
    progress: Array, bounds: Array, learned: Array, highest: Array, stands: npt.NDArray[np.bool_]
) -> tuple[Array, Array]:
    """Correct predictions (sets x places) and their bounds (sets x places x 3) by the learned effects.

    The prediction of a lone tenant is corrected too, because its sensitivity is mostly the cost of its cap. Its
    bounds stay, because windows beside others say nothing about their width.

    Args:
        learned: as in `TenantTable`, 4 x sets x places.
        highest: upper bound of the progress alone under the cap, at most 1, sets x places: no effect moves a
            prediction above it, as no neighbour makes a tenant faster than it is alone (docs/adr/0227).
    """
    sensitivity, pressure, deviation, trust = np.where(stands, learned, 0.0)
    others = pressure.sum(axis=1, keepdims=True) - pressure
    sizes = stands.sum(axis=1, keepdims=True)
    count = np.maximum(sizes - 1, 1)
    trust = np.where(sizes > 1, trust, 0.0)
    moved = np.minimum(progress * np.exp(sensitivity + others / count), np.maximum(progress, highest))
    own = _ERRORS_IN_BOUND * deviation * moved
    learnt = np.stack([-own, own, -own / _ERRORS_IN_BOUND], axis=2)
    return moved, bounds + trust[:, :, None] * (learnt - bounds)


def errors_shape() -> tuple[int, ...]:
    """Return the shape of `InterferenceModel.errors`."""
    return len(LACKINGS), APART, len(SIZES), len(KEPT_EDGES) + 1, 2


def shortfalls_shape() -> tuple[int, ...]:
    """Return the shape of `InterferenceModel.shortfalls`."""
    return len(LACKINGS), APART, len(LOAD_EDGES) + 1, len(KEPT_EDGES) + 1


def likely_below(shortfalls: Array) -> Array:
    """Return the most that is likely to be kept in any lower stratum of kept progress, at its upper edge.

    Args:
        shortfalls: as widened; `shortfalls_shape`, which the result has too. The lowest stratum has none below
            (-inf).
    """
    at_edges = np.maximum.accumulate(shortfalls[..., :-1] + np.array(KEPT_EDGES), axis=-1)
    return np.concatenate([np.full((*shortfalls.shape[:-1], 1), -np.inf), at_edges], axis=-1)


def loads_of(profiles: Sequence[Profile], caps: Sequence[float]) -> Array:
    """Return the SMs that tenants keep busy under their caps (0 to 1 each), in whole GPUs.

    By the counter alone, which is all that some profiles have; a tenant without it is taken to fill its cap.
    """
    busy = [1.0 if profile.counters.sm_util is None else profile.counters.sm_util for profile in profiles]
    return np.minimum(busy, caps)


def load_strata(loads: Array) -> npt.NDArray[np.int64]:
    """Return each tenant's stratum by the loads of the others in its set (sets x places; 0 for nobody)."""
    others = loads.sum(axis=1, keepdims=True) - loads
    return np.asarray(np.searchsorted(_LOAD_EDGES, others, side="right"), dtype=np.int64)


def are_apart(caps: Array) -> npt.NDArray[np.int64]:
    """Return 1 if a set's caps (0 to 1 each) leave every tenant its own SMs, else 0."""
    return (np.asarray(caps) <= _FULL).astype(np.int64)


def standardised(inputs: Array, mean: Array, scale: Array) -> Array:
    """Scale the features to order one and clip outliers."""
    return np.asarray(np.clip((inputs - mean) / scale, -4.0, 4.0))


def with_one(rows: Array) -> Array:
    """Return the rows with a column of ones prepended."""
    return np.hstack([np.ones((len(rows), 1)), rows])


def _rounded(values: Array) -> Any:
    return [_rounded(each) for each in values] if values.ndim else float(f"{float(values):.7g}")
