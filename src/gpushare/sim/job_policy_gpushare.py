"""Our packing for the job-level simulator: by predicted progress, cautiously (docs/design.md 5).

Aggressive: a waiting job joins the GPU, under the cap, where the predicted gain in summed progress is highest.
Cautious: only where the upper bound of every tenant's predicted slowdown stays within what that tenant tolerates.
When observed progress says that the prediction was wrong, the newest tenant leaves and the set is remembered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gpushare.research.dataset import Mechanism
from gpushare.sim.jobs import JobCluster
from gpushare.sim.truth import TenantKind

CAPS: Final = (100, 75, 50, 33, 25)  # what calibration measures; between them the model interpolates
MOST_TENANTS: Final = 6
LEAST_GAIN: Final = (
    0.05  # a newcomer that adds less than the predictor's own error of a pair is not worth a neighbour
)
RETRACTION_SECONDS: Final = 60.0  # several 10 s windows of the node agent
INFERENCE_ERROR: Final = 0.05  # of observed progress: docs/facts.md 31, pairs, mean absolute error 0.052
LOOK_AHEAD_JOBS: Final = 16  # of the queue, when a free GPU's first set of tenants is formed

PredictKinds = Callable[[tuple[TenantKind, ...]], tuple[Sequence[float], Sequence[float]]]
"""Set of tenants -> (expected progress, cautious lower bound) of each."""


@dataclass(slots=True)
class GpuSharePolicy:
    """Predicted progress, cautious bound, retraction.

    Attributes:
        predict: the interference model as the live system asks it, from solo signatures only.
        has_caps: whether the colocation data knows caps; without, every tenant runs uncapped.
        rng: draws the error of observed progress.
    """

    predict: PredictKinds
    rng: np.random.Generator
    has_caps: bool = True
    most_tenants: int = MOST_TENANTS
    name: str = "gpushare"
    mechanism: Mechanism = Mechanism.MPS
    _wrong: set[tuple[TenantKind, ...]] = field(default_factory=set)
    _slow_since: dict[int, float] = field(default_factory=dict)
    _known: dict[tuple[TenantKind, ...], tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)
    _noise: dict[tuple[int, tuple[TenantKind, ...]], float] = field(default_factory=dict)

    def schedule(self, cluster: JobCluster) -> None:
        """Take back what went wrong, then give waiting jobs their places."""
        self._retract(cluster)
        free = cluster.free_gpus()
        while free and cluster.queue:
            self._fill(cluster, free.pop(0), gpus_left=len(free))
        for job in list(cluster.queue):
            self._join(cluster, job)
        self._watch(cluster)

    def _caps(self) -> tuple[int, ...]:
        return CAPS if self.has_caps else (100,)

    def _fill(self, cluster: JobCluster, gpu: int, *, gpus_left: int) -> None:
        """Form the best set for a free GPU out of the head of the queue and its best companions."""
        head = cluster.queue[0]
        chosen = [head]
        kinds: tuple[TenantKind, ...] = (TenantKind(cluster.jobs[head].workload, 100),)
        value = 1.0
        while len(cluster.queue) - len(chosen) > gpus_left and len(chosen) < self._most(cluster):
            best: tuple[float, int, tuple[TenantKind, ...]] | None = None
            for job in [j for j in cluster.queue[:LOOK_AHEAD_JOBS] if j not in chosen]:
                members = [*chosen, job]
                if not _memory_fits(cluster, members):
                    continue
                for cap in self._caps():
                    candidate = tuple(TenantKind(cluster.jobs[j].workload, cap) for j in members)
                    total = self._value(cluster, candidate, members)
                    if total is not None and (best is None or total > best[0]):
                        best = (total, job, candidate)
            if best is None or best[0] < value + LEAST_GAIN:
                break
            value, kinds = best[0], best[2]
            chosen.append(best[1])
        for job, kind in zip(chosen, kinds, strict=True):
            cluster.start(job, gpu, kind.thread_percentage)

    def _join(self, cluster: JobCluster, job: int) -> None:
        """Put one waiting job beside running ones, where and under which cap it adds most."""
        best: tuple[float, int, int] | None = None
        seen: dict[tuple[TenantKind, ...], bool] = {}
        for gpu, tenants in enumerate(cluster.gpus):
            present = cluster.kinds(gpu)
            if present in seen or len(tenants) >= self._most(cluster) or not cluster.memory_fits(gpu, job):
                continue
            seen[present] = True
            members = [*(tenant.job for tenant in tenants), job]
            before = sum(self._predicted(present)[0])
            for cap in self._caps():
                candidate = (*present, TenantKind(cluster.jobs[job].workload, cap))
                total = self._value(cluster, candidate, members)
                if (
                    total is not None
                    and total >= before + LEAST_GAIN
                    and (best is None or total - before > best[0])
                ):
                    best = (total - before, gpu, cap)
        if best is not None:
            cluster.start(job, best[1], best[2])

    def _value(self, cluster: JobCluster, kinds: tuple[TenantKind, ...], members: Sequence[int]) -> float | None:
        """Predicted summed progress, or None where a tenant's tolerance may be broken or experience says no."""
        if tuple(sorted(kinds)) in self._wrong:
            return None
        expected, lower = self._predicted(kinds)
        for job, bound in zip(members, lower, strict=True):
            if bound * cluster.jobs[job].max_slowdown < 1:
                return None
        return sum(expected)

    def _predicted(self, kinds: tuple[TenantKind, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if not kinds:
            return (), ()
        if kinds not in self._known:
            expected, lower = self.predict(kinds)
            self._known[kinds] = (tuple(expected), tuple(lower))
        return self._known[kinds]

    def _retract(self, cluster: JobCluster) -> None:
        """The newest tenant leaves a GPU on which someone was observed too slow for long enough."""
        since = self._slow_since
        for gpu, tenants in enumerate(cluster.gpus):
            waits = [cluster.now_seconds - since[tenant.job] for tenant in tenants if tenant.job in since]
            if len(tenants) > 1 and max(waits, default=0.0) >= RETRACTION_SECONDS - 1e-6:
                self._wrong.add(tuple(sorted(cluster.kinds(gpu))))
                for tenant in tenants:
                    since.pop(tenant.job, None)
                cluster.retract(tenants[-1].job, gpu)

    def _watch(self, cluster: JobCluster) -> None:
        """Note who is observed beyond its tolerance and since when; look again when that lasted too long."""
        for gpu, tenants in enumerate(cluster.gpus):
            kinds = cluster.kinds(gpu)
            for tenant, progress in zip(tenants, cluster.progress(gpu), strict=True):
                ready = tenant.ready_seconds <= cluster.now_seconds
                observed = self._observed(tenant.job, kinds, progress)
                if len(tenants) > 1 and ready and observed * cluster.jobs[tenant.job].max_slowdown < 1:
                    since = self._slow_since.setdefault(tenant.job, cluster.now_seconds)
                    cluster.wake_at(since + RETRACTION_SECONDS)
                else:
                    self._slow_since.pop(tenant.job, None)

    def _observed(self, job: int, kinds: tuple[TenantKind, ...], progress: float) -> float:
        """Inferred progress: the truth with an error that stays while the set stays."""
        key = (job, kinds)
        if key not in self._noise:
            self._noise[key] = float(self.rng.normal(0.0, INFERENCE_ERROR))
        return max(0.01, progress + self._noise[key])

    def _most(self, cluster: JobCluster) -> int:
        return min(self.most_tenants, cluster.truth.max_tenants)


def _memory_fits(cluster: JobCluster, jobs: Sequence[int]) -> bool:
    needs = sum(cluster.truth.memory_mib(cluster.jobs[job].workload) for job in jobs)
    return needs <= cluster.truth.gpu_memory_mib
