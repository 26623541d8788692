"""Profile workloads that have neighbours, by stopping their throughput neighbours for about a second.

A GPU's counters are one tenant's own once the others' queued work has drained (docs/facts.md 25, 26). No pod of
class latency is stopped, none whose probe would fail, and none for more than a tenth of any minute.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gpushare.core.api import JobClass
from gpushare.core.gpu import MIN_SIGNATURE_SECONDS, GpuSample
from gpushare.mps.asks import boottime
from gpushare.mps.duty import MAX_STOP_SECONDS
from gpushare.mps.status import GateState, GateStatus, ThrottleStatus
from gpushare_deviceplugin.measuring import threads_of
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import TermsOf
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import tenants_of

_log = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 0.5  # until the counters are one pod's own (docs/facts.md 25)
PROBE_MARGIN_SECONDS: Final = 0.2  # part of its time-out that a stopped pod's probe keeps
MINUTE_SECONDS: Final = 60.0
MOST_STOPPED_SECONDS: Final = 6.0  # of any minute, each pod
APART_SECONDS: Final = 3.0  # between two readings on a GPU
FIRST_SECONDS: Final = 2.0  # age of a process before its first reading
PATIENT_READINGS: Final = 8  # without a result; after these, a workload is read only rarely
PATIENT_SECONDS: Final = 120.0
# After a tenant change, a new profile or a reading, before a known workload is read: the loop acts first.
QUIET_SECONDS: Final = 10.0
PATIENT_BROKEN_SECONDS: Final = 30.0  # further wait of such a reading while a promise is broken
LOOK_SECONDS: Final = 0.5
CALM_LOOK_SECONDS: Final = 1.0  # while no unknown workload is to be read; a known one waits for 10 s and more
POLL_SECONDS: Final = 0.02
FREEZE_SECONDS: Final = 0.4  # the host looks for new asks at least every 0.2 s
WORD_POLL_SECONDS: Final = 0.1
WORD_SECONDS: Final = 2.0  # twice the longest silence of the throttle's process
_EARLY_SECONDS: Final = 0.05  # the host reports a freeze slightly late
_SERVING: Final = frozenset({GateState.ACTIVE, GateState.DEGRADED})


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """One reading: the pod to read, its thread percentage, the pods to stop, and for how long."""

    pod: ManagedPod
    cap: int
    stopped: tuple[str, ...]
    seconds: float


@dataclass(slots=True)
class _PastReadings:
    """A GPU's readings of the last minute, and by pod when it was read.

    Attributes:
        active: the pods with clients.
        quiet_since: since when the set is unchanged and none of its workloads became known.
        stops: of each reading, when it ended, how many seconds it took, and the pods that it stopped.
        is_any_unknown: whether one of them is to be read as soon as may be, as its workload is unknown.
    """

    active: frozenset[str] = frozenset()
    quiet_since: float = 0.0
    stops: list[tuple[float, float, tuple[str, ...]]] = field(default_factory=list)
    read_at: dict[str, list[float]] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    is_any_unknown: bool = False


@dataclass(slots=True)
class ReadingCounts:
    """Counters of one GPU since the agent started.

    Attributes:
        taken: readings; failed: those without figures; stopped_seconds: time that neighbours were stopped.
    """

    taken: int = 0
    failed: int = 0
    stopped_seconds: float = 0.0


class SampledGpu(Protocol):
    """Part of the sampler that a reading needs."""

    gates: dict[str, GateStatus | None]

    def hold(self, uuid: str) -> None:
        """Leave a GPU's counters alone until `release`."""
        ...

    def release(self, uuid: str) -> None:
        """Go on sampling a GPU."""
        ...

    async def sample_now(self, uuid: str) -> GpuSample | None:
        """Read a GPU's counters since the last reading of them."""
        ...


class Stopper(Protocol):
    """Part of the loop that a reading needs."""

    def stop(self, uuid: str, stops: Mapping[str, float]) -> None:
        """Ask for pods to be stopped, each until a time in seconds since boot."""
        ...

    def is_broken(self, uuid: str, pod_uid: str) -> bool | None:
        """Return whether a tenant's promise is broken; None while its progress is unknown."""
        ...


class Readings:
    """Readings of unknown workloads, one after the other on each GPU.

    Args:
        throttled: the throttle's present status of a GPU.
        may_profile: whether a pod's workload may be profiled.
        clock: monotonic seconds; boot: the throttle's clock; sleep: as asyncio.sleep.
        rest: waits between two looks for workloads to read; may end them early.
    """

    def __init__(
        self,
        state: NodeState,
        signatures: Signatures,
        terms: TermsOf,
        sampler: SampledGpu,
        loop: Stopper,
        *,
        throttled: Callable[[str], ThrottleStatus],
        may_profile: Callable[[ManagedPod], bool],
        clock: Callable[[], float],
        boot: Callable[[], float] = boottime,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.counts: dict[str, ReadingCounts] = {}
        self._state = state
        self._signatures = signatures
        self._terms = terms
        self._sampler = sampler
        self._loop = loop
        self._throttled = throttled
        self._may_profile = may_profile
        self._clock = clock
        self._boot = boot
        self._sleep = sleep
        self._rest = rest
        self._records: dict[str, _PastReadings] = {}
        self._busy: set[str] = set()

    async def run(self) -> None:
        """Look for workloads to read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for uuid in list(self._state.gpus):
                    if uuid not in self._busy and (plan := self.plan(uuid)) is not None:
                        self._busy.add(uuid)
                        tasks.create_task(self.read(uuid, plan))
                is_any_unknown = any(record.is_any_unknown for record in self._records.values())
                await self._rest(LOOK_SECONDS if is_any_unknown else CALM_LOOK_SECONDS)

    def plan(self, uuid: str) -> ReadingPlan | None:
        """Return a GPU's next reading that is due and allowed now, if any."""
        gate = self._sampler.gates.get(uuid)
        record = self._records.setdefault(uuid, _PastReadings())
        record.is_any_unknown = False
        if gate is None or gate.state not in _SERVING or gate.throttle.problem:
            return None
        pods = [pod for pod, _ in tenants_of(self._state, uuid)]
        known = {pod.uid for pod in pods}
        with_clients = {client.pod_uid for client in gate.clients}
        active = [pod for pod in pods if pod.uid in with_clients]
        now = self._clock()
        record.since = {pod.uid: record.since.get(pod.uid, now) for pod in active}
        record.read_at = {uid: at for uid, at in record.read_at.items() if uid in known}
        if record.active != (present := frozenset(pod.uid for pod in active)):
            record.active, record.quiet_since = present, now
        record.stops = [stop for stop in record.stops if now - stop[0] < MINUTE_SECONDS]
        if len(active) < 2 or not with_clients <= known:
            return None
        model = self._state.gpus[uuid].model
        wanted = [
            pod
            for pod in active
            if pod.own_percentage is None and self._is_wanted(pod, model, threads_of(gate, pod), record, now)
        ]
        unknown = [pod for pod in wanted if not self._is_known(pod, model)]
        record.is_any_unknown = bool(unknown)
        apart = now - record.stops[-1][0] if record.stops else math.inf
        if not wanted or apart < APART_SECONDS:
            return None
        is_calm = self._is_calm(uuid, active, min(apart, now - record.quiet_since))
        due = [pod for pod in (wanted if is_calm else unknown) if now - record.since[pod.uid] >= FIRST_SECONDS]
        refused = {refusal.pod_uid for refusal in gate.throttle.refused}
        for pod in sorted(due, key=lambda each: self._turn(each, model, record)):
            others = [other for other in active if other.uid != pod.uid]
            are_free = all(_has_time_left(other, record) and self._may_stop(other, refused) for other in others)
            if are_free and self._may_profile(pod):
                seconds = min([MAX_STOP_SECONDS, *(_longest_stop(other) for other in others)])
                return ReadingPlan(pod, threads_of(gate, pod), tuple(other.uid for other in others), seconds)
        return None

    async def read(self, uuid: str, plan: ReadingPlan) -> None:
        """Stop the neighbours, wait until their queued work has drained, read, and resume them.

        The reading counts only if the same throttle process reports before and after it: if that process ends, its
        pods run although its last report still calls them stopped.
        """
        record = self._records.setdefault(uuid, _PastReadings())
        counts = self.counts.setdefault(uuid, ReadingCounts())
        began = self._clock()
        sample: GpuSample | None = None
        throttle: float | None = None
        read_at = -math.inf
        self._sampler.hold(uuid)
        try:
            self._loop.stop(uuid, dict.fromkeys(plan.stopped, self._boot() + plan.seconds))
            throttle = await self._stopped_by(uuid, plan.stopped)
            if throttle is not None:
                until = self._boot() + plan.seconds - _EARLY_SECONDS
                self._loop.stop(uuid, dict.fromkeys(plan.stopped, until))
                await self._sleep(SETTLE_SECONDS)
                await self._sampler.sample_now(uuid)
                await self._sleep(max(0.0, until - self._boot() - POLL_SECONDS))
                if self._boot() < until and _stops(self._throttled(uuid), plan.stopped):
                    sample = await self._sampler.sample_now(uuid)
                    read_at = self._boot()
        finally:
            self._loop.stop(uuid, {})
            self._sampler.release(uuid)
            self._busy.discard(uuid)
            spent = min(plan.seconds, self._clock() - began)
            record.stops.append((self._clock(), spent, plan.stopped))
            record.read_at.setdefault(plan.pod.uid, []).append(self._clock())
            counts.taken += 1
            counts.stopped_seconds += spent
        if sample is not None and not await self._is_still_there(uuid, throttle, read_at):
            sample = None
        if sample is None or sample.window_seconds < MIN_SIGNATURE_SECONDS or not self._is_still(uuid, plan):
            counts.failed += 1
            return
        model = self._state.gpus[uuid].model
        is_new = self._signatures.of(plan.pod, model) is None
        self._signatures.learn(plan.pod, model, sample, plan.cap, is_reading=True)
        if is_new and self._signatures.of(plan.pod, model) is not None:
            record.quiet_since = self._clock()
            took = self._clock() - record.since.get(plan.pod.uid, began)
            _log.info(
                "workload %s profiled in place in %d readings, %.0f s after its pod %s began",
                plan.pod.workload,
                len(record.read_at[plan.pod.uid]),
                took,
                plan.pod.key,
                extra={"pod": plan.pod.uid, "gpu": uuid},
            )

    async def _stopped_by(self, uuid: str, pods: tuple[str, ...]) -> float | None:
        """Wait for the report that all of them are stopped; return when the throttle process that did it started.

        None when the report does not come in time.
        """
        deadline = self._clock() + FREEZE_SECONDS
        while self._clock() < deadline:
            status = self._throttled(uuid)
            if _stops(status, pods):
                return status.started_at
            if {each.pod_uid for each in status.refused} & set(pods):
                return None
            await self._sleep(POLL_SECONDS)
        return None

    async def _is_still_there(self, uuid: str, started_at: float | None, read_at: float) -> bool:
        """Wait for a report later than a reading; return whether the same throttle process wrote it."""
        deadline = self._clock() + WORD_SECONDS
        while (status := self._throttled(uuid)).beat < read_at and self._clock() < deadline:
            await self._sleep(WORD_POLL_SECONDS)
        return status.beat >= read_at and status.started_at == started_at

    def _is_still(self, uuid: str, plan: ReadingPlan) -> bool:
        """Return whether the tenants are still the same."""
        gate = self._sampler.gates.get(uuid)
        connected = {client.pod_uid for client in gate.clients} if gate is not None else set()
        return connected == {plan.pod.uid, *plan.stopped}

    def _turn(self, pod: ManagedPod, model: str, record: _PastReadings) -> tuple[bool, int, str]:
        """Return the sort key of pods to read: unknown ones first, then those read least."""
        return self._is_known(pod, model), len(record.read_at.get(pod.uid, ())), pod.uid

    def _is_known(self, pod: ManagedPod, model: str) -> bool:
        return self._signatures.of(pod, model) is not None and not self._signatures.is_doubted(pod, model)

    def _is_calm(self, uuid: str, active: Sequence[ManagedPod], seconds: float) -> bool:
        """Return whether a known workload may be read: a reading takes windows that the loop needs.

        Args:
            seconds: since the last reading, or since exactly these pods are active and known as well as now.
        """
        is_broken = any(self._loop.is_broken(uuid, pod.uid) for pod in active)
        return seconds >= (PATIENT_BROKEN_SECONDS if is_broken else QUIET_SECONDS)

    def _is_wanted(self, pod: ManagedPod, model: str, cap: int, record: _PastReadings, now: float) -> bool:
        """Return whether a pod is to be read: soon if its workload is unknown, rarely if readings give nothing.

        A workload whose windows contradict its signature is read again. So is one under a cap near which it was
        never
        observed: its promise depends on its progress under that cap.
        """
        read = record.read_at.get(pod.uid, [])
        is_light = self._signatures.is_light(pod, model)
        if self._signatures.is_doubted(pod, model):
            return True
        is_known = not is_light and self._signatures.of(pod, model) is not None
        if is_known and not self._signatures.lacks(pod, model, cap):
            return False
        is_seldom = bool(read) and (is_light or len(read) >= PATIENT_READINGS)
        return not is_seldom or now - read[-1] >= PATIENT_SECONDS

    def _may_stop(self, pod: ManagedPod, refused: set[str]) -> bool:
        terms = self._terms(pod)
        return (
            terms.job_class is JobClass.THROUGHPUT
            and terms.is_certain
            and pod.uid not in refused
            and len(self._state.gpus_of(pod)) == 1
            and _longest_stop(pod) >= SETTLE_SECONDS + MIN_SIGNATURE_SECONDS
        )


def _stops(status: ThrottleStatus, pods: tuple[str, ...]) -> bool:
    """Return whether all of these pods are stopped."""
    return {each.pod_uid for each in status.pods if each.is_stopped} >= set(pods)


def _has_time_left(pod: ManagedPod, record: _PastReadings) -> bool:
    """Return whether one more reading leaves a pod the rest of its minute."""
    spent = sum(seconds for _, seconds, stopped in record.stops if pod.uid in stopped)
    return spent + MAX_STOP_SECONDS <= MOST_STOPPED_SECONDS


def _longest_stop(pod: ManagedPod) -> float:
    """Return how long a pod may be stopped without failing a probe, seconds."""
    return math.inf if pod.probe_seconds is None else pod.probe_seconds - PROBE_MARGIN_SECONDS
