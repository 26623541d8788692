"""GPUs closed to all pods but one while its workload is profiled: which pod has one, and until when."""

import math
from collections import Counter
from dataclasses import dataclass

from gpushare.core.api import GpuShare, PodView, ProfileMode, names
from gpushare.core.interference import as_profile


@dataclass(frozen=True, slots=True)
class Unprofiled:
    """A workload without a profile that may get one.

    Attributes:
        workloads: its names: GpuShare, owner of its pods, workload key. Two workloads with a common name are the
            same.
        pod: name of the pod that asks, for messages; "" means its uid.
        window_seconds: how long its GpuShare wants it to run alone; None for the default.
        namespace: of its pod; "" for none, as in simulations.
    """

    workloads: frozenset[str]
    pod: str = ""
    window_seconds: float | None = None
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class ProbationTerm:
    """The probation of a pod, from its decision.

    Attributes:
        workloads: names of its workload, as in `Unprofiled`.
        pod: the pod's name, for messages.
        until: its latest end, in seconds of the caller's clock (Unix time on a live cluster).
        namespace: of the pod; "" for none.
    """

    workloads: frozenset[str]
    pod: str
    until: float
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class ClosedGpu:
    """A GPU that one pod has to itself."""

    pod_uid: str
    gpu_uuid: str
    term: ProbationTerm


class ClosedGpus:
    """The terms of all pods that hold a reservation, expired or not; one such pod per workload."""

    def __init__(self) -> None:
        self._closed: dict[str, ClosedGpu] = {}
        self._workloads: Counter[str] = Counter()
        self._last: tuple[ClosedGpu, ...] = ()
        self._last_from, self._last_until = math.inf, -math.inf

    def put(self, closed: ClosedGpu) -> None:
        """Record a pod's term."""
        self._closed[closed.pod_uid] = closed
        self._workloads.update(closed.term.workloads)
        self._last_from = math.inf

    def drop(self, pod_uid: str) -> None:
        """Forget the term, if any, of a pod that no longer holds a reservation."""
        closed = self._closed.pop(pod_uid, None)
        if closed is not None:
            self._workloads.subtract(closed.term.workloads)
            self._workloads = +self._workloads
            self._last_from = math.inf

    def at(self, now: float) -> tuple[ClosedGpu, ...]:
        """Return the closed GPUs whose term has not ended at `now`; cached until a term ends or changes."""
        if not self._last_from <= now < self._last_until:
            self._last = tuple(each for each in self._closed.values() if each.term.until > now)
            self._last_from = now
            self._last_until = min((each.term.until for each in self._last), default=math.inf)
        return self._last

    def has_one_of(self, workloads: frozenset[str]) -> bool:
        """Return whether a pod of this workload has a term, or had one and still runs."""
        return not self._workloads.keys().isdisjoint(workloads)


def unprofiled_of(pod: PodView, share: GpuShare | None) -> Unprofiled | None:
    """Return the names of a pod's workload if it has no profile but may get one, else None.

    Its GpuShare may be younger than the pod, so the name of its owner is one of them.
    """
    owner = f"{pod.controller[0]}/{pod.controller[1]}" if pod.controller is not None else f"Pod/{pod.uid}"
    workloads = {f"{pod.namespace}/{owner}"}
    key = pod.annotations.get(names.WORKLOAD)
    if key is not None:
        workloads.add(f"{pod.namespace}/workload/{key}")
    window: float | None = None
    if share is not None:
        signature, profile = share.status.profile, share.spec.profile
        if signature is not None and as_profile(signature) is not None:
            return None
        if share.spec.selector is not None and key is None:
            return None  # pods of several kinds get no profile
        if profile is not None:
            if profile.mode is ProfileMode.OFF:
                return None
            window = profile.window_seconds
        workloads.add(f"{share.namespace}/GpuShare/{share.name}")
    return Unprofiled(frozenset(workloads), pod.key, window, pod.namespace)


def term_of(pod: PodView, unprofiled: Unprofiled | None, begins_at: float) -> ProbationTerm | None:
    """Return the term of a bound pod from its decision; None if it has none.

    Args:
        begins_at: when its window begins (`WindowStarts`), in seconds of the caller's clock.
    """
    if pod.decision is None or pod.decision.probation_seconds is None or unprofiled is None:
        return None
    until = begins_at + pod.decision.probation_seconds
    return ProbationTerm(unprofiled.workloads, pod.key, until, pod.namespace)
