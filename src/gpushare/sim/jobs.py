"""Job-level simulator: jobs arrive at GPUs and progress at the rates of a truth; exact between events.

A policy places, caps and retracts; the simulator moves time from event to event (an arrival, an end, a restarted
job that is ready, a wake-up that a policy asked for) and keeps the accounts. Between events every rate is
constant, so nothing is approximated. Times are seconds of simulated time; work is seconds of running alone on a
whole GPU.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gpushare.core.api import JobClass
from gpushare.research.dataset import Mechanism
from gpushare.sim.truth import TenantKind, Truth

# Start of a container and a CUDA context (docs/facts.md 13), pull of an image, data loader warm again.
RESTART_SECONDS: Final = 30.0
_EPSILON: Final = 1e-9


class SimulationError(Exception):
    """The trace does not match the truth; one sentence."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a trace.

    Attributes:
        solo_seconds: how long it takes alone; max_slowdown: what it tolerates.
        fraction, job_class: what its pod asks for; only our own policy reads them.
    """

    name: str
    workload: str
    submit_seconds: float
    solo_seconds: float
    max_slowdown: float
    fraction: str = "auto"
    job_class: JobClass = JobClass.THROUGHPUT


@dataclass(slots=True)
class JobTenant:
    """A job on a GPU: its cap in percent, since when, and when it is ready to progress (restarts take time)."""

    job: int
    thread_percentage: int
    since_seconds: float
    ready_seconds: float


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of one job: `run_seconds` on a GPU, `late_seconds` of them slower than tolerated."""

    name: str
    workload: str
    submit_seconds: float
    end_seconds: float
    solo_seconds: float
    run_seconds: float
    late_seconds: float
    retractions: int

    @property
    def completion_seconds(self) -> float:
        """Return the time from submission to end."""
        return self.end_seconds - self.submit_seconds

    @property
    def slowdown(self) -> float:
        """Return time on a GPU over time alone, at least 1 up to rounding."""
        return self.run_seconds / self.solo_seconds


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of constant rates.

    Attributes:
        gpus_in_use, summed_progress, waiting: GPUs with a job, progress of all jobs, jobs that wait.
        gpus_shared: GPUs with two or more jobs; gpus_modelled: those of them whose rates were not measured.
    """

    begin_seconds: float
    end_seconds: float
    gpus_in_use: float
    summed_progress: float
    waiting: int
    gpus_shared: int = 0
    gpus_modelled: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulation: every job's result in trace order, and the cluster over time."""

    policy: str
    gpus: int
    jobs: tuple[JobResult, ...]
    spans: tuple[Span, ...]


class JobPolicy(Protocol):
    """Decides at every event; `mechanism` says how tenants of one GPU share it."""

    name: str
    mechanism: Mechanism

    def schedule(self, cluster: "JobCluster") -> None:
        """Start, cap or retract jobs by calling the cluster's methods."""
        ...


class FluidPolicy(JobPolicy, Protocol):
    """A policy that splits time itself: it sets every active job's rate instead of placing it."""

    def rates(self, cluster: "JobCluster") -> Mapping[int, float]:
        """Job -> progress for all submitted unfinished jobs; absent means 0."""
        ...


@dataclass(slots=True)
class JobCluster:
    """The state that a policy sees and acts on.

    Attributes:
        now_seconds: simulated time.
        queue: submitted jobs that wait, by submission; gpus: tenants of each GPU, oldest first.
        remaining_seconds: work left by job; wake_seconds: when the policy asked to be called again.
    """

    jobs: Sequence[Job]
    truth: Truth
    mechanism: Mechanism
    gpus: list[list[JobTenant]]
    queue: list[int] = field(default_factory=list)
    now_seconds: float = 0.0
    remaining_seconds: dict[int, float] = field(default_factory=dict)
    retractions: dict[int, int] = field(default_factory=dict)
    wake_seconds: float = math.inf
    _known: dict[tuple[TenantKind, ...], tuple[float, ...]] = field(default_factory=dict)

    def start(self, job: int, gpu: int, thread_percentage: int = 100) -> None:
        """Start a waiting job on a GPU; one that was retracted before needs RESTART_SECONDS to be ready."""
        self.queue.remove(job)
        ready = self.now_seconds + (RESTART_SECONDS if self.retractions.get(job) else 0.0)
        self.gpus[gpu].append(JobTenant(job, thread_percentage, self.now_seconds, ready))

    def retract(self, job: int, gpu: int) -> None:
        """Move a running job to the head of the queue; it keeps the work done."""
        tenants = self.gpus[gpu]
        tenants.remove(next(tenant for tenant in tenants if tenant.job == job))
        self.retractions[job] = self.retractions.get(job, 0) + 1
        self.queue.insert(0, job)

    def wake_at(self, seconds: float) -> None:
        """Ask to be called again at this time at the latest."""
        self.wake_seconds = min(self.wake_seconds, max(seconds, self.now_seconds + _EPSILON))

    def kinds(self, gpu: int) -> tuple[TenantKind, ...]:
        """Return (workload, thread percentage) of the GPU's tenants, oldest first."""
        return tuple(TenantKind(self.jobs[t.job].workload, t.thread_percentage) for t in self.gpus[gpu])

    def free_gpus(self) -> list[int]:
        """Return the GPUs without tenants."""
        return [gpu for gpu, tenants in enumerate(self.gpus) if not tenants]

    def memory_fits(self, gpu: int, job: int) -> bool:
        """Return whether the job's memory fits beside the GPU's tenants'."""
        needs = [self.truth.memory_mib(self.jobs[t.job].workload) for t in self.gpus[gpu]]
        return sum(needs) + self.truth.memory_mib(self.jobs[job].workload) <= self.truth.gpu_memory_mib

    def progress(self, gpu: int) -> tuple[float, ...]:
        """Return the tenants' true progress, oldest first; one that is not ready has 0 and affects nobody."""
        tenants = self.gpus[gpu]
        ready = [tenant.ready_seconds <= self.now_seconds + _EPSILON for tenant in tenants]
        kinds = tuple(kind for kind, is_ready in zip(self.kinds(gpu), ready, strict=True) if is_ready)
        rates = iter(self.rates_of(kinds))
        return tuple(next(rates) if is_ready else 0.0 for is_ready in ready)

    def shared_gpus(self) -> tuple[int, int]:
        """Count the GPUs with two or more tenants, and those of them whose rates were not measured."""
        shared = [gpu for gpu, tenants in enumerate(self.gpus) if len(tenants) > 1]
        return len(shared), sum(not self.truth.is_measured(self.kinds(gpu), self.mechanism) for gpu in shared)

    def rates_of(self, kinds: tuple[TenantKind, ...]) -> tuple[float, ...]:
        """Return the true rates of a set, cached by its sorted form."""
        order = sorted(range(len(kinds)), key=lambda index: kinds[index])
        key = tuple(kinds[index] for index in order)
        if key not in self._known:
            self._known[key] = self.truth.progress(key, self.mechanism) if key else ()
        result = [0.0] * len(kinds)
        for position, rate in zip(order, self._known[key], strict=True):
            result[position] = rate
        return tuple(result)


def simulate(
    jobs: Sequence[Job],
    gpus: int,
    policy: JobPolicy,
    truth: Truth,
    *,
    on_end: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a trace to its end.

    Raises:
        SimulationError: a job's workload is unknown to the truth, needs more memory than a GPU has, or the policy
            leaves jobs waiting for ever.
    """
    _check(jobs, gpus, truth)
    cluster = JobCluster(jobs, truth, policy.mechanism, [[] for _ in range(gpus)])
    arrivals = [(job.submit_seconds, index) for index, job in enumerate(jobs)]
    heapq.heapify(arrivals)
    fluid: Callable[[JobCluster], Mapping[int, float]] | None = getattr(policy, "rates", None)
    run_seconds: dict[int, float] = dict.fromkeys(range(len(jobs)), 0.0)
    late_seconds: dict[int, float] = dict.fromkeys(range(len(jobs)), 0.0)
    ended: dict[int, float] = {}
    spans: list[Span] = []
    cluster.now_seconds = arrivals[0][0] if arrivals else 0.0

    while len(ended) < len(jobs):
        while arrivals and arrivals[0][0] <= cluster.now_seconds + _EPSILON:
            _, index = heapq.heappop(arrivals)
            cluster.queue.append(index)
            cluster.remaining_seconds[index] = jobs[index].solo_seconds
        cluster.wake_seconds = math.inf
        policy.schedule(cluster)

        rates = dict(fluid(cluster)) if fluid else _placed_rates(cluster)
        until = min(arrivals[0][0] if arrivals else math.inf, cluster.wake_seconds, _next_ready(cluster))
        for index, rate in rates.items():
            if rate > 0:
                until = min(until, cluster.now_seconds + cluster.remaining_seconds[index] / rate)
        if math.isinf(until):
            raise SimulationError(
                f"policy {policy.name} leaves {len(cluster.queue)} jobs waiting for ever, "
                f'the first is "{jobs[cluster.queue[0]].name}"'
            )
        elapsed = max(0.0, until - cluster.now_seconds)
        active = [index for index in rates if index in cluster.remaining_seconds]
        for index in active:
            cluster.remaining_seconds[index] -= rates[index] * elapsed
            run_seconds[index] += elapsed
            if rates[index] * jobs[index].max_slowdown < 1 - 1e-6:
                late_seconds[index] += elapsed
        if elapsed > 0:
            placed = gpus - len(cluster.free_gpus())
            in_use = placed or min(gpus, len(active))
            shared, modelled = cluster.shared_gpus()
            spans.append(
                Span(cluster.now_seconds, until, in_use, sum(rates.values()), len(cluster.queue), shared, modelled)
            )
        cluster.now_seconds = until
        for index in active:
            if cluster.remaining_seconds[index] <= _EPSILON * max(1.0, jobs[index].solo_seconds):
                _end(cluster, index)
                ended[index] = until
                on_end()

    results = tuple(
        JobResult(
            job.name,
            job.workload,
            job.submit_seconds,
            ended[index],
            job.solo_seconds,
            run_seconds[index],
            late_seconds[index],
            cluster.retractions.get(index, 0),
        )
        for index, job in enumerate(jobs)
    )
    return Outcome(policy.name, gpus, results, tuple(spans))


def _check(jobs: Sequence[Job], gpus: int, truth: Truth) -> None:
    if gpus < 1:
        raise SimulationError("there are no GPUs to run on")
    for job in jobs:
        if job.workload not in truth.workloads:
            raise SimulationError(
                f'job "{job.name}": workload "{job.workload}" is absent from the colocation data'
            )
        if truth.memory_mib(job.workload) > truth.gpu_memory_mib:
            raise SimulationError(
                f'job "{job.name}": workload "{job.workload}" needs {truth.memory_mib(job.workload)} MiB, '
                f"a GPU has {truth.gpu_memory_mib} MiB"
            )


def _placed_rates(cluster: JobCluster) -> dict[int, float]:
    rates: dict[int, float] = {}
    for gpu, tenants in enumerate(cluster.gpus):
        for tenant, rate in zip(tenants, cluster.progress(gpu), strict=True):
            rates[tenant.job] = rate
    return rates


def _next_ready(cluster: JobCluster) -> float:
    waits = [
        t.ready_seconds for ts in cluster.gpus for t in ts if t.ready_seconds > cluster.now_seconds + _EPSILON
    ]
    return min(waits, default=math.inf)


def _end(cluster: JobCluster, job: int) -> None:
    del cluster.remaining_seconds[job]
    if job in cluster.queue:
        cluster.queue.remove(job)
    for tenants in cluster.gpus:
        tenants[:] = [tenant for tenant in tenants if tenant.job != job]
