"""A GPU that runs the measured table: throttling gives the exact mixture of the sets with and without a tenant."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files

import numpy as np

from gpushare import data
from gpushare.core.admission import Defaults
from gpushare.core.api import JobClass
from gpushare.core.control import turns_of
from gpushare.core.gpu import Counters
from gpushare.core.interference import Profile, promised_progress
from gpushare.research.dataset import Dataset, parse

CappedProgram = tuple[str, int]  # program, thread percentage


@dataclass(frozen=True)
class MeasuredSet:
    """Programs under caps, every subset of which was measured.

    Attributes:
        progress: of each member by position, for each subset that runs.
        promises: of each member, with an equal share of the GPU (its cap's where caps are unequal and sum to 100).
        strict_promises: what each would be promised if it were of class latency.
        latency: positions of members of class latency, which are never throttled.
    """

    members: tuple[CappedProgram, ...]
    progress: Mapping[frozenset[int], Mapping[int, float]]
    promises: tuple[float, ...]
    strict_promises: tuple[float, ...]
    latency: frozenset[int] = frozenset()

    def with_latency(self, position: int) -> "MeasuredSet":
        """Return the same set with one member of class latency."""
        promises = list(self.promises)
        promises[position] = self.strict_promises[position]
        return replace(self, promises=tuple(promises), latency=self.latency | {position})

    def at(self, duties: Sequence[float]) -> list[float]:
        """Return everyone's progress while each runs for its duty's part of the time, frozen in turn."""
        found = [0.0] * len(self.members)
        for share, running in turns_of(duties):
            for position, rate in self.progress.get(frozenset(running), {}).items():
                found[position] += share * rate
        return found

    @cached_property
    def broken(self) -> tuple[int, ...]:
        """Return the members (positions) whose promise is broken while all run unthrottled."""
        free = self.at([1.0] * len(self.members))
        return tuple(position for position, rate in enumerate(free) if rate < self.promises[position])

    @property
    def depth(self) -> float:
        """Return how far the worst-off member is below its promise while all run unthrottled."""
        free = self.at([1.0] * len(self.members))
        return max(promise - rate for promise, rate in zip(self.promises, free, strict=True))

    def best_room(self, step: float = 0.05) -> float:
        """Return the most that the worst-off member can be above its promise, over a whole grid of duties."""
        progress = self._on_grid(step)
        room = [each - promise for each, promise in zip(progress, self.promises, strict=True)]
        return float(np.minimum.reduce(room).max())

    def best_sum(self, step: float = 0.05) -> float | None:
        """Return the most summed progress with every promise kept, over a whole grid; None: none keeps them."""
        progress = self._on_grid(step)
        kept = np.logical_and.reduce(
            [each >= promise for each, promise in zip(progress, self.promises, strict=True)]
        )
        return float(np.sum(progress, axis=0)[kept].max()) if kept.any() else None

    def _on_grid(self, step: float, least: float = 0.1) -> list[np.ndarray]:
        """Return everyone's progress for every combination of duties; latency pods are not throttled."""
        grid = np.append(np.arange(least, 1.0 - step / 2, step), 1.0)
        axes = [np.ones(1) if position in self.latency else grid for position in range(len(self.members))]
        duties = np.stack(np.meshgrid(*axes, indexing="ij"))
        rates = np.zeros((2 ** len(duties), len(duties)))  # by the running set, as bits
        for subset, found in self.progress.items():
            rates[sum(1 << position for position in subset), list(found)] = list(found.values())
        # core.control.freeze_turns, for all combinations together
        ends = np.cumsum(1.0 - duties, axis=0)
        begins = ends - (1.0 - duties)
        edges = np.sort(np.concatenate([begins % 1.0, ends[-1:] % 1.0, np.ones_like(ends[:1])]), axis=0)
        progress = np.zeros_like(duties)
        for start, end in itertools.pairwise(edges):
            is_running = ((start + end) / 2 - begins) % 1.0 >= 1.0 - duties
            bits = sum(each.astype(int) << position for position, each in enumerate(is_running))
            progress += (end - start) * np.moveaxis(rates[bits], -1, 0)
        return list(progress)


def read_table() -> Dataset:
    """Read the complete table measured on an H200."""
    with (files(data) / data.H200_TABLE).open("rb") as lines:
        return parse(lines)


def measured_sets(table: Dataset, size: int) -> Iterator[MeasuredSet]:
    """Yield every set of that many programs, all of whose subsets were measured under the same caps."""
    known: dict[tuple[CappedProgram, ...], tuple[float, ...]] = {}
    for run, progress in table.shared_runs():
        found = [(tenant.workload, tenant.thread_percentage) for tenant in run.tenants]
        order = sorted(range(len(found)), key=found.__getitem__)
        known[tuple(found[i] for i in order)] = tuple(progress[i] for i in order)
    for program in table.solo:
        known |= {((program, cap),): (rate,) for cap, rate in table.cap_curve(program).items()}
    for members in sorted(key for key in known if len(key) == size):
        subsets = [chosen for n in range(1, size + 1) for chosen in itertools.combinations(range(size), n)]
        keys = [tuple(members[i] for i in subset) for subset in subsets]
        if any(key not in known for key in keys):
            continue
        rates = {
            frozenset(subset): dict(zip(subset, known[key], strict=True))
            for subset, key in zip(subsets, keys, strict=True)
        }
        yield MeasuredSet(
            members,
            rates,
            tuple(
                _promise(table, members, member, Defaults().max_slowdown_of(JobClass.THROUGHPUT))
                for member in members
            ),
            tuple(
                _promise(table, members, member, Defaults().max_slowdown_of(JobClass.LATENCY))
                for member in members
            ),
        )


def _promise(
    table: Dataset, members: tuple[CappedProgram, ...], member: CappedProgram, max_slowdown: float
) -> float:
    caps = [cap for _, cap in members]
    share = member[1] if sum(caps) <= 100 else 100 // len(members)
    curve = table.cap_curve(member[0])
    counters = table.solo_counters(member[0]) or Counters()
    return promised_progress(Profile(counters, cap_curve=curve), share, max_slowdown)
