"""Our policy on the table, knowing no more than the agents and the operator would.

A program is unknown until one of its jobs was read: alone where it runs alone, or beside neighbours that are
stopped for it, which costs them that time. Profiles, cap curves, inferred progress and learnt effects are those of
the live code (`table_agents`). Of the truth it asks only what a device shows: the counters of what runs now.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from gpushare.core.api import AUTO, JobClass
from gpushare.core.control import WatchedTenant
from gpushare.core.gpu import Counters
from gpushare.core.interference import Profile, expectation, recommended_fraction
from gpushare.core.placement import DecisionContext, Judge, KnownWorkload, PlacementRequest, Unprofiled
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import Job, JobCluster, JobTenant
from gpushare.sim.table_agents import (
    NAMESPACE,
    CounterNoise,
    GpuAgent,
    ProgramShares,
    SeenPod,
    TablePod,
    TableReading,
)
from gpushare.sim.table_ours import WINDOW_SECONDS, LiveOnTable, TableSight, share_name
from gpushare.sim.table_policies import share_percent
from gpushare.sim.table_truth import TableTruth
from gpushare.sim.truth import TenantKind

# Until the neighbours' work is in the counters again (the sampler of the agent).
SETTLE_AFTER_READING_SECONDS: Final = 0.45


@dataclass(frozen=True, slots=True)
class Profiled:
    """A program that was profiled in place: when, and how long after the agent first saw the job that was read."""

    workload: str
    at_seconds: float
    took_seconds: float


@dataclass(slots=True)
class ReadOnTable(LiveOnTable):
    """The live decision and loop, knowing what was read.

    Attributes:
        uses_model: whether decisions and inference use profiles and the model; if not, shares are the caps.
        noise: errors of counters.
        profiled: when each agent profiled a program in place.
        stopped_seconds: time for which tenants were stopped for readings, summed over them.
    """

    uses_model: bool = True
    noise: CounterNoise = field(default_factory=CounterNoise)
    profiled: list[Profiled] = field(default_factory=list)
    stopped_seconds: float = 0.0
    _shares: ProgramShares = field(init=False)
    _agents: list[GpuAgent] = field(default_factory=list)
    _known: dict[str, KnownWorkload] = field(default_factory=dict)
    _as_admitted: dict[tuple[int, int], Job] = field(default_factory=dict)
    _uids: dict[str, int] = field(default_factory=dict)
    _next_arrival: float = math.inf

    def __post_init__(self) -> None:
        LiveOnTable.__post_init__(self)
        self._requests = GpuSharePolicy(self.model, self.gpu_model, {}, self.release)
        self._shares = ProgramShares(self.gpu_model)

    def schedule(self, cluster: JobCluster) -> None:
        """Take in what was published, end readings, decide and watch as usual, then see who is to be read."""
        now = cluster.now_seconds
        if not self._agents:
            self._begin(cluster)
        before = self._shares.version
        self._next_arrival = self._shares.arrive(now)
        for gpu, agent in enumerate(self._agents):
            if self._shares.version != before and len(cluster.gpus[gpu]) > 1:
                agent.look_at = min(agent.look_at, now)
            self._end_reading(cluster, gpu, agent)
        LiveOnTable.schedule(self, cluster)
        self._read(cluster)
        for closed in self._context_now.state.closed_gpus.at(now):  # from then on it takes other jobs again
            cluster.wake_at(closed.term.until)

    def _begin(self, cluster: JobCluster) -> None:
        expected = expectation(self.model.for_gpu(self.gpu_model)) if self.uses_model else None
        rng = np.random.default_rng([self.seed, 13])

        def tell(workload: str, took: float) -> None:
            self.profiled.append(Profiled(workload, cluster.now_seconds, took))

        self._agents = [GpuAgent(self._shares, expected, self.noise, rng, tell) for _ in cluster.gpus]
        self._shares.workload_of = {job.name: share_name(job.workload) for job in cluster.jobs}
        self._uids = {job.name: index for index, job in enumerate(cluster.jobs)}

    # -- deciding

    @property
    def _context_now(self) -> DecisionContext:
        assert self._context is not None, "it is made at the first event"
        return self._context

    def _new_context(self, cluster: JobCluster) -> DecisionContext:
        """Return a context whose judge always knows what is known now, as the extender's."""
        judge = Judge(
            lambda: self.model,
            lambda uid: self._known.get(cluster.jobs[self._uids[uid]].workload),
            lambda: any(each.matters for each in self._known.values()),
            headroom_ratio=self.release.slowdown_headroom_ratio,
        )
        return replace(self._requests.new_context(cluster), judge=judge)

    def _situation(self, cluster: JobCluster) -> object:
        closed = self._context_now.state.closed_gpus.at(cluster.now_seconds)
        return LiveOnTable._situation(self, cluster), self._shares.version, closed  # noqa: SLF001 - its base

    def _keeping(self, cluster: JobCluster, context: DecisionContext) -> DecisionContext:
        self._renew(cluster)
        return LiveOnTable._keeping(self, cluster, context)  # noqa: SLF001 - its base

    def _renew(self, cluster: JobCluster) -> None:
        """Bring the knowledge about all workloads up to date; the judge starts anew if any has changed."""
        running = [cluster.jobs[tenant.job].workload for tenants in cluster.gpus for tenant in tenants]
        now = {name: self._known_now(name, running.count(name), cluster) for name in cluster.truth.workloads}
        if now != self._known:
            self._known = now
            self._context_now.judge.forget()

    def _known_now(self, workload: str, pods: int, cluster: JobCluster) -> KnownWorkload:
        share = share_name(workload)
        known = self._shares.known(share, self._learned.get(workload))
        if not self.uses_model:
            known = KnownWorkload("", "", None, None)
        apart, wants_own = self._evictor.apart(share, pods, cluster.now_seconds)
        return replace(known, name=share, apart=apart, wants_own=wants_own)

    def _request(self, cluster: JobCluster, job: int) -> PlacementRequest:
        asked = self._admitted(cluster, job)
        known = self._known[asked.workload]
        request = replace(self._requests.request_of(asked, cluster.truth), known=known, unprofiled=None)
        if known.profile is None and self.uses_model:
            of = Unprofiled(frozenset({known.name}), asked.name, namespace=NAMESPACE)
            request = replace(request, unprofiled=of)
        return request

    def _admitted(self, cluster: JobCluster, job: int) -> Job:
        """Return a job as admission charges it: `auto` is chosen once, from what is known then."""
        key = job, cluster.retractions.get(job, 0)
        if key not in self._as_admitted:
            asked = cluster.jobs[job]
            if asked.is_auto:
                kept = self._shares.kept.get(share_name(asked.workload)) if self.uses_model else None
                told = recommended_fraction(kept, max_slowdown=asked.max_slowdown, job_class=asked.job_class)
                asked = replace(asked, fraction=told or self.release.defaults.auto_fraction)
                assert asked.fraction != AUTO, "request_of takes a share"
            self._as_admitted[key] = asked
        return self._as_admitted[key]

    def _is_profiled(self, workload: str) -> bool:
        return self.uses_model and self._shares.kept.get(share_name(workload)) is not None

    def _known_of(self, workload: str) -> Profile:
        profile = self._shares.known(share_name(workload), self._learned.get(workload)).profile
        assert profile is not None, "asked only of profiled ones"
        return profile

    # -- watching

    def _look(self, cluster: JobCluster, gpu: int, sight: TableSight) -> None:
        reading = self._agents[gpu].reading
        if reading is not None:  # the counters belong to the reading
            sight.next_seconds = reading.ends + SETTLE_AFTER_READING_SECONDS + WINDOW_SECONDS
            return
        LiveOnTable._look(self, cluster, gpu, sight)  # noqa: SLF001 - its base

    def _watched(self, cluster: JobCluster, gpu: int, _sight: TableSight) -> tuple[WatchedTenant, ...]:
        """Return the tenants as the agent infers them from the device's counters."""
        agent, tenants = self._agents[gpu], cluster.gpus[gpu]
        self._note_present(cluster, gpu, agent)
        working = self._working(cluster, gpu)
        found = {}
        if working:
            seen = agent.measure(_truth(cluster).counters(*_as_table(cluster, gpu)), working, cluster.now_seconds)
            found = {each.pod.uid: one for each, one in zip(working, seen, strict=True)}
        watched = []
        for order, tenant in enumerate(tenants):
            asked = self._admitted(cluster, tenant.job)
            one = found.get(asked.name)
            promise = agent.promise(
                self._pod(asked), share_percent(asked), asked.max_slowdown, is_auto=asked.is_auto
            )
            watched.append(
                WatchedTenant(
                    str(tenant.job),
                    asked.job_class,
                    promise,
                    None if one is None else one.progress,
                    None if one is None else one.error,
                    float(order),
                    active=one is not None and not one.is_asleep,
                    alone=1.0 if one is None else one.alone,
                    is_light=one is not None and one.is_light,
                )
            )
        return tuple(watched)

    # -- reading

    def _read(self, cluster: JobCluster) -> None:
        """Learn from who is alone, begin the readings that are due, and ask to be called when there is more."""
        now = cluster.now_seconds
        for gpu, (agent, sight) in enumerate(zip(self._agents, self._sights, strict=True)):
            self._note_present(cluster, gpu, agent)
            if agent.learns_at <= now + 1e-9:
                (only,) = self._working(cluster, gpu)
                agent.learn_alone(self._counters_alone(cluster, only), now)
            if agent.reading is None and agent.look_at <= now + 1e-9:
                is_broken = any(each.is_broken for each in sight.watched.tenants.values())
                begun = agent.plan(now, is_broken=is_broken)
                if begun is not None:
                    cluster.stop(gpu, {self._uids[uid] for uid in begun.stopped})
            due = agent.reading.ends if agent.reading is not None else agent.look_at
            cluster.wake_at(min(due, agent.learns_at))
        self._next_arrival = self._shares.arrive(now)
        cluster.wake_at(self._next_arrival)

    def _end_reading(self, cluster: JobCluster, gpu: int, agent: GpuAgent) -> None:
        """End the reading under way if it is over, or if its tenants have changed."""
        begun = agent.reading
        if begun is None:
            return
        self._note_present(cluster, gpu, agent)
        if agent.reading is not None and begun.ends <= cluster.now_seconds + 1e-9:
            counters = self._counters_alone(cluster, SeenPod(begun.pod, begun.threads))
            agent.end_reading(counters, cluster.now_seconds)
            self._let_go(cluster, gpu, begun)

    def _let_go(self, cluster: JobCluster, gpu: int, ended: TableReading) -> None:
        self.stopped_seconds += (cluster.now_seconds - ended.begins) * len(ended.stopped)
        cluster.stop(gpu, ())

    def _note_present(self, cluster: JobCluster, gpu: int, agent: GpuAgent) -> None:
        was = agent.reading
        agent.changed(
            self._working(cluster, gpu), lambda each: self._counters_alone(cluster, each), cluster.now_seconds
        )
        if was is not None and agent.reading is None:
            self._let_go(cluster, gpu, was)

    def _working(self, cluster: JobCluster, gpu: int) -> list[SeenPod]:
        """Return the tenants of a GPU that have begun, whether they are stopped for a reading or not."""
        return [
            SeenPod(
                self._pod(cluster.jobs[tenant.job]),
                tenant.thread_percentage,
                tenant.duty_ratio,
                cluster.jobs[tenant.job].job_class is JobClass.THROUGHPUT,
            )
            for tenant in _begun(cluster, gpu)
        ]

    def _counters_alone(self, cluster: JobCluster, each: SeenPod) -> Counters:
        workload = cluster.jobs[self._uids[each.pod.uid]].workload
        return _truth(cluster).counters([TenantKind(workload, each.threads)], [1.0])

    @staticmethod
    def _pod(job: Job) -> TablePod:
        return TablePod(job.name, share_name(job.workload))


def _begun(cluster: JobCluster, gpu: int) -> list[JobTenant]:
    return [tenant for tenant in cluster.gpus[gpu] if tenant.ready_seconds <= cluster.now_seconds + 1e-9]


def _as_table(cluster: JobCluster, gpu: int) -> tuple[Sequence[TenantKind], Sequence[float]]:
    """Return the kinds and duties of the tenants that have begun."""
    begun = _begun(cluster, gpu)
    kinds = [TenantKind(cluster.jobs[tenant.job].workload, tenant.thread_percentage) for tenant in begun]
    return kinds, [tenant.duty_ratio for tenant in begun]


def _truth(cluster: JobCluster) -> TableTruth:
    assert isinstance(cluster.truth, TableTruth), "only the table has counters"
    return cluster.truth
