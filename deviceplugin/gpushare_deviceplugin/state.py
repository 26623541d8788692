"""The agent's view of its node: GPUs and health, pods, and their allocations. One event loop owns it."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from gpushare.core.api import SHARES_PER_GPU
from gpushare.core.gpu import GpuHealth, GpuInfo, Health
from gpushare_deviceplugin.gates import ListedHealth
from gpushare_deviceplugin.pods import ManagedPod, end_of_clients

_log = logging.getLogger(__name__)
_WAITING: Final = frozenset({"", "Pending"})
_RUNNING: Final = "Running"
# From when the API server has forgotten a pod that was deleted by force; the gate has stopped its clients by then.
FORGOTTEN_SECONDS: Final = 10.0
PRESUMED_SECONDS: Final = 30.0  # kubelet lists an allocation much sooner; by then the pod was refused

CLOCK_SECONDS: Final = 1.0  # a deletion's time is in whole seconds; clocks that NTP keeps differ by far less


class AgentPart(StrEnum):
    """Parts of the agent whose trouble is counted; docs/metrics.md lists them."""

    ANNOTATIONS = "annotations"
    CLOCK = "clock"
    DECISIONS = "decisions"
    DEVICES = "devices"
    EVENTS = "events"
    FORECAST = "forecast"
    FORECASTS = "forecasts"
    GPUNODE = "gpunode"
    HEAP = "heap"
    HYGIENE = "hygiene"
    LOOP = "loop"
    OUTSIDE = "outside"
    PLUGIN = "plugin"
    PODRESOURCES = "podresources"
    PRUNE = "prune"
    READINGS = "readings"
    RECONCILER = "reconciler"
    REGISTRATION = "registration"
    RUNTIME = "runtime"
    SAMPLER = "sampler"
    SAMPLING = "sampling"
    SLO = "slo"
    THROTTLE = "throttle"


@dataclass(slots=True)
class Counts:
    """Counts of errors since the agent started, as in docs/metrics.md."""

    mismatches: int = 0
    refused_allocations: int = 0
    refused_starts: int = 0
    bad_pods: int = 0
    registrations: int = 0
    errors: dict[AgentPart, int] = field(default_factory=dict)

    def error(self, part: AgentPart) -> None:
        """Count one error of a part."""
        self.errors[part] = self.errors.get(part, 0) + 1


def problem_in_words(pod: ManagedPod) -> str:
    """Return what is wrong with a pod's annotations and what follows; empty if nothing is wrong."""
    if not pod.problem:
        return ""
    if pod.decision is None:
        return f"{pod.problem}; no decision can be read, so its processes wait at the gate"
    return f"{pod.problem}; what was decided for the pod stays in force"


def _age(pod: ManagedPod) -> tuple[str, str]:
    """Return what sorts the pod that was decided first to the front."""
    return (pod.decision.decided_at if pod.decision else "", pod.uid)


class NodeState:
    """The agent's state, which is not durable: it is rebuilt from pods and PodResources.

    Attributes:
        gpus: every GPU seen since the start, by uuid; one that vanished stays, as unhealthy.
        listed_health: health of the GPUs as kubelet is told.
        allocations: pod uid -> shares by GPU, from kubelet's PodResources, whose lists can lack a pod for a while
            (`set_allocations`); None until its first answer.
        problem: why the driver gives no devices; left_out: by index, why a GPU that it counts cannot be read.
        unmeasured: by GPU, why it gives no figures at present.
        unreadable: by GPU, why its tenants cannot be read in place, empty if they can; absent until that is known.
        changed: set by every change that matters to the GpuNode, the decisions or kubelet.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self.gpus: dict[str, GpuInfo] = {}
        self.health: dict[str, GpuHealth] = {}
        self.listed_health = ListedHealth(clock)
        self.pods: dict[str, ManagedPod] = {}
        self.allocations: dict[str, dict[str, int]] | None = None
        self.counts = Counts()
        self.problem = ""
        self.left_out: Mapping[int, str] = {}
        self.unmeasured: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self._listed: frozenset[str] = frozenset()  # uids that kubelet's last list names
        self._presumed: dict[str, tuple[dict[str, int], float]] = {}
        self._forgotten: dict[str, tuple[ManagedPod, float]] = {}
        self._reported: dict[str, str] = {}  # pod uid -> the problem that was logged last
        self._clock, self._wall = clock, wall
        self._is_clock_behind = False
        self._waiters: set[asyncio.Event] = set()

    def subscribe(self) -> asyncio.Event:
        """Return an event that every change sets; the subscriber clears it."""
        event = asyncio.Event()
        self._waiters.add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        """End a subscription."""
        self._waiters.discard(event)

    def touch(self) -> None:
        """Notify every subscriber of a change."""
        for event in self._waiters:
            event.set()

    def set_gpus(self, gpus: tuple[GpuInfo, ...]) -> None:
        """Record the GPUs that the driver lists now; those missing now stay known."""
        new = {gpu.uuid: gpu for gpu in gpus}
        if any(self.gpus.get(uuid) != gpu for uuid, gpu in new.items()):
            self.gpus |= new
            for uuid in new:
                self.health.setdefault(uuid, GpuHealth(Health.HEALTHY))
            self.touch()

    def set_left_out(self, left_out: Mapping[int, str]) -> None:
        """Record the GPUs that cannot be read now, by index with the reason."""
        if self.left_out != left_out:
            self.left_out = dict(left_out)
            self.touch()

    def set_health(self, uuid: str, health: GpuHealth, *, may_pass: bool = False) -> None:
        """Record a GPU's health as concluded from the device and its MPS; call it in every round.

        Args:
            may_pass: whether what makes it unhealthy may pass by itself, so that kubelet is not told yet.
        """
        if self.listed_health.update(uuid, health, may_pass=may_pass):
            self.touch()
        old = self.health.get(uuid)
        if old == health:
            return
        self.health[uuid] = health
        level = logging.INFO if health.health is Health.HEALTHY else logging.WARNING
        if old is not None and (old.health != health.health or health.health is Health.UNHEALTHY):
            _log.log(level, "GPU %s is %s %s", uuid, health.health, health.reason, extra={"gpu": uuid})
        self.touch()

    def set_unmeasured(self, uuid: str, why: str) -> None:
        """Record why a GPU gives no figures; empty when it does."""
        if self.unmeasured.get(uuid, "") == why:
            return
        if why:
            self.unmeasured[uuid] = why
            _log.warning("GPU %s is not measured: %s", uuid, why, extra={"gpu": uuid})
        else:
            del self.unmeasured[uuid]
            _log.info("GPU %s is measured again", uuid, extra={"gpu": uuid})
        self.touch()

    def set_unreadable(self, uuid: str, why: str) -> None:
        """Record why a GPU's tenants cannot be read in place; empty if they can."""
        if self.unreadable.get(uuid) != why:
            self.unreadable[uuid] = why
            self.touch()

    def put_pod(self, pod: ManagedPod) -> None:
        """Record a pod that appeared or changed; each new problem with its annotations is logged.

        What was decided stays in force while they are invalid. All else is as it is now: that the pod ends, above
        all.
        """
        old = self.pods.get(pod.uid)
        if pod.problem and old is not None and old.decision is not None:
            pod = pod.as_annotated_before(old)
        if pod.problem and pod.problem != self._reported.get(pod.uid):
            self._reported[pod.uid] = pod.problem
            self.counts.bad_pods += 1
            _log.warning("pod %s: %s", pod.key, problem_in_words(pod), extra={"pod": pod.uid})
        if old is not None and pod.ends_at is not None:
            pod = self._with_own_end(old, pod, pod.ends_at)
        if old != pod:
            self.pods[pod.uid] = pod
            self.touch()

    def _with_own_end(self, old: ManagedPod, pod: ManagedPod, ends_at: float) -> ManagedPod:
        """Return a pod under deletion whose end is counted by our own clock too; the earliest end counts.

        Kubelet counts the grace period from the moment in which it sees the deletion, by a timer. The deletion's
        own time is the API server's, so on a node whose clock is behind, that end would come after the kill.
        """
        ends = [ends_at] if old.ends_at is None else [ends_at, old.ends_at]
        if old.ends_at is None or old.grace_seconds != pod.grace_seconds:  # deleted now, or again with another one
            ends.append(end_of_clients(self._wall() + pod.grace_seconds, pod.grace_seconds))
            self._check_clock(behind_seconds=ends_at - ends[-1])
        return replace(pod, ends_at=min(ends))

    def _check_clock(self, behind_seconds: float) -> None:
        is_behind = behind_seconds > CLOCK_SECONDS
        if is_behind:
            self.counts.error(AgentPart.CLOCK)
        if is_behind and not self._is_clock_behind:
            _log.warning(
                "this node's clock is %.0f s behind the API server's, or more: ends of deleted pods are counted "
                "from when they are seen",
                behind_seconds,
            )
        self._is_clock_behind = is_behind

    def drop_pod(self, uid: str) -> None:
        """Forget a pod that is gone from the API.

        Its clients are still to be ended if it was being deleted and had not ended: a forced deletion takes it
        from the API at once, and kubelet kills it seconds later (docs/adr/0259).
        """
        pod = self.pods.pop(uid, None)
        if pod is not None:
            if pod.ends_at is not None and not pod.is_over:
                ends_at = min(pod.ends_at, self._wall())
                self._forgotten[uid] = replace(pod, ends_at=ends_at), self._clock() + FORGOTTEN_SECONDS
            self._presumed.pop(uid, None)
            self._reported.pop(uid, None)
            self.touch()

    def forgotten(self) -> list[ManagedPod]:
        """Return the pods that were deleted by force moments ago: gone from the API, perhaps still at work."""
        now = self._clock()
        self._forgotten = {uid: each for uid, each in self._forgotten.items() if now < each[1]}
        return [pod for uid, (pod, _) in self._forgotten.items() if uid not in self.pods]

    def allocated(self, pod: ManagedPod) -> Mapping[str, int] | None:
        """Return the shares by GPU that kubelet gave the pod; None if it has none (yet).

        Until PodResources has answered, a running pod counts as having its decided shares.
        """
        if self.allocations is not None and pod.uid in self.allocations:
            return self.allocations[pod.uid]
        if self._is_presumed(pod):
            return self._presumed[pod.uid][0]
        if self.allocations is None and pod.phase == _RUNNING and pod.decision is not None:
            gpus = pod.decision.gpu_uuids
            return {uuid: pod.share_units // len(gpus) for uuid in gpus}
        return None

    def _is_presumed(self, pod: ManagedPod) -> bool:
        """Return whether the pod counts as having what an Allocate call gave; for good once it runs.

        Lists may fail, or lack it, for minutes. A pod that kubelet refused after the call never runs.
        """
        return self._is_just_given(pod) or (pod.uid in self._presumed and pod.phase == _RUNNING)

    def _is_just_given(self, pod: ManagedPod) -> bool:
        return pod.uid in self._presumed and self._clock() < self._presumed[pod.uid][1]

    def gpus_of(self, pod: ManagedPod) -> tuple[str, ...]:
        """Return the GPUs on which the pod's processes may run: the allocated ones, else the decided ones."""
        allocated = self.allocated(pod)
        if allocated:
            return tuple(allocated)
        return pod.decision.gpu_uuids if pod.decision else ()

    def pending(self) -> list[ManagedPod]:
        """Return the pods that are bound to this node without device ids yet; a running pod always has some."""
        return [pod for pod in self.pods.values() if self._is_pending(pod)]

    def _is_pending(self, pod: ManagedPod) -> bool:
        return pod.phase in _WAITING and self.allocated(pod) is None

    def asking(self) -> list[ManagedPod]:
        """Return the pods for which kubelet may ask for ids now, the likeliest first.

        These are the pending ones, and after them those that its last list does not name, although they have ids.
        A kubelet that restarts without its checkpoint allocates anew, also for a pod whose phase is still Running:
        the whole node was started anew, or its container waits for its next start.
        """
        unlisted = [
            pod
            for pod in self.pods.values()
            if not (pod.is_over or pod.uid in self._listed or self._is_just_given(pod) or self._is_pending(pod))
        ]
        return [*sorted(self.pending(), key=_age), *sorted(unlisted, key=_age)]

    def fitting(self, shares: Mapping[str, int]) -> list[ManagedPod]:
        """Return the pods that may be requesting these shares by GPU, the one decided first at the front.

        Those that no list names are returned only if no pending pod fits.
        """
        size = sum(shares.values())
        fitting = [
            pod
            for pod in self.asking()
            if pod.share_units == size and pod.decision is not None and set(pod.decision.gpu_uuids) == set(shares)
        ]
        return [pod for pod in fitting if self._is_pending(pod)] or fitting

    def candidates(self, size: int) -> list[ManagedPod]:
        """Return every pod that an Allocate call for so many ids can be for, however unlikely.

        So a pod that was only presumed to have its ids is one, and one that was decided for another GPU. A pod
        that kubelet lists has its ids; one that is being deleted does not start any more.
        """
        return [
            pod
            for pod in self.pods.values()
            if pod.share_units == size and pod.uid not in self._listed and not pod.is_over and pod.ends_at is None
        ]

    def likely(self, shares: Mapping[str, int]) -> list[ManagedPod]:
        """Return the pods of which one is likely given these shares by GPU; for people, nothing is decided by it.

        Unlike `fitting`, also those that an earlier call was presumed to be for: no list has named them yet.
        """
        found = sorted(self.candidates(sum(shares.values())), key=_age)
        found = [pod for pod in found if pod.phase in _WAITING] or found
        return [pod for pod in found if pod.decision and set(pod.decision.gpu_uuids) == set(shares)] or found

    def holding(self, uuid: str) -> list[ManagedPod]:
        """Return the decided pods that hold memory of a GPU.

        As in the extender, a pod that is being deleted holds it until it is gone or over. A pod that kubelet has
        given nothing yet does not: its own Allocate call is still to come.
        """
        waiting = {pod.uid for pod in self.pending()}
        return [
            pod
            for pod in self.pods.values()
            if pod.decision is not None
            and not pod.is_over
            and pod.uid not in waiting
            and uuid in self.gpus_of(pod)
        ]

    def presume(self, shares: Mapping[str, int]) -> ManagedPod | None:
        """Presume which pod's Allocate call was answered: of the pods that match, the one decided first.

        kubelet does not name the pod; PodResources does moments later, and then replaces this guess.
        """
        pod = next(iter(self.fitting(shares)), None)
        if pod is None:
            return None
        self._presumed[pod.uid] = (dict(shares), self._clock() + PRESUMED_SECONDS)
        self.touch()
        return pod

    def set_allocations(self, listed: dict[str, dict[str, int]]) -> None:
        """Record PodResources' allocations, by pod uid.

        A pod that this list lacks keeps what an earlier one gave it (ADR 0218): a kubelet that restarts answers
        before it knows its pods, for minutes if the API server is away, while they run on.

        If a listed pod was not presumed, another pod was wrongly presumed to have its shares. That one becomes
        unallocated again; otherwise its decision would not be found when kubelet asks for its GPU.
        """
        known = self.allocations or {}
        for uid, shares in listed.items():
            if self._presumed.pop(uid, None) is not None or known.get(uid) == shares:
                continue
            mistaken = [
                other for other, (given, _) in self._presumed.items() if given == shares and other not in listed
            ]
            if mistaken:
                del self._presumed[mistaken[-1]]
        self._listed = frozenset(listed)
        allocations = listed | self._kept(known, listed)
        contradicted = self._contradicted(allocations)
        for uid in contradicted:
            del self._presumed[uid]
        if allocations != self.allocations or contradicted:
            self.allocations = allocations
            self.touch()

    def _contradicted(self, allocations: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Return the pods whose old presumption leaves no room on a GPU for what is known of others."""
        total: Counter[str] = Counter()
        for shares in allocations.values():
            total.update(shares)
        return [
            uid
            for uid, (given, until) in self._presumed.items()
            if self._clock() >= until and any(total[uuid] + n > SHARES_PER_GPU for uuid, n in given.items())
        ]

    def _kept(
        self, known: Mapping[str, dict[str, int]], listed: Mapping[str, dict[str, int]]
    ) -> dict[str, dict[str, int]]:
        """Return the known allocations that a list lacks and does not contradict.

        Kubelet frees the ids of a pod whose containers have ended before the API says so, and may give them to
        another pod. Where the sum would then exceed a GPU, only what is listed counts.
        """
        kept = {
            uid: shares
            for uid, shares in known.items()
            if uid not in listed and uid in self.pods and not self.pods[uid].is_over
        }
        total: Counter[str] = Counter()
        for shares in (*listed.values(), *kept.values()):
            total.update(shares)
        full = {uuid for uuid, units in total.items() if units > SHARES_PER_GPU}
        return {uid: shares for uid, shares in kept.items() if not full & shares.keys()}
