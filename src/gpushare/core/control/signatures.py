"""Profiles: measured by an agent, stored in the GpuShare.

An agent that measures a workload alone on a GPU, or in place, publishes the signature in its GpuNode
(`TenantStatus.profile`); the operator copies it into `GpuShare.status.profile`. The interference model reads it by
`gpushare.core.interference.as_profile`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, overload

from gpushare.core.admission import JointKnowledge
from gpushare.core.api import (
    LONGER_WINDOW,
    MOST_OTHER_PHASES,
    CapPoint,
    GpuShare,
    GpuShareSpec,
    LearnedEffect,
    PhaseReading,
    WorkloadPhase,
    WorkloadSignature,
    is_workload_key,
    names,
)
from gpushare.core.gpu import MIN_SIGNATURE_SECONDS
from gpushare.core.progress import BAD_FIT, FAR_FIT, progress_shown, shape_misfit

_DIGITS: Final = 4  # of a cap curve's point in JSON


def choose_signature(
    kept: WorkloadSignature | None,
    seen: Iterable[WorkloadSignature],
    spec: GpuShareSpec,
    *,
    is_one_kind: bool,
    now: str,
) -> WorkloadSignature | None:
    """Choose the signature that a GpuShare keeps.

    One that was measured alone has to last as long as the spec asks. One that was read in place, beside
    neighbours that were stopped, cannot; it gives way to one alone that does.

    Args:
        seen: signatures that agents published for its pods. Of those on the kept signature's GPU model, the latest
            revision wins, then the one under the most threads, then the longest.
        is_one_kind: whether all its pods run one workload; otherwise nothing is taken.
        now: RFC 3339, for a newly taken signature; one that another GpuShare has keeps its own time.
    """
    seen = list(seen)
    asked = (spec.profile.window_seconds if spec.profile is not None else None) or 0
    fitting = [
        each
        for each in seen
        if each.is_usable()
        and (each.reading is PhaseReading.IN_PLACE or (each.window_seconds or 0.0) >= asked)
        and (kept is None or kept.gpu_model in {"", each.gpu_model})
    ]
    best = max(
        fitting,
        key=lambda each: (each.revision or 0, each.cap, each.window_seconds or 0.0, each.gpu_model),
        default=None,
    )
    if not is_one_kind:
        return kept
    if best is None:
        return _with_highest_memory(kept, seen)
    is_new = kept is None or kept.gives_way(best)
    usual = best if kept is None or is_new else kept
    others = [*(() if kept is None else (kept,)), *fitting]
    same = [each for each in others if each.gpu_model == usual.gpu_model and each.revision == usual.revision]
    phases = merged_phases(usual, (phase for each in same for phase in each.phases))
    found = replace(usual, phases=phases, cap_curve=grown_curve(usual, same))
    found = _with_highest_memory(found, seen if kept is None else (kept, *seen))
    return replace(found, taken_at=usual.taken_at or now) if is_new else found


def joint_of(
    kept: WorkloadSignature | None,
    known: Mapping[str, JointKnowledge],
    gpu_models: Iterable[str],
    spec: GpuShareSpec,
) -> JointKnowledge | None:
    """Return what a GpuShare takes of a joined workload's knowledge; None for nothing.

    A GpuShare keeps one profile. So one that has none takes no profile of a GPU model that it has no pod on.

    Args:
        known: by GPU model (`JoinedShares.of`).
        gpu_models: those of the GPUs that its pods are on.
    """
    models = sorted(gpu_models) if kept is None else [kept.gpu_model]
    found = next((known[model] for model in models if model in known), None)
    return found if found is not None and found.suits(spec.profile) else None


def joined_with(
    kept: WorkloadSignature | None, joint: JointKnowledge, spec: GpuShareSpec, *, now: str
) -> WorkloadSignature | None:
    """Return the profile of a joined workload, with the points and phases that only this GpuShare's has."""
    if kept is None or kept == joint.profile:
        return joint.profile
    return choose_signature(joint.profile, [kept], spec, is_one_kind=True, now=now)


def learnt_with(
    profile: WorkloadSignature | None,
    learned: Iterable[tuple[WorkloadSignature | None, tuple[LearnedEffect, ...]]],
) -> tuple[LearnedEffect, ...]:
    """Return the effects that were learnt with this profile, those from most windows; the first of several.

    Args:
        learned: profiles, and the effects learnt with each.
    """

    def windows(effects: tuple[LearnedEffect, ...]) -> int:
        model = profile.gpu_model if profile is not None else ""
        return next((each.windows for each in effects if each.gpu_model == model), 0)

    work = usual_work(profile)
    return max((effects for of, effects in learned if usual_work(of) == work), key=windows, default=())


@overload
def _with_highest_memory(profile: None, seen: Iterable[WorkloadSignature]) -> None: ...


@overload
def _with_highest_memory(profile: WorkloadSignature, seen: Iterable[WorkloadSignature]) -> WorkloadSignature: ...


def _with_highest_memory(
    profile: WorkloadSignature | None, seen: Iterable[WorkloadSignature]
) -> WorkloadSignature | None:
    """Return a signature with the highest peak of memory that was seen on its GPU model, whatever the work was."""
    if profile is None:
        return None
    peaks = [each.memory_peak_mib for each in (profile, *seen) if each.gpu_model == profile.gpu_model]
    return replace(profile, memory_peak_mib=max((peak for peak in peaks if peak is not None), default=None))


def usual_work(profile: WorkloadSignature | None) -> WorkloadSignature | None:
    """Return the signature without other phases and the memory's peak: learnt effects refer to the usual work."""
    return None if profile is None else replace(profile, phases=(), memory_peak_mib=None)


def grown_curve(usual: WorkloadSignature, others: Iterable[WorkloadSignature]) -> tuple[CapPoint, ...]:
    """Return a signature's cap curve, with points added from signatures of the same work under fewer threads.

    The counters of another signature under its cap, relative to this one's, give the progress under that cap
    (`gpushare.core.progress.progress_shown`); its other points are scaled to match. For one cap the first point
    counts, so that two nodes do not replace each other's for ever. No point is above a point with more threads.

    Args:
        others: signatures of another GPU model, revision or kind of work add nothing.
    """
    known = {point.thread_percentage: point.progress_ratio for point in usual.cap_curve}
    seen = dict(known)
    for other in others:
        if _adds_points(usual, other):
            for cap, progress in _points_shown(usual, other).items():
                seen.setdefault(cap, progress)
    if seen == known:
        return usual.cap_curve
    points = []
    most = math.inf
    for cap in sorted(seen, reverse=True):
        most = min(most, seen[cap])
        points.append(CapPoint(cap, most))
    return tuple(reversed(points))


def _points_shown(usual: WorkloadSignature, other: WorkloadSignature) -> dict[int, float]:
    """Return another signature's points at or below the cap of `usual`, scaled to its progress."""
    points = {point.thread_percentage: point.progress_ratio for point in other.cap_curve}
    own = points.get(other.cap, 0.0)
    scale = 1.0
    if other.cap < usual.cap and own > 0:
        shown = progress_shown(
            usual.as_counters(),
            other.seen_counters(),
            other.cap / 100,
            whole_mhz=usual.sm_clock_mhz,
            seen_mhz=other.sm_clock_mhz,
        )
        scale = shown / own
    return {cap: round(scale * each, _DIGITS) for cap, each in points.items() if cap <= usual.cap}


def _adds_points(usual: WorkloadSignature, other: WorkloadSignature) -> bool:
    """Return whether a signature shows the same work of the same program on the same GPU model."""
    own, others = usual.as_counters(), other.as_counters()
    return (
        other != usual
        and (other.gpu_model, other.revision) == (usual.gpu_model, usual.revision)
        and not other.contradiction()
        and not own.is_far_more_active(others)
        and not others.is_far_more_active(own)
        and _is_same_work(_as_phase(usual), _as_phase(other))
    )


def merged_phases(usual: WorkloadSignature, phases: Iterable[WorkloadPhase]) -> tuple[WorkloadPhase, ...]:
    """Return a workload's phases besides its usual work, each once, the most frequent first.

    Of two readings of one phase the first counts, unless the other's window is much longer, so that two nodes do
    not replace each other's for ever. The larger part of the time counts too, so that a phase is not dropped by
    one reading and added again by the other.

    Args:
        usual: the signature of the usual work; work that it explains is not a phase.
        phases: the stored ones first, then those that agents published.
    """
    found: list[WorkloadPhase] = []
    for phase in phases:
        if phase in found or not _is_usable(phase) or _is_same_work(_as_phase(usual), phase):
            continue
        at = next((at for at, other in enumerate(found) if _is_same_work(other, phase)), None)
        if at is None:
            found.append(phase)
        elif (phase.window_seconds or 0.0) >= LONGER_WINDOW * max(1.0, found[at].window_seconds or 0.0):
            ratios = [each.time_ratio for each in (found[at], phase) if each.time_ratio is not None]
            found[at] = replace(phase, time_ratio=max(ratios, default=None))
    found.sort(key=lambda each: (each.time_ratio or 0.0, each.window_seconds or 0.0), reverse=True)
    return tuple(found[:MOST_OTHER_PHASES])


def _is_usable(phase: WorkloadPhase) -> bool:
    """Return whether a phase says enough; readings beside stopped neighbours are short."""
    is_long = (phase.window_seconds or 0.0) >= MIN_SIGNATURE_SECONDS
    return is_long and "sm_util" in phase.counters and not phase.as_signature("").contradiction()


def _as_phase(signature: WorkloadSignature) -> WorkloadPhase:
    return WorkloadPhase(
        signature.counters, thread_percentage=signature.thread_percentage, sm_clock_mhz=signature.sm_clock_mhz
    )


def _is_same_work(one: WorkloadPhase, other: WorkloadPhase) -> bool:
    """Return whether two signatures show the same kind of work: their counters have the same proportions."""
    known, seen = one.as_signature("").as_counters(), other.as_signature("").as_counters()
    missed = shape_misfit(known, seen, one.sm_clock_mhz, other.sm_clock_mhz)
    bar = BAD_FIT if one.thread_percentage == other.thread_percentage else FAR_FIT
    return missed is None or missed <= bar


def is_one_kind(spec: GpuShareSpec, annotations: Iterable[Mapping[str, str]]) -> bool:
    """Return whether all pods of a GpuShare run one workload: one owner, or the same `gpushare.io/workload`."""
    keys = {each.get(names.WORKLOAD) for each in annotations}
    return len(keys) <= 1 and (spec.selector is None or None not in keys)


def workload_of(share: GpuShare, annotations: Iterable[Mapping[str, str]]) -> str | None:
    """Return the key `gpushare.io/workload` that all pods of a GpuShare have; without pods, the last one."""
    keys = {each.get(names.WORKLOAD) for each in annotations}
    if not keys:
        return share.status.workload
    key = keys.pop()
    return key if not keys and key is not None and is_workload_key(key) else None
