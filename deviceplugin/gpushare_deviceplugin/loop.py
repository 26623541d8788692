"""Control loop of this node's GPUs: pass windows to `core.control.watch`, and its answers to throttle and API.

This module decides nothing, it only translates. Its state is rebuilt from windows: after a start of the agent no
pod is throttled, nor on a GPU whose agent is silent (`gpushare.mps.asks.LEASE_SECONDS`).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gpushare.core.api import ConditionStatus, RateSlo, TenantSlo
from gpushare.core.control import (
    FREE,
    GpuWatch,
    RateBelief,
    SloReason,
    StepRule,
    WatchActions,
    WatchedTenant,
    WatchReason,
    WatchSettings,
    WatchStep,
    WatchWindow,
    believed,
    explain,
    watch,
)
from gpushare.core.gpu import GpuSample
from gpushare.core.progress import progress_alone, promise_of
from gpushare.mps.asks import ThrottleAsk, ThrottleAsks, boottime
from gpushare.mps.layout import GpuDirectory, write_throttle
from gpushare.mps.status import GateState, GateStatus
from gpushare.runtime.moments import unix_seconds
from gpushare.runtime.tasks import without_end
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.node_signatures import Signatures
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import TermsOf
from gpushare_deviceplugin.slo import SloReader
from gpushare_deviceplugin.state import AgentPart, NodeState
from gpushare_deviceplugin.status import GpuMeasure, Keeping, TenantMeasure, tenants_of

_log = logging.getLogger(__name__)

BEAT_SECONDS: Final = 1.0  # a fifth of the lease
CALM_SAMPLES: Final = 5  # in a window while every promise is kept and no pod is throttled
ALERT_SECONDS: Final = 10.0  # of short windows after a change of the tenants or of their use
HURRY_SECONDS: Final = 0.5  # length of a window and of a sample until a broken promise is certain
WATCH_SECONDS: Final = 1.0  # length of a window while something is wrong: a full throttle cycle (mps.duty)
UNEVEN_SECONDS: Final = 2.0  # the same with a duty below a half, whose cycle does not divide a second
MOVED_RATIO: Final = 0.1  # a larger change of a counter between windows means that something has changed
SETTLED_SECONDS: Final = 10.0  # without news while something is wrong; then windows are twice as long
SETTLED_WINDOW_SECONDS: Final = 2.0
EVENT_SECONDS: Final = 60.0  # between two events of one kind on one pod
# The host says whom it cannot freeze only while it is asked to; so long nobody is asked for again.
REFUSED_SECONDS: Final = 60.0
_MOST_WAITING: Final = 256  # events in the queue while the API server is slow
_WARNINGS: Final = frozenset({WatchReason.PROMISE_BROKEN, WatchReason.RETRACTION_ASKED})
_SERVING: Final = frozenset({GateState.ACTIVE, GateState.DEGRADED})
_NOTHING: Final = WatchActions()


@dataclass(slots=True)
class _WatchedGpu:
    """State of one GPU in the loop; `stops`: pods stopped for a reading, and until when; None: no reading.

    `news_at` is the time of the last change of the tenants, the GPU's use, the actions, or a shortfall.
    `rules`: for each tenant whose promise is broken, the rule that decided last.
    `refused_at`: when the host last refused to freeze a pod.
    `beliefs`: of each tenant that reports a rate. `read_at`: when the last reading in place ended.
    """

    watch: GpuWatch = field(default_factory=GpuWatch)
    actions: WatchActions = _NOTHING
    concluded_at: float = -math.inf
    alert_until: float = -math.inf
    hurry_until: float = -math.inf
    news_at: float = -math.inf
    tenants: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    counters: Mapping[str, float] = field(default_factory=dict)
    stops: Mapping[str, float] | None = None
    written: Mapping[str, ThrottleAsk] | None = None
    unusable: str = ""
    rules: tuple[tuple[str, StepRule], ...] = ()
    refused_at: Mapping[str, float] = field(default_factory=dict)
    beliefs: dict[str, RateBelief] = field(default_factory=dict)
    read_at: float = -math.inf


@dataclass(slots=True)
class LoopCounts:
    """Counters of one GPU since the agent started."""

    broken: int = 0
    throttled: int = 0
    retractions: int = 0


class Loop:
    """Watcher of promises that acts when one is broken.

    Args:
        directory: the node's gpushare directory.
        tell: write an event.
        clock: monotonic seconds; boot: seconds since the node booted, the throttle's clock.
        sleep: waits between two beats; may end them early, or 0.05 s late.
        enabled: if not, promises are reported only, without any action.
        slos: the pods' own targets.
    """

    def __init__(
        self,
        state: NodeState,
        signatures: Signatures,
        terms: TermsOf,
        directory: Path,
        *,
        tell: Callable[[Notice], Awaitable[None]],
        clock: Callable[[], float],
        settings: WatchSettings,
        enabled: bool = True,
        boot: Callable[[], float] = boottime,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        slos: SloReader | None = None,
    ) -> None:
        self.enabled = enabled
        self.counts: dict[str, LoopCounts] = {}
        self._state = state
        self._signatures = signatures
        self._terms = terms
        self._directory = directory
        self._tell = tell
        self._clock = clock
        self._boot = boot
        self._sleep = sleep
        self._slos = slos
        self._settings = settings
        self._gpus: dict[str, _WatchedGpu] = {}
        self._gates: dict[str, GateStatus] = {}
        self._told_at: dict[tuple[str, WatchReason], float] = {}
        self._notices: asyncio.Queue[Notice] = asyncio.Queue(_MOST_WAITING)
        self._failing = False
        self._unthrottled = ""

    def is_due(self, uuid: str, fresh: Sequence[GpuSample]) -> bool:
        """Return whether to conclude from these samples now.

        Short windows while something is wrong, changed lately, or changes now; long ones cost less.
        """
        gpu = self._gpus.get(uuid)
        if gpu is None or not self.enabled:
            return len(fresh) >= CALM_SAMPLES
        now = self._clock()
        if _has_moved(gpu.counters, fresh[-1]):
            gpu.alert_until, gpu.news_at = now + ALERT_SECONDS, now
        duties = gpu.actions.duties.values()
        is_wrong = gpu.actions.broken or gpu.actions.missed
        if not duties and not is_wrong and now >= gpu.alert_until:
            return len(fresh) >= CALM_SAMPLES
        seconds = UNEVEN_SECONDS if any(duty < 0.5 for duty in duties) else WATCH_SECONDS
        if now - gpu.news_at >= SETTLED_SECONDS:
            seconds = SETTLED_WINDOW_SECONDS
        elif not duties and now < gpu.hurry_until:
            seconds = HURRY_SECONDS
        return sum(sample.window_seconds for sample in fresh) >= 0.9 * seconds

    def pace(self) -> float:
        """Return the seconds until the next samples are wanted: few while a promise may be broken."""
        now = self._clock()
        is_hurried = any(not gpu.actions.duties and now < gpu.hurry_until for gpu in self._gpus.values())
        return HURRY_SECONDS if is_hurried and self.enabled else math.inf

    def conclude(self, uuid: str, gate: GateStatus | None, measure: GpuMeasure) -> bool:
        """Watch one GPU's window, and act on what it shows; return whether something changed on the GPU.

        Args:
            measure: of the window; without a sample it only lists the tenants.
        """
        now = self._clock()
        gpu = self._gpus.setdefault(uuid, _WatchedGpu())
        if gate is not None:
            self._gates[uuid] = gate
        if measure.sample is None:
            gpu.alert_until, gpu.news_at = now + ALERT_SECONDS, now
            if len(tenants_of(self._state, uuid)) > 1:
                gpu.hurry_until = now + 2 * BEAT_SECONDS
        tenants = frozenset(measure.tenants)
        if not self.enabled or (measure.sample is None and tenants == gpu.tenants):
            return False
        gpu.tenants = tenants
        changed_at = gpu.watch.changed_at
        if measure.sample is None:
            self._act(uuid, gpu, self._window(uuid, gate, measure, 0.0, now), now)
            return gpu.watch.changed_at != changed_at
        gpu.counters = measure.sample.counters.as_dict()
        gpu.concluded_at = now
        window = self._window(uuid, gate, measure, measure.sample.window_seconds, now)
        if any(_is_below(each) and each.uid not in gpu.actions.broken for each in window.tenants):
            gpu.news_at = now
        if any(t.progress is not None and t.progress < t.promise and t.active for t in window.tenants):
            gpu.alert_until = max(gpu.alert_until, now + ALERT_SECONDS / 2)
            if now >= gpu.hurry_until + ALERT_SECONDS:  # only briefly, then normal windows
                gpu.hurry_until = now + 2 * BEAT_SECONDS
        gpu.known = frozenset(t.uid for t in window.tenants if t.progress is not None and t.active)
        self._act(uuid, gpu, window, now)
        return gpu.watch.changed_at != changed_at

    def keeping(self, uuid: str, pod: ManagedPod, share_percent: int) -> Keeping:
        """Return a tenant's promise, and the loop's actions on its GPU."""
        gpu = self._gpus.get(uuid, _WatchedGpu())
        duty = gpu.actions.duties.get(pod.uid, FREE)
        return Keeping(
            promise_ratio=self._promise(uuid, pod, share_percent),
            throttle_ratio=round(1.0 - duty, 2) if duty < FREE else None,
            retract=self._named(gpu.actions.retract_why, pod)[:1024] if gpu.actions.retract == pod.uid else None,
            slo=_with_belief(self._slos.status(pod), gpu.beliefs.get(pod.uid)) if self._slos is not None else None,
        )

    def is_broken(self, uuid: str, pod_uid: str) -> bool | None:
        """Return whether a tenant's promise is broken; None while its progress is unknown."""
        gpu = self._gpus.get(uuid)
        if gpu is None or not (pod_uid in gpu.known or pod_uid in gpu.actions.broken):
            return None
        return pod_uid in gpu.actions.broken

    def stop(self, uuid: str, stops: Mapping[str, float] | None) -> None:
        """Ask for pods to be stopped for a reading, each until a time (seconds since boot); None ends the reading.

        Until then nobody is throttled: a throttled pod's freeze would be added to its stop, and a pod that is read
        would show less than its program draws.
        """
        gpu = self._gpus.setdefault(uuid, _WatchedGpu())
        if gpu.stops is not None and stops is None:
            gpu.read_at = self._clock()
        gpu.stops = stops
        self._write(uuid, gpu)

    async def run(self) -> None:
        """Renew the asks and write events until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(without_end("writing events", self._tell_all()))
            while True:
                self.beat()
                await self._sleep(BEAT_SECONDS)

    def beat(self) -> None:
        """Renew the asks of every GPU that has some; let time pass for GPUs without windows."""
        if not self.enabled:
            return
        now = self._clock()
        for uuid in self._state.gpus:
            gpu = self._gpus.setdefault(uuid, _WatchedGpu())
            if now - gpu.concluded_at >= 2 * BEAT_SECONDS:
                self._act(uuid, gpu, None, now)
            self._write(uuid, gpu)

    def _act(self, uuid: str, gpu: _WatchedGpu, window: WatchWindow | None, now: float) -> None:
        gate = self._gates.get(uuid)
        problem = gate.throttle.problem if gate is not None else ""
        if problem and problem != self._unthrottled:
            _log.warning(
                "no pod can be throttled on this node, so broken promises lead to retractions: %s", problem
            )
        self._unthrottled = problem
        before, state = gpu.actions, gpu.watch
        settings = replace(self._settings, can_throttle=self._settings.can_throttle and not problem)
        gpu.watch, gpu.actions = watch(state, window, now, settings)
        if now - gpu.watch.seen_at >= settings.blind_seconds:
            gpu.known = frozenset()
        is_told = gpu.actions.broken or gpu.rules or _log.isEnabledFor(logging.DEBUG)  # else it costs nothing
        if window is not None and is_told:
            self._log_step(uuid, gpu, explain(state, gpu.watch, window, now, settings))
        counts = self.counts.setdefault(uuid, LoopCounts())
        counts.broken += len(set(gpu.actions.broken) - set(before.broken))
        counts.throttled += len(gpu.actions.duties.keys() - before.duties.keys())
        counts.retractions += gpu.actions.retract is not None and gpu.actions.retract != before.retract
        for note in gpu.actions.notes:
            self._note(note.uid, note.reason, note.message, uuid, now)
        if gpu.actions.duties != before.duties:
            self._write(uuid, gpu)
        if _in_force(gpu.actions) != _in_force(before):
            gpu.news_at = now
        if (gpu.actions.retract, gpu.actions.broken) != (before.retract, before.broken):
            self._state.touch()

    def _log_step(self, uuid: str, gpu: _WatchedGpu, step: WatchStep | None) -> None:
        """Log what a step acted by: at INFO where another rule decides about a broken promise, else at DEBUG."""
        rules = step.rules if step is not None else ()
        if step is not None:
            level = logging.INFO if rules != gpu.rules else logging.DEBUG
            _log.log(level, "step on GPU %s: %s", uuid, step, extra={"gpu": uuid})
        gpu.rules = rules

    def _note(self, uid: str, reason: WatchReason, message: str, uuid: str, now: float) -> None:
        _log.info("%s: pod %s on GPU %s %s", reason, uid, uuid, message, extra={"pod": uid, "gpu": uuid})
        if now - self._told_at.get((uid, reason), -math.inf) < EVENT_SECONDS or self._notices.full():
            return
        self._told_at = {key: at for key, at in self._told_at.items() if now - at < EVENT_SECONDS}
        self._told_at[uid, reason] = now
        message = self._named(message, self._state.pods.get(uid))
        self._notices.put_nowait(Notice(uid, str(reason), message, is_warning=reason in _WARNINGS))

    def _named(self, message: str, about: ManagedPod | None) -> str:
        """Return a sentence with names for uids; a pod's owner does not see names of other namespaces."""
        for uid, pod in self._state.pods.items():
            if uid in message:
                is_foreign = about is None or pod.namespace != about.namespace
                message = message.replace(uid, "a pod of another namespace" if is_foreign else f"pod {pod.name}")
        return message

    def _window(
        self, uuid: str, gate: GateStatus | None, measure: GpuMeasure, seconds: float, now: float
    ) -> WatchWindow:
        refused = self._refused(self._gpus[uuid], gate, now)
        tenants = tuple(
            self._watched(uuid, pod, share, measure.tenants.get(pod.uid, TenantMeasure()), refused.keys())
            for pod, share in tenants_of(self._state, uuid)
        )
        tenants = self._with_reports(uuid, tenants, measure, now)
        why_not = "" if gate is not None and gate.state in _SERVING else "MPS does not serve"
        return WatchWindow(now, tenants, usable=not why_not, why_not=why_not, seconds=seconds)

    def _refused(self, gpu: _WatchedGpu, gate: GateStatus | None, now: float) -> Mapping[str, float]:
        """Return when the host last refused to freeze a pod, for those that are not asked for again yet."""
        lately = {uid: at for uid, at in gpu.refused_at.items() if now - at < REFUSED_SECONDS}
        refusals = gate.throttle.refused if gate is not None else ()
        gpu.refused_at = lately | dict.fromkeys((refusal.pod_uid for refusal in refusals), now)
        return gpu.refused_at

    def _watched(
        self, uuid: str, pod: ManagedPod, share: int, measured: TenantMeasure, refused: AbstractSet[str]
    ) -> WatchedTenant:
        terms = self._terms(pod)
        gpu = self._state.gpus.get(uuid)
        return WatchedTenant(
            uid=pod.uid,
            job_class=terms.job_class,
            promise=self._promise(uuid, pod, share),
            progress=measured.progress_ratio,
            error=measured.progress_error_ratio,
            order=unix_seconds(pod.decision.decided_at if pod.decision else None),
            active=bool(measured.clients) and not measured.is_asleep,
            can_throttle=terms.is_certain and pod.uid not in refused and len(self._state.gpus_of(pod)) == 1,
            alone=1.0 if measured.alone_ratio is None else measured.alone_ratio,
            slo=self._slos.sign(pod.uid) if self._slos is not None else None,
            is_light=gpu is not None and self._signatures.is_light(pod, gpu.model),
        )

    def _with_reports(
        self, uuid: str, tenants: tuple[WatchedTenant, ...], measure: GpuMeasure, now: float
    ) -> tuple[WatchedTenant, ...]:
        """Return the tenants with the progress that they report, where they do and it is believed."""
        gpu, slos = self._gpus[uuid], self._slos
        reporting = {
            each.uid: pod
            for each in tenants
            if (pod := self._state.pods.get(each.uid)) is not None and isinstance(pod.slo, RateSlo)
        }
        # A page that cannot be read for a moment makes nobody forget what was found of its pod before.
        before, gpu.beliefs = gpu.beliefs, {}
        since = max(gpu.watch.changed_at, gpu.read_at) + self._settings.delay_seconds
        found = []
        for each in tenants:
            if slos is None or each.uid not in reporting:
                found.append(each)
                continue
            beside = {other.uid for other in tenants} - {each.uid}
            belief, tenant = believed(
                before.get(each.uid, RateBelief()),
                each,
                slos.rate(reporting[each.uid]),
                now,
                self._settings,
                since=math.inf if gpu.stops is not None else since,
                predicted_error=measure.tenants.get(each.uid, TenantMeasure()).predicted_error_ratio,
                beside=beside,
                is_eased=any(uid in gpu.actions.duties for uid in beside),
            )
            gpu.beliefs[each.uid] = belief
            if belief.is_implausible != before.get(each.uid, RateBelief()).is_implausible:
                self._state.touch()
                how = f"is not believed: {belief.words}" if belief.is_implausible else "is believed again"
                _log.info("the rate of pod %s on GPU %s %s", each.uid, uuid, how, extra={"pod": each.uid})
                if belief.is_implausible and not self._notices.full():
                    why = f"what it counts is not believed ({SloReason.IMPLAUSIBLE}): {belief.words}"
                    self._notices.put_nowait(Notice(each.uid, "SloUnknown", why[:1024], is_warning=True))
            found.append(tenant)
        return tuple(found)

    def _promise(self, uuid: str, pod: ManagedPod, share_percent: int) -> float:
        gpu = self._state.gpus.get(uuid)
        signatures = self._signatures.phases(pod, gpu.model) if gpu is not None else ()
        share = max(1, min(100, share_percent))
        alone = None
        if signatures and signatures[0].counters.sm_util is not None:  # it must hold in each phase
            known = [each for each in signatures if each.counters.sm_util is not None]
            alone = min(1.0, *(progress_alone(each.counters, each.cap_curve, share / 100) for each in known))
        return promise_of(alone, share, self._terms(pod).max_slowdown, is_auto=pod.is_auto)

    def _write(self, uuid: str, gpu: _WatchedGpu) -> None:
        """Write the asks of one GPU; do nothing if there are none and were none."""
        if not self.enabled:
            return
        if gpu.stops is not None:
            asks = {uid: ThrottleAsk(stopped_until=until) for uid, until in gpu.stops.items()}
        else:
            asks = {uid: ThrottleAsk(duty) for uid, duty in gpu.actions.duties.items() if duty < FREE}
        place = GpuDirectory.of(self._directory, uuid)
        if not asks and not gpu.written and (gpu.written is not None or not place.throttle.exists()):
            return
        try:
            write_throttle(place, ThrottleAsks(asks, self._boot()))
        except OSError as error:
            self._state.counts.error(AgentPart.THROTTLE)
            if not self._failing:
                _log.error("asks to throttle pods of GPU %s not written, they run free: %s", uuid, error)
            self._failing = True
        else:
            gpu.written, self._failing = asks, False

    async def _tell_all(self) -> None:
        while True:
            await self._tell(await self._notices.get())


def _with_belief(slo: TenantSlo | None, belief: RateBelief | None) -> TenantSlo | None:
    """Return a pod's status against its target, which is unknown while what it reports is not believed.

    One that reports more than the counters leave possible harms nobody: by its own word it meets its target.
    """
    if slo is None or belief is None or not belief.is_implausible or slo.met is ConditionStatus.TRUE:
        return slo
    message = f"{slo.message}; {belief.words}"[:1024]
    return replace(slo, met=ConditionStatus.UNKNOWN, reason=SloReason.IMPLAUSIBLE.value, message=message)


def _in_force(actions: WatchActions) -> tuple[object, ...]:
    """Return the actions and shortfalls, without the notes."""
    return dict(actions.duties), actions.retract, actions.broken, actions.missed


def _is_below(tenant: WatchedTenant) -> bool:
    """Return whether this window alone shows a promise broken by more than its error."""
    if tenant.progress is None or tenant.error is None:
        return False
    return tenant.active and tenant.progress + tenant.error < tenant.promise


def _has_moved(before: Mapping[str, float], sample: GpuSample) -> bool:
    now = sample.counters.as_dict()
    return any(abs(value - before.get(name, value)) > MOVED_RATIO for name, value in now.items())
