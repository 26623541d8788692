"""The truth that the loop is judged by: a complete table of measured sets, without any model.

The table (docs/measurements/table.md) has ten programs alone under five caps, every pair, triple and four of
different ones under some caps, and what was measured of the sets that hold one twice. A set is offered only if it
was measured, with all of its subsets: at most four tenants. `gpushare.data.measured` says how other caps, and a
program alone, are derived.

Time slicing was not measured with these programs: each gets what it needs until the GPU's time is used up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np

from gpushare.core.control import turns_of
from gpushare.core.gpu import COUNTERS, Counters
from gpushare.core.interference import Profile
from gpushare.data.measured import MOST_TENANTS, Caps, LacksProgramError, MeasuredSets, MeasuredWindow
from gpushare.research.dataset import Dataset, Mechanism
from gpushare.research.pairs.table import Floats
from gpushare.research.solo_profiles import profile_of
from gpushare.sim.jobs import SimulationError
from gpushare.sim.truth import TenantKind, taking_turns

_LEAST: Final = 1e-3  # given to a tenant that stood still for its window, so that its job ends


class TableTruth:
    """Progress of sets of programs from a complete table of measurements.

    Raises:
        SimulationError: the table lacks a program alone on the whole GPU, or under a second cap.
    """

    has_caps = True
    max_tenants = MOST_TENANTS

    def __init__(self, dataset: Dataset, *, gpu_memory_mib: int) -> None:
        self.gpu_memory_mib = gpu_memory_mib
        self.gpu_model = dataset.gpu_model
        try:
            self._sets = MeasuredSets(_windows(dataset))
        except LacksProgramError as error:
            raise SimulationError(str(error)) from error
        if not self._sets.workloads:
            raise SimulationError("the table has no program alone on the whole GPU")
        for name in self._sets.workloads:
            if len(self._sets.caps_alone(name)) < 2:
                raise SimulationError(f"the table has {name} alone under 100% only; a second cap is needed")
        alone = _without_later(dataset, self._sets)
        self.profiles: dict[str, Profile] = {name: profile_of(alone, name) for name in self._sets.workloads}
        self._counters: dict[tuple[TenantKind, ...], Floats] = {}

    @property
    def workloads(self) -> Sequence[str]:
        """Return the names of the programs."""
        return self._sets.workloads

    def offers(self, workloads: Sequence[str]) -> bool:
        """Return whether these tenants may share a GPU: the table has them together, under any caps."""
        return len(workloads) < 2 or self._sets.offers(workloads)

    def rate_alone(self, workload: str) -> float:
        """Return the iterations/s alone on the whole GPU."""
        return self._sets.rate_alone(workload)

    def alone(self, workload: str, thread_percentage: float) -> float:
        """Return the progress alone under a cap; 1 on the whole GPU."""
        return self._sets.alone(workload, thread_percentage)

    def progress(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> tuple[float, ...]:
        """Return the progress of each tenant relative to alone on the whole GPU, in order.

        Raises:
            SimulationError: the table does not hold these programs together.
        """
        if len(kinds) == 1:
            return (self.alone(*kinds[0]),)
        names = [kind.workload for kind in kinds]
        if not self._sets.offers(names):
            raise SimulationError(f"the table holds no set of {', '.join(sorted(names))}")
        if mechanism is Mechanism.TIME_SLICING:
            return taking_turns([self.busy_ratio(name) for name in names])
        found = self.progress_under(names, [[kind.thread_percentage for kind in kinds]])
        return tuple(found[0].tolist())

    def progress_under(self, workloads: Sequence[str], caps: Sequence[Sequence[float]] | Floats) -> Floats:
        """Return the progress of one set under MPS and many caps: choices x tenants, like `caps`."""
        found = self._sets.under(workloads, caps)
        return found if len(workloads) == 1 else np.maximum(_LEAST, found)

    def counters(self, kinds: Sequence[TenantKind], duties: Sequence[float]) -> Counters:
        """Return the device's counters of a set under MPS, each tenant frozen for a part of the time.

        As with progress, a throttle is the exact mixture of the sets with and without the frozen ones.
        """
        total = np.zeros(len(COUNTERS))
        for weight, running in turns_of(duties):
            if running:
                total += weight * self._counters_of(tuple(sorted(kinds[at] for at in running)))
        return Counters(**dict(zip(COUNTERS, total.tolist(), strict=True)))

    def _counters_of(self, kinds: tuple[TenantKind, ...]) -> Floats:
        if kinds not in self._counters:
            found = self._sets.counters(
                [each.workload for each in kinds], [each.thread_percentage for each in kinds]
            )
            self._counters[kinds] = np.array([getattr(found, name) or 0.0 for name in COUNTERS])
        return self._counters[kinds]

    def is_measured(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> bool:
        """Return whether a window of the table has exactly this set under exactly these caps."""
        caps = self._sets.caps_of([kind.workload for kind in kinds]) if len(kinds) > 1 else ()
        return mechanism is Mechanism.MPS and tuple(kind.thread_percentage for kind in kinds) in caps

    def caps_of(self, workloads: Sequence[str]) -> Sequence[Caps]:
        """Return the caps under which a set was measured, each in the order of the workloads."""
        return self._sets.caps_of(workloads)

    def memory_mib(self, workload: str) -> int:
        """Return the peak over its windows alone."""
        return self._sets.memory_mib(workload)

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
        return self._sets.pairs()

    @cached_property
    def true_profiles(self) -> Mapping[str, Profile]:
        """Return each workload's progress alone under caps, to compute promises; its counters are not used."""
        return {
            name: Profile(
                self.profiles[name].counters, cap_curve={cap: self.alone(name, cap) for cap in range(1, 101)}
            )
            for name in self.workloads
        }


def _without_later(dataset: Dataset, sets: MeasuredSets) -> Dataset:
    """Return the dataset without the windows alone of a program's later sessions."""
    runs = [
        run for run in dataset.runs if not run.is_solo or run.session == sets.session_of(run.tenants[0].workload)
    ]
    return replace(dataset, runs=tuple(runs))


def _windows(dataset: Dataset) -> Iterator[MeasuredWindow]:
    for run in dataset.runs:
        if not run.has_probe:
            yield MeasuredWindow(
                tuple(tenant.workload for tenant in run.tenants),
                tuple(tenant.thread_percentage for tenant in run.tenants),
                run.iterations_per_s,
                run.counters,
                run.memory_mib,
                run.session,
            )
