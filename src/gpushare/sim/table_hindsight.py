"""Hindsight: a policy that knows the table, by exhaustive search at each decision.

For a set of jobs it tries every combination of caps (those measured for some set) and of duties (all free, or one
throughput tenant throttled in steps of a tenth), keeps those under which every promise holds, and takes the one
with the most summed progress. Each waiting job in turn goes where that gains most.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import numpy as np

from gpushare.core.api import JobClass
from gpushare.research.dataset import Mechanism
from gpushare.research.pairs.table import Floats
from gpushare.sim.jobs import Job, JobCluster
from gpushare.sim.table_policies import WHOLE, share_percent, waiting
from gpushare.sim.table_truth import TableTruth

CAPS: Final = (25, 33, 50, 75, 100)
DUTIES: Final = tuple(step / 10 for step in range(9, 0, -1))
_KEPT: Final = 1.0 - 1e-6


class Asker(NamedTuple):
    """Properties of a job that the search needs; equal ones are interchangeable."""

    workload: str
    promise: float
    can_throttle: bool

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return what the search must know about a job."""
        return cls(job.workload, job.least_progress, job.job_class is JobClass.THROUGHPUT)


@dataclass(frozen=True, slots=True)
class Best:
    """The best caps and duties for a set, in the given order, and the summed progress; all promises hold."""

    caps: tuple[int, ...]
    duties: tuple[float, ...]
    summed_progress: float


@dataclass(frozen=True, slots=True)
class _Options:
    """Every choice for one set of workloads.

    Attributes:
        caps: choices x tenants; duties: likewise; progress: likewise.
        throttled: which tenant is throttled, -1 for none, by choice.
    """

    caps: Floats
    duties: Floats
    progress: Floats
    throttled: Floats


class TableSearch:
    """Exhaustive search over caps and duties, cached by set."""

    def __init__(self, truth: TableTruth) -> None:
        self._truth = truth
        self._options: dict[tuple[str, ...], _Options] = {}
        self._found: dict[tuple[tuple[Asker, int | None], ...], Best | None] = {}
        self._kept: dict[tuple[tuple[Asker, int], ...], bool] = {}

    def best(self, askers: Sequence[Asker], caps: Sequence[int | None]) -> Best | None:
        """Return the best way to run this set; None if it is not offered or a promise would not hold.

        Args:
            caps: caps of running tenants; None for a tenant whose cap is free.
        """
        if not askers:
            return Best((), (), 0.0)
        if not self._truth.offers([asker.workload for asker in askers]):
            return None
        order = sorted(range(len(askers)), key=lambda at: askers[at])
        key = tuple((askers[at], caps[at]) for at in order)
        if key not in self._found:
            self._found[key] = self._search([askers[at] for at in order], [caps[at] for at in order])
        found = self._found[key]
        if found is None:
            return None
        back = sorted(range(len(order)), key=lambda place: order[place])
        return Best(
            tuple(found.caps[at] for at in back), tuple(found.duties[at] for at in back), found.summed_progress
        )

    def keeps(self, askers: Sequence[Asker], caps: Sequence[int]) -> bool:
        """Return whether the promises of a set under these caps can be kept, by throttling one tenant or none."""
        order = sorted(range(len(askers)), key=lambda at: askers[at])
        key = tuple((askers[at], caps[at]) for at in order)
        if key not in self._kept:
            names = tuple(askers[at].workload for at in order)
            options = self._choices(names, [(caps[at],) for at in order])
            self._kept[key] = bool(self._allowed(options, [askers[at] for at in order]).any())
        return self._kept[key]

    def _search(self, askers: list[Asker], caps: list[int | None]) -> Best | None:
        names = tuple(asker.workload for asker in askers)
        if names not in self._options:
            self._options[names] = self._choices(names, [CAPS] * len(names))
        options = self._options[names]
        allowed = self._allowed(options, askers)
        for at, cap in enumerate(caps):
            if cap is not None:
                allowed &= options.caps[:, at] == cap
        if not allowed.any():
            return None
        summed = np.where(allowed, options.progress.sum(axis=1), -np.inf)
        choice = int(summed.argmax())
        return Best(
            tuple(int(cap) for cap in options.caps[choice]),
            tuple(options.duties[choice].tolist()),
            float(summed[choice]),
        )

    @staticmethod
    def _allowed(options: _Options, askers: Sequence[Asker]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        promises = np.array([asker.promise for asker in askers])
        free = [at for at, asker in enumerate(askers) if not asker.can_throttle]
        allowed = (options.progress >= _KEPT * promises).all(axis=1) & ~np.isin(options.throttled, free)
        for at in free:  # a latency tenant runs uncapped
            allowed &= options.caps[:, at] == WHOLE
        return np.asarray(allowed)

    def _choices(self, names: tuple[str, ...], caps: Sequence[Sequence[int]]) -> _Options:
        """Return all caps and duties of a set, in the order of `names`."""
        count = len(names)
        given = np.array(list(itertools.product(*caps)), float)
        free = self._truth.progress_under(names, given)
        all_free = np.ones_like(given)
        progress, duties, throttled = [free], [all_free], [np.full(len(given), -1)]
        for at in range(count if count > 1 else 0):
            others = [other for other in range(count) if other != at]
            without = np.zeros_like(free)
            without[:, others] = self._truth.progress_under([names[each] for each in others], given[:, others])
            for duty in DUTIES:
                progress.append(duty * free + (1.0 - duty) * without)
                of_duty = all_free.copy()
                of_duty[:, at] = duty
                duties.append(of_duty)
                throttled.append(np.full(len(given), at))
        return _Options(
            np.tile(given, (len(progress), 1)),
            np.concatenate(duties),
            np.concatenate(progress),
            np.concatenate(throttled),
        )


@dataclass(slots=True)
class Hindsight:
    """Each waiting job in turn goes where the summed progress, by the table, gains most.

    Attributes:
        changes_caps: whether caps of running processes may change at every decision, which no real system can;
            otherwise a job keeps the cap that it was started under.
        by_share: whether shares on a GPU sum to at most 100.
    """

    search: TableSearch
    name: str = "hindsight"
    mechanism: Mechanism = Mechanism.MPS
    changes_caps: bool = False
    by_share: bool = True
    _sets: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def schedule(self, cluster: JobCluster) -> None:
        """Run the remaining jobs on each GPU as well as possible, then place the waiting ones."""
        for gpu, tenants in enumerate(cluster.gpus):
            if self._sets.get(gpu, ()) != tuple(tenant.job for tenant in tenants):
                self._settle(cluster, gpu)
        for job in waiting(cluster):
            gains: dict[object, float] = {}
            best: tuple[float, int] | None = None
            for gpu in range(len(cluster.gpus)):
                state = self._state(cluster, gpu)
                if state not in gains:
                    gains[state] = self._gain(cluster, gpu, job)
                gain = gains[state]
                if gain > 0.0 and (best is None or gain > best[0]):
                    best = gain, gpu
            if best is not None:
                cluster.start(job, best[1])
                self._settle(cluster, best[1], newcomer=job)

    def _state(self, cluster: JobCluster, gpu: int) -> object:
        """Return everything a gain depends on, so that equal GPUs are evaluated once."""
        tenants = cluster.gpus[gpu]
        return tuple(
            (Asker.of(cluster.jobs[t.job]), t.thread_percentage, cluster.jobs[t.job].fraction) for t in tenants
        )

    def _gain(self, cluster: JobCluster, gpu: int, job: int) -> float:
        tenants = cluster.gpus[gpu]
        if (
            self.by_share
            and sum(share_percent(cluster.jobs[each]) for each in (job, *(t.job for t in tenants))) > WHOLE
        ):
            return -np.inf
        askers = [Asker.of(cluster.jobs[tenant.job]) for tenant in tenants]
        caps = [None if self.changes_caps else tenant.thread_percentage for tenant in tenants]
        after = self.search.best([*askers, Asker.of(cluster.jobs[job])], [*caps, None])
        return after.summed_progress - sum(cluster.progress(gpu)) if after is not None else -np.inf

    def _settle(self, cluster: JobCluster, gpu: int, newcomer: int | None = None) -> None:
        """Give the tenants of a GPU the best duties, and the best caps to those that may change."""
        tenants = cluster.gpus[gpu]
        self._sets[gpu] = tuple(tenant.job for tenant in tenants)
        askers = [Asker.of(cluster.jobs[tenant.job]) for tenant in tenants]
        caps = [
            None if self.changes_caps or tenant.job == newcomer else tenant.thread_percentage for tenant in tenants
        ]
        best = self.search.best(askers, caps)
        # Without a tenant that left, a window shows less than with it, so no choice keeps every promise.
        if best is None:
            cluster.throttle(gpu, {})
            return
        cluster.cap(gpu, {t.job: cap for t, cap in zip(tenants, best.caps, strict=True)})
        cluster.throttle(gpu, {t.job: duty for t, duty in zip(tenants, best.duties, strict=True)})
