"""Latency targets of this node's pods: read every few seconds, told where they change, and given to the loop."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from gpushare.core.api import ConditionStatus, JobClass, Slo, TenantSlo
from gpushare.core.control import SloReading, SloReason, SloRecord, SloSign, SloTrouble, read_slo
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import TermsOf
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)
READ_SECONDS: Final = 5.0
EVENT_SECONDS: Final = 60.0  # between two events of one kind on one pod
_AT_ONCE: Final = 8
_MISSED, _MET, _UNKNOWN = "SloMissed", "SloMet", "SloUnknown"
_EVENTS: Final = {ConditionStatus.FALSE: _MISSED, ConditionStatus.TRUE: _MET, ConditionStatus.UNKNOWN: _UNKNOWN}
# Unknown for these reasons is nobody's mistake.
_QUIET: Final = frozenset({SloReason.STARTING, SloReason.TOO_FEW_REQUESTS})

ReadSlo = Callable[[ManagedPod, Slo], Awaitable[SloReading]]


class SloReader:
    """What is known of each pod's target.

    Args:
        read: read one pod's target once.
        tell: write an event.
        clock: monotonic seconds, the loop's own.

    Attributes:
        failures: readings that gave nothing, by reason, since the agent started.
    """

    def __init__(
        self,
        state: NodeState,
        terms: TermsOf,
        read: ReadSlo,
        *,
        tell: Callable[[Notice], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self.failures: Counter[str] = Counter()
        self._state = state
        self._terms = terms
        self._read = read
        self._tell = tell
        self._clock = clock
        self._records: dict[str, SloRecord] = {}
        self._told_at: dict[tuple[str, str], float] = {}

    def sign(self, pod_uid: str) -> SloSign | None:
        """Return what the loop hears of a pod's target."""
        record = self._records.get(pod_uid)
        return record.sign() if record is not None else None

    def status(self, pod: ManagedPod) -> TenantSlo | None:
        """Return how a pod fares against its target; None for one without."""
        if pod.slo is None:
            return None
        record = self._records.get(pod.uid, SloRecord())
        return TenantSlo(
            met=record.met,
            reason=record.reason.value,
            message=record.detail[:1024],
            target=str(pod.slo),
            target_seconds=pod.slo.target_seconds,
            measured_seconds=record.measured_seconds,
        )

    async def step(self) -> None:
        """Read every running pod's target once."""
        pods = [pod for pod in self._state.pods.values() if pod.slo is not None and pod.phase == "Running"]
        wanted = {pod.uid for pod in pods}
        self._records = {uid: record for uid, record in self._records.items() if uid in wanted}
        room = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for pod in pods:
                tasks.create_task(self._step(pod, room))

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(READ_SECONDS)

    async def _step(self, pod: ManagedPod, room: asyncio.Semaphore) -> None:
        if pod.slo is None:
            return
        before = self._records.get(pod.uid, SloRecord())
        if self._terms(pod).job_class is JobClass.LATENCY:
            async with room:
                reading = await self._read(pod, pod.slo)
        else:
            reading = SloTrouble(SloReason.NOT_LATENCY, "its GpuShare says class throughput, which has no target")
        if isinstance(reading, SloTrouble):
            self.failures[reading.reason.value] += 1
        after = read_slo(before, reading, self._clock(), pod.slo)
        self._records[pod.uid] = after
        if (after.met, after.reason) != (before.met, before.reason):
            self._state.touch()
            await self._note(pod, before, after)

    async def _note(self, pod: ManagedPod, before: SloRecord, after: SloRecord) -> None:
        _log.info("target %s of pod %s: %s, %s", pod.slo, pod.key, after.reason, after.detail)
        if after.reason in _QUIET and before.met is ConditionStatus.UNKNOWN:
            return
        reason, now = _EVENTS[after.met], self._clock()
        if now - self._told_at.get((pod.uid, reason), -math.inf) < EVENT_SECONDS:
            return
        self._told_at = {key: at for key, at in self._told_at.items() if now - at < EVENT_SECONDS}
        self._told_at[pod.uid, reason] = now
        words = {
            _MET: f"meets its target {pod.slo}: {after.detail}",
            _MISSED: f"misses its target {pod.slo}: {after.detail}",
            _UNKNOWN: f"it is unknown whether it meets its target {pod.slo} ({after.reason}): {after.detail}",
        }
        is_warning = after.met is not ConditionStatus.TRUE and after.reason not in _QUIET
        await self._tell(Notice(pod.uid, reason, words[reason][:1024], is_warning=is_warning))
