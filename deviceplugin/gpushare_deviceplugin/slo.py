"""Read the own targets of this node's pods every few seconds; write events on changes; inform the loop."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from gpushare.core.api import ConditionStatus, JobClass, RateSlo, Slo, TenantSlo, class_of_target
from gpushare.core.control import (
    CounterReading,
    RateSign,
    SloReading,
    SloReason,
    SloRecord,
    SloSign,
    SloTrouble,
    rate_sign,
    read_target,
)
from gpushare.runtime.tasks import without_end
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import TermsOf
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)
READ_SECONDS: Final = 5.0
EVENT_SECONDS: Final = 60.0  # between two events of one kind on one pod, and two log lines of one reason
_MOST_WAITING: Final = 256  # events in the queue while the API server is slow
_AT_ONCE: Final = 8
# A page answers within milliseconds. Of those that took longer the last time, so many are read in a round: two
# time-outs one after the other.
_SLOW_SECONDS: Final = 1.0
_MOST_SLOW: Final = 2 * _AT_ONCE
_MISSED, _MET, _UNKNOWN = "SloMissed", "SloMet", "SloUnknown"
_EVENTS: Final = {ConditionStatus.FALSE: _MISSED, ConditionStatus.TRUE: _MET, ConditionStatus.UNKNOWN: _UNKNOWN}
# For these reasons an unknown state is normal, so it causes no event.
_QUIET: Final = frozenset({SloReason.STARTING, SloReason.BORDERLINE, SloReason.TOO_FEW_REQUESTS, SloReason.IDLE})

ReadSlo = Callable[[ManagedPod, Slo | RateSlo], Awaitable[SloReading]]


class SloReader:
    """State of each pod's own target.

    Args:
        read: read one pod's target once.
        tell: write an event.
        clock: monotonic seconds, the loop's own.
        sleep: waits between two readings; may end them up to a second early.

    Attributes:
        failures: failed readings by reason, since the agent started.
    """

    def __init__(
        self,
        state: NodeState,
        terms: TermsOf,
        read: ReadSlo,
        *,
        tell: Callable[[Notice], Awaitable[None]],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._state = state
        self._terms = terms
        self._read = read
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._records: dict[str, SloRecord] = {}
        self._slow: dict[str, float] = {}  # when each pod was last read that was slow then
        self._told_at: dict[tuple[str, str], float] = {}
        self._logged_at: dict[tuple[str, str], float] = {}
        self._notices: asyncio.Queue[Notice] = asyncio.Queue(_MOST_WAITING)

    def sign(self, pod_uid: str) -> SloSign | None:
        """Return the state of a pod's latency target for the loop."""
        record = self._records.get(pod_uid)
        return record.sign(self._clock()) if record is not None else None

    def rate(self, pod: ManagedPod) -> RateSign | None:
        """Return what a pod reports of its rate, for the loop."""
        record = self._records.get(pod.uid)
        return rate_sign(record, pod.slo) if record is not None and isinstance(pod.slo, RateSlo) else None

    def status(self, pod: ManagedPod) -> TenantSlo | None:
        """Return a pod's status against its target; None for one without a target."""
        if pod.slo is None:
            return None
        record = self._records.get(pod.uid, SloRecord())
        return TenantSlo(
            met=record.met,
            reason=record.reason.value,
            message=record.detail[:1024],
            target=str(pod.slo),
            target_seconds=pod.slo.target_seconds if isinstance(pod.slo, Slo) else None,
            measured_seconds=record.measured_seconds,
            target_per_second=pod.slo.target_per_second if isinstance(pod.slo, RateSlo) else None,
            measured_per_second=record.measured_per_second,
        )

    async def step(self) -> None:
        """Read every running pod's target once; of those that were slow the last time, some in turn.

        A tenant whose pages hang would delay the readings of all others' targets by a minute.
        """
        pods = {
            pod.uid: pod for pod in self._state.pods.values() if pod.slo is not None and pod.phase == "Running"
        }
        self._records = {uid: record for uid, record in self._records.items() if uid in pods}
        self._slow = {uid: at for uid, at in self._slow.items() if uid in pods}
        usual = [pod for uid, pod in pods.items() if uid not in self._slow]
        slow = [pods[uid] for uid in sorted(self._slow, key=lambda uid: self._slow[uid])[:_MOST_SLOW]]
        room = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for pod in (*usual, *slow):
                tasks.create_task(self._step(pod, room))

    async def run(self) -> None:
        """Read and report changes until cancelled; an unreachable API server delays no reading."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(without_end("writing events", self.tell_all()))
            while True:
                await self.step()
                await self._sleep(READ_SECONDS)

    async def tell_all(self) -> None:
        """Write the queued events until cancelled."""
        while True:
            notice = await self._notices.get()
            try:
                await self._tell(notice)
            except Exception:  # noqa: BLE001 - an event that cannot be written must not end the readings
                self._state.counts.error(AgentPart.SLO)
                _log.exception("event %s of pod %s not written", notice.reason, notice.pod_uid)

    async def _step(self, pod: ManagedPod, room: asyncio.Semaphore) -> None:
        if pod.slo is None:
            return
        before = self._records.get(pod.uid, SloRecord())
        try:
            reading = await self._reading(pod, pod.slo, room)
            after = read_target(before, reading, self._clock(), pod.slo)
        except Exception:  # noqa: BLE001 - one pod's page must not end the readings of the others
            self._state.counts.error(AgentPart.SLO)
            _log.exception("target of pod %s could not be read", pod.key)
            reading = SloTrouble(SloReason.BAD_ANSWER, "the agent fails at what it read")
            after = read_target(before, reading, self._clock(), pod.slo)
        if isinstance(reading, SloTrouble) and reading.reason is not SloReason.STARTING:
            self.failures[reading.reason.value] += 1
        self._records[pod.uid] = after
        if after.met is not before.met:
            self._state.touch()
        if (after.met, after.reason) != (before.met, before.reason):
            self._note(pod, before, after)

    async def _reading(self, pod: ManagedPod, slo: Slo | RateSlo, room: asyncio.Semaphore) -> SloReading:
        terms = self._terms(pod)
        if not terms.is_certain:
            return SloTrouble(SloReason.STARTING, "its GpuShare was not read yet, so its class is unknown")
        if terms.job_class is not class_of_target(slo):
            if terms.job_class is JobClass.LATENCY:
                return SloTrouble(SloReason.NOT_THROUGHPUT, "its GpuShare says class latency, which has no rate")
            return SloTrouble(
                SloReason.NOT_LATENCY, "its GpuShare says class throughput, which has no latency target"
            )
        async with room:
            begun = self._clock()
            try:
                found = await self._read(pod, slo)
                if isinstance(found, CounterReading):
                    return replace(found, took_seconds=max(0.0, self._clock() - begun))
                return found
            finally:
                now = self._clock()
                self._slow.pop(pod.uid, None)
                if now - begun >= _SLOW_SECONDS:
                    self._slow[pod.uid] = now

    def _note(self, pod: ManagedPod, before: SloRecord, after: SloRecord) -> None:
        now = self._clock()
        if _is_first(self._logged_at, (pod.uid, after.reason), now):
            _log.info("target %s of pod %s: %s, %s", pod.slo, pod.key, after.reason, after.detail)
        if after.reason in _QUIET and before.met is ConditionStatus.UNKNOWN:
            return
        reason = _EVENTS[after.met]
        if self._notices.full() or not _is_first(self._told_at, (pod.uid, reason), now):
            return
        words = {
            _MET: f"meets its target {pod.slo}: {after.detail}",
            _MISSED: f"misses its target {pod.slo}: {after.detail}",
            _UNKNOWN: f"it is unknown whether it meets its target {pod.slo} ({after.reason}): {after.detail}",
        }
        is_warning = after.met is not ConditionStatus.TRUE and after.reason not in _QUIET
        self._notices.put_nowait(Notice(pod.uid, reason, words[reason][:1024], is_warning=is_warning))


def _is_first(at: dict[tuple[str, str], float], key: tuple[str, str], now: float) -> bool:
    """Return whether this has not happened for a minute, and record that it does now."""
    for old in [each for each, then in at.items() if now - then >= EVENT_SECONDS]:
        del at[old]
    if key in at:
        return False
    at[key] = now
    return True
