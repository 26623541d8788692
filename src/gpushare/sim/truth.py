"""True rates of jobs that share a GPU in the job-level simulator: measured where possible, else modelled.

Two sources: a colocation dataset (any number of tenants, with caps; for a set that was never measured, progress is
drawn from the interference model's forecast, with its residual as noise), and a table of measured pairs (two
tenants, no caps, as gavel's).
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from gpushare.core.gpu import COUNTERS
from gpushare.core.interference import Forecast, Profile, ProfileError
from gpushare.research.dataset import Dataset, Mechanism
from gpushare.research.pairs.table import Floats, PairTable
from gpushare.research.solo_profiles import profile_of
from gpushare.twin.drawn import LEAST_PROGRESS, draw

Forecaster = Callable[[Sequence[tuple[Profile, int]]], tuple[Forecast, ...]]
"""Returns each tenant's forecast from its (profile, thread percentage), as `InterferenceModel.predict`."""


class TenantKind(NamedTuple):
    """A tenant as the truth sees it: workload and thread percentage."""

    workload: str
    thread_percentage: int = 100


class Truth(Protocol):
    """Progress of any set that a policy may form, and each workload's solo profile."""

    gpu_memory_mib: int
    max_tenants: int
    has_caps: bool

    @property
    def workloads(self) -> Sequence[str]:
        """Return every known workload."""
        ...

    def offers(self, workloads: Sequence[str]) -> bool:
        """Return whether these tenants may share a GPU at all; memory is checked separately."""
        ...

    def alone(self, workload: str, thread_percentage: int) -> float:
        """Return the progress alone under a cap, 1 on the whole GPU."""
        ...

    def progress(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> tuple[float, ...]:
        """Return the progress of each tenant of the set relative to alone at 100%, in order."""
        ...

    def is_measured(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> bool:
        """Return whether the progress of exactly this set was measured; otherwise it comes from a model."""
        ...

    def memory_mib(self, workload: str) -> int:
        """Return the peak device memory; 0 if not measured."""
        ...

    def profile(self, workload: str) -> Floats:
        """Return the solo profile that predictors see: [features], the same features for every workload."""
        ...

    def busy_ratio(self, workload: str) -> float:
        """Return the utilisation alone that a monitor would show, 0 to 1."""
        ...

    def measured_pairs(self) -> Sequence[tuple[str, str, float]]:
        """Return uncapped pairs with their measured summed progress, for predictors to train on."""
        ...


class DatasetTruth:
    """A colocation dataset; the progress of a set that it lacks is drawn once, from the forecast's interval.

    A workload without a usable profile (too short, counters missing) is not in `workloads`.
    """

    has_caps = True

    def __init__(
        self,
        dataset: Dataset,
        forecaster: Forecaster,
        *,
        gpu_memory_mib: int,
        time_slicing: Dataset | None = None,
        seed: int = 0,
    ) -> None:
        self._dataset = dataset
        self._forecaster = forecaster
        self._seed = seed
        self.gpu_memory_mib = gpu_memory_mib
        self.gpu_model = dataset.gpu_model
        self.max_tenants = 48
        self.profiles: dict[str, Profile] = {}
        for workload in dataset.solo:
            with contextlib.suppress(ProfileError):
                self.profiles[workload] = profile_of(dataset, workload)
        self._measured: dict[Mechanism, dict[tuple[TenantKind, ...], list[tuple[float, ...]]]] = {}
        for source in (dataset, time_slicing):
            if source is not None:
                self._measured.setdefault(source.mechanism, {}).update(_measured_sets(source))

    @cached_property
    def workloads(self) -> Sequence[str]:
        """Return every workload with a usable solo profile."""
        return sorted(self.profiles)

    def offers(self, workloads: Sequence[str]) -> bool:
        """Return whether MPS takes this many tenants."""
        return len(workloads) <= self.max_tenants

    def progress(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> tuple[float, ...]:
        """Return the mean of the runs with exactly this set, else the cap curve (one tenant) or the model."""
        ordered = tuple(sorted(kinds))
        runs = self._runs(ordered, mechanism)
        if runs:
            by_kind = iter(np.maximum(np.mean(runs, axis=0), LEAST_PROGRESS).tolist())
        elif mechanism is Mechanism.TIME_SLICING:
            by_kind = iter(taking_turns([self.busy_ratio(kind.workload) for kind in ordered]))
        elif len(ordered) == 1:
            by_kind = iter([self.alone(*ordered[0])])
        else:
            by_kind = iter(self._modelled(ordered))
        result = [0.0] * len(kinds)
        for index in sorted(range(len(kinds)), key=lambda position: kinds[position]):
            result[index] = next(by_kind)
        return tuple(result)

    def is_measured(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> bool:
        """Return whether a run of the dataset has exactly this set."""
        return bool(self._runs(tuple(sorted(kinds)), mechanism))

    def _runs(self, ordered: tuple[TenantKind, ...], mechanism: Mechanism) -> list[tuple[float, ...]]:
        """Return the progress in every run with exactly this sorted set."""
        return self._measured.get(mechanism, {}).get(ordered, [])

    def alone(self, workload: str, thread_percentage: int) -> float:
        """Return the progress alone under a cap: the measured curve, linear between points and to 0 at 0%."""
        curve = {0: 0.0, 100: 1.0, **self._dataset.cap_curve(workload)}
        points = sorted(curve)
        at = float(np.interp(thread_percentage, points, [curve[point] for point in points]))
        return max(LEAST_PROGRESS, at)

    def memory_mib(self, workload: str) -> int:
        """Return the peak over its solo runs."""
        runs = self._dataset.solo[workload][100]
        return max((run.memory_mib[0] or 0 for run in runs), default=0)

    def profile(self, workload: str) -> Floats:
        """Return [12] counters in the colocation dataset's order, 0 where not measured."""
        measured = self.profiles[workload].counters
        return np.array([getattr(measured, name) or 0.0 for name in COUNTERS])

    def busy_ratio(self, workload: str) -> float:
        """Return the graphics (NVML) utilisation if measured, else the SM activity."""
        measured = self.profiles[workload].counters
        return measured.graphics_util if measured.graphics_util is not None else (measured.sm_util or 0.0)

    def measured_pairs(self) -> Sequence[tuple[str, str, float]]:
        """Return the pairs that ran with both caps at 100%."""
        return [
            (kinds[0].workload, kinds[1].workload, float(np.mean([sum(run) for run in runs])))
            for kinds, runs in sorted(self._measured.get(Mechanism.MPS, {}).items())
            if len(kinds) == 2 and all(kind.thread_percentage == 100 for kind in kinds)
        ]

    def _modelled(self, kinds: tuple[TenantKind, ...]) -> tuple[float, ...]:
        forecasts = self._forecaster([(self.profiles[kind.workload], kind.thread_percentage) for kind in kinds])
        return draw(forecasts, [self.alone(*kind) for kind in kinds], repr(kinds), seed=self._seed)


def taking_turns(busy: Sequence[float]) -> tuple[float, ...]:
    """Return the progress under time slicing: each tenant gets what it needs until the time is used up.

    Args:
        busy: part of its time alone in which each tenant uses the GPU, 0 to 1. Idle gaps of one serve another.
    """
    needs = [max(0.01, each) for each in busy]
    left, progress = 1.0, [0.0] * len(needs)
    order = sorted(range(len(needs)), key=lambda index: needs[index])
    for position, index in enumerate(order):
        turn = min(needs[index], left / (len(order) - position))
        progress[index] = max(LEAST_PROGRESS, turn / needs[index])
        left -= turn
    return tuple(progress)


class PairsTruth:
    """A table of measured pairs: at most two tenants, no caps; a pair that did not fit is refused by `fits`."""

    has_caps = False
    max_tenants = 2

    def __init__(self, table: PairTable) -> None:
        self._table = table
        self._index = {name: index for index, name in enumerate(table.workloads)}
        self._pairs: dict[tuple[int, int], tuple[float, float]] = {}
        for row, (a, b) in enumerate(zip(table.first.tolist(), table.second.tolist(), strict=True)):
            one, other = (float(rate) for rate in table.progress[row])
            self._pairs[a, b], self._pairs[b, a] = (one, other), (other, one)
        # The pairs that did not fit bound each one's memory; any numbers that reproduce the table suffice.
        self.gpu_memory_mib = 0

    @property
    def workloads(self) -> Sequence[str]:
        """Return every workload of the table."""
        return self._table.workloads

    def offers(self, workloads: Sequence[str]) -> bool:
        """Return whether there are at most two."""
        return len(workloads) <= self.max_tenants

    def alone(self, workload: str, thread_percentage: int) -> float:  # noqa: ARG002 - no caps were measured
        """Return 1, as the table has no caps."""
        return 1.0

    def progress(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> tuple[float, ...]:
        """Return the measured progress of a pair; half each if taking turns, not measured, or not fitting."""
        if len(kinds) == 1:
            return (1.0,)
        if mechanism is Mechanism.TIME_SLICING or len(kinds) > 2:
            return (1.0 / len(kinds),) * len(kinds)
        rates = self._pair(kinds)
        return rates if min(rates) > 0 else (0.5, 0.5)

    def is_measured(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> bool:
        """Return whether it is a pair of the table that fit."""
        return len(kinds) == 2 and mechanism is not Mechanism.TIME_SLICING and min(self._pair(kinds)) > 0

    def _pair(self, kinds: tuple[TenantKind, ...]) -> tuple[float, float]:
        return self._pairs.get((self._index[kinds[0].workload], self._index[kinds[1].workload]), (0.0, 0.0))

    def memory_mib(self, workload: str) -> int:  # noqa: ARG002 - the table has no memory; see `progress`
        """Return 0, as the table does not say."""
        return 0

    def profile(self, workload: str) -> Floats:
        """Return [2] log2 of the solo rate and of the batch size."""
        index = self._index[workload]
        return np.array([self._table.log2_solo[index], self._table.log2_batch[index]])

    def busy_ratio(self, workload: str) -> float:
        """Return 1 less what it leaves to partners on average, as the table has no utilisation."""
        index = self._index[workload]
        sums = [sum(rates) for (a, _), rates in self._pairs.items() if a == index and min(rates) > 0]
        return float(np.clip(2 - np.mean(sums), 0.05, 1.0)) if sums else 1.0

    def measured_pairs(self) -> Sequence[tuple[str, str, float]]:
        """Return every pair that fit."""
        names, sums = self._table.workloads, self._table.normalized_sum
        rows = np.flatnonzero(self._table.fits).tolist()
        return [(names[self._table.first[r]], names[self._table.second[r]], float(sums[r])) for r in rows]


def _measured_sets(dataset: Dataset) -> dict[tuple[TenantKind, ...], list[tuple[float, ...]]]:
    """Return by sorted set the progress of each run that measured it, aligned with the set."""
    sets: dict[tuple[TenantKind, ...], list[tuple[float, ...]]] = defaultdict(list)
    for run, progress in dataset.shared_runs():
        kinds = [TenantKind(tenant.workload, tenant.thread_percentage) for tenant in run.tenants]
        order = sorted(range(len(kinds)), key=lambda index: kinds[index])
        sets[tuple(kinds[index] for index in order)].append(tuple(progress[index] for index in order))
    return dict(sets)
