"""Policies of other systems for the job-level simulator: placement without a predictor.

Each is a short class with its source. Jobs start in the order they were submitted; a policy says which GPU a job
may join. The common search is `_Greedy`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpushare.research.dataset import Mechanism
from gpushare.sim.jobs import JobCluster
from gpushare.sim.truth import DatasetTruth, TenantKind

# A mini-batch profile per placement; Gandiva (OSDI'18) section 4.3 looks at minutes.
GANDIVA_WINDOW_SECONDS: Final = 60.0

# NVIDIA's MIG profiles of one H200 cut into 2 + 2 + 3 of 7 compute slices with 2 + 2 + 4 of 8 memory slices
# (MIG user guide, table of H200 profiles: 2g.35gb, 2g.35gb, 3g.71gb).
MIG_SLICES: Final = ((3 / 7, 4 / 8), (2 / 7, 2 / 8), (2 / 7, 2 / 8))


@dataclass(slots=True)
class _Greedy:
    """First come, first served: each job goes to the GPU that `choose` picks among those with free places."""

    name: str
    mechanism: Mechanism
    tenants_per_gpu: int
    thread_percentage: int = 100

    def schedule(self, cluster: JobCluster) -> None:
        """Start jobs from the head of the queue until the head finds no GPU."""
        while cluster.queue:
            gpu = self.choose(cluster, cluster.queue[0])
            if gpu is None:
                return
            cluster.start(cluster.queue[0], gpu, self.thread_percentage)

    def choose(self, cluster: JobCluster, job: int) -> int | None:
        """Return the GPU with the fewest tenants that has a free place and the memory."""
        room = [
            gpu
            for gpu, tenants in enumerate(cluster.gpus)
            if len(tenants) < min(self.tenants_per_gpu, cluster.truth.max_tenants)
            and cluster.memory_fits(gpu, job)
        ]
        return min(room, key=lambda gpu: len(cluster.gpus[gpu]), default=None)


class Fifo(_Greedy):
    """One job per GPU, in order: a cluster without sharing, the baseline."""

    def __init__(self) -> None:
        super().__init__("fifo", Mechanism.MPS, 1)


class TimeSlicing(_Greedy):
    """Replicas that take turns, as NVIDIA's device plugin offers (its `timeSlicing.replicas`)."""

    def __init__(self, replicas: int = 4) -> None:
        super().__init__("time-slicing", Mechanism.TIME_SLICING, replicas)


class MpsUncapped(_Greedy):
    """MPS without caps."""

    def __init__(self, tenants: int = 4) -> None:
        super().__init__("mps-uncapped", Mechanism.MPS, tenants)


class MpsEqual(_Greedy):
    """MPS with 100/n percent each, as NVIDIA's device plugin does (its `mps.replicas`)."""

    def __init__(self, tenants: int = 4) -> None:
        super().__init__("mps-equal", Mechanism.MPS, tenants, thread_percentage=100 // tenants)


class Salus(_Greedy):
    """Pack by memory alone, first fit: Salus (MLSys'20) PACK, whose admission is the memory that jobs declare."""

    def __init__(self) -> None:
        super().__init__("salus", Mechanism.MPS, 48)

    def choose(self, cluster: JobCluster, job: int) -> int | None:
        """Return the first GPU whose memory fits."""
        most = min(self.tenants_per_gpu, cluster.truth.max_tenants)
        fitting = (
            gpu
            for gpu, tenants in enumerate(cluster.gpus)
            if len(tenants) < most and cluster.memory_fits(gpu, job)
        )
        return next(fitting, None)


@dataclass(slots=True)
class Gandiva:
    """Gandiva (OSDI'18) packing: onto the least utilised GPU, undone if worse than taking turns."""

    name: str = "gandiva"
    mechanism: Mechanism = Mechanism.MPS
    tenants_per_gpu: int = 2
    _bad: set[tuple[str, ...]] = field(default_factory=set)

    def schedule(self, cluster: JobCluster) -> None:
        """Undo packings that a measured window showed to be worse, then pack greedily."""
        for gpu, tenants in enumerate(cluster.gpus):
            if len(tenants) < 2:
                continue
            watched_until = max(max(t.since_seconds, t.ready_seconds) for t in tenants) + GANDIVA_WINDOW_SECONDS
            if cluster.now_seconds < watched_until - 1e-6:
                cluster.wake_at(watched_until)
            elif sum(cluster.progress(gpu)) < 1.0:
                self._bad.add(_names(cluster, gpu))
                cluster.retract(tenants[-1].job, gpu)
        for job in list(cluster.queue):
            chosen = self._choose(cluster, job)
            if chosen is not None:
                cluster.start(job, chosen)
                if len(cluster.gpus[chosen]) > 1:
                    cluster.wake_at(cluster.now_seconds + GANDIVA_WINDOW_SECONDS)

    def _choose(self, cluster: JobCluster, job: int) -> int | None:
        free = cluster.free_gpus()
        if free:
            return free[0]
        workload = cluster.jobs[job].workload
        most = min(self.tenants_per_gpu, cluster.truth.max_tenants)
        room = [
            gpu
            for gpu, tenants in enumerate(cluster.gpus)
            if len(tenants) < most
            and cluster.memory_fits(gpu, job)
            and tuple(sorted((*_names(cluster, gpu), workload))) not in self._bad
        ]

        def utilization(gpu: int) -> float:
            return sum(cluster.truth.busy_ratio(cluster.jobs[t.job].workload) for t in cluster.gpus[gpu])

        return min(room, key=utilization, default=None)


@dataclass(slots=True)
class Mig:
    """Static MIG slices: each job alone in one, at its measured progress under a cap of that size."""

    truth: DatasetTruth
    name: str = "mig"
    mechanism: Mechanism = Mechanism.MPS
    _slot: dict[int, int] = field(default_factory=dict)

    def schedule(self, cluster: JobCluster) -> None:
        """Give the head of the queue the largest free slice whose memory fits."""
        running = {tenant.job for tenants in cluster.gpus for tenant in tenants}
        self._slot = {job: slot for job, slot in self._slot.items() if job in running}
        for job in list(cluster.queue):
            need = self.truth.memory_mib(cluster.jobs[job].workload)
            places = [
                (slot, gpu)
                for gpu, tenants in enumerate(cluster.gpus)
                for slot, (_, memory) in enumerate(MIG_SLICES)
                if slot not in {self._slot[t.job] for t in tenants} and need <= memory * self.truth.gpu_memory_mib
            ]
            if not places:
                if need > max(memory for _, memory in MIG_SLICES) * self.truth.gpu_memory_mib:
                    continue
                return
            slot, gpu = min(places)
            cluster.start(job, gpu, round(100 * MIG_SLICES[slot][0]))
            self._slot[job] = slot

    def rates(self, cluster: JobCluster) -> dict[int, float]:
        """Return the progress alone in the slice; slices are separate hardware, so neighbours have no effect."""
        return {
            tenant.job: self.truth.alone(cluster.jobs[tenant.job].workload, tenant.thread_percentage)
            for tenants in cluster.gpus
            for tenant in tenants
        }


ScorePair = Callable[[str, str], float]


@dataclass(slots=True)
class Pairing:
    """Two jobs per GPU: a job joins the lone tenant with the highest `score`, if it is above `least`."""

    name: str
    score: ScorePair
    least: float = float("-inf")
    mechanism: Mechanism = Mechanism.MPS

    def schedule(self, cluster: JobCluster) -> None:
        """Fill free GPUs first; then find the best partner for each waiting job, in order."""
        for job in list(cluster.queue):
            free = cluster.free_gpus()
            if free:
                cluster.start(job, free[0])
                continue
            workload = cluster.jobs[job].workload
            partners = [
                (self.score(cluster.jobs[tenants[0].job].workload, workload), -gpu)
                for gpu, tenants in enumerate(cluster.gpus)
                if len(tenants) == 1 and cluster.memory_fits(gpu, job)
            ]
            if partners and max(partners)[0] > self.least:
                cluster.start(job, -max(partners)[1])


def equal_kinds(workloads: Sequence[str], thread_percentage: int = 100) -> tuple[TenantKind, ...]:
    """Return the set with the same cap for every tenant."""
    return tuple(TenantKind(workload, thread_percentage) for workload in workloads)


def _names(cluster: JobCluster, gpu: int) -> tuple[str, ...]:
    return tuple(sorted(kind.workload for kind in cluster.kinds(gpu)))
