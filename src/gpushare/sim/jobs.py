"""Job-level simulator: jobs arrive at GPUs and progress at the rates of a truth; exact between events.

A policy places, caps and retracts; the simulator moves time from event to event (an arrival, an end, a restarted
job that is ready, a wake-up that a policy asked for) and keeps the accounts. Between events every rate is
constant, so nothing is approximated. Times are seconds of simulated time; work is seconds of running alone on a
whole GPU.
"""

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gpushare.core.api import JobClass
from gpushare.core.control import turns_of
from gpushare.research.dataset import Mechanism
from gpushare.sim.truth import TenantKind, Truth

# Time to start a container and a CUDA context (docs/facts.md 13), pull an image and warm up the data loader.
RESTART_SECONDS: Final = 30.0
_EPSILON: Final = 1e-9


class SimulationError(Exception):
    """The trace does not match the truth; one sentence."""


class StuckPolicyError(SimulationError):
    """A policy leaves jobs waiting for ever; another one may run the trace to its end."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a trace.

    Attributes:
        solo_seconds: how long it takes alone.
        max_slowdown: tolerated slowdown.
        fraction: its pod's fraction; only read by policies that count shares.
        job_class: its pod's class; likewise.
        promise: promised progress; None for 1 / max_slowdown.
        start_seconds: time on a GPU before it makes progress: context, model, first compilation.
        is_auto: whether its fraction was chosen by `auto`.
    """

    name: str
    workload: str
    submit_seconds: float
    solo_seconds: float
    max_slowdown: float
    fraction: str = "auto"
    job_class: JobClass = JobClass.THROUGHPUT
    promise: float | None = None
    start_seconds: float = 0.0
    is_auto: bool = False

    @property
    def least_progress(self) -> float:
        """Return the progress below which a second on a GPU counts as late."""
        return self.promise if self.promise is not None else 1.0 / self.max_slowdown


@dataclass(slots=True)
class JobTenant:
    """A job on a GPU.

    Attributes:
        thread_percentage: its cap.
        since_seconds: when it started there.
        ready_seconds: when it starts to progress (restarts take time).
        duty_ratio: part of the time in which it is not frozen, 0 to 1.
        is_stopped: whether it is frozen all the time, whatever its duty, as for a reading of its neighbour.
    """

    job: int
    thread_percentage: int
    since_seconds: float
    ready_seconds: float
    duty_ratio: float = 1.0
    is_stopped: bool = False

    def runs_at(self, seconds: float) -> bool:
        """Return whether it is ready and not stopped."""
        return self.ready_seconds <= seconds + _EPSILON and not self.is_stopped


@dataclass(frozen=True, slots=True)
class JobRetraction:
    """One job taken back: when, and (job, cap) of all tenants of its GPU, itself included."""

    seconds: float
    job: int
    tenants: tuple[tuple[int, int], ...]


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
        """Return time on a GPU divided by time alone; at least 1, up to rounding."""
        return self.run_seconds / self.solo_seconds


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of constant rates.

    Attributes:
        gpus_in_use: number of GPUs with a job.
        summed_progress: progress of all jobs.
        waiting: number of waiting jobs.
        gpus_shared: number of GPUs with two or more jobs.
        gpus_modelled: number of shared GPUs whose rates were not measured.
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
    """One simulation: every job's result in trace order, and the cluster over time.

    Attributes:
        latency_seconds: by (progress, promise) of latency jobs, the seconds that they spent so on GPUs.
    """

    policy: str
    gpus: int
    jobs: tuple[JobResult, ...]
    spans: tuple[Span, ...]
    latency_seconds: Mapping[tuple[float, float], float] = field(default_factory=dict)
    retractions: tuple[JobRetraction, ...] = ()


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
        """Return the progress of all submitted unfinished jobs; missing ones make none."""
        ...


@dataclass(slots=True)
class JobCluster:
    """The state that a policy reads and changes.

    Attributes:
        gpus: tenants of each GPU, oldest first.
        queue: waiting jobs, by submission.
        now_seconds: simulated time.
        remaining_seconds: work left, by job.
        wake_seconds: when the policy asked to be called again.
    """

    jobs: Sequence[Job]
    truth: Truth
    mechanism: Mechanism
    gpus: list[list[JobTenant]]
    queue: list[int] = field(default_factory=list)
    now_seconds: float = 0.0
    remaining_seconds: dict[int, float] = field(default_factory=dict)
    retractions: dict[int, int] = field(default_factory=dict)
    retracted: list[JobRetraction] = field(default_factory=list)
    wake_seconds: float = math.inf
    _known: dict[tuple[TenantKind, ...], tuple[float, ...]] = field(default_factory=dict)
    _seen: dict[int, "_GpuRates"] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def start(self, job: int, gpu: int, thread_percentage: int = 100) -> None:
        """Start a waiting job on a GPU; a retracted one needs at least RESTART_SECONDS until it is ready."""
        self.queue.remove(job)
        start = self.jobs[job].start_seconds
        ready = self.now_seconds + (max(start, RESTART_SECONDS) if self.retractions.get(job) else start)
        self.gpus[gpu].append(JobTenant(job, thread_percentage, self.now_seconds, ready))
        self._seen.pop(gpu, None)

    def retract(self, job: int, gpu: int) -> None:
        """Move a running job to the head of the queue; it keeps the work done."""
        tenants = self.gpus[gpu]
        self.retracted.append(
            JobRetraction(self.now_seconds, job, tuple((t.job, t.thread_percentage) for t in tenants))
        )
        tenants.remove(next(tenant for tenant in tenants if tenant.job == job))
        self._seen.pop(gpu, None)
        self.retractions[job] = self.retractions.get(job, 0) + 1
        self.queue.insert(0, job)

    def throttle(self, gpu: int, duties: Mapping[int, float]) -> None:
        """Freeze tenants for a part of the time from now on; jobs that are not named run free."""
        for tenant in self.gpus[gpu]:
            tenant.duty_ratio = duties.get(tenant.job, 1.0)
        self._seen.pop(gpu, None)

    def stop(self, gpu: int, jobs: Collection[int]) -> None:
        """Freeze these jobs wholly from now on; all others of the GPU run as their duties say."""
        for tenant in self.gpus[gpu]:
            tenant.is_stopped = tenant.job in jobs
        self._seen.pop(gpu, None)

    def cap(self, gpu: int, thread_percentages: Mapping[int, int]) -> None:
        """Give running jobs other caps at once, which no real system can; jobs that are not named keep theirs."""
        for tenant in self.gpus[gpu]:
            tenant.thread_percentage = thread_percentages.get(tenant.job, tenant.thread_percentage)
        self._seen.pop(gpu, None)

    def end(self, job: int) -> None:
        """Remove a job that has ended from its GPU or the queue."""
        del self.remaining_seconds[job]
        if job in self.queue:
            self.queue.remove(job)
        for gpu, tenants in enumerate(self.gpus):
            if any(tenant.job == job for tenant in tenants):
                tenants[:] = [tenant for tenant in tenants if tenant.job != job]
                self._seen.pop(gpu, None)

    def number_of(self, name: str) -> int:
        """Return a job's number in the trace."""
        if not self._numbers:
            self._numbers.update((job.name, index) for index, job in enumerate(self.jobs))
        return self._numbers[name]

    def wake_at(self, seconds: float) -> None:
        """Ask to be called again at this time at the latest."""
        later = max(self.now_seconds + _EPSILON, math.nextafter(self.now_seconds, math.inf))
        self.wake_seconds = min(self.wake_seconds, max(seconds, later))

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

    def takes(self, gpu: int, job: int) -> bool:
        """Return whether the job may join the GPU's tenants: the truth offers that set, and the memory fits."""
        names = [self.jobs[tenant.job].workload for tenant in self.gpus[gpu]]
        return self.truth.offers([*names, self.jobs[job].workload]) and self.memory_fits(gpu, job)

    def progress(self, gpu: int) -> tuple[float, ...]:
        """Return the tenants' true progress, oldest first; one that is not ready has 0 and affects no other."""
        return self.look(gpu).progress

    def look(self, gpu: int) -> "_GpuRates":
        """Return the GPU's present rates."""
        known = self._seen.get(gpu)
        if known is None or known.until_seconds <= self.now_seconds + _EPSILON:
            self._seen[gpu] = known = self._look(gpu)
        return known

    def _look(self, gpu: int) -> "_GpuRates":
        tenants = self.gpus[gpu]
        waits = [t.ready_seconds for t in tenants if t.ready_seconds > self.now_seconds + _EPSILON]
        ready = [t for t in tenants if t.runs_at(self.now_seconds)]
        kinds = tuple(TenantKind(self.jobs[t.job].workload, t.thread_percentage) for t in ready)
        rates = iter(mixture(self.rates_of, kinds, [t.duty_ratio for t in ready]))
        found = tuple(next(rates) if t.runs_at(self.now_seconds) else 0.0 for t in tenants)
        is_shared = len(tenants) > 1
        is_measured = is_shared and self.truth.is_measured(self.kinds(gpu), self.mechanism)
        return _GpuRates(found, min(waits, default=math.inf), is_shared, is_measured)

    def shared_gpus(self) -> tuple[int, int]:
        """Count the GPUs with two or more tenants, and those of them whose rates were not measured."""
        shared = [each for gpu in range(len(self.gpus)) if (each := self.look(gpu)).is_shared]
        return len(shared), sum(not each.is_measured for each in shared)

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


@dataclass(frozen=True, slots=True)
class _GpuRates:
    """The tenants' progress, oldest first, valid until a tenant comes, leaves, is throttled or becomes ready."""

    progress: tuple[float, ...]
    until_seconds: float
    is_shared: bool
    is_measured: bool


def mixture(
    rates_of: Callable[[tuple[TenantKind, ...]], tuple[float, ...]],
    kinds: tuple[TenantKind, ...],
    duties: Sequence[float],
) -> tuple[float, ...]:
    """Return the progress of tenants of which some are frozen for a part of the time, one after the other.

    Args:
        rates_of: returns the progress of a running set.
        duties: part of the time in which each tenant runs, 0 to 1.
    """
    if not any(duty < 1.0 for duty in duties):
        return rates_of(kinds) if kinds else ()
    total = [0.0] * len(kinds)
    for weight, running in turns_of(duties):
        rates = rates_of(tuple(kinds[index] for index in running)) if running else ()
        for index, rate in zip(running, rates, strict=True):
            total[index] += weight * rate
    return tuple(total)


OnSpan = Callable[[JobCluster, Mapping[int, float], float], None]
"""Called with the cluster, the progress by job, and until when both stay unchanged."""


def simulate(
    jobs: Sequence[Job],
    gpus: int,
    policy: JobPolicy,
    truth: Truth,
    *,
    on_end: Callable[[], None] = lambda: None,
    on_span: "OnSpan" = lambda _cluster, _rates, _until: None,
) -> Outcome:
    """Run a trace to its end.

    Args:
        on_end: called when a job ends.
        on_span: called for each stretch of constant rates, before time moves on.

    Raises:
        SimulationError: a job's workload is unknown to the truth, or needs more memory than a GPU has.
        StuckPolicyError: the policy leaves jobs waiting for ever.
    """
    _check(jobs, gpus, truth)
    cluster = JobCluster(jobs, truth, policy.mechanism, [[] for _ in range(gpus)])
    arrivals = [(job.submit_seconds, index) for index, job in enumerate(jobs)]
    heapq.heapify(arrivals)
    fluid: Callable[[JobCluster], Mapping[int, float]] | None = getattr(policy, "rates", None)
    account = _JobAccounts(jobs)
    ended: dict[int, float] = {}
    cluster.now_seconds = arrivals[0][0] if arrivals else 0.0

    while len(ended) < len(jobs):
        while arrivals and arrivals[0][0] <= cluster.now_seconds + _EPSILON:
            _, index = heapq.heappop(arrivals)
            cluster.queue.append(index)
            cluster.remaining_seconds[index] = jobs[index].solo_seconds
        cluster.wake_seconds = math.inf
        policy.schedule(cluster)

        rates = dict(fluid(cluster)) if fluid else _placed_rates(cluster)
        active = {index: rate for index, rate in rates.items() if index in cluster.remaining_seconds}
        until = min(arrivals[0][0] if arrivals else math.inf, cluster.wake_seconds, _next_ready(cluster))
        ends = {
            index: cluster.now_seconds + cluster.remaining_seconds[index] / rate
            for index, rate in rates.items()
            if rate > 0
        }
        until = min(until, min(ends.values(), default=math.inf))
        if math.isinf(until):
            raise StuckPolicyError(
                f"policy {policy.name} leaves {len(cluster.queue)} jobs waiting for ever, "
                f'the first is "{jobs[cluster.queue[0]].name}"'
            )
        elapsed = max(0.0, until - cluster.now_seconds)
        if elapsed > 0:
            for index, rate in active.items():
                cluster.remaining_seconds[index] -= rate * elapsed
            account.add(cluster, active, sum(rates.values()), until)
            on_span(cluster, active, until)
        cluster.now_seconds = until
        for index in active:
            # by its end as well: what rounding of a late time leaves of its work may be too little to move time
            is_due = ends.get(index, math.inf) <= until
            if is_due or cluster.remaining_seconds[index] <= _EPSILON * max(1.0, jobs[index].solo_seconds):
                cluster.end(index)
                ended[index] = until
                on_end()
    return account.outcome(policy.name, cluster, ended)


class _JobAccounts:
    """Accounts of every job, and of the cluster over time."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._run = [0.0] * len(jobs)
        self._late = [0.0] * len(jobs)
        self._least = [job.least_progress * (1 - 1e-6) for job in jobs]
        self._is_latency = [job.job_class is JobClass.LATENCY for job in jobs]
        self._latency: dict[tuple[float, float], float] = {}
        self._spans: list[Span] = []

    def add(self, cluster: JobCluster, rates: Mapping[int, float], summed: float, until: float) -> None:
        """Add a stretch of constant rates that starts now."""
        begin = cluster.now_seconds
        elapsed = until - begin
        for index, rate in rates.items():
            self._run[index] += elapsed
            if rate < self._least[index]:
                self._late[index] += elapsed
            if self._is_latency[index]:
                key = (rate, self._jobs[index].least_progress)
                self._latency[key] = self._latency.get(key, 0.0) + elapsed
        placed = len(cluster.gpus) - len(cluster.free_gpus())
        in_use = placed or min(len(cluster.gpus), len(rates))
        self._spans.append(Span(begin, until, in_use, summed, len(cluster.queue), *cluster.shared_gpus()))

    def outcome(self, policy: str, cluster: JobCluster, ended: Mapping[int, float]) -> Outcome:
        """Return the whole simulation."""
        results = tuple(
            JobResult(
                job.name,
                job.workload,
                job.submit_seconds,
                ended[index],
                job.solo_seconds,
                self._run[index],
                self._late[index],
                cluster.retractions.get(index, 0),
            )
            for index, job in enumerate(self._jobs)
        )
        return Outcome(
            policy, len(cluster.gpus), results, tuple(self._spans), self._latency, tuple(cluster.retracted)
        )


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
    return min((cluster.look(gpu).until_seconds for gpu in range(len(cluster.gpus))), default=math.inf)
