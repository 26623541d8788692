"""Detect trouble of this node's pods in each window, report it once, publish it, and drain GPUs by policy."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from gpushare.core.api import JobClass, TenantTrouble, TroubleKind
from gpushare.core.control import (
    IDLE_SM_RATIO,
    HygieneAction,
    HygieneLook,
    HygieneSettings,
    HygieneWatch,
)
from gpushare.core.gpu import OutsideWatch
from gpushare.mps.status import GateStatus, ThrottleRefusal
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.shares import TermsOf
from gpushare_deviceplugin.state import NodeState
from gpushare_deviceplugin.status import GpuMeasure, TenantMeasure, tenants_of

_log = logging.getLogger(__name__)
_MOST_WAITING: Final = 256  # events in the queue while the API server is slow
_EVENTS: Final = {TroubleKind.STALLED: "PodStalled", TroubleKind.GPU_FAULT: "PodLostInFault"}
_OVER: Final = "PodWorksAgain"


class Hygiene:
    """Troubles of the tenants of each GPU.

    Args:
        outside: processes outside MPS, by GPU.
        tell: write an event.
    """

    def __init__(
        self,
        state: NodeState,
        terms: TermsOf,
        outside: Mapping[str, OutsideWatch],
        *,
        tell: Callable[[Notice], Awaitable[None]],
        clock: Callable[[], float],
        settings: HygieneSettings,
    ) -> None:
        self._state = state
        self._terms = terms
        self._outside = outside
        self._tell = tell
        self._clock = clock
        self._settings = settings
        self._watches: dict[str, HygieneWatch] = {}
        self._troubles: dict[str, dict[str, TenantTrouble]] = {}
        self._notices: asyncio.Queue[Notice] = asyncio.Queue(_MOST_WAITING)

    def of(self, uuid: str, pod_uid: str) -> TenantTrouble | None:
        """Return a tenant's trouble; None if it has none."""
        return self._troubles.get(uuid, {}).get(pod_uid)

    def drained(self, uuid: str) -> str:
        """Return why a GPU gets no new pods; empty if it may."""
        drain = HygieneAction.DRAIN
        watch = self._watches.get(uuid, HygieneWatch())
        if self._settings.fault is drain and watch.is_quarantined(self._clock()):
            return "its MPS server had a fault moments ago (policy.hygiene.fault is drain)"
        outside = self._outside.get(uuid, OutsideWatch()).present
        if self._settings.outside_mps is drain and len(outside) == 1:
            return "1 process uses it outside MPS (policy.hygiene.outsideMps is drain)"
        if self._settings.outside_mps is drain and outside:
            return f"{len(outside)} processes use it outside MPS (policy.hygiene.outsideMps is drain)"
        for trouble in self._troubles.get(uuid, {}).values():
            if self._settings.action_of(trouble.kind) is drain:
                return f"a pod on it is in trouble, {trouble.kind} (policy.hygiene)"
        return ""

    def take(self, uuid: str, gate: GateStatus | None, measure: GpuMeasure) -> None:
        """Check one GPU after a window, or after its tenants changed."""
        now = self._clock()
        pods = {pod.uid: pod for pod, _ in tenants_of(self._state, uuid)}
        idle = None
        if measure.sample is not None:
            sm_util = measure.sample.counters.sm_util
            is_idle_gpu = sm_util is not None and sm_util < IDLE_SM_RATIO
            idle = frozenset(
                uid
                for uid, pod in pods.items()
                if _does_nothing(measure.tenants.get(uid, TenantMeasure()), is_idle_gpu=is_idle_gpu)
                and self._terms(pod).is_certain
                and self._terms(pod).job_class is JobClass.THROUGHPUT
            )
        look = HygieneLook(
            frozenset(pods),
            frozenset(client.pod_uid for client in gate.clients if client.pod_uid) if gate is not None else None,
            idle,
            measure.sample.window_seconds if measure.sample is not None else 0.0,
            gate.faults if gate is not None else None,
            frozenset(gate.last_fault_pods) if gate is not None else frozenset(),
            frozenset(gate.lost_pods) if gate is not None else frozenset(),
            gate.written_at - gate.last_fault_at if gate is not None and gate.last_fault_at is not None else None,
        )
        watch = self._watches[uuid] = self._watches.get(uuid, HygieneWatch()).after(look, now)
        troubles = self._found(uuid, gate, watch, frozenset(pods), now)
        before, self._troubles[uuid] = self._troubles.get(uuid, {}), troubles
        if before != troubles:
            self._state.touch()
            self._note(uuid, before, troubles, frozenset(pods))

    def _found(
        self, uuid: str, gate: GateStatus | None, watch: HygieneWatch, pods: frozenset[str], now: float
    ) -> dict[str, TenantTrouble]:
        minutes = self._settings.stalled_seconds / 60
        frozen = {
            refused.pod_uid
            for refused in (gate.throttle.refused if gate is not None else ())
            if refused.reason is ThrottleRefusal.FROZEN_BY_OTHERS
        }
        found = {}
        for uid in watch.stalled(self._settings):
            why = "; somebody other than gpushare has frozen it" if uid in frozen else ""
            sentence = f"its processes have done nothing on GPU {uuid} for {minutes:g} minutes{why}"
            found[uid] = TenantTrouble(TroubleKind.STALLED, sentence)
        for uid in watch.lost(now):
            sentence = f"a fault of GPU {uuid} ended its processes, and none has connected since"
            found[uid] = TenantTrouble(TroubleKind.GPU_FAULT, sentence)
        for process in self._outside.get(uuid, OutsideWatch()).present:
            if process.pod_uid in pods:
                sentence = (
                    f"processes of it use GPU {uuid} outside MPS, where no share and no memory limit binds them"
                )
                found[process.pod_uid] = TenantTrouble(TroubleKind.OUTSIDE_MPS, sentence)
        return found

    def _note(
        self,
        uuid: str,
        before: Mapping[str, TenantTrouble],
        after: Mapping[str, TenantTrouble],
        pods: frozenset[str],
    ) -> None:
        for uid, trouble in after.items():
            if uid in before and before[uid].kind is trouble.kind:
                continue
            _log.warning("pod %s: %s", uid, trouble.message, extra={"pod": uid, "gpu": uuid})
            if trouble.kind in _EVENTS:  # processes outside MPS have their own events, with pids
                self._put(Notice(uid, _EVENTS[trouble.kind], trouble.message))
        for uid in (before.keys() - after.keys()) & pods:
            if before[uid].kind in _EVENTS:
                self._put(Notice(uid, _OVER, f"its processes work on GPU {uuid} again", is_warning=False))

    def _put(self, notice: Notice) -> None:
        if not self._notices.full():
            self._notices.put_nowait(notice)

    async def run(self) -> None:
        """Write events about findings until cancelled."""
        while True:
            await self._tell(await self._notices.get())


def _does_nothing(measured: TenantMeasure, *, is_idle_gpu: bool) -> bool:
    """Return whether a tenant with processes is known to have done nothing."""
    return bool(measured.clients) and (measured.is_asleep or is_idle_gpu)
