"""A GpuShare's phase, conditions and whole status, computed from decisions and observations.

Only `status_of` makes a GpuShareStatus. Everything in it except the profile and its fraction is rebuilt from the
pods and the GpuNodes each time, so a restarted operator writes the same status as before.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.core.admission import Defaults, JoinedShares, JoinedWorkload, Needs, resolve
from gpushare.core.api import (
    Condition,
    ConditionStatus,
    GpuNodeStatus,
    GpuShare,
    GpuShareSpec,
    GpuShareStatus,
    GroupReplacements,
    JobClass,
    LearnedEffect,
    NeighboursEnded,
    Observed,
    Phase,
    PodPlacement,
    PodView,
    Rejection,
    Retraction,
    TenantSlo,
    TenantStatus,
    TenantTrouble,
    WorkloadSignature,
    names,
)
from gpushare.core.control import signatures
from gpushare.core.control.conditions import (
    ENDS_NEIGHBOURS,
    PROMISE_KEPT,
    SLO_MET,
    dated,
    ends_neighbours,
    is_promise_broken,
    overlapping,
    profiled,
    promise_kept,
    ready,
    retraction_refused,
    slo_met,
    troubled,
    wants_profile,
)
from gpushare.core.control.hygiene import HygieneSettings
from gpushare.core.control.profiling import ProfilingView
from gpushare.core.control.retraction import RetractionSettings
from gpushare.core.interference import as_profile, promised_progress, recommended_fraction
from gpushare.core.placement import ProbationSettings

MOST_PLACEMENTS: Final = 1000  # as in the schema; the Ready condition counts them all
_DIGITS: Final = 3  # of progress and slowdown; more digits would cause more writes


@dataclass(frozen=True, slots=True)
class PodReport:
    """The agents' report on one pod, the worst over its GPUs; None where not measured.

    Attributes:
        error_ratio: standard deviation of the progress.
        throttle_ratio: part of the time that it is stopped; None if it runs freely.
        profile: its workload's signature, if a node has measured it.
        slo: state of its own target.
        trouble: what is wrong with it.
        is_silent: its node's agent is silent, so nothing else is known.
        neighbours: uids of the other pods on its GPUs, sorted.
        can_read: whether workloads can be profiled in place on its node, as far as the agent says.
        promise_ratio: the progress that the agent keeps for it.
        gpu_model: of its GPU; "" if unknown.
    """

    progress_ratio: float | None = None
    slowdown_ratio: float | None = None
    profile: WorkloadSignature | None = None
    error_ratio: float | None = None
    throttle_ratio: float | None = None
    slo: TenantSlo | None = None
    trouble: TenantTrouble | None = None
    is_silent: bool = False
    neighbours: tuple[str, ...] = ()
    can_read: bool = True
    promise_ratio: float | None = None
    gpu_model: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts that decide the phase.

    Attributes:
        live: number of pods that are not finished.
        placed: number of live pods with a decision.
        profiling: whether a pod has a GPU to itself until the workload is profiled or the window ends.
        profiled: whether the signature is known.
        retracting: whether a pod is being moved away, or was and none has been placed since.
    """

    live: int
    placed: int
    profiling: bool = False
    profiled: bool = False
    retracting: bool = False


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """The operator's settings.

    Attributes:
        defaults: values that neither pod nor GpuShare sets.
        probation: where, and for how long, the extender keeps a workload without a profile alone on its GPU.
        retraction: which pods may be evicted, and how often.
        hygiene: actions for pods in trouble.
        joined: workload keys that mean one workload in several namespaces.
    """

    defaults: Defaults
    probation: ProbationSettings = field(default_factory=ProbationSettings)
    retraction: RetractionSettings = field(default_factory=RetractionSettings)
    hygiene: HygieneSettings = field(default_factory=HygieneSettings)
    joined: tuple[JoinedWorkload, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """Facts about a GpuShare that the operator keeps apart from its pods.

    Attributes:
        retractions: intended and done.
        refusal: why a pod that should leave its GPU stays, as (reason, sentence).
        learned: effects learnt of its workload beside others.
        overlaps: GpuShares that come first by name, with the number of pods that this one selects too.
        neighbours_ended: when its pods ended their neighbours in the last day.
        replacements: of its pods in trouble, if there were any in the last day.
    """

    retractions: tuple[Retraction, ...] = ()
    refusal: tuple[str, str] | None = None
    learned: tuple[LearnedEffect, ...] = ()
    overlaps: tuple[tuple[str, int], ...] = ()
    neighbours_ended: tuple[NeighboursEnded, ...] = ()
    replacements: GroupReplacements | None = None


def next_phase(current: Phase, situation: Situation) -> Phase:
    """Return the phase that follows `current` (docs/design.md 4 and 5).

    Pending: no pod is placed. Probation: a placed pod has its GPU to itself until the profile is taken or the
    window ends. Sharing: pods are placed and may get neighbours. Retracted: pods were moved away to keep a
    neighbour's promise; this lasts until one of them is placed again. Profiled: no pod is placed, but the
    signature is known, so the next pod goes straight to Sharing.
    """
    if situation.retracting or (current is Phase.RETRACTED and situation.live > 0 and situation.placed == 0):
        return Phase.RETRACTED
    if situation.placed == 0:
        return Phase.PROFILED if situation.profiled else Phase.PENDING
    if situation.profiling and not situation.profiled:
        return Phase.PROBATION
    return Phase.SHARING


def status_of(
    share: GpuShare,
    pods: Iterable[PodView],
    pod_reports: Mapping[str, PodReport],
    settings: OperatorSettings,
    now: str,
    *,
    standing: Standing | None = None,
    profiling: ProfilingView | None = None,
    joined: JoinedShares | None = None,
) -> GpuShareStatus:
    """Compute the status of a GpuShare.

    Args:
        share: the present GpuShare; its status has the profile, the last phase and the times of its conditions.
        pods: its pods, in any order.
        pod_reports: the agents' report on each pod, by uid.
        now: RFC 3339, UTC, for conditions that change.
        standing: by default, as in its status.
        profiling: pods on probation, and pods that cannot be profiled where they are; by default none.
        joined: GpuShares of joined workloads, this one among them; by default none.
    """
    standing = standing or Standing(
        share.status.retractions,
        learned=share.status.learned,
        neighbours_ended=share.status.neighbours_ended,
        replacements=share.status.replacements,
    )
    live = sorted((pod for pod in pods if not pod.finished), key=lambda pod: (pod.name, pod.uid))
    wrong: list[str] = []
    workload = signatures.workload_of(share, [pod.annotations for pod in live])
    profile, learned = _knowledge(share, live, pod_reports, standing.learned, joined, workload=workload, now=now)
    known = replace(share, status=replace(share.status, profile=profile))
    broken = frozenset(p.pod_uid for p in share.status.placements if p.is_promise_broken)
    placements = [
        p
        for pod in live
        if (p := _placement(pod, known, pod_reports, settings.defaults, wrong, broken=broken)) is not None
    ]
    situation = Situation(
        live=len(live),
        placed=len(placements),
        profiling=profiling is not None and bool(profiling.on_probation),
        profiled=profile is not None,
        retracting=_is_retracting(standing.retractions, live, placed=bool(placements), now=now),
    )
    job_class = _class_of(share, live, settings.defaults)
    conditions = [
        ready(situation.live, situation.placed, wrong),
        profiled(share.spec, profile, profiling),
        *_conditions_of_pods(live, pod_reports, placements),
        *_conditions_of_standing(standing),
    ]
    return GpuShareStatus(
        phase=next_phase(share.status.phase, situation),
        observed_generation=share.generation,
        workload=workload,
        profile=profile,
        job_class=job_class,
        recommended_fraction=_recommended(share, profile, job_class, settings.defaults, none_live=not live),
        observed=_worst(placements),
        promise_ratio=min((p.promise_ratio for p in placements if p.promise_ratio is not None), default=None),
        learned=learned,
        retractions=standing.retractions,
        neighbours_ended=standing.neighbours_ended,
        replacements=standing.replacements,
        placements=tuple(placements[:MOST_PLACEMENTS]),
        conditions=dated(conditions, share.status.conditions, share.generation, now),
    )


def _knowledge(
    share: GpuShare,
    live: Sequence[PodView],
    pod_reports: Mapping[str, PodReport],
    learned: tuple[LearnedEffect, ...],
    joined: JoinedShares | None,
    *,
    workload: str | None,
    now: str,
) -> tuple[WorkloadSignature | None, tuple[LearnedEffect, ...]]:
    """Return the profile that the GpuShare keeps from now on, and the effects that were learnt with it.

    Args:
        learned: the effects learnt with the present profile.
        workload: the key that all of its pods have; None without one.
    """
    profile = share.status.profile
    sources = [(profile, learned)]
    if wants_profile(share.spec):
        reports = [(pod, report) for pod in live if (report := pod_reports.get(pod.uid)) is not None]
        if joined is not None and (of_all := joined.of(share.namespace, workload)):
            models = {report.gpu_model for pod, report in reports if pod.decision is not None}
            if (joint := signatures.joint_of(profile, of_all, models, share.spec)) is not None:
                profile = signatures.joined_with(profile, joint, share.spec, now=now)
                sources.insert(0, (joint.profile, joint.learned))
        seen = [report.profile for _, report in reports if report.profile is not None]
        one_kind = signatures.is_one_kind(share.spec, [pod.annotations for pod in live])
        profile = signatures.choose_signature(profile, seen, share.spec, is_one_kind=one_kind, now=now)
    return profile, signatures.learnt_with(profile, sources)


def _conditions_of_pods(
    live: Sequence[PodView], pod_reports: Mapping[str, PodReport], placements: Sequence[PodPlacement]
) -> list[Condition]:
    """Return the conditions that follow from the agents' reports on the live pods."""
    reports = [(pod, pod_reports.get(pod.uid, PodReport())) for pod in live]
    found = [promise_kept(placements, [pod.name for pod, report in reports if report.is_silent])]
    placed = [(pod, report) for pod, report in reports if pod.decision is not None]
    targets = {pod.name: report.slo for pod, report in placed if names.SLO in pod.annotations}
    if (met := slo_met(targets)) is not None:
        found.append(met)
    if troubles := {pod.name: report.trouble for pod, report in reports if report.trouble is not None}:
        found.append(troubled(troubles))
    return found


def _conditions_of_standing(standing: Standing) -> list[Condition]:
    """Return the conditions that follow from what the operator keeps apart from the pods; each only when true."""
    found = []
    if standing.overlaps:
        found.append(overlapping(standing.overlaps))
    if standing.refusal is not None:
        found.append(retraction_refused(*standing.refusal))
    if ended := standing.neighbours_ended:
        is_isolated = GpuShareStatus(neighbours_ended=ended).ends_neighbours
        found.append(ends_neighbours(len(ended), isolated=is_isolated))
    return found


def pod_reports_of(nodes: Iterable[GpuNodeStatus]) -> dict[str, PodReport]:
    """Return the agents' report on each pod, by uid: the least progress and greatest slowdown over its GPUs."""
    tenants: dict[str, list[TenantStatus]] = {}
    models: dict[str, str] = {}
    beside: dict[str, set[str]] = {}
    unreadable: set[str] = set()
    for node in nodes:
        for gpu in node.gpus:
            uids = {tenant.pod_uid for tenant in gpu.tenants}
            for tenant in gpu.tenants:
                tenants.setdefault(tenant.pod_uid, []).append(tenant)
                models[tenant.pod_uid] = gpu.model or ""
                beside.setdefault(tenant.pod_uid, set()).update(uids - {tenant.pod_uid})
            if not node.can_read:
                unreadable |= uids
    return {
        uid: replace(
            _pod_report(of_pod),
            neighbours=tuple(sorted(beside[uid])),
            can_read=uid not in unreadable,
            gpu_model=models[uid],
        )
        for uid, of_pod in tenants.items()
    }


def reports_only_figures(one: PodReport, other: PodReport) -> bool:
    """Return whether two reports on one pod differ at most in figures, which no condition depends on.

    False also where the reports alone do not tell it.
    """
    kept, other_kept = _promise_of(one), _promise_of(other)
    return kept is not None and kept == other_kept and _without_ratios(one) == _without_ratios(other)


def _promise_of(report: PodReport) -> tuple[object, ...] | None:
    """Return what the condition PromiseKept depends on; None if its promise is not in the report."""
    progress, promise = report.progress_ratio, report.promise_ratio
    if progress is None:
        return (bool(report.throttle_ratio),)
    if promise is None:
        return None
    is_below, is_clearly = progress < promise, progress + (report.error_ratio or 0.0) < promise
    return bool(report.throttle_ratio), is_below, is_clearly, f"{promise:.2f}" if is_below else ""


def _without_ratios(report: PodReport) -> PodReport:
    slo = report.slo
    return replace(
        report,
        progress_ratio=None,
        slowdown_ratio=None,
        error_ratio=None,
        throttle_ratio=None,
        promise_ratio=None,
        slo=TenantSlo(slo.met, slo.reason, target=slo.target) if slo is not None else None,
    )


def differs_only_in_figures(one: GpuShareStatus, other: GpuShareStatus) -> bool:
    """Return whether two statuses differ at most in measured figures, which may be written later."""
    return _without_figures(one) == _without_figures(other)


def transitions(before: GpuShareStatus, after: GpuShareStatus) -> tuple[tuple[str, str], ...]:
    """Return the events due between two statuses, as (reason, message)."""
    found = []
    if before.profile is None and after.profile is not None:
        auto = (
            f"; auto means {after.recommended_fraction}, within maxSlowdown of a whole GPU"
            if after.recommended_fraction
            else ""
        )
        found.append(("ProfileTaken", f"signature taken on {after.profile.gpu_model or 'a GPU'}{auto}"))
    if before.phase is not after.phase and after.phase is not Phase.RETRACTED:  # retractions have own events
        found.append((after.phase.value, f"phase was {before.phase}, is {after.phase}"))
    if after.ends_neighbours and not before.ends_neighbours:
        found.append(("Isolated", _condition_of(after, ENDS_NEIGHBOURS).message))
    for kind, prefix in ((PROMISE_KEPT, ""), (SLO_MET, "Slo")):
        was_broken = _condition_of(before, kind).status is ConditionStatus.FALSE
        one = _condition_of(after, kind)
        if one.status is (ConditionStatus.TRUE if was_broken else ConditionStatus.FALSE):
            found.append((f"{prefix}{one.reason}", one.message))
    return tuple(found)


def _is_retracting(retractions: Iterable[Retraction], live: Iterable[PodView], *, placed: bool, now: str) -> bool:
    leaving = {pod.uid for pod in live if pod.leaving}
    return any(
        one.pod_uid in leaving or (not placed and one.until is not None and one.until > now) for one in retractions
    )


def _condition_of(status: GpuShareStatus, kind: str) -> Condition:
    return next((one for one in status.conditions if one.type == kind), Condition())


def _placement(
    pod: PodView,
    share: GpuShare,
    pod_reports: Mapping[str, PodReport],
    defaults: Defaults,
    wrong: list[str],
    *,
    broken: AbstractSet[str],
) -> PodPlacement | None:
    """Return where a pod runs, or None without a decision; append what is malformed to `wrong`.

    Args:
        broken: uids of the pods whose promise was broken before.
    """
    if pod.decision_problem:
        wrong.append(f"{pod.name}: {pod.decision_problem}")
        return None
    needs = resolve(pod.annotations, share, defaults, limit_percent=pod.limit_percent)
    if isinstance(needs, Rejection):
        wrong.append(f"{pod.name}: {needs}")
    decision = pod.decision
    if decision is None:
        return None
    report = pod_reports.get(pod.uid, PodReport())
    promise = _promised(needs, share.status.profile, report) if isinstance(needs, Needs) else None
    return PodPlacement(
        pod_uid=pod.uid,
        pod=pod.name,
        node=pod.node,
        gpu_uuids=decision.gpu_uuids,
        share_percent=needs.share_percent if isinstance(needs, Needs) else None,
        thread_percentage=decision.thread_percentage,
        memory_limit_mib=decision.memory_limit_mib,
        progress_ratio=report.progress_ratio,
        slowdown_ratio=report.slowdown_ratio,
        promise_ratio=promise,
        is_promise_broken=is_promise_broken(
            report.progress_ratio, report.error_ratio, promise, was_broken=pod.uid in broken
        )
        or None,
        throttle_ratio=report.throttle_ratio,
    )


def _promised(needs: Needs, signature: WorkloadSignature | None, report: PodReport) -> float:
    """Return the promise that the pod's agent keeps; without a report, the one that its profile makes.

    The agent knows the GPU. A profile of another GPU model promises nothing on it.
    """
    if report.promise_ratio is not None:
        return report.promise_ratio
    is_of_gpu = signature is not None and (not report.gpu_model or signature.gpu_model in {"", report.gpu_model})
    profile = as_profile(signature) if signature is not None and is_of_gpu else None
    return round(
        promised_progress(profile, needs.share_percent, needs.max_slowdown_ratio, is_auto=needs.is_auto), _DIGITS
    )


def _class_of(share: GpuShare, live: Sequence[PodView], defaults: Defaults) -> JobClass:
    """Return the class of the pods, latency if any pod has it; without live pods, keep the previous value."""
    needs = [resolve(pod.annotations, share, defaults, limit_percent=pod.limit_percent) for pod in live]
    classes = [each.job_class for each in needs if isinstance(each, Needs)]
    if classes:
        return JobClass.LATENCY if JobClass.LATENCY in classes else JobClass.THROUGHPUT
    return share.spec.job_class or share.status.job_class or defaults.job_class


def _recommended(
    share: GpuShare, profile: WorkloadSignature | None, job_class: JobClass, defaults: Defaults, *, none_live: bool
) -> str | None:
    """Return the fraction that `auto` means; without live pods, keep the previous value."""
    before = share.status.recommended_fraction
    if before is not None and none_live and profile == share.status.profile:
        return before
    tolerated = _tolerated(share.spec, job_class, defaults)
    recommended = recommended_fraction(profile, max_slowdown=tolerated, job_class=job_class)
    return recommended if recommended is not None else before


def _tolerated(spec: GpuShareSpec, job_class: JobClass, defaults: Defaults) -> float:
    return spec.max_slowdown if spec.max_slowdown is not None else defaults.max_slowdown_of(job_class)


def _pod_report(tenants: Sequence[TenantStatus]) -> PodReport:
    promises = [tenant.promise_ratio for tenant in tenants if tenant.promise_ratio is not None]
    slowest = min(
        ((t.progress_ratio, t.progress_error_ratio) for t in tenants if t.progress_ratio is not None),
        key=lambda each: each[0],
        default=(None, None),
    )
    return PodReport(
        _rounded(slowest[0]),
        _rounded(max((t.slowdown_ratio for t in tenants if t.slowdown_ratio is not None), default=None)),
        next((tenant.profile for tenant in tenants if tenant.profile is not None), None),
        _rounded(slowest[1]),
        _rounded(max((t.throttle_ratio for t in tenants if t.throttle_ratio), default=None)),
        next((tenant.slo for tenant in tenants if tenant.slo is not None), None),
        next((tenant.trouble for tenant in tenants if tenant.trouble is not None), None),
        promise_ratio=_rounded(min(promises, default=None)),
    )


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, _DIGITS)


def _worst(placements: Iterable[PodPlacement]) -> Observed | None:
    listed = list(placements)
    progress = [p.progress_ratio for p in listed if p.progress_ratio is not None]
    slowdown = [p.slowdown_ratio for p in listed if p.slowdown_ratio is not None]
    if not progress and not slowdown:
        return None
    return Observed(min(progress, default=None), max(slowdown, default=None))


def _without_figures(status: GpuShareStatus) -> GpuShareStatus:
    placements = tuple(
        replace(p, progress_ratio=None, slowdown_ratio=None, throttle_ratio=None, promise_ratio=None)
        for p in status.placements
    )
    return replace(status, observed=None, promise_ratio=None, placements=placements, learned=())
