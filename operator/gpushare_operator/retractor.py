"""Carry out retractions: core plans each step; this writes it to the GpuShare, evicts the pod, and writes events.

The intent is in the GpuShare before the pod is evicted, so a retraction is neither lost nor done twice when the
operator is killed in between (docs/adr/0124). So is the count of a replacement, after which its group is paused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Final

from gpushare.core import control
from gpushare.core.admission import Needs, ShareKey, resolve
from gpushare.core.api import GroupReplacements, JobClass, PodView, Retraction
from gpushare.core.backoff import Backoff
from gpushare.core.control import (
    SILENT_SECONDS,
    HygieneAction,
    ReplacementAsk,
    ReplacementPlan,
    Replacements,
    Resident,
    RetractionPlan,
    RetractionRecord,
    RetractionSituation,
)
from gpushare.kube import (
    GPUSHARES,
    PODS,
    Api,
    ApiError,
    Conflict,
    EventType,
    Json,
    NotFound,
    Retryable,
    cut_note,
    record_event,
)
from gpushare.runtime.moments import unix_seconds
from gpushare_operator.jobs import LastTries
from gpushare_operator.metrics import EvictionRefusal, OperatorMetrics
from gpushare_operator.reports import NodeReport, Reports
from gpushare_operator.world import ClusterView

_log = logging.getLogger(__name__)

STEP_SECONDS: Final = 1.0
# Waits before retrying an eviction that a disruption budget refused, for as long as the agent requests it.
REFUSED: Final = Backoff(first_seconds=5.0, longest_seconds=60.0)
TOLD_AFTER_SECONDS: Final = 60.0  # after which the GpuShare reports a refused eviction
WAITED_SECONDS: Final = 300.0
"""After which the GpuShare reports that an eviction waits: an operator's start, a pod's grace period of 30 s, the
pause after it and a full minute of evictions take less, one after the other."""
# An accepted eviction marks the pod as leaving at once, and the watch is about to report one that is gone. If it
# still seems to stay after this time, retry.
_ACCEPTED_SECONDS: Final = 60.0
_BUDGET_CAUSE: Final = "DisruptionBudget"  # of a Status; a server that is busy answers 429 too
_WAITS: Final = "WaitsForLong"


@dataclass(frozen=True, slots=True)
class _ReplacementIntent:
    """A replacement that its GpuShare counts before the pod is evicted; `before` is the count without it."""

    pod_uid: str
    before: GroupReplacements | None
    counted: GroupReplacements


class _EvictionOutcome(Enum):
    """Result of asking for an eviction; GONE: there was no such pod any more."""

    ACCEPTED = auto()
    GONE = auto()
    REFUSED = auto()


class Refusals:
    """Evictions that the API server did not accept, by pod; times are monotonic seconds."""

    def __init__(self) -> None:
        self._of_pod: dict[str, tuple[int, float, str, str]] = {}  # how many, when to try again, reason, answer

    def add(self, uid: str, now: float, error: ApiError) -> str:
        """Record a refusal; return its reason in one word."""
        count = self._of_pod.get(uid, (0, 0.0, "", ""))[0] + 1
        least = error.retry_after_seconds if isinstance(error, Retryable) else 0.0
        is_budget = _BUDGET_CAUSE in error.causes
        reason = EvictionRefusal.BUDGET if is_budget else EvictionRefusal.FAILED
        next_at = now + max(least, REFUSED.seconds(count))
        self._of_pod[uid] = (count, next_at, reason.value, cut_note(str(error)))
        return reason.value

    def is_waiting(self, uid: str, now: float) -> bool:
        """Return whether it is too early to try again."""
        return uid in self._of_pod and now < self._of_pod[uid][1]

    def answer(self, uid: str) -> tuple[str, str] | None:
        """Return the last refusal's reason and the API server's answer, cut as an event's note is."""
        known = self._of_pod.get(uid)
        return None if known is None else known[2:]

    def keep(self, uids: Iterable[str]) -> None:
        """Forget every other pod."""
        wanted = set(uids)
        self._of_pod = {uid: known for uid, known in self._of_pod.items() if uid in wanted}


class Retractor:
    """Executor of the plans of `control.plan_retractions`, step by step.

    Args:
        clock: seconds of the wall clock, which continues across restarts.
        monotonic: seconds of a clock that is never set, for how long agents have been silent and pods wait.
        is_known: returns whether all pods and GpuShares of a namespace are known. Until then a pod of it may seem
            to have left.
    """

    def __init__(
        self,
        api: Api,
        world: ClusterView,
        settings: control.OperatorSettings,
        metrics: OperatorMetrics,
        *,
        controller: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        is_known: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.reports = Reports()
        self._api, self._world, self._settings, self._metrics = api, world, settings, metrics
        self._controller, self._clock, self._monotonic = controller, clock, monotonic
        self._is_known = is_known
        self._last_tries = LastTries(api, monotonic)
        self._accepted: dict[str, float] = {}
        self._last_left: dict[str, float] = {}
        self._refusals = Refusals()
        self._reasons: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._waits_since: dict[str, tuple[float, float]] = {}  # by the wall clock, and by the monotonic one
        self._replaced: dict[str, float] = {}
        self._intents: dict[ShareKey, _ReplacementIntent] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            try:
                await self.step()
            except Exception:  # noqa: BLE001 - one bad step must not end retraction for good
                _log.exception("retraction: a step failed")
            await asyncio.sleep(STEP_SECONDS)

    def node_changed(self, node: str, report: NodeReport | None) -> None:
        """Record what a node's agent wrote; None: its GpuNode is gone."""
        self.reports.put(node, report, self._monotonic())
        faults = report.faults if report is not None else ()
        for fault in control.ended_lately(faults, self._clock(), unix_seconds):
            self._world.blame(node, fault)

    def answered(self) -> None:
        """Record that the API server answered about GpuNodes."""
        self.reports.answered(self._monotonic())

    async def step(self) -> None:
        """Do what is due now."""
        self._world.silence(self.reports.silent(self._monotonic(), SILENT_SECONDS))
        await self._last_tries.look(self._asked_pods())
        now = self._clock()
        situation = self._situation(now)
        plan = control.plan_retractions(situation, self._settings.retraction, now)
        for share, records in plan.records.items():
            self._world.retract(_key(share), tuple(map(_written, records)))
        for share, recorded in plan.done:
            await self._done(_key(share), recorded)
        self._metrics.retractions_waiting.set(len(situation.asks))
        asks = self._replacement_asks()
        replacement = self._plan_replacement(asks, situation, now)
        waiting = {**replacement.waiting, **plan.waiting}
        both = now, self._monotonic()
        self._waits_since = {uid: self._waits_since.get(uid, both) for uid in waiting}
        self._world.refuse(
            self._refused_replacements(asks, replacement) | self._refused_retractions(plan, situation, now)
        )
        if plan.evict is not None:
            await self._evict(plan.evict, now)
        elif replacement.evict is not None:
            await self._replace(replacement.evict, asks[replacement.evict], now)

    def _asked_pods(self) -> list[PodView]:
        """Return the pods that agents ask to move away or, where the settings say so, to replace."""
        now, wanted = self._monotonic(), self._settings.hygiene
        asked = [(node, ask.pod_uid, ask.gpu) for node, ask in self.reports.asks(now)]
        asked += [
            (node, ask.pod_uid, ask.gpu)
            for node, ask in self.reports.troubles(now)
            if wanted.action_of(ask.kind) is HygieneAction.REPLACE
        ]
        return [pod for each in asked if (pod := self._pod_of(*each)) is not None]

    def _replacement_asks(self) -> dict[str, ReplacementAsk]:
        """Return the pods in trouble that are to be replaced, by uid."""
        wanted = self._settings.hygiene
        return {
            ask.pod_uid: ask
            for node, ask in self.reports.troubles(self._monotonic())
            if wanted.action_of(ask.kind) is HygieneAction.REPLACE and self._is_its_own(node, ask.pod_uid, ask.gpu)
        }

    def _plan_replacement(
        self, asks: Mapping[str, ReplacementAsk], situation: RetractionSituation, now: float
    ) -> ReplacementPlan:
        self._replaced = {uid: at for uid, at in self._replaced.items() if 0.0 <= now - at < _ACCEPTED_SECONDS}
        self._keep_intents(asks)
        gpus = {ask.gpu for ask in asks.values()}
        residents = self._residents(gpus)
        self._last_left |= _left_now(residents, now)
        retraction = self._settings.retraction
        records = [one for history in situation.records.values() for one in history if not one.is_intent]
        evicted = {one.pod_uid: one.at for one in records} | self._accepted | self._replaced
        intended = {one.gpu for history in situation.records.values() for one in history if one.is_intent}
        return control.plan_replacement(
            [ask for ask in asks.values() if ask.gpu not in intended and self._is_next(ask.pod_uid)],
            residents,
            Replacements(
                self._lately_replaced(asks, now),
                evicted,
                self._last_left,
                [uid for uid in asks if self._refusals.is_waiting(uid, self._monotonic())],
            ),
            per_minute=retraction.per_minute,
            calm_seconds=retraction.calm_seconds,
            now=now,
        )

    def _refused_replacements(
        self, asks: Mapping[str, ReplacementAsk], plan: ReplacementPlan
    ) -> dict[ShareKey, tuple[str, str]]:
        """Return (reason, sentence) for the GpuShares of pods that should be replaced but are not."""
        refused: dict[ShareKey, tuple[str, str]] = {}
        for uid, ask in asks.items():
            key, answer = self._world.share_of_pod(uid), self._refusals.answer(uid)
            if key is None or uid in self._replaced or self._world.pods[uid].leaving:
                continue
            what = f"{self._name(uid)} should be replaced ({ask.reason})"
            if uid in plan.never:
                refused[key] = ("NotRetractable", f"{what} and stays: {plan.never[uid]}")
            elif answer is not None:
                refused[key] = (answer[0], f"{what}, and its eviction is refused: {answer[1]}")
            elif uid in plan.waiting and self._waits_for_long(uid):
                refused[key] = (_WAITS, f"{what}, and waits since {self._since(uid)}: {plan.waiting[uid]}")
        return refused

    async def _replace(self, uid: str, ask: ReplacementAsk, now: float) -> None:
        """Evict a pod in trouble, so that its controller creates another, once its GpuShare counts that."""
        pod, key = self._world.pods.get(uid), self._world.share_of_pod(uid)
        share = self._world.shares.get(key) if key is not None else None
        if pod is None or key is None or share is None:
            return
        if (intent := self._intents.get(key)) is None:
            count, at = control.count_replacement(self._lately_replaced([uid], now).get(str(key)), now)
            intent = _ReplacementIntent(uid, self._world.replacements_of(key), GroupReplacements(count, _text(at)))
            self._intents[key] = intent
            self._world.count_replacements(key, intent.counted)
        if share.status.replacements != intent.counted:
            return  # not written yet
        outcome = await self._try_to_evict(pod)
        if outcome is _EvictionOutcome.REFUSED:
            return
        self._replaced[uid] = now
        del self._intents[key]
        if outcome is _EvictionOutcome.GONE:
            self._world.count_replacements(key, intent.before)
            return
        if now - unix_seconds(intent.counted.at) >= TOLD_AFTER_SECONDS:  # a budget refused it until now
            self._world.count_replacements(key, GroupReplacements(intent.counted.count, _text(now)))
        self._metrics.replacements.labels(ask.kind.value).inc()
        _log.info("evicted pod %s, so that another is made in its place: %s", pod.key, ask.reason)
        reference = {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(pod.namespace, pod.name, uid)}
        await self._tell(reference, "Replaced", f"evicted so that another is made in its place: {ask.reason}")

    def _keep_intents(self, asks: Mapping[str, ReplacementAsk]) -> None:
        """Forget intents that the GpuShare has lost, and those whose pod needs no replacement any more.

        A pod that stays is not counted; one that leaves may have been evicted by a request that seemed to fail.
        """
        for key, intent in list(self._intents.items()):
            is_counted = self._world.replacements_of(key) == intent.counted
            if is_counted and intent.pod_uid in asks and self._world.share_of_pod(intent.pod_uid) == key:
                continue
            del self._intents[key]
            pod = self._world.pods.get(intent.pod_uid)
            if is_counted and pod is not None and not pod.leaving:
                self._world.count_replacements(key, intent.before)

    def _is_next(self, uid: str) -> bool:
        """Return whether no other pod of its group is about to be replaced."""
        key = self._world.share_of_pod(uid)
        intent = self._intents.get(key) if key is not None else None
        return intent is None or intent.pod_uid == uid

    def _lately_replaced(self, uids: Iterable[str], now: float) -> dict[str, tuple[int, float]]:
        """Return for these pods' GpuShares how many pods in trouble were replaced, and when the last one was.

        One that is only intended is not counted.
        """
        found: dict[str, tuple[int, float]] = {}
        for key in {self._world.share_of_pod(uid) for uid in uids}:
            if key is None:
                continue
            intent = self._intents.get(key)
            replacements = self._world.replacements_of(key) if intent is None else intent.before
            if (kept := control.lately_replaced(replacements, now, unix_seconds)) is not None:
                found[str(key)] = kept.count, unix_seconds(kept.at)
        return found

    def _situation(self, now: float) -> RetractionSituation:
        """Return the known facts; this costs almost nothing while there is no request and no intent."""
        reported = self.reports.asks(self._monotonic())
        asks = tuple(ask for node, ask in reported if self._is_its_own(node, ask.pod_uid, ask.gpu))
        self._reasons = {ask.pod_uid: ask.reason for ask in asks} | {
            uid: why for uid, why in self._reasons.items() if uid in self._accepted
        }
        names = {ask.pod_uid: self._world.pods[ask.pod_uid].name for ask in asks}
        self._names = names | {uid: name for uid, name in self._names.items() if uid in self._accepted}
        records = {
            str(key): tuple(map(_read, history))
            for key, history in self._world.retractions().items()
            if self._is_known(key.namespace)
        }
        intents = {one.pod_uid: one for history in records.values() for one in history if one.is_intent}
        self._refusals.keep({*intents, *self._replacement_asks()})
        self._accepted = {
            uid: at for uid, at in self._accepted.items() if uid in intents and 0.0 <= now - at < _ACCEPTED_SECONDS
        }
        residents = self._residents({ask.gpu for ask in asks} | {one.gpu for one in intents.values()})
        self._last_left |= _left_now(residents, now)
        calm = self._settings.retraction.calm_seconds
        self._last_left = {gpu: at for gpu, at in self._last_left.items() if 0.0 <= now - at < calm}
        return RetractionSituation(
            asks=asks,
            residents=residents,
            records=records,
            written=frozenset(
                uid
                for uid, gpu in self._written_intents()
                if uid in intents
                and gpu == intents[uid].gpu
                and not self._refusals.is_waiting(uid, self._monotonic())
            ),
            evicted=self._accepted | self._replaced,
            corrected={
                uid: self._resident(self._world.pods[uid])
                for uid, intent in intents.items()
                if uid in self._world.pods and uid not in {one.uid for one in residents[intent.gpu]}
            },
            last_left=self._last_left,
        )

    def _is_its_own(self, node: str, pod_uid: str, gpu: str) -> bool:
        """Return whether the pod is on that node and GPU, and it is known what becomes of its Job without it."""
        pod = self._pod_of(node, pod_uid, gpu)
        return pod is not None and self._last_tries.is_known(pod)

    def _pod_of(self, node: str, pod_uid: str, gpu: str) -> PodView | None:
        """Return a pod that is known, on that node and GPU: a node may not decide about other nodes' pods."""
        pod = self._world.pods.get(pod_uid)
        if pod is None or pod.node != node or not self._is_known(pod.namespace):
            return None
        return pod if pod.decision is not None and gpu in pod.decision.gpu_uuids else None

    def _residents(self, gpus: set[str]) -> dict[str, tuple[Resident, ...]]:
        """Return the pods placed on these GPUs."""
        found: dict[str, list[Resident]] = {gpu: [] for gpu in gpus}
        for pod in self._world.pods.values() if gpus else ():
            for gpu in pod.decision.gpu_uuids if pod.decision is not None else ():
                if gpu in gpus:
                    found[gpu].append(self._resident(pod))
        return {gpu: tuple(pods) for gpu, pods in found.items()}

    def _resident(self, pod: PodView) -> Resident:
        key = self._world.share_of_pod(pod.uid)
        share = self._world.shares.get(key) if key is not None else None
        needs = resolve(pod.annotations, share, self._settings.defaults, limit_percent=pod.limit_percent)
        # A pod that cannot be read is not evicted, nor is a latency pod.
        job_class = needs.job_class if isinstance(needs, Needs) else JobClass.LATENCY
        return Resident(
            pod.uid,
            str(key) if share is not None else "",
            job_class,
            leaving=pod.leaving,
            ended=pod.finished,
            replaceable=pod.controller is not None,
            is_last_try=self._last_tries.has(pod.uid),
        )

    def _written_intents(self) -> set[tuple[str, str]]:
        """Return pod and GPU of each intent that the API server has accepted."""
        shares = (self._world.shares[key] for key in self._world.retractions())
        return {
            (one.pod_uid, one.gpu or "")
            for share in shares
            for one in share.status.retractions
            if one.until is None and one.pod_uid is not None
        }

    async def _evict(self, uid: str, now: float) -> None:
        pod = self._world.pods.get(uid)
        outcome = await self._try_to_evict(pod) if pod is not None else _EvictionOutcome.REFUSED
        if pod is None or outcome is _EvictionOutcome.REFUSED:
            return
        self._accepted[uid] = now
        if outcome is _EvictionOutcome.GONE:
            return
        why = self._reasons.get(uid, "")
        _log.info("evicted pod %s for a neighbour's promise: %s", pod.key, why)
        note = f"evicted so that its neighbours keep their promises: {why}"
        reference = {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(pod.namespace, pod.name, uid)}
        await self._tell(reference, "Retracted", note)

    async def _try_to_evict(self, pod: PodView) -> _EvictionOutcome:
        """Ask the API server to evict a pod."""
        try:
            await self._api.evict(pod.name, namespace=pod.namespace, uid=pod.uid)
        except ApiError as error:
            if isinstance(error, NotFound) or (isinstance(error, Conflict) and await self._is_gone(pod)):
                return _EvictionOutcome.GONE  # the watch is about to report it
            reason = self._refusals.add(pod.uid, self._monotonic(), error)
            self._metrics.retractions_refused.labels(reason).inc()
            _log.warning("pod %s not evicted, tried again: %s", pod.key, error)
            return _EvictionOutcome.REFUSED
        self._last_tries.evicted(pod)
        return _EvictionOutcome.ACCEPTED

    async def _is_gone(self, pod: PodView) -> bool:
        """Return whether the API server has no pod of this name, or another one, such as a StatefulSet's next."""
        try:
            present = await self._api.get(PODS, pod.name, namespace=pod.namespace)
        except ApiError as error:
            return isinstance(error, NotFound)
        return bool(present["metadata"]["uid"] != pod.uid)

    async def _done(self, key: ShareKey, recorded: tuple[RetractionRecord, ...]) -> None:
        self._metrics.retractions.inc()
        share = self._world.shares.get(key)
        if share is None:
            return
        record = recorded[0]
        pod, why = self._world.pods.get(record.pod_uid), self._reasons.get(record.pod_uid, "")
        known = self._names.get(record.pod_uid, f"the pod with uid {record.pod_uid}")
        name = pod.name if pod is not None else known
        because = f": {why}" if why else ""
        apart = " and ".join(
            f"until {_text(one.until or one.at)} none of these pods is put beside {_shown(one, key.namespace)}"
            for one in recorded
        )
        note = f"{name} left {record.gpu} so that its neighbours keep their promises{because}; {apart}"
        metadata = _metadata(key.namespace, key.name, share.uid)
        await self._tell(
            {"apiVersion": GPUSHARES.api_version, "kind": GPUSHARES.kind, "metadata": metadata}, "Retracted", note
        )

    def _refused_retractions(
        self, plan: RetractionPlan, situation: RetractionSituation, now: float
    ) -> dict[ShareKey, tuple[str, str]]:
        """Return (reason, sentence) for the GpuShares of pods that should leave and cannot; one pod for each."""
        refused: dict[ShareKey, tuple[str, str]] = {}
        for uid, why in plan.waiting.items():
            if (key := self._world.share_of_pod(uid)) is not None and self._waits_for_long(uid):
                what = f"{self._name(uid)} should leave its GPU so that its neighbours keep their promises"
                refused[key] = (_WAITS, f"{what}, and waits since {self._since(uid)}: {why}")
        for uid, why in plan.never.items():
            if (key := self._world.share_of_pod(uid)) is not None:
                refused[key] = ("NotRetractable", f"{self._name(uid)} should leave its GPU and stays: {why}")
        for share, history in situation.records.items():
            for intent in history:
                answer = self._refusals.answer(intent.pod_uid)
                if intent.is_intent and answer is not None and now - intent.at >= TOLD_AFTER_SECONDS:
                    sentence = (
                        f"{self._name(intent.pod_uid)} should leave its GPU since {_text(intent.at)} so that its "
                        "neighbours keep their promises, and its eviction is refused; it is tried again every "
                        f"minute while the node asks for it: {answer[1]}"
                    )
                    refused[_key(share)] = (answer[0], sentence)
        return refused

    def _waits_for_long(self, uid: str) -> bool:
        return self._monotonic() - self._waits_since[uid][1] >= WAITED_SECONDS

    def _since(self, uid: str) -> str:
        return _text(self._waits_since[uid][0])

    def _name(self, uid: str) -> str:
        pod = self._world.pods.get(uid)
        return pod.name if pod is not None else uid

    async def _tell(self, regarding: Json, reason: str, note: str) -> None:
        await record_event(
            self._api,
            regarding,
            reason=reason,
            note=note,
            action="Retract",
            controller=self._controller,
            event_type=EventType.WARNING,
        )


def _shown(record: RetractionRecord, namespace: str) -> str:
    """Return the neighbours' names if they are in the reader's namespace, else their number."""
    own = [name for name in record.neighbours if name.startswith(f"{namespace}/")]
    others = len(record.neighbours) - len(own)
    return ", ".join([*own, *([f"{others} of other namespaces"] if others else [])])


def _left_now(residents: Mapping[str, tuple[Resident, ...]], now: float) -> dict[str, float]:
    """Return by GPU the present time where a pod is moving out."""
    return {gpu: now for gpu, pods in residents.items() if any(pod.is_moving_out for pod in pods)}


def _metadata(namespace: str, name: str, uid: str) -> Json:
    return {"namespace": namespace, "name": name, "uid": uid}


def _key(share: str) -> ShareKey:
    namespace, _, name = share.partition("/")
    return ShareKey(namespace, name)


def _text(seconds: float) -> str:
    moment = datetime.fromtimestamp(max(0.0, seconds), UTC)  # a missing time counts as long ago
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _written(record: RetractionRecord) -> Retraction:
    until = _text(record.until) if record.until is not None else None
    retractions = None if record.is_intent else record.retractions
    return Retraction(
        record.neighbours, _text(record.at), until, record.count, record.pod_uid, record.gpu, retractions
    )


def _read(one: Retraction) -> RetractionRecord:
    until = unix_seconds(one.until) if one.until is not None else None
    return RetractionRecord(
        one.neighbours, unix_seconds(one.at), one.pod_uid or "", one.gpu or "", until, one.count, one.stands_for
    )
