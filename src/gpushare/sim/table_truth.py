"""The truth that the loop is judged by: a complete table of measured sets, and no model's word in it.

The table (docs/measurements/table.md) holds ten programs alone under five caps, and every pair, triple and four of
different ones under some. A set is offered only if it was measured: at most four tenants, no program twice.

- Alone: the mean window under each cap, made to rise with the cap (a cap never speeds a program up; where it seems
  to, the windows of both caps are pooled). Below the lowest measured cap progress falls by a power of the cap with
  an exponent halfway between what was last measured and 1, in proportion.
- A measured set under measured caps: its window's rates relative to alone on the whole GPU, at most 1.
- Other caps of a measured set: each tenant keeps of its progress alone under its cap the mean of what it kept
  under the measured caps of that same set, weighted by the inverse square of the distance in the caps' logarithms.
  Above the highest cap that was measured of a set nothing is known: a higher cap counts as that one.
- Time slicing was not measured with these programs: each gets what it needs until the GPU's time is out.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from gpushare.core.gpu import COUNTERS
from gpushare.core.interference import Profile
from gpushare.research.dataset import Dataset, Mechanism, Run
from gpushare.research.pairs.table import Floats
from gpushare.research.solo_profiles import profile_of
from gpushare.sim.jobs import SimulationError
from gpushare.sim.truth import TenantKind, taking_turns

MOST_TENANTS: Final = 4
_WHOLE: Final = 100
_LEAST: Final = 1e-3  # a tenant that stood still for its whole window gets on a little, or its job would never end

_SAME: Final = 1e-12  # square of a distance in the caps' logarithms that is rounding

Caps = tuple[int, ...]


class TableTruth:
    """Progress of sets of different programs from a complete table of measurements.

    Raises:
        SimulationError: the table lacks a program alone on the whole GPU.
    """

    has_caps = True
    max_tenants = MOST_TENANTS

    def __init__(self, dataset: Dataset, *, gpu_memory_mib: int) -> None:
        self.gpu_memory_mib = gpu_memory_mib
        self.gpu_model = dataset.gpu_model
        self._solo = dataset.solo
        self._alone: dict[str, dict[int, float]] = {}
        self._rates: dict[str, float] = {}
        for workload, caps in dataset.solo.items():
            if _WHOLE not in caps:
                raise SimulationError(f"the table lacks {workload} alone on the whole GPU")
            self._rates[workload], self._alone[workload] = _rising(caps)
        self.profiles: dict[str, Profile] = {name: profile_of(dataset, name) for name in sorted(self._alone)}
        self._sets: dict[tuple[str, ...], dict[Caps, Floats]] = self._measured_sets(dataset)

    @property
    def workloads(self) -> Sequence[str]:
        """The programs, by name."""
        return sorted(self._alone)

    def offers(self, workloads: Sequence[str]) -> bool:
        """Whether these tenants may share a GPU: the table holds them together, under whatever caps."""
        return len(workloads) < 2 or tuple(sorted(workloads)) in self._sets

    def rate_alone(self, workload: str) -> float:
        """Iterations/s alone on the whole GPU."""
        return self._rates[workload]

    def alone(self, workload: str, thread_percentage: float) -> float:
        """Progress alone under a cap, 1 on the whole GPU."""
        curve = self._alone[workload]
        low, second = sorted(curve)[:2]
        if thread_percentage >= low:
            points = sorted(curve)
            return float(np.interp(thread_percentage, points, [curve[point] for point in points]))
        last = math.log(curve[second] / curve[low]) / math.log(second / low)
        return float(curve[low] * (thread_percentage / low) ** ((last + 1.0) / 2.0))

    def progress(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> tuple[float, ...]:
        """Progress of each tenant relative to alone on the whole GPU, in order.

        Raises:
            SimulationError: the table does not hold these programs together.
        """
        if len(kinds) == 1:
            return (self.alone(*kinds[0]),)
        order = sorted(range(len(kinds)), key=lambda index: kinds[index])
        names = tuple(kinds[index].workload for index in order)
        if names not in self._sets:
            raise SimulationError(f"the table holds no set of {', '.join(names)}")
        if mechanism is Mechanism.TIME_SLICING:
            return taking_turns([self.busy_ratio(kind.workload) for kind in kinds])
        found = self.progress_under(
            [kind.workload for kind in kinds], [[kind.thread_percentage for kind in kinds]]
        )
        return tuple(found[0].tolist())

    def progress_under(self, workloads: Sequence[str], caps: Sequence[Sequence[float]] | Floats) -> Floats:
        """Progress of one set under MPS and many caps: choices x tenants, as `caps`."""
        asked = np.asarray(caps, float)
        if len(workloads) == 1:
            return np.array([[self.alone(workloads[0], cap)] for (cap,) in asked.tolist()])
        order = sorted(range(len(workloads)), key=lambda index: workloads[index])
        found = np.empty_like(asked)
        found[:, order] = self._under(tuple(workloads[index] for index in order), asked[:, order])
        bounded: Floats = np.maximum(_LEAST, found)
        return bounded

    def is_measured(self, kinds: tuple[TenantKind, ...], mechanism: Mechanism) -> bool:
        """Whether a window of the table holds just this set under just these caps."""
        names, caps = zip(*sorted(kinds), strict=True)
        return mechanism is Mechanism.MPS and caps in self._sets.get(names, {})

    def caps_of(self, workloads: Sequence[str]) -> Sequence[Caps]:
        """The caps that were measured of a set, each in the order of the workloads."""
        order = sorted(range(len(workloads)), key=lambda index: workloads[index])
        if len(workloads) == 1:
            return [(cap,) for cap in sorted(self._alone[workloads[0]])]
        found = []
        for caps in sorted(self._sets[tuple(sorted(workloads))]):
            given = [0] * len(caps)
            for index, cap in zip(order, caps, strict=True):
                given[index] = cap
            found.append(tuple(given))
        return found

    def memory_mib(self, workload: str) -> int:
        """Peak over its windows alone."""
        return max((run.memory_mib[0] or 0 for run in self._solo[workload][_WHOLE]), default=0)

    def profile(self, workload: str) -> Floats:
        """[12] counters of the colocation dataset's order, 0 where not measured."""
        measured = self.profiles[workload].counters
        return np.array([getattr(measured, name) or 0.0 for name in COUNTERS])

    def busy_ratio(self, workload: str) -> float:
        """Graphics (NVML) utilisation where measured, else SM activity."""
        measured = self.profiles[workload].counters
        return measured.graphics_util if measured.graphics_util is not None else (measured.sm_util or 0.0)

    def measured_pairs(self) -> Sequence[tuple[str, str, float]]:
        """Pairs that ran with both caps at 100%."""
        return [
            (names[0], names[1], float(caps[_WHOLE, _WHOLE].sum()))
            for names, caps in sorted(self._sets.items())
            if len(names) == 2 and (_WHOLE, _WHOLE) in caps
        ]

    @cached_property
    def true_profiles(self) -> Mapping[str, Profile]:
        """What each workload makes alone under caps, for promises: no counter of them is read."""
        return {
            name: Profile(
                self.profiles[name].counters, cap_curve={cap: self.alone(name, cap) for cap in range(1, 101)}
            )
            for name in self.workloads
        }

    def _under(self, names: tuple[str, ...], caps: Floats) -> Floats:
        """Progress of a sorted set under any caps: choices x tenants."""
        known = self._sets[names]
        measured = np.array(list(known), float)
        rates = np.array(list(known.values()))
        kept = rates / self._alone_under(names, measured)
        clipped = np.minimum(caps, measured.max(axis=0))
        squares = (np.log(clipped[:, None, :] / measured[None]) ** 2).sum(axis=2)
        is_there = squares < _SAME
        weights = 1.0 / np.where(is_there, 1.0, squares)
        weights = np.where(is_there.any(axis=1, keepdims=True), is_there, weights)
        mean = weights @ kept / weights.sum(axis=1, keepdims=True)
        return np.asarray(np.minimum(1.0, mean * self._alone_under(names, clipped)))

    def _alone_under(self, names: Sequence[str], caps: Floats) -> Floats:
        """Progress alone of each under its cap: choices x tenants."""
        found = np.empty_like(caps)
        for at, name in enumerate(names):
            distinct, inverse = np.unique(caps[:, at], return_inverse=True)
            found[:, at] = np.array([self.alone(name, cap) for cap in distinct.tolist()])[inverse.reshape(-1)]
        return found

    def _measured_sets(self, dataset: Dataset) -> dict[tuple[str, ...], dict[Caps, Floats]]:
        """Sorted programs -> sorted caps -> mean progress over the windows that measured them."""
        windows: dict[tuple[str, ...], dict[Caps, list[list[float]]]] = {}
        for run in dataset.runs:
            names = [tenant.workload for tenant in run.tenants]
            if run.is_solo or len(names) > MOST_TENANTS or len(set(names)) < len(names):
                continue
            if not set(names) <= set(self._rates):
                continue
            order = sorted(range(len(names)), key=lambda index: names[index])
            progress = [min(1.0, run.iterations_per_s[at] / self._rates[names[at]]) for at in order]
            of_set = windows.setdefault(tuple(names[at] for at in order), {})
            of_set.setdefault(tuple(run.tenants[at].thread_percentage for at in order), []).append(progress)
        return {
            names: {caps: np.mean(each, axis=0) for caps, each in of_set.items()}
            for names, of_set in windows.items()
        }


def _rising(caps: Mapping[int, Sequence[Run]]) -> tuple[float, dict[int, float]]:
    """Rate alone on the whole GPU, and progress by cap: the mean window, pooled where it falls as caps rise."""
    points = sorted(caps)
    pools: list[tuple[float, int, int]] = []  # mean, windows, caps
    for cap in points:
        rates = [run.iterations_per_s[0] for run in caps[cap]]
        pools.append((sum(rates) / len(rates), len(rates), 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (one, n, i), (other, m, j) = pools[-2:]
            pools[-2:] = [((one * n + other * m) / (n + m), n + m, i + j)]
    means = [mean for mean, _, count in pools for _ in range(count)]
    return means[-1], {cap: mean / means[-1] for cap, mean in zip(points, means, strict=True)}
