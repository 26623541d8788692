"""Why a pod is where it is, or waits: the decision made again, with promises, forecasts and measurements.

Where the cluster may not be read, `account` says what the pod's own objects say.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple, Self

from gpushare.core.admission import Defaults
from gpushare.core.api import GpuNode, GpuShare, GpuStatus, PodPlacement, Rejection, TenantStatus
from gpushare.core.interference import Forecast, InterferenceModel, predict_worst, promised_progress
from gpushare.core.placement.caps import UNCAPPED_PERCENT
from gpushare.core.placement.decide import DecisionContext, decide, survey
from gpushare.core.placement.keeping import KeptGpus
from gpushare.core.placement.known import KnownWorkload
from gpushare.core.placement.probation import clock_time, why_unread
from gpushare.core.placement.search import Candidates
from gpushare.core.placement.shapes import MILLI_PER_PERCENT, Placement, PlacementRequest, Tenant, tolerated

_EQUAL: Final = 1e-6  # scores that differ by less are equal


class PlaceStanding(StrEnum):
    """Comparison of a pod's place with the place that would be chosen now."""

    BEST = "Best"
    """No node ranks higher."""
    BETTER_ELSEWHERE = "BetterElsewhere"
    """It would fit its node, but another one ranks higher now."""
    NOT_NOW = "NotNow"
    """It would no longer be placed on its node."""
    FITS = "Fits"
    """It waits, although there is room."""
    WAITS = "Waits"
    """It waits, and fits nowhere."""


@dataclass(frozen=True, slots=True)
class Happening:
    """An event about the pod.

    Attributes:
        at: RFC 3339; empty if unknown.
        count: number of occurrences.
    """

    at: str
    reason: str
    note: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ExplainedTenant:
    """One tenant of the pod's GPU.

    Attributes:
        pod: namespace/name.
        is_subject: whether it is the pod in question.
        promise_ratio: its promised progress; None if neither its node nor its GpuShare says it.
        is_known: whether its workload has a profile; None if that was not read.
        thread_percentage: cap of its decision, for its next process.
        predicted: its forecast in this set of tenants under the caps in force; None while one of them has no
            profile.
        seen: the last measurement of its node's agent; None without one.
        phases: number of kinds of work that its workload does besides the usual one.
    """

    pod: str
    is_subject: bool
    share_percent: int
    thread_percentage: int | None
    promise_ratio: float | None
    is_known: bool | None
    predicted: Forecast | None
    seen: TenantStatus | None
    phases: int = 0


@dataclass(frozen=True, slots=True)
class ExplainedGpu:
    """One GPU of the pod, or the one that it would get, with all its tenants."""

    uuid: str
    node: str
    model: str
    tenants: tuple[ExplainedTenant, ...]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Reason for which the pod is not on some nodes.

    Attributes:
        nodes: number of nodes with this reason.
        example: one of them.
    """

    rejection: Rejection
    nodes: int
    example: str


@dataclass(frozen=True, slots=True)
class PodAccount:
    """A pod, its place and its story, without the decision made again.

    Attributes:
        placed: its placement; None while it waits.
        gpus: the GPUs of its place; for an `Explanation` of a waiting pod, of the one that it would get now.
        done: events, oldest first.
        profiling: a sentence on how its workload is profiled; empty if it has a profile.
    """

    request: PlacementRequest
    placed: Placement | None
    gpus: tuple[ExplainedGpu, ...]
    done: tuple[Happening, ...]
    profiling: str


@dataclass(frozen=True, slots=True)
class Explanation(PodAccount):
    """The answer to "why is this pod here", or "why does it wait".

    Attributes:
        now: the decision if made again now, without the pod itself.
        nodes: number of all nodes.
        fits_on: number of nodes on which it fits.
        better: number of nodes that rank above its own.
        elsewhere: refusals of other nodes, the most frequent first.
        kept: GPUs kept for the pod until it is placed; None if none are.
    """

    policy: str
    now: Placement | Rejection
    standing: PlaceStanding
    nodes: int
    fits_on: int
    better: int
    elsewhere: tuple[Elsewhere, ...]
    kept: KeptGpus | None


def explain(
    request: PlacementRequest,
    context: DecisionContext,
    model: Callable[[], InterferenceModel],
    placed: Placement | None,
    *,
    defaults: Defaults,
    seen: Mapping[str, TenantStatus] | None = None,
    share: GpuShare | None = None,
    happened: Iterable[Happening] = (),
    excluded: Mapping[str, Rejection] | None = None,
) -> Explanation:
    """Explain one pod.

    Args:
        context: with a state that does not include the pod itself.
        placed: its placement; None while it waits.
        seen: by namespace/name, the agents' measurements of the tenants on the pod's GPUs.
        share: the pod's GpuShare, for its retractions.
        happened: events about the pod.
        excluded: by node, why kube-scheduler would not ask about it for this pod.
    """
    # 1. Make the same decision again, as if the pod arrived now.
    found, now = survey(request, context, excluded=excluded), decide(request, context, excluded=excluded)
    # 2. Compare: would it go there again, and is another node better by now?
    standing, better = _standing(found, placed, now)
    # 3. Its neighbours: what each was promised, what the model predicts for the set, what was measured.
    place = placed if placed is not None else now if isinstance(now, Placement) else None
    gpus: tuple[ExplainedGpu, ...] = ()
    if place is not None:
        gpus = tuple(
            _gpu(request, context, model, place, uuid, defaults=defaults, seen=seen or {})
            for uuid in place.gpu_uuids
        )
    # 4. What was done, and why not elsewhere.
    elsewhere = elsewhere_of(found)
    return Explanation(
        request,
        placed,
        gpus,
        _done(share, happened),
        _profiling(request, context, place, is_placed=placed is not None),
        context.policy.name,
        now,
        standing,
        len(found.nodes) + sum(each.nodes for each in elsewhere),
        len(found.nodes),
        better,
        elsewhere,
        next(
            (each for each in (*context.nominated, *context.kept) if each.pod.request.pod_uid == request.pod_uid),
            None,
        ),
    )


def account(
    request: PlacementRequest,
    placed: Placement | None,
    uid: str,
    nodes: Iterable[GpuNode],
    *,
    share: GpuShare | None = None,
    happened: Iterable[Happening] = (),
) -> PodAccount:
    """Say what a pod's own objects say, without the rest of the cluster.

    Args:
        placed: its placement; None while it waits.
        uid: the pod's uid in the API.
        nodes: the GpuNodes that may be read, its own among them; without it only the pod's own figures are known.
        share: the pod's GpuShare, for its figures and its retractions.
        happened: events about the pod.
    """
    by_uuid = {gpu.uuid: gpu for node in nodes for gpu in node.status.gpus}
    listed = share.status.placements if share is not None else ()
    own = next((each for each in listed if each.pod_uid == uid), None)
    gpus: tuple[ExplainedGpu, ...] = ()
    if placed is not None:
        subject = _subject(request, placed, own)
        gpus = tuple(_gpu_as_read(placed.node, uuid, by_uuid.get(uuid), uid, subject) for uuid in placed.gpu_uuids)
    return PodAccount(request, placed, gpus, _done(share, happened), "")


def _gpu_as_read(
    node: str, uuid: str, gpu: GpuStatus | None, pod_uid: str, subject: ExplainedTenant
) -> ExplainedGpu:
    """Return one GPU of the pod as its GpuNode tells it.

    Args:
        gpu: None if it was not read.
        subject: the pod, for where the GpuNode does not list it.
    """
    others = []
    for each in gpu.tenants if gpu is not None else ():
        tenant = ExplainedTenant(
            f"{each.namespace}/{each.pod}",
            is_subject=False,
            share_percent=each.share_percent,
            thread_percentage=each.thread_percentage,
            promise_ratio=each.promise_ratio,
            is_known=None,
            predicted=None,
            seen=each,
        )
        if each.pod_uid == pod_uid:
            subject = replace(tenant, is_subject=True, thread_percentage=subject.thread_percentage)
        else:
            others.append(tenant)
    return ExplainedGpu(uuid, node, gpu.model if gpu is not None else "", (subject, *others))


def _subject(request: PlacementRequest, placed: Placement, own: PodPlacement | None) -> ExplainedTenant:
    """Return the pod as a tenant, by its decision and its GpuShare."""
    share_percent = max(1, request.share_milli // MILLI_PER_PERCENT)
    promise = own.promise_ratio if own is not None else None
    seen = None
    if own is not None:
        seen = TenantStatus(
            pod_uid=own.pod_uid,
            pod=own.pod,
            share_percent=share_percent,
            progress_ratio=own.progress_ratio,
            slowdown_ratio=own.slowdown_ratio,
            promise_ratio=promise,
            throttle_ratio=own.throttle_ratio,
        )
    return ExplainedTenant(
        request.pod_uid,
        is_subject=True,
        share_percent=share_percent,
        thread_percentage=placed.thread_percentage,
        promise_ratio=promise,
        is_known=None,
        predicted=None,
        seen=seen,
    )


def _profiling(
    request: PlacementRequest, context: DecisionContext, place: Placement | None, *, is_placed: bool
) -> str:
    """Return a sentence on how an unknown workload is being profiled, or why it is not."""
    if request.unprofiled is None or place is None or request.gpu_count != 1:
        return ""
    if place.probation is not None and place.probation.until > context.now:
        until = clock_time(place.probation.until)
        has = "has" if is_placed else "would have"
        return f"It {has} its GPU to itself until {until} at the latest, while its workload's profile is taken."
    at = context.state.gpu_at(place.gpu_uuids[0])
    can_read = context.probation.freezes and at is not None and not context.state.unreadable[at[0]]
    classes = [each.job_class for each in context.state.tenants(place.gpu_uuids[0])]
    why = why_unread(classes, can_read=can_read)
    if not why:
        return ""
    runs = "runs" if is_placed else "would run"
    return (
        f"Not profiled: it {runs} under its share as cap {why}; its workload's profile is taken once a pod of it "
        "is alone on a GPU for some seconds."
    )


def elsewhere_of(found: Candidates) -> tuple[Elsewhere, ...]:
    """Return refusals grouped by sentence, the most frequent first."""
    groups: dict[Rejection, list[str]] = {}
    for node, rejection in found.rejections().items():
        groups.setdefault(rejection, []).append(node)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0].reason, item[0].detail))
    return tuple(Elsewhere(rejection, len(nodes), nodes[0]) for rejection, nodes in ordered)


def _standing(
    found: Candidates, placed: Placement | None, now: Placement | Rejection
) -> tuple[PlaceStanding, int]:
    if placed is None:
        return (PlaceStanding.FITS if isinstance(now, Placement) else PlaceStanding.WAITS), 0
    scores = dict(zip(found.nodes, found.scores.tolist(), strict=True))
    own = scores.get(placed.node)
    if own is None:
        return PlaceStanding.NOT_NOW, len(scores)
    better = sum(score > own + _EQUAL for score in scores.values())
    return (PlaceStanding.BETTER_ELSEWHERE if better else PlaceStanding.BEST), better


def _gpu(
    request: PlacementRequest,
    context: DecisionContext,
    model: Callable[[], InterferenceModel],
    place: Placement,
    uuid: str,
    *,
    defaults: Defaults,
    seen: Mapping[str, TenantStatus],
) -> ExplainedGpu:
    node = context.state.spec(place.node)
    gpu_model = next((gpu.model for gpu in node.gpus if gpu.uuid == uuid), "") if node else ""
    subject = _Occupant(
        request.pod_uid,
        request.share_milli,
        tolerated(request, request.known, defaults),
        place.thread_percentage,
        request.known,
        request.is_auto,
    )
    occupants = [subject, *map(_Occupant.of, context.state.tenants(uuid))]
    in_force = [each.cap_in_force(seen.get(each.pod)) for each in occupants]
    predicted = _predicted(
        model, gpu_model, [(each.known, cap) for each, cap in zip(occupants, in_force, strict=True)]
    )
    return ExplainedGpu(
        uuid,
        place.node,
        gpu_model,
        tuple(
            _explained(each, forecast, seen.get(each.pod), is_subject=each is subject)
            for each, forecast in zip(occupants, predicted, strict=True)
        ),
    )


class _Occupant(NamedTuple):
    """The pod in question, or another tenant of its GPU."""

    pod: str
    share_milli: int
    max_slowdown: float
    cap: int | None
    known: KnownWorkload | None
    is_auto: bool

    @classmethod
    def of(cls, tenant: Tenant) -> Self:
        """Return a tenant of the state, with the slowdown that its workload tolerates if that says so."""
        own = tenant.known.max_slowdown if tenant.known is not None else None
        tolerates = tenant.max_slowdown if own is None else own
        return cls(
            tenant.pod_uid, tenant.share_milli, tolerates, tenant.thread_percentage, tenant.known, tenant.is_auto
        )

    def cap_in_force(self, seen: TenantStatus | None) -> int:
        """Return the cap that its processes run under, whatever was decided since; else that of its decision."""
        return (seen.thread_percentage_in_force if seen is not None else None) or self.cap or UNCAPPED_PERCENT


def _explained(
    occupant: _Occupant, forecast: Forecast | None, seen: TenantStatus | None, *, is_subject: bool
) -> ExplainedTenant:
    profile = occupant.known.profile if occupant.known is not None else None
    share_percent = max(1, occupant.share_milli // MILLI_PER_PERCENT)
    promise = promised_progress(profile, share_percent, max(1.0, occupant.max_slowdown), is_auto=occupant.is_auto)
    if seen is not None and seen.promise_ratio is not None:
        promise = seen.promise_ratio  # the promise that the agent keeps now
    return ExplainedTenant(
        occupant.pod,
        is_subject,
        share_percent,
        occupant.cap,
        promise,
        profile is not None,
        forecast,
        seen,
        len(profile.phases) if profile is not None else 0,
    )


def _predicted(
    model: Callable[[], InterferenceModel], gpu_model: str, members: Sequence[tuple[KnownWorkload | None, int]]
) -> Sequence[Forecast | None]:
    """Return the model's forecasts of a set; None for all while one of them is unknown on this GPU model."""
    known = [
        (each.profile, cap)
        for each, cap in members
        if each is not None and each.profile is not None and each.gpu_model in {"", gpu_model}
    ]
    if len(known) < len(members):
        return [None] * len(members)
    return predict_worst(model().for_gpu(gpu_model), known)


def _done(share: GpuShare | None, happened: Iterable[Happening]) -> tuple[Happening, ...]:
    """Return a pod's events and the retractions of its group, oldest first."""
    return tuple(sorted((*happened, *_retractions(share)), key=lambda each: each.at))


def _retractions(share: GpuShare | None) -> list[Happening]:
    """Return the retractions of the pod's group as events; one that a later one replaced is counted there."""
    retractions = share.status.retractions if share is not None else ()
    return [
        Happening(
            each.at or "",
            "Retracted",
            f"a pod of it was moved away from {', '.join(each.neighbours)}"
            + (f"; not beside them again before {each.until}" if each.until else ""),
            each.count,
        )
        for each in retractions
        if each.neighbours
    ]
