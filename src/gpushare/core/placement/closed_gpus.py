"""GPUs that are closed for all but one pod, while its workload's profile is taken: who has one, and until when."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import GpuShare, PodView, ProfileMode, names
from gpushare.core.interference import as_profile

START_SECONDS: Final = 240.0
"""A window begins when the pod's container runs, or so long after the decision: PyTorch's image takes minutes."""


@dataclass(frozen=True, slots=True)
class Unprofiled:
    """A workload without a profile that may get one.

    Attributes:
        workloads: names of it: its GpuShare's, its pods' owner's, its key. One in common makes two the same.
        pod: the pod that asks, for people; "": its uid.
        window_seconds: of running alone that its GpuShare asks of a profile; None: nothing in particular.
        namespace: its pod's; "": none, as in simulations.
    """

    workloads: frozenset[str]
    pod: str = ""
    window_seconds: float | None = None
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class ProbationTerm:
    """What a pod's decision says of its probation.

    Attributes:
        until: its end at the latest, in seconds of the caller's clock (Unix time on a live cluster).
        namespace: the pod's; "": none.
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
    """The terms of all pods that hold a reservation, over or not: a workload gets one while such a pod lives."""

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
        """Forget a pod that holds no reservation any more, if it has a term."""
        closed = self._closed.pop(pod_uid, None)
        if closed is not None:
            self._workloads.subtract(closed.term.workloads)
            self._workloads = +self._workloads
            self._last_from = math.inf

    def at(self, now: float) -> tuple[ClosedGpu, ...]:
        """Those whose term is not over at a time; looked for again only when one was, or a pod came or went."""
        if not self._last_from <= now < self._last_until:
            self._last = tuple(each for each in self._closed.values() if each.term.until > now)
            self._last_from = now
            self._last_until = min((each.term.until for each in self._last), default=math.inf)
        return self._last

    def has_one_of(self, workloads: frozenset[str]) -> bool:
        """Whether a pod of this workload has a term, or had one and still runs."""
        return not self._workloads.keys().isdisjoint(workloads)


def unprofiled_of(pod: PodView, share: GpuShare | None) -> Unprofiled | None:
    """What a pod's workload is called while it has no profile and may get one; None where it has, or may not.

    Its GpuShare may be younger than the pod, so its owner's name counts as well.
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


def term_of(
    pod: PodView, unprofiled: Unprofiled | None, decided_at: float, started_at: float
) -> ProbationTerm | None:
    """The term of a bound pod by its decision; None where it has none.

    Args:
        decided_at: seconds; -inf where the decision does not say.
        started_at: when its first container did, seconds; -inf while none has.
    """
    if pod.decision is None or pod.decision.probation_seconds is None or unprofiled is None:
        return None
    latest = decided_at + START_SECONDS
    begins = latest if started_at == -math.inf else min(started_at, latest)
    until = begins + pod.decision.probation_seconds
    return ProbationTerm(unprofiled.workloads, pod.key, until, pod.namespace)
