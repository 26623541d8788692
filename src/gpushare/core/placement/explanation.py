"""Why a pod is where it is, or waits: the decision asked again; what was promised, predicted, seen and done."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpushare.core.admission import Defaults
from gpushare.core.api import GpuShare, Rejection, TenantStatus
from gpushare.core.interference import Forecast, InterferenceModel, predict_worst, promised_progress
from gpushare.core.placement.decide import DecisionContext, decide, survey
from gpushare.core.placement.keeping import KeptGpus
from gpushare.core.placement.known import KnownWorkload
from gpushare.core.placement.probation import clock_time, why_unread
from gpushare.core.placement.search import Candidates
from gpushare.core.placement.shapes import MILLI_PER_PERCENT, Placement, PlacementRequest, tolerated

_EQUAL: Final = 1e-6  # scores that differ by less are equal


class PlaceStanding(StrEnum):
    """How a pod's place compares with what would be decided now."""

    BEST = "Best"
    """No node ranks higher."""
    BETTER_ELSEWHERE = "BetterElsewhere"
    """It would fit its node, and another one ranks higher by now."""
    NOT_NOW = "NotNow"
    """It would no longer be placed on its node."""
    FITS = "Fits"
    """It waits, and there is room."""
    WAITS = "Waits"
    """It waits, and fits nowhere."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that was done or said about the pod.

    Attributes:
        at: RFC 3339; empty where it is not known.
        count: how often.
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
        promise_ratio: progress that it may count on.
        predicted: of this set of tenants under their caps; None while one of them has no profile.
        seen: what its node's agent measured last; None without.
        phases: kinds of work that its workload does beside the usual one.
    """

    pod: str
    is_subject: bool
    share_percent: int
    thread_percentage: int | None
    promise_ratio: float
    is_known: bool
    predicted: Forecast | None
    seen: TenantStatus | None
    phases: int = 0


@dataclass(frozen=True, slots=True)
class ExplainedGpu:
    """One GPU of the pod, or the one that it would get, with everybody on it."""

    uuid: str
    node: str
    model: str
    tenants: tuple[ExplainedTenant, ...]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Why the pod is not on some nodes.

    Attributes:
        nodes: how many say so; example: one of them.
    """

    rejection: Rejection
    nodes: int
    example: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer to "why is this pod here", or "why does it wait".

    Attributes:
        placed: where it was decided to be; None while it waits.
        now: what the decision is when asked again, the pod itself left out.
        fits_on: nodes on which it fits; nodes: of all; better: those that rank above its own.
        gpus: of its place, or of the one that it would get now; empty where it fits nowhere.
        elsewhere: the most frequent reason first.
        done: oldest first.
        kept: what is kept for the pod until it is placed; None: nothing.
        profiling: how it stands with the profile of its workload, a sentence; empty where it has one.
    """

    request: PlacementRequest
    policy: str
    placed: Placement | None
    now: Placement | Rejection
    standing: PlaceStanding
    nodes: int
    fits_on: int
    better: int
    gpus: tuple[ExplainedGpu, ...]
    elsewhere: tuple[Elsewhere, ...]
    done: tuple[Happening, ...]
    kept: KeptGpus | None = None
    profiling: str = ""


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
) -> Explanation:
    """Explain one pod.

    Args:
        context: of a state that does not hold the pod itself.
        placed: where it is; None while it waits.
        seen: tenants of the pod's GPUs as their agents see them, by namespace/name.
        share: the pod's GpuShare, for its retractions.
        happened: events about the pod.
    """
    # 1. Ask the same decision again, as if the pod came now.
    found, now = survey(request, context), decide(request, context)
    # 2. Compare: would it go there again, and is another node better by now?
    standing, better = _standing(found, placed, now)
    # 3. Who is there with it: what each was promised, what the model says of them together, what is seen.
    place = placed if placed is not None else now if isinstance(now, Placement) else None
    gpus = tuple(
        _gpu(request, context, model, place, uuid, defaults=defaults, seen=seen or {})
        for place in ((place,) if place else ())
        for uuid in place.gpu_uuids
    )
    # 4. What was done, and why not elsewhere.
    done = sorted((*happened, *_retractions(share)), key=lambda each: each.at)
    return Explanation(
        request,
        context.policy.name,
        placed,
        now,
        standing,
        int(context.state.alive.sum()),
        len(found.nodes),
        better,
        gpus,
        elsewhere_of(found),
        tuple(done),
        next((each for each in context.kept if each.pod.request.pod_uid == request.pod_uid), None),
        _profiling(request, context, place, is_placed=placed is not None),
    )


def _profiling(
    request: PlacementRequest, context: DecisionContext, place: Placement | None, *, is_placed: bool
) -> str:
    """Say how the profile of an unknown workload is taken, or why it is not."""
    if request.unprofiled is None or place is None or request.gpu_count != 1:
        return ""
    if place.probation is not None and place.probation.until > context.now:
        until = clock_time(place.probation.until)
        has = "has" if is_placed else "would have"
        return f"It {has} its GPU to itself until {until} at the latest, while its workload's profile is taken."
    at = context.state.gpu_at(place.gpu_uuids[0])
    freezes = context.probation.freezes and at is not None and not context.state.unfreezable[at[0]]
    classes = [each.job_class for each in context.state.tenants(place.gpu_uuids[0])]
    why = why_unread(classes, can_freeze=freezes)
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
    state = context.state
    node = state.spec(place.node)
    gpu_model = next((gpu.model for gpu in node.gpus if gpu.uuid == uuid), "") if node else ""
    subject = (
        request.pod_uid,
        request.share_milli,
        tolerated(request, request.known, defaults),
        place.thread_percentage,
        request.known,
        request.is_auto,
    )
    others = []
    for each in state.tenants(uuid):
        own = each.known.max_slowdown if each.known is not None else None
        tolerates = each.max_slowdown if own is None else own
        others.append(
            (each.pod_uid, each.share_milli, tolerates, each.thread_percentage, each.known, each.is_auto)
        )
    members = [subject, *others]
    predicted = _predicted(model, gpu_model, [(known, cap or 100) for *_, cap, known, _ in members])
    tenants = []
    for (pod, milli, tolerates, cap, known, is_auto), forecast in zip(members, predicted, strict=True):
        seen_of = seen.get(pod)
        share = max(1, milli // MILLI_PER_PERCENT)
        profile = known.profile if known is not None else None
        phases = len(profile.phases) if profile is not None else 0
        promise = promised_progress(profile, share, max(1.0, tolerates), is_auto=is_auto)
        if seen_of is not None and seen_of.promise_ratio is not None:
            promise = seen_of.promise_ratio  # what is kept there now
        tenants.append(
            ExplainedTenant(
                pod, pod == request.pod_uid, share, cap, promise, profile is not None, forecast, seen_of, phases
            )
        )
    return ExplainedGpu(uuid, place.node, gpu_model, tuple(tenants))


def _predicted(
    model: Callable[[], InterferenceModel], gpu_model: str, members: Sequence[tuple[KnownWorkload | None, int]]
) -> Sequence[Forecast | None]:
    """What the model says of a set; nothing while one of them is not known on this model of GPU."""
    known = [
        (each.profile, cap)
        for each, cap in members
        if each is not None and each.profile is not None and each.gpu_model in {"", gpu_model}
    ]
    if len(known) < len(members):
        return [None] * len(members)
    return predict_worst(model().for_gpu(gpu_model), known)


def _retractions(share: GpuShare | None) -> list[Happening]:
    """Pods of the group that were moved away."""
    retractions = share.status.retractions if share is not None else ()
    return [
        Happening(
            each.at or "",
            "Retracted",
            f"a pod of it was moved away from {', '.join(each.neighbours) or 'its neighbours'}"
            + (f"; not beside them again before {each.until}" if each.until else ""),
            each.count,
        )
        for each in retractions
    ]
