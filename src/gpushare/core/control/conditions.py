"""The conditions of a GpuShare, with messages for people."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpushare.core.api import (
    Condition,
    ConditionStatus,
    GpuShareSpec,
    PodPlacement,
    ProfileMode,
    TenantSlo,
    TenantTrouble,
    WorkloadSignature,
)
from gpushare.core.control.profiling import ProfilingView
from gpushare.core.control.slo_reading import SloReason

READY: Final = "Ready"
PROFILED: Final = "Profiled"
PROMISE_KEPT: Final = "PromiseKept"
RETRACTION_REFUSED: Final = "RetractionRefused"
SLO_MET: Final = "SLOMet"
TROUBLED: Final = "Troubled"
OVERLAPPING: Final = "Overlapping"
ENDS_NEIGHBOURS: Final = "EndsNeighbours"

BROKEN: Final = "PromiseBroken"
_MOST_NAMED: Final = 3  # most pods that a message names
# Why it is unknown whether a target is met. No figures: those are in the GpuNode and in the pod's events.
_UNKNOWN: Final = {
    SloReason.STARTING: "too few windows were read so far",
    SloReason.BORDERLINE: "it is about at its target, so that chance decides",
    SloReason.TOO_FEW_REQUESTS: "too few requests to judge",
    SloReason.UNREACHABLE: "its page or Prometheus cannot be read",
    SloReason.TOO_LARGE: "the answer is too large to be read",
    SloReason.TOO_COSTLY: "the answer costs its node's agent too much CPU time to be read each minute",
    SloReason.BAD_ANSWER: "the answer cannot be understood",
    SloReason.NO_SERIES: "the series, or its quantile, is not in the answer",
    SloReason.NOT_A_NUMBER: "the values are no numbers, or no rising counts",
    SloReason.BUCKETS: "the histogram's largest bound is below the target",
    SloReason.STALE: "Prometheus' own time stands still",
    SloReason.NO_PROMETHEUS: "no Prometheus is set (the chart's value slo.prometheusUrl)",
    SloReason.HOST_NETWORK: "the pod uses the node's network; use gpushare.io/slo-query",
    SloReason.NOT_LATENCY: "its GpuShare says class throughput, which has no latency target",
    SloReason.NOT_THROUGHPUT: "its GpuShare says class latency, which has no rate",
    SloReason.IDLE: "its counter stands still",
    SloReason.IMPLAUSIBLE: (
        "the GPU's counters leave what it reports impossible, so they alone count; a target is to be what the pod "
        "makes at its promised progress"
    ),
}
_NOT_REPORTED: Final = ("NotReported", "its node's agent does not report on it")


def ready(live: int, placed: int, wrong: Sequence[str]) -> Condition:
    """Return the condition Ready: whether every live pod is placed; `wrong` lists malformed pods."""
    if wrong:
        return Condition(READY, ConditionStatus.FALSE, "Malformed", "; ".join(wrong[:3])[:1000])
    if live == 0:
        return Condition(READY, ConditionStatus.TRUE, "NoPods", "no pod asks for a share now")
    message = f"{placed} of {live} pods are placed"
    if placed < live:
        return Condition(
            READY, ConditionStatus.FALSE, "WaitingForRoom", f"{message}; see the events of the others"
        )
    return Condition(READY, ConditionStatus.TRUE, "Placed", message)


def profiled(
    spec: GpuShareSpec, profile: WorkloadSignature | None, profiling: ProfilingView | None = None
) -> Condition:
    """Return the condition Profiled: whether the workload's signature is known, or how far profiling has come."""
    if profile is not None and (contradiction := profile.contradiction()):
        message = f"the profile contradicts itself and is not used: {contradiction}; it is measured again"
        return Condition(PROFILED, ConditionStatus.FALSE, "Contradictory", message)
    if profile is not None:
        return Condition(
            PROFILED, ConditionStatus.TRUE, "Taken", f"signature taken on {profile.gpu_model or 'a GPU'}"
        )
    if not wants_profile(spec):
        return Condition(PROFILED, ConditionStatus.FALSE, "Off", "profile.mode is Off")
    if profiling is not None and profiling.on_probation:
        pods = [
            f"{pod} has its GPU to itself until {until} at the latest"
            for pod, until in sorted(profiling.on_probation.items())
        ]
        return Condition(
            PROFILED, ConditionStatus.FALSE, "OnProbation", f"{_named(pods, '; ')}: it is taken meanwhile"
        )
    asked = spec.profile.window_seconds if spec.profile is not None else None
    long = f"{asked} s" if asked else "some seconds"
    if profiling is not None and profiling.unread:
        pods = [f"{pod} runs under its share as cap {why}" for pod, why in sorted(profiling.unread.items())]
        message = f"not profiled: {_named(pods, '; ')}; it is taken once a pod of it is alone on a GPU for {long}"
        return Condition(PROFILED, ConditionStatus.FALSE, "UnderItsShare", message)
    message = (
        f"taken once a pod of it runs alone on a GPU for {long}, or beside throughput pods that can be "
        "stopped for a moment; until then it may count on its share over maxSlowdown, and its share is its cap "
        "(class latency has none)"
    )
    return Condition(PROFILED, ConditionStatus.FALSE, "NotYet", message)


def is_promise_broken(
    progress: float | None, error: float | None, promise: float | None, *, was_broken: bool
) -> bool:
    """Return whether a pod's promise counts as broken; not while its progress is unknown, as while it sleeps.

    It breaks when the inferred progress is below the promise by more than its error, and stays broken until the
    progress itself reaches the promise.

    Args:
        progress: inferred, relative to running alone; None if unknown.
        error: its standard deviation; None if unknown.
        promise: promised progress; None if unknown.
        was_broken: whether the promise was broken before.
    """
    if progress is None or promise is None:
        return False
    return progress + (0.0 if was_broken else error or 0.0) < promise


def promise_kept(placements: Iterable[PodPlacement], silent: Sequence[str] = ()) -> Condition:
    """Return the condition PromiseKept: whether every pod reaches its promised progress.

    Messages contain no figure that changes with every window, because each change costs a write.

    Args:
        silent: names of pods whose node's agent has fallen silent.
    """
    listed = list(placements)
    measured = [p for p in listed if p.progress_ratio is not None and p.promise_ratio is not None]
    throttled = [p.pod for p in listed if p.throttle_ratio]
    slowed = ""
    if throttled:
        slowed = f"; kept stopped for a part of the time, for a neighbour's promise: {_named(throttled)}"
    if silent:
        slowed += f"; nothing is heard of {_named(silent)}: its node's agent is silent, and throttles nobody"
    if not measured and silent:
        return Condition(PROMISE_KEPT, ConditionStatus.UNKNOWN, "AgentSilent", slowed.removeprefix("; "))
    if not measured:
        return Condition(
            PROMISE_KEPT, ConditionStatus.UNKNOWN, "NotMeasured", f"no pod's progress is known{slowed}"
        )
    below = [
        f"{p.pod} makes less than the {p.promise_ratio:.2f} of running alone that it may count on"
        for p in measured
        if p.is_promise_broken
    ]
    if below:
        return Condition(PROMISE_KEPT, ConditionStatus.FALSE, BROKEN, f"{_named(below, '; ')}{slowed}")
    message = f"every pod whose progress is known makes what it may count on{slowed}"
    return Condition(PROMISE_KEPT, ConditionStatus.TRUE, "PromiseKept", message)


def slo_met(pods: Mapping[str, TenantSlo | None]) -> Condition | None:
    """Return the condition SLOMet: whether every pod meets its own target; None if no pod has one.

    As for promises, the message contains no figure that changes with every window.

    Args:
        pods: each placed pod with a target, by name, and what its node reports about it.
    """
    if not pods:
        return None
    known = {pod: slo for pod, slo in pods.items() if slo is not None}
    missed = [f"{pod} misses {slo.target}" for pod, slo in known.items() if slo.met is ConditionStatus.FALSE]
    if missed:
        return Condition(SLO_MET, ConditionStatus.FALSE, "Missed", _named(missed))
    unknown = {
        pod: why_unknown(slo) for pod, slo in pods.items() if slo is None or slo.met is not ConditionStatus.TRUE
    }
    if unknown:
        [(reason, _), *_] = unknown.values()
        why = _named([f"{pod}: {sentence}" for pod, (_, sentence) in unknown.items()], "; ")
        return Condition(SLO_MET, ConditionStatus.UNKNOWN, reason, why)
    return Condition(SLO_MET, ConditionStatus.TRUE, "Met", "every pod meets its own target")


def why_unknown(slo: TenantSlo | None) -> tuple[str, str]:
    """Return the reason and its sentence, which does not change from reading to reading."""
    if slo is None:
        return _NOT_REPORTED
    try:
        return slo.reason, _UNKNOWN[SloReason(slo.reason)]
    except (ValueError, KeyError):  # a reason from an agent of another version
        return slo.reason, "its node's agent says why, in the GpuNode"


def troubled(pods: Mapping[str, TenantTrouble]) -> Condition:
    """Return the condition Troubled: pods hold a share and make no good use of it. Only made when true."""
    [first, *_] = pods.values()
    sentences = [f"{pod}: {trouble.message}" for pod, trouble in pods.items()]
    return Condition(TROUBLED, ConditionStatus.TRUE, first.kind.value, _named(sentences, "; "))


def overlapping(first: Sequence[tuple[str, int]]) -> Condition:
    """Return the condition Overlapping: GpuShares that come first select some of its pods. Only made when true."""
    pods = [f"{count} {'pod' if count == 1 else 'pods'} to {name}" for name, count in first]
    message = f"of the pods that it selects, some belong to GpuShares that come first by name: {_named(pods)}"
    return Condition(OVERLAPPING, ConditionStatus.TRUE, "AnotherGpuShareFirst", message)


def retraction_refused(reason: str, message: str) -> Condition:
    """Return the condition RetractionRefused: a pod that should leave its GPU stays. Only made when true."""
    return Condition(RETRACTION_REFUSED, ConditionStatus.TRUE, reason, message)


def ends_neighbours(count: int, *, isolated: bool) -> Condition:
    """Return the condition EndsNeighbours: its pods ended their neighbours lately. Only made when they did."""
    times = "a pod of it was" if count == 1 else f"{count} times a pod of it was"
    what = f"{times} killed within a kernel in the last day, which ended every other tenant of its GPU"
    if not isolated:
        message = f"{what}; after another time its pods are isolated"
        return Condition(ENDS_NEIGHBOURS, ConditionStatus.FALSE, "KilledInKernelOnce", message)
    message = f"{what}; so its next pods get whole GPUs, and are charged for them"
    return Condition(ENDS_NEIGHBOURS, ConditionStatus.TRUE, "KilledInKernel", message)


def dated(
    conditions: Iterable[Condition], before: Iterable[Condition], generation: int, now: str
) -> tuple[Condition, ...]:
    """Set the time of each condition's last change of status."""
    old = {condition.type: condition for condition in before}
    found = []
    for new in conditions:
        previous = old.get(new.type)
        same = previous is not None and previous.status is new.status and previous.last_transition_time
        since = previous.last_transition_time if previous is not None and same else now
        found.append(Condition(new.type, new.status, new.reason, new.message, since, generation))
    return tuple(found)


def wants_profile(spec: GpuShareSpec) -> bool:
    """Return whether the user lets the workload be profiled."""
    return spec.profile is None or spec.profile.mode is not ProfileMode.OFF


def _named(texts: Sequence[str], mark: str = ", ") -> str:
    """Return the first texts, separated by `mark`, and how many more there are."""
    more = f"{mark}and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return mark.join(texts[:_MOST_NAMED]) + more
