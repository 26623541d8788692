"""Profile workloads that have neighbours, by stopping their throughput neighbours for about a second.

A GPU's counters are one tenant's own once the others' queued work has drained (docs/facts.md 25, 26). No pod of
class latency is stopped, none whose probe would fail, and none for more than a tenth of any minute.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from gpushare.core.api import JobClass
from gpushare.core.control import PastReadings, ReadingTenant, next_reading
from gpushare.core.gpu import MIN_SIGNATURE_SECONDS, GpuSample
from gpushare.mps.asks import boottime
from gpushare.mps.duty import MAX_FREEZE_SECONDS, MAX_STOP_SECONDS
from gpushare.mps.status import GateState, GateStatus, ThrottleStatus
from gpushare_deviceplugin.measuring import threads_of
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import TermsOf
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import tenants_of

_log = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 0.5  # until the counters are one pod's own (docs/facts.md 25)
LOOK_SECONDS: Final = 0.5
CALM_LOOK_SECONDS: Final = 1.0  # while no unknown workload is to be read; a known one waits for 10 s and more
PROBE_MARGIN_SECONDS: Final = 0.2  # part of its time-out that a stopped pod's probe keeps
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

    def stop(self, uuid: str, stops: Mapping[str, float] | None) -> None:
        """Ask for pods to be stopped, each until a time in seconds since boot, and for nobody to be throttled.

        None ends the reading.
        """
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
        self._records: dict[str, PastReadings] = {}
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
        record = self._records.setdefault(uuid, PastReadings())
        record.is_any_unknown = False
        if gate is None or gate.state not in _SERVING or gate.throttle.problem:
            return None
        if self._state.unreadable.get(uuid) != "":  # or not known yet
            return None
        pods = [pod for pod, _ in tenants_of(self._state, uuid)]
        known = {pod.uid for pod in pods}
        with_clients = {client.pod_uid for client in gate.clients}
        active = {pod.uid: pod for pod in pods if pod.uid in with_clients}
        now = self._clock()
        record.look(list(active), known, now)
        if len(active) < 2 or not with_clients <= known:
            return None
        refused = {refusal.pod_uid for refusal in gate.throttle.refused}
        tenants = [self._tenant(uuid, gate, pod, refused) for pod in active.values()]
        is_broken = any(self._loop.is_broken(uuid, uid) for uid in active)
        read = next_reading(record, tenants, now, longest_stop=MAX_STOP_SECONDS, is_broken=is_broken)
        if read is None:
            return None
        pod = active[read.uid]
        others = [other for other in active.values() if other.uid != pod.uid]
        seconds = min([MAX_STOP_SECONDS, *(_longest_stop(other) for other in others)])
        return ReadingPlan(pod, threads_of(gate, pod), tuple(other.uid for other in others), seconds)

    async def read(self, uuid: str, plan: ReadingPlan) -> None:
        """Lift the throttles, stop the neighbours, wait until their queued work has drained, read, and resume all.

        The reading counts only if the same throttle process reports before and after it: if that process ends, its
        pods run although its last report still calls them stopped.
        """
        record = self._records.setdefault(uuid, PastReadings())
        counts = self.counts.setdefault(uuid, ReadingCounts())
        began = self._clock()
        sample: GpuSample | None = None
        throttle: float | None = None
        is_free = False
        read_at = -math.inf
        self._sampler.hold(uuid)
        try:
            is_free = await self._is_freed(uuid)
            began = self._clock()
            if is_free:
                self._loop.stop(uuid, dict.fromkeys(plan.stopped, self._boot() + plan.seconds))
                throttle, frozen_at = await self._stopped_by(uuid, plan.stopped)
            if throttle is not None:
                until = frozen_at + plan.seconds - _EARLY_SECONDS
                self._loop.stop(uuid, dict.fromkeys(plan.stopped, until))
                await self._sleep(SETTLE_SECONDS)
                settled_at = self._clock()
                await self._sampler.sample_now(uuid)
                await self._sleep(max(0.0, until - self._boot() - POLL_SECONDS))
                if self._boot() < until and _stops(self._throttled(uuid), plan.stopped):
                    sample = await self._sampler.sample_now(uuid)
                    read_at = self._boot()
                    if sample is not None and (sample.reach_seconds or 0.0) > self._clock() - settled_at:
                        sample = None  # its window began before the neighbours' work had drained
        finally:
            self._loop.stop(uuid, None)
            self._sampler.release(uuid)
            self._busy.discard(uuid)
            spent = min(plan.seconds, self._clock() - began) if is_free else 0.0
            record.ended(plan.pod.uid, spent, plan.stopped, self._clock())
            counts.taken += 1
            counts.stopped_seconds += spent
        if sample is not None and not await self._is_still_there(uuid, throttle, read_at):
            sample = None
        if sample is None or sample.window_seconds < MIN_SIGNATURE_SECONDS or not self._is_still(uuid, plan):
            counts.failed += 1
            return
        record.succeeded(plan.pod.uid)
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

    async def _is_freed(self, uuid: str) -> bool:
        """Lift the GPU's throttles until the reading ends; return whether its pods run now, and may be stopped.

        Else a freeze that is under way would be added to a stop (docs/adr/0236).
        """
        if not self._throttled(uuid).pods:
            return True
        self._loop.stop(uuid, {})
        deadline = self._clock() + FREEZE_SECONDS
        while self._throttled(uuid).pods:
            if self._clock() >= deadline:
                return False
            await self._sleep(POLL_SECONDS)
        await self._sleep(MAX_FREEZE_SECONDS)  # a thawed pod runs as long as it was frozen, at least
        return True

    async def _stopped_by(self, uuid: str, pods: tuple[str, ...]) -> tuple[float | None, float]:
        """Wait for the report that all of them are stopped.

        Returns:
            When the throttle process that did it started, None when the report does not come in time; and when
            the first of them was reported, seconds since boot.
        """
        deadline = self._clock() + FREEZE_SECONDS
        frozen_at = math.inf
        while self._clock() < deadline:
            status = self._throttled(uuid)
            if any(each.is_stopped for each in status.pods):
                frozen_at = min(frozen_at, self._boot())
            if _stops(status, pods):
                return status.started_at, frozen_at
            if {each.pod_uid for each in status.refused} & set(pods):
                break
            await self._sleep(POLL_SECONDS)
        return None, frozen_at

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

    def _tenant(self, uuid: str, gate: GateStatus, pod: ManagedPod, refused: set[str]) -> ReadingTenant:
        model = self._state.gpus[uuid].model
        return ReadingTenant(
            pod.uid,
            has_signature=self._signatures.of(pod, model) is not None,
            is_light=self._signatures.is_light(pod, model),
            is_doubted=self._signatures.is_doubted(pod, model),
            lacks_cap=self._signatures.lacks(pod, model, threads_of(gate, pod)),
            may_read=pod.own_percentage is None,
            may_profile=self._may_profile(pod),
            may_stop=self._may_stop(pod, refused),
        )

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


def _longest_stop(pod: ManagedPod) -> float:
    """Return how long a pod may be stopped without failing a probe, seconds."""
    return math.inf if pod.probe_seconds is None else pod.probe_seconds - PROBE_MARGIN_SECONDS
