"""Our policy on the table: the live decision and the live loop, with given knowledge.

`gpushare.core.placement.decide` chooses GPU and cap of a job, among the GPUs on which the truth offers the job;
`gpushare.core.control.watch` decides who is throttled or retracted. This module only adds the observations and the
operator's handling of a retraction. Here all programs are known from the start: signatures with the counters'
noise **and the cap curves**, which no agent has before it saw them, and windows show the truth with an error. What
agents can know is in `table_live`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from gpushare.core.api import LearnedEffect, Rejection, retracted_often
from gpushare.core.control import (
    GpuWatch,
    Resident,
    RetractionAsk,
    RetractionRecord,
    RetractionSettings,
    RetractionSituation,
    SeenTenant,
    WatchedTenant,
    WatchSettings,
    WatchWindow,
    is_decided_by_counters,
    learnt,
    plan_retractions,
    watch,
)
from gpushare.core.gpu import Counters
from gpushare.core.interference import InterferenceModel, Profile, cap_progress, effects_of, promised_progress
from gpushare.core.placement import (
    DecisionContext,
    KeptApart,
    KnownWorkload,
    PlacementRequest,
    Settings,
    decide,
    is_due,
    survey,
)
from gpushare.research.dataset import Mechanism
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import JobCluster
from gpushare.sim.table_policies import share_percent
from gpushare.sim.table_truth import TableTruth

# Error of one tenant's inferred progress, one standard deviation: 0.05 in all (docs/measurements/attribution.md).
# Most of it stays while the same tenants run (a signature that does not fit), the rest changes.
STANDING_ERROR: Final = 0.04
PASSING_ERROR: Final = 0.03
# Errors of a signature: its counters' relative error and floor (core.progress.counter_errors: work, floor), and
# the error of the cap curve's points, which are measured under caps that were in force at some time.
COUNTER_ERROR: Final = 0.04
COUNTER_FLOOR: Final = 0.003
CURVE_ERROR: Final = 0.03
CURVE_CAPS: Final = (10, 25, 33, 50, 75)
_LEAST_ERROR: Final = 0.005  # error that is reported if observations are exact
_INTERVAL_DEVIATIONS: Final = 3.29  # width of a 90% interval in standard deviations

WINDOW_SECONDS: Final = 2.0
CALM_WINDOW_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 300.0
"""Interval of windows on a quiet GPU; at each the passing part of the error is drawn again."""
_HURRY_SECONDS: Final = 20.0
"""How long windows stay short after a change."""


@dataclass(frozen=True, slots=True)
class InferenceError:
    """Error of inferred progress, standard deviations: the part that stays while the tenants do, and the rest."""

    standing: float = STANDING_ERROR
    passing: float = PASSING_ERROR

    @property
    def stated(self) -> float:
        """Return the error that the agent assumes."""
        return max(_LEAST_ERROR, math.hypot(self.standing, self.passing))


def known_profiles(truth: TableTruth, seed: int, curve_caps: tuple[int, ...] = CURVE_CAPS) -> dict[str, Profile]:
    """Return the profile of every workload with noise: counters, rate, and points of the true cap curve."""
    rng = np.random.default_rng([seed, 11])
    return {
        name: Profile(
            _noisy(truth.profiles[name].counters, rng),
            truth.rate_alone(name),
            truth.memory_mib(name),
            {
                cap: float(np.clip(truth.alone(name, cap) * (1 + CURVE_ERROR * rng.standard_normal()), 0.01, 1.0))
                for cap in curve_caps
            },
        )
        for name in truth.workloads
    }


def _noisy(counters: Counters, rng: np.random.Generator) -> Counters:
    def read(value: float | None) -> float | None:
        off = COUNTER_ERROR * rng.standard_normal(), COUNTER_FLOOR * rng.standard_normal()
        return None if value is None else float(np.clip(value * (1 + off[0]) + off[1], 0.0, 1.0))

    return replace(counters, **{name: read(getattr(counters, name)) for name in Counters.__slots__})


@dataclass(slots=True)
class TableSight:
    """State of one GPU's agent.

    Attributes:
        jobs: the tenants at its last look.
        since_seconds: since when these have been there.
        next_seconds: end of the next window.
        standing: the lasting error of inference, by job.
        passing: the changing error, by job.
        passing_until: until when `passing` stays.
        learns_at: when the next window is learnt from, if no tenant is throttled in it.
    """

    jobs: tuple[int, ...] = ()
    since_seconds: float = 0.0
    next_seconds: float = math.inf
    window_seconds: float = WINDOW_SECONDS
    watched: GpuWatch = field(default_factory=GpuWatch)
    standing: dict[int, float] = field(default_factory=dict)
    passing: dict[int, float] = field(default_factory=dict)
    passing_until: float = 0.0
    learns_at: float = math.inf


@dataclass(slots=True)
class _Evictor:
    """The operator's part: `plan_retractions` step by step, with all jobs of a program as one GpuShare."""

    settings: RetractionSettings = field(default_factory=RetractionSettings)
    records: dict[str, tuple[RetractionRecord, ...]] = field(default_factory=dict)
    last_left: dict[str, float] = field(default_factory=dict)

    def evict(self, cluster: JobCluster, asks: Mapping[int, str]) -> int | None:
        """Follow the agents' asks (job -> why) as far as allowed; return the GPU that a job was evicted from."""
        now = cluster.now_seconds
        gpu_of = {tenant.job: gpu for gpu, tenants in enumerate(cluster.gpus) for tenant in tenants}
        intended = {r.gpu for history in self.records.values() for r in history if r.is_intent}
        gpus = {str(gpu_of[job]) for job in asks} | intended
        situation = RetractionSituation(
            tuple(RetractionAsk(str(job), str(gpu_of[job]), why) for job, why in asks.items()),
            {gpu: self._residents(cluster, int(gpu)) for gpu in gpus},
            {**{share_name(job.workload): () for job in cluster.jobs}, **self.records},
            frozenset(r.pod_uid for history in self.records.values() for r in history if r.is_intent),
            {},
            self.last_left,
        )
        plan = plan_retractions(situation, self.settings, now)
        self.records.update(plan.records)
        if plan.evict is None:
            return None
        job = int(plan.evict)
        cluster.retract(job, gpu_of[job])
        self.last_left[str(gpu_of[job])] = now
        return gpu_of[job]

    def apart(self, share: str, pods: int, now: float) -> tuple[tuple[KeptApart, ...], bool]:
        """Return whom a GpuShare is kept apart from, and whether its next pod gets a GPU of its own."""
        records = [record for record in self.records.get(share, ()) if record.until is not None]
        apart = tuple(
            KeptApart(frozenset(record.neighbours), record.until)
            for record in records
            if record.until is not None and record.until > now
        )
        return apart, retracted_often(sum(record.retractions for record in records), pods)

    @staticmethod
    def _residents(cluster: JobCluster, gpu: int) -> tuple[Resident, ...]:
        jobs = [(tenant.job, cluster.jobs[tenant.job]) for tenant in cluster.gpus[gpu]]
        return tuple(Resident(str(index), share_name(job.workload), job.job_class) for index, job in jobs)


def share_name(workload: str) -> str:
    """Return the GpuShare name of a program's jobs."""
    return f"default/{workload}"


@dataclass(slots=True)
class LiveOnTable:
    """The live decision, and the live loop unless `watches` is False, of programs that are known from the start.

    Attributes:
        profiles: known profile of each workload; if empty, shares are the caps and the model is not used.
        seen: profiles by which the agent computes promises if `profiles` is empty.
        release: the settings of the installation.
        learns: whether effects are learnt from windows (`learnt`), as by the operator's learner.
        error: error of inferred progress.
    """

    model: InterferenceModel
    gpu_model: str
    profiles: Mapping[str, Profile]
    seed: int
    name: str = "gpushare"
    watches: bool = True
    learns: bool = True
    error: InferenceError = field(default_factory=InferenceError)
    seen: Mapping[str, Profile] = field(default_factory=dict)
    settings: WatchSettings = field(default_factory=WatchSettings)
    mechanism: Mechanism = Mechanism.MPS
    release: Settings = field(default_factory=Settings)
    _requests: GpuSharePolicy = field(init=False)
    _rng: np.random.Generator = field(init=False)
    _context: DecisionContext | None = None
    _looked_at: object = None
    _lessons: int = 0
    _sights: list[TableSight] = field(default_factory=list)
    _promises: dict[int, float] = field(default_factory=dict)
    _learned: dict[str, LearnedEffect] = field(default_factory=dict)
    _current: dict[str, Profile] = field(default_factory=dict)
    _evictor: _Evictor = field(default_factory=_Evictor)
    _asks: dict[int, tuple[int, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._requests = GpuSharePolicy(self.model, self.gpu_model, self.profiles, self.release)
        self._rng = np.random.default_rng([self.seed, 12])

    def schedule(self, cluster: JobCluster) -> None:
        """Forget the jobs that ended, process the windows that are due, and decide about waiting jobs."""
        if self._context is None:
            self._context = self._new_context(cluster)
            self._sights = [TableSight() for _ in cluster.gpus]
        if self.watches:
            self._watch(cluster)
        running = {cluster.jobs[tenant.job].name for tenants in cluster.gpus for tenant in tenants}
        for uid in [uid for uid in self._context.state.reservations if uid not in running]:
            self._context.state.release(uid)
        looked_at = self._situation(cluster)
        if looked_at != self._looked_at:  # otherwise waiting jobs would be refused again
            self._looked_at = looked_at
            self._place(cluster, self._keeping(cluster, self._context.at(cluster.now_seconds)))
        if self.watches:
            for gpu, sight in enumerate(self._sights):
                self._notice(cluster, gpu, sight)
            cluster.wake_at(min(sight.next_seconds for sight in self._sights))

    # -- deciding

    def _new_context(self, cluster: JobCluster) -> DecisionContext:
        return self._requests.new_context(cluster)

    def _situation(self, cluster: JobCluster) -> object:
        """Return everything decisions depend on, so that a window that changes none of it costs no decision."""
        now, after = cluster.now_seconds, self.release.reserve_after_seconds
        records = [(share, each) for share, history in self._evictor.records.items() for each in history]
        return (
            tuple(cluster.queue),
            [is_due(now - cluster.jobs[job].submit_seconds, after) for job in cluster.queue],
            tuple(tuple((each.job, each.thread_percentage) for each in tenants) for tenants in cluster.gpus),
            self._lessons,
            records,
            [each.until is not None and each.until > now for _, each in records],
        )

    def _keeping(self, cluster: JobCluster, context: DecisionContext) -> DecisionContext:
        """Return the context with GPUs kept for jobs that have waited long."""
        return self._requests.keeping(
            context, cluster, lambda job, _truth: self._request(cluster, cluster.number_of(job.name))
        )

    def _place(self, cluster: JobCluster, context: DecisionContext) -> None:
        """Start waiting jobs in order, each where `decide` puts it among the GPUs on which the truth offers it."""
        refused: dict[object, tuple[int, float, str]] = {}
        for job in list(cluster.queue):
            request = self._request(cluster, job)
            kind = request.shape, request.known, request.is_auto
            if kind in refused and refused[kind] < request.rank:  # a later job stands back for no fewer pods
                continue
            offered = [self._requests.node_of(gpu) for gpu in range(len(cluster.gpus)) if cluster.takes(gpu, job)]
            found = survey(request, context, offered)
            if not found.nodes:
                refused[kind] = request.rank
                continue
            refused.clear()  # with one more tenant a set may fit a job that was refused before
            (row,) = found.best(1)
            decided = decide(request, context, node=context.state.node_name(int(row)))
            assert not isinstance(decided, Rejection), "it was surveyed"
            assert decided.thread_percentage is not None, "a job asks for a GPU"
            gpu = int(decided.gpu_uuids[0])
            cap = self._cap(cluster, job, gpu, decided.thread_percentage)
            context.state.reserve(request.pod_uid, replace(decided, thread_percentage=cap), request)
            cluster.start(job, gpu, cap)

    def _cap(self, _cluster: JobCluster, _job: int, _gpu: int, decided: int) -> int:
        """Return the cap under which a job starts: the decided one; studies may override this."""
        return decided

    def _request(self, cluster: JobCluster, job: int) -> PlacementRequest:
        asked = cluster.jobs[job]
        request = self._requests.request_of(asked, cluster.truth)
        share = share_name(asked.workload)
        pods = sum(cluster.jobs[t.job].workload == asked.workload for tenants in cluster.gpus for t in tenants)
        known = request.known or KnownWorkload("", "", asked.max_slowdown, None)
        if known.profile is not None:
            profile = self._known_of(asked.workload)
            known = replace(known, key=f"{asked.workload}@{profile.effects}", profile=profile)
        apart, wants_own = self._evictor.apart(share, pods, cluster.now_seconds)
        known = replace(known, name=share, apart=apart, wants_own=wants_own)
        return replace(request, known=known, unprofiled=None)  # without profiles no workload is profiled

    # -- watching

    def _watch(self, cluster: JobCluster) -> None:
        for gpu, sight in enumerate(self._sights):
            self._notice(cluster, gpu, sight)
            if sight.next_seconds <= cluster.now_seconds + 1e-9:
                self._look(cluster, gpu, sight)
        if self._asks:
            asks = dict(self._asks.values())
            for _ in range(2):  # first the intent is written, then it is followed
                left = self._evictor.evict(cluster, asks)
                if left is not None:
                    del self._asks[left]
                    self._notice(cluster, left, self._sights[left])
                    self._evictor.evict(cluster, dict(self._asks.values()))
                    break

    def _notice(self, cluster: JobCluster, gpu: int, sight: TableSight) -> None:
        """Update the state with the tenants that came and left since the last look."""
        jobs = tuple(tenant.job for tenant in cluster.gpus[gpu])
        if jobs == sight.jobs:
            return
        self._asks.pop(gpu, None)
        now = cluster.now_seconds
        sight.jobs, sight.since_seconds = jobs, now
        sight.standing = {job: self.error.standing * self._rng.standard_normal() for job in jobs}
        sight.passing_until = now
        sight.learns_at = now + 2 * WINDOW_SECONDS
        sight.window_seconds = WINDOW_SECONDS
        sight.next_seconds = now + WINDOW_SECONDS if jobs else math.inf

    def _look(self, cluster: JobCluster, gpu: int, sight: TableSight) -> None:
        now, tenants = cluster.now_seconds, cluster.gpus[gpu]
        if now >= sight.passing_until:
            sight.passing = {job: self.error.passing * self._rng.standard_normal() for job in sight.jobs}
            sight.passing_until = now + LOOK_SECONDS
        watched = self._watched(cluster, gpu, sight)
        if self.learns and now >= sight.learns_at:
            self._learn(cluster, gpu, sight, watched)
        before = {str(tenant.job): tenant.duty_ratio for tenant in tenants if tenant.duty_ratio < 1.0}
        window = WatchWindow(now, watched, seconds=sight.window_seconds)
        sight.watched, actions = watch(sight.watched, window, now, self.settings)
        duties = dict(actions.duties)
        if duties != before:
            cluster.throttle(gpu, {int(uid): duty for uid, duty in duties.items()})
            sight.since_seconds = now
        self._asks.pop(gpu, None)
        if actions.retract is not None:
            self._asks[gpu] = int(actions.retract), actions.retract_why
        is_busy = bool(duties or actions.broken or actions.retract) or self._is_suspicious(watched)
        is_busy = is_busy or self._awaits_reports(sight)
        if len(tenants) < 2 or (not is_busy and now >= sight.since_seconds + 3 * WINDOW_SECONDS):
            sight.window_seconds = WINDOW_SECONDS
            sight.next_seconds = sight.passing_until if len(tenants) > 1 else math.inf
            return
        hurries = now < sight.since_seconds + _HURRY_SECONDS
        sight.window_seconds = WINDOW_SECONDS if hurries else CALM_WINDOW_SECONDS
        sight.next_seconds = (
            now + sight.window_seconds + (self.settings.delay_seconds if duties != before else 0.0)
        )

    def _watched(self, cluster: JobCluster, gpu: int, sight: TableSight) -> tuple[WatchedTenant, ...]:
        """Return the tenants as the agent sees them: the truth with an error."""
        now = cluster.now_seconds
        return tuple(
            WatchedTenant(
                str(tenant.job),
                cluster.jobs[tenant.job].job_class,
                self._promise(cluster, tenant.job),
                None if not_ready else max(0.0, progress + sight.standing[tenant.job] + sight.passing[tenant.job]),
                self.error.stated,
                float(order),
                active=not not_ready,
                alone=self._alone(cluster.jobs[tenant.job].workload, tenant.thread_percentage),
            )
            for order, (tenant, progress, not_ready) in enumerate(
                (tenant, progress, tenant.ready_seconds > now)
                for tenant, progress in zip(cluster.gpus[gpu], cluster.progress(gpu), strict=True)
            )
        )

    def _learn(self, cluster: JobCluster, gpu: int, sight: TableSight, watched: tuple[WatchedTenant, ...]) -> None:
        """Learn from a window in which no tenant was throttled."""
        tenants = cluster.gpus[gpu]
        names = [cluster.jobs[tenant.job].workload for tenant in tenants]
        if (
            len(tenants) < 2
            or any(tenant.duty_ratio < 1.0 for tenant in tenants)
            or any(each.progress is None for each in watched)
            or not all(self._is_profiled(name) for name in names)
        ):
            return
        sight.learns_at = cluster.now_seconds + LOOK_SECONDS
        predicted = self.model.predict(
            [(self._known_of(name), tenant.thread_percentage) for name, tenant in zip(names, tenants, strict=True)]
        )
        window = [
            SeenTenant(
                name,
                tenant.thread_percentage,
                each.progress or 0.0,
                each.error or 0.0,
                forecast.progress,
                (forecast.upper - forecast.lower) / _INTERVAL_DEVIATIONS,
            )
            for name, tenant, each, forecast in zip(names, tenants, watched, predicted, strict=True)
        ]
        if is_decided_by_counters(window):
            before = {name: effects_of([self._learned[name]], self.gpu_model) for name in self._learned}
            self._learned |= learnt(window, self._learned, self.gpu_model)
            for name in names:
                if effects_of([self._learned[name]], self.gpu_model) != before.get(name):
                    self._current.pop(name, None)
                    self._lessons += 1

    def _is_profiled(self, workload: str) -> bool:
        """Return whether decisions know a workload's profile."""
        return workload in self.profiles

    def _known_of(self, workload: str) -> Profile:
        """Return the present profile of a workload, learned effects included."""
        if workload not in self._current:
            learned = [self._learned[workload]] if workload in self._learned else []
            effects = effects_of(learned, self.gpu_model)
            self._current[workload] = replace(self.profiles[workload], effects=effects)
        return self._current[workload]

    def _awaits_reports(self, _sight: TableSight) -> bool:
        """Return whether a job's own rate is about to be known; here none reports one."""
        return False

    def _is_suspicious(self, watched: tuple[WatchedTenant, ...]) -> bool:
        """Return whether another window like this one would show a broken promise or a missed target."""
        return any(
            (
                each.progress is not None
                and each.progress + self.settings.confidence * (each.error or 0.0) < each.promise
            )
            or (each.slo is not None and each.slo.is_missed)
            for each in watched
        )

    def _alone(self, workload: str, thread_percentage: int) -> float:
        known = self.profiles.get(workload) or self.seen.get(workload)
        return 1.0 if known is None else min(1.0, cap_progress(known, thread_percentage / 100))

    def _promise(self, cluster: JobCluster, job: int) -> float:
        """Return the promise that the agent computes, from what is known of the workload."""
        if job not in self._promises:
            asked = cluster.jobs[job]
            known = self.profiles.get(asked.workload) or self.seen.get(asked.workload)
            self._promises[job] = promised_progress(
                known, share_percent(asked), asked.max_slowdown, is_auto=asked.is_auto
            )
        return self._promises[job]
