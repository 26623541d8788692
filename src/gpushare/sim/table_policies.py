"""The policies that ours is compared with on the table: one job per GPU, equal replicas, shares as caps.

Waiting jobs are tried in the order of arrival, and a job that fits nowhere does not delay the next, as in
kube-scheduler.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import JobClass
from gpushare.research.dataset import Mechanism
from gpushare.sim.jobs import Job, JobCluster

WHOLE: Final = 100


def share_percent(job: Job) -> int:
    """Return the share that a job requests, 1 to 100."""
    return round(100 * float(job.fraction))


def waiting(cluster: JobCluster) -> Iterator[int]:
    """Yield waiting jobs in order; of equal ones only the first that was not started."""
    refused: set[object] = set()
    for job in list(cluster.queue):
        asked = cluster.jobs[job]
        kind = (asked.workload, asked.fraction, asked.job_class)
        if kind in refused:
            continue
        yield job
        if cluster.queue and job in cluster.queue:
            refused.add(kind)


@dataclass(slots=True)
class Replicas:
    """Every GPU has a number of equal places, as NVIDIA's device plugin makes them; shares are ignored."""

    name: str
    mechanism: Mechanism
    places: int
    thread_percentage: int = WHOLE

    def schedule(self, cluster: JobCluster) -> None:
        """Start each job on the GPU with the fewest tenants."""
        for job in waiting(cluster):
            room = [
                (len(tenants), gpu)
                for gpu, tenants in enumerate(cluster.gpus)
                if len(tenants) < self.places and cluster.takes(gpu, job)
            ]
            if room:
                cluster.start(job, min(room)[1], self.thread_percentage)


@dataclass(slots=True)
class HardCaps:
    """A job's share is its cap, whatever its neighbours, and shares sum to at most 100: HAMi, and ours until now.

    A latency job runs uncapped, as with ours; its share is counted like any other.
    """

    name: str = "hard-caps"
    mechanism: Mechanism = Mechanism.MPS

    def schedule(self, cluster: JobCluster) -> None:
        """Start each job on the GPU with the most free share, as HAMi's default (spread) does."""
        given_percent = [sum(share_percent(cluster.jobs[t.job]) for t in tenants) for tenants in cluster.gpus]
        for job in waiting(cluster):
            share = share_percent(cluster.jobs[job])
            room = [
                (each, gpu)
                for gpu, each in enumerate(given_percent)
                if each + share <= WHOLE and cluster.takes(gpu, job)
            ]
            if room:
                gpu = min(room)[1]
                is_latency = cluster.jobs[job].job_class is JobClass.LATENCY
                cluster.start(job, gpu, WHOLE if is_latency else share)
                given_percent[gpu] += share


def exclusive() -> Replicas:
    """Return whole GPUs: no sharing."""
    return Replicas("exclusive", Mechanism.MPS, 1)


def time_slicing() -> Replicas:
    """Return four replicas that take turns."""
    return Replicas("time-slicing", Mechanism.TIME_SLICING, 4)


def mps_pairs() -> Replicas:
    """Return two uncapped jobs per GPU under MPS."""
    return Replicas("mps-pairs", Mechanism.MPS, 2)


def mps_equal() -> Replicas:
    """Return four jobs per GPU under MPS at 25% each."""
    return Replicas("mps-equal", Mechanism.MPS, 4, 25)
