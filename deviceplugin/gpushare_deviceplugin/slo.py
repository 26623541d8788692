"""Read the own targets of this node's pods every few seconds; write events on changes; inform the loop."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from gpushare.core.api import ConditionStatus, JobClass, RateSlo, Slo, TenantSlo, class_of_target
from gpushare.core.control import (
    LONGEST_WINDOW_SECONDS,
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
from gpushare.runtime.tasks import is_asked_to_end, without_end
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.page_budget import PageBudget
from gpushare_deviceplugin.page_parser import HUNG_SECONDS, HungPageError, PageParser
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import TermsOf
from gpushare_deviceplugin.slo_sources import SloPage
from gpushare_deviceplugin.state import AgentPart, NodeState

_log = logging.getLogger(__name__)
READ_SECONDS: Final = 5.0
_LEAST_PAUSE_SECONDS: Final = 1.0  # after a round that took longer, as of pages that hang
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

FetchSlo = Callable[[ManagedPod, Slo | RateSlo], Awaitable[SloPage | SloReading]]


class SloReader:
    """State of each pod's own target.

    Args:
        fetch: fetch one pod's target once; what comes as a page is then parsed in a thread.
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
        fetch: FetchSlo,
        *,
        tell: Callable[[Notice], Awaitable[None]],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._state = state
        self._terms = terms
        self._fetch = fetch
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._records: dict[str, SloRecord] = {}
        self._slow: dict[str, float] = {}  # when each pod was last read that was slow then
        self._parser = PageParser()
        self._budget = PageBudget(clock())
        self._put_off: dict[str, float] = {}  # since when the budget has not paid for each pod's page
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
        """Read every running pod's target once that its budget pays for; of those that were slow, some in turn.

        A tenant whose pages hang would delay the readings of all others' targets by a minute.
        """
        pods = {
            pod.uid: pod for pod in self._state.pods.values() if pod.slo is not None and pod.phase == "Running"
        }
        self._records = {uid: record for uid, record in self._records.items() if uid in pods}
        self._slow = {uid: at for uid, at in self._slow.items() if uid in pods}
        self._put_off = {uid: at for uid, at in self._put_off.items() if uid in pods}
        self._budget.begin_round(self._clock(), pods)
        usual = sorted((uid for uid in pods if uid not in self._slow), key=self._budget.after)
        slow = sorted(self._slow, key=lambda uid: self._slow[uid])[:_MOST_SLOW]
        room = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for uid in (*usual, *slow):
                tasks.create_task(self._step(pods[uid], room))

    async def run(self) -> None:
        """Read and report changes until cancelled; an unreachable API server delays no reading."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(without_end("writing events", self.tell_all()))
                while True:
                    began = self._clock()
                    await self.step()
                    await self._sleep(max(_LEAST_PAUSE_SECONDS, READ_SECONDS - (self._clock() - began)))
        except asyncio.CancelledError as error:
            if is_asked_to_end(error):
                self._parser.close()
            raise

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
            reading, at = await self._reading(pod, pod.slo, room)
            if reading is None:
                return
            after = read_target(before, reading, at, pod.slo)
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

    async def _reading(
        self, pod: ManagedPod, slo: Slo | RateSlo, room: asyncio.Semaphore
    ) -> tuple[SloReading | None, float]:
        """Return a reading and when its answer had come; None where the budget does not pay for it now."""
        terms = self._terms(pod)
        if not terms.is_certain:
            why = "its GpuShare was not read yet, so its class is unknown"
            return SloTrouble(SloReason.STARTING, why), self._clock()
        if terms.job_class is not class_of_target(slo):
            reason, why = SloReason.NOT_LATENCY, "its GpuShare says class throughput, which has no latency target"
            if terms.job_class is JobClass.LATENCY:
                reason, why = SloReason.NOT_THROUGHPUT, "its GpuShare says class latency, which has no rate"
            return SloTrouble(reason, why), self._clock()
        async with room:
            if not self._budget.begin(pod.uid):
                now = self._clock()
                return self._too_costly(pod, self._put_off.setdefault(pod.uid, now)), now
            put_off_at = self._put_off.pop(pod.uid, None)
            cpu_seconds = 0.0
            try:
                found, took_seconds = await self._fetched(pod, slo)
                came_at = self._clock()
                if isinstance(found, SloPage):
                    found, cpu_seconds = await self._parser.parse(found.parse, self._budget.after(pod.uid))
            except HungPageError:
                cpu_seconds = HUNG_SECONDS
                raise
            finally:
                self._budget.end(pod.uid, cpu_seconds)
        if isinstance(found, CounterReading):
            found = replace(found, took_seconds=took_seconds)
        return (put_off_at is not None and self._too_costly(pod, put_off_at)) or found, came_at

    async def _fetched(self, pod: ManagedPod, slo: Slo | RateSlo) -> tuple[SloPage | SloReading, float]:
        begun = self._clock()
        try:
            return await self._fetch(pod, slo), max(0.0, self._clock() - begun)
        finally:
            now = self._clock()
            self._slow.pop(pod.uid, None)
            if now - begun >= _SLOW_SECONDS:
                self._slow[pod.uid] = now

    def _too_costly(self, pod: ManagedPod, put_off_at: float) -> SloTrouble | None:
        """Return the trouble with a pod whose page is read too rarely for a verdict; None if it is not.

        Rarer readings make windows of more than a minute, after which the loop has forgotten the one before.
        """
        if self._clock() - put_off_at < LONGEST_WINDOW_SECONDS - READ_SECONDS:
            return None
        cost = f"{1000 * self._budget.cost_seconds(pod.uid):.0f} ms"
        why = f"its page costs the agent up to {cost} of CPU time, which it does not have once a minute for it"
        return SloTrouble(SloReason.TOO_COSTLY, why)

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
