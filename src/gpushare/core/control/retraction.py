"""Retraction: choose the pod to evict for a neighbour's promise, and record it (docs/design.md 5).

An agent asks for a retraction when throttling cannot keep a promise. Its steps: an *intent* is written into the
pod's GpuShare, the pod is evicted, and once it leaves, the intent becomes a *record* with a back-off, during which
no pod of the group is put beside these neighbours. `plan_retractions` derives each step from what the API holds,
so an operator that was killed between two steps continues: an intent whose pod has left becomes a record, and one
whose pod is still there is tried again.

Times are seconds of the wall clock, passed as arguments.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpushare.core.api import JobClass
from gpushare.core.backoff import Backoff

KEPT_APART: Final = Backoff(first_seconds=3600.0, longest_seconds=86_400.0)
"""How long two workloads are kept apart, by the number of retractions between them (docs/adr/0163)."""
REMEMBERED_SECONDS: Final = 86_400.0
"""How long a record is kept after its back-off; until then the next back-off of the same workloads is doubled."""
SILENT_SECONDS: Final = 150.0
"""An ask expires this long after its agent last wrote; agents write at least every 60 s."""
MOST_RECORDS: Final = 32  # as in the schema
MOST_NEIGHBOURS: Final = 100  # as in the schema
_RATE_SECONDS: Final = 60.0
_DISRUPTION: Final = "DisruptionTarget"  # condition of an evicted pod
_DEFAULT_RETRIES: Final = 6  # of a Job: backoffLimit
_COUNT: Final = "Count"  # the actions of a Job's podFailurePolicy
_IGNORE: Final = "Ignore"
_ENDINGS: Final = frozenset({"FailJob", "FailIndex"})
_ENDED_CODES: Final = frozenset({137, 143})  # by SIGKILL and by SIGTERM
_LEAVING: Final = "another pod is leaving its GPU"


@dataclass(frozen=True, slots=True)
class RetractionSettings:
    """The chart's settings.

    Attributes:
        evicts: if False, asks are only shown and no pod is evicted.
        per_minute: most evictions a minute over the whole cluster.
        calm_seconds: pause on a GPU after a pod has left it, so that its agent can measure what changed.
    """

    evicts: bool = True
    per_minute: int = 2
    calm_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class RetractionAsk:
    """An agent's request to move a pod away.

    Attributes:
        reason: the agent's sentence, with its figures.
        silent_seconds: time since the agent last wrote, by the reader's clock; the agent's clock is not used.
        is_confirmed: the agent has written since this process first saw its GpuNode, whose content may be days
            old.
    """

    pod_uid: str
    gpu: str
    reason: str
    silent_seconds: float = 0.0
    is_confirmed: bool = True

    @property
    def is_stale(self) -> bool:
        """Return whether its agent has been silent for too long."""
        return self.silent_seconds > SILENT_SECONDS


@dataclass(frozen=True, slots=True)
class Resident:
    """A pod that was placed on a GPU.

    Attributes:
        share: its GpuShare as namespace/name; "" while it has none.
        leaving: it is being deleted, for any reason.
        ended: its containers have ended for good; a finalizer may keep the object for long.
        replaceable: it has a controller, which creates another pod in its place.
        is_last_try: that controller is a Job that would fail instead (`fails_with_next`).
    """

    uid: str
    share: str
    job_class: JobClass
    leaving: bool = False
    ended: bool = False
    replaceable: bool = True
    is_last_try: bool = False

    @property
    def is_moving_out(self) -> bool:
        """Return whether it is being deleted and still has a part of its GPU: what it leaves is not known yet."""
        return self.leaving and not self.ended

    @property
    def why_final(self) -> str | None:
        """Return why no other pod would be made in its place; None if one would."""
        if not self.replaceable:
            return "it has no controller that would make another pod in its place"
        return "its Job has no retry left and would fail" if self.is_last_try else None


@dataclass(frozen=True, slots=True)
class RetractionRecord:
    """An intended or completed retraction.

    Attributes:
        neighbours: GpuShares of the other tenants, as namespace/name, sorted; empty in a record that was replaced.
        at: when it was intended; once completed, when the pod left.
        until: end of the back-off; None while it is only intended.
        count: number of retractions between the group and each of these neighbours so far.
        retractions: number of the group's retractions that no other record counts.
    """

    neighbours: tuple[str, ...]
    at: float
    pod_uid: str
    gpu: str
    until: float | None = None
    count: int = 1
    retractions: int = 1

    @property
    def is_intent(self) -> bool:
        """Return whether the pod has not left yet."""
        return self.until is None


RetractionRecords = Mapping[str, tuple[RetractionRecord, ...]]


@dataclass(frozen=True, slots=True)
class RetractionSituation:
    """The present facts.

    Attributes:
        asks: the agents' requests.
        residents: by GPU, every pod placed on a GPU that an ask or intent names.
        records: by namespace/name, the records in the GpuShares that exist.
        written: uids of pods whose intent the API has accepted; only those are evicted.
        evicted: by uid, when the API accepted a pod's eviction, for pods that have not left yet.
        last_left: by GPU UUID, when a pod was last seen moving out.
        corrected: by uid, pods with an intent that exist and are not on its GPU: kubelet gave them another one, so
            their annotation was corrected.
    """

    asks: tuple[RetractionAsk, ...] = ()
    residents: Mapping[str, tuple[Resident, ...]] = field(default_factory=dict)
    records: RetractionRecords = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    evicted: Mapping[str, float] = field(default_factory=dict)
    last_left: Mapping[str, float] = field(default_factory=dict)
    corrected: Mapping[str, Resident] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RetractionPlan:
    """The next steps.

    Attributes:
        records: by GpuShare, its new records; only GpuShares that change.
        evict: uid of the one pod to evict now.
        done: GpuShare and records of each pod that has just left, the longest back-off first.
        waiting: by pod uid, why an ask is not followed yet.
        never: by pod uid, why an ask is never followed.
    """

    records: RetractionRecords
    evict: str | None = None
    done: tuple[tuple[str, tuple[RetractionRecord, ...]], ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    never: Mapping[str, str] = field(default_factory=dict)


def plan_retractions(situation: RetractionSituation, settings: RetractionSettings, now: float) -> RetractionPlan:
    """Return the next steps; at most one pod is evicted at a time."""
    records = {share: without_expired(history, now) for share, history in situation.records.items()}
    done: list[tuple[str, tuple[RetractionRecord, ...]]] = []
    asks = {ask.pod_uid: ask for ask in situation.asks if not ask.is_stale}
    # 1. Intents: if the pod has left, make a record; if nobody asks any more, eviction is not allowed, or the pod
    #    is on another GPU after all, drop it.
    for share, history in list(records.items()):
        for intent in [record for record in history if record.is_intent]:
            uid, corrected = intent.pod_uid, situation.corrected.get(intent.pod_uid)
            resident = corrected or _resident(situation, intent.gpu, uid)
            if resident is None or (resident.leaving and (corrected is None or uid in situation.evicted)):
                recorded = _recorded(intent, records[share], now)
                done.append((share, recorded))
                records[share] = _with(records[share], recorded, now)
            elif uid not in situation.evicted and (
                corrected is not None
                or uid not in asks
                or resident.ended
                or _objection(resident, settings) is not None
            ):
                records[share] = tuple(one for one in records[share] if one != intent)
    # 2. New intents: at most one per calm GPU, for asks that may be followed.
    waiting: dict[str, str] = {}
    never: dict[str, str] = {}
    for uid, ask in sorted(asks.items(), key=lambda item: (item[1].gpu, item[0])):
        resident = _resident(situation, ask.gpu, uid)
        is_settled = not _is_intended(records, uid) and uid not in situation.corrected
        if resident is None or resident.leaving or resident.ended or not is_settled:
            continue
        objection = _objection(resident, settings)
        why = _doubt(situation, ask) or _unrest(situation, records, ask.gpu, settings, now)
        if objection is not None:
            never[uid] = objection
        elif why is not None:
            waiting[uid] = why
        else:
            intent = RetractionRecord(_neighbours(situation, ask), now, uid, ask.gpu)
            records[resident.share] = _newest([*records.get(resident.share, ()), intent])
    # 3. Eviction: the oldest intent that the API has accepted and whose agent is alive, within the cluster's rate.
    heard = {uid for uid, ask in asks.items() if ask.is_confirmed}
    ready = _ready(situation, records, heard)
    due = [one for one in ready if not _is_left_by_another(situation, one.gpu)]
    waiting |= {one.pod_uid: _LEAVING for one in ready if one not in due}
    evict = None
    if _evicted_lately(situation, records, now) < settings.per_minute:
        evict = min(due, key=lambda one: (one.at, one.pod_uid)).pod_uid if due else None
    else:
        waiting |= {one.pod_uid: within_a_minute(settings.per_minute, "retracted") for one in due}
    changed = {share: history for share, history in records.items() if history != situation.records.get(share, ())}
    return RetractionPlan(changed, evict, tuple(done), waiting, never)


def within_a_minute(count: int, done: str) -> str:
    """Return the sentence on why a pod waits once the cluster's rate of evictions is reached.

    Args:
        count: of the pods that left within a minute.
        done: what was done to them, a participle.
    """
    return f"{count} {'pod was' if count == 1 else 'pods were'} {done} within a minute"


def fails_with_next(job: Mapping[str, Any], index_failures: int = 0) -> bool:
    """Return whether a Job (batch/v1, as JSON), or a pod's index of it, fails for good once that pod is evicted.

    To a Job an evicted pod has failed, unless its podFailurePolicy says otherwise. An index that fails, fails the
    Job: at once if maxFailedIndexes is passed, else once all other indexes have ended.

    Args:
        index_failures: how often the pod's index has failed so far, of a Job with backoffLimitPerIndex.
    """
    spec, status = job.get("spec") or {}, job.get("status") or {}
    action = _action_on_eviction(spec)
    if action != _COUNT:
        return action in _ENDINGS
    failed = (status.get("failed") or 0) + len((status.get("uncountedTerminatedPods") or {}).get("failed") or ())
    if spec.get("podFailurePolicy") or spec.get("podReplacementPolicy") == "Failed":
        failed += status.get("terminating") or 0  # those of other Jobs are counted when they are deleted
    per_index, limit = spec.get("backoffLimitPerIndex"), spec.get("backoffLimit")
    if per_index is not None and index_failures >= per_index:
        return True
    if limit is None:
        limit = _DEFAULT_RETRIES if per_index is None else math.inf
    return bool(failed >= limit)


def _action_on_eviction(spec: Mapping[str, Any]) -> str:
    """Return the action of the first rule of a Job's podFailurePolicy that an evicted pod meets.

    Its exit code is not known before. So a rule on codes counts only if it would end the Job, or the index, at one
    of those with which programs end that are told to.
    """
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
        action, on_codes = rule.get("action"), rule.get("onExitCodes")
        if on_codes:
            listed = frozenset(on_codes.get("values") or ())
            met = _ENDED_CODES & listed if on_codes.get("operator") == "In" else _ENDED_CODES - listed
            if met and action in _ENDINGS:
                return str(action)
        elif action in {_COUNT, _IGNORE, *_ENDINGS} and any(
            one.get("type") == _DISRUPTION and (one.get("status") or "True") == "True"
            for one in rule.get("onPodConditions") or ()
        ):
            return str(action)
    return _COUNT


def without_expired(records: Iterable[RetractionRecord], now: float) -> tuple[RetractionRecord, ...]:
    """Return the records without those whose back-off ended long ago, or that a later one replaced."""
    return tuple(
        one
        for one in records
        if one.until is None or now < one.until + (REMEMBERED_SECONDS if one.neighbours else 0.0)
    )


def _recorded(
    intent: RetractionRecord, history: Iterable[RetractionRecord], now: float
) -> tuple[RetractionRecord, ...]:
    """Return what an intent becomes once its pod leaves: a record for the neighbours of each count, highest first.

    Counted by neighbour: one that it leaves for the first time is not kept apart for as long as one that it left
    often. The first record counts the retraction.
    """
    before = {name: one.count for one in history if not one.is_intent for name in one.neighbours}
    by_count: dict[int, list[str]] = {} if intent.neighbours else {1: []}
    for name in intent.neighbours:
        by_count.setdefault(1 + before.get(name, 0), []).append(name)
    return tuple(
        replace(
            intent,
            neighbours=tuple(by_count[count]),
            at=now,
            until=now + KEPT_APART.seconds(count),
            count=count,
            retractions=int(number == 0),
        )
        for number, count in enumerate(sorted(by_count, reverse=True))
    )


def _with(
    history: Iterable[RetractionRecord], new: tuple[RetractionRecord, ...], now: float
) -> tuple[RetractionRecord, ...]:
    """Return the records with those of a new retraction; each neighbour stays only in its newest record.

    A record that so has no neighbours left still says, for a minute, when a pod left which GPU: without it, an
    operator that is restarted then would evict from that GPU again, and more pods a minute than it may. The first
    new record counts its retractions on.
    """
    kept: list[RetractionRecord] = []
    first, *others = new
    again = {name for one in new for name in one.neighbours}
    for one in history:
        if one.is_intent:
            if one.pod_uid != first.pod_uid:
                kept.append(one)
            continue
        neighbours = tuple(name for name in one.neighbours if name not in again)
        if neighbours:
            kept.append(replace(one, neighbours=neighbours))
            continue
        first = replace(first, retractions=first.retractions + one.retractions)
        if now < (until := one.at + _RATE_SECONDS):
            kept.append(replace(one, neighbours=(), until=until, retractions=0))
    return _newest(without_expired((*kept, first, *others), now))


def _newest(records: Iterable[RetractionRecord]) -> tuple[RetractionRecord, ...]:
    """Return at most `MOST_RECORDS` records, the oldest dropped first and intents last."""
    return tuple(sorted(records, key=lambda one: (one.is_intent, one.at))[-MOST_RECORDS:])


def _resident(situation: RetractionSituation, gpu: str, uid: str) -> Resident | None:
    return next((one for one in situation.residents.get(gpu, ()) if one.uid == uid), None)


def _is_intended(records: RetractionRecords, uid: str) -> bool:
    return any(one.is_intent and one.pod_uid == uid for history in records.values() for one in history)


def _neighbours(situation: RetractionSituation, ask: RetractionAsk) -> tuple[str, ...]:
    others = situation.residents.get(ask.gpu, ())
    shares = {one.share for one in others if one.uid != ask.pod_uid and one.share and not one.ended}
    return tuple(sorted(shares))[:MOST_NEIGHBOURS]


def _doubt(situation: RetractionSituation, ask: RetractionAsk) -> str | None:
    """Return why an ask is not trusted yet; None if it is."""
    if not ask.is_confirmed:
        return "its node's agent has not written since the operator started"
    return None if _neighbours(situation, ask) else "no other pod is on its GPU"


def _objection(resident: Resident, settings: RetractionSettings) -> str | None:
    """Return why a pod is never evicted, however long its agent asks; None if it may be."""
    if not settings.evicts:
        return "policy.retraction is none"
    if resident.job_class is not JobClass.THROUGHPUT:
        return f"pods of class {resident.job_class.value} are not retracted"
    if resident.why_final is not None:
        return resident.why_final
    if not resident.share:
        return "it has no GpuShare yet"
    return None


def _unrest(
    situation: RetractionSituation, records: RetractionRecords, gpu: str, settings: RetractionSettings, now: float
) -> str | None:
    """Return why a GPU is left alone for now; None if a pod of it may be moved."""
    if _is_left_by_another(situation, gpu):
        return _LEAVING
    on_gpu = [one for history in records.values() for one in history if one.gpu == gpu]
    if any(one.is_intent for one in on_gpu):
        return "another pod of its GPU is being retracted"
    left = [one.at for one in on_gpu] + [situation.last_left.get(gpu, float("-inf"))]
    if any(0.0 <= now - at < settings.calm_seconds for at in left):
        return f"a pod left its GPU less than {settings.calm_seconds:g} s ago"
    return None


def _is_left_by_another(situation: RetractionSituation, gpu: str) -> bool:
    return any(one.is_moving_out for one in situation.residents.get(gpu, ()))


def _ready(
    situation: RetractionSituation, records: RetractionRecords, heard: AbstractSet[str]
) -> list[RetractionRecord]:
    """Return the intents whose pod may be evicted once its GPU is calm."""
    ready = (heard & situation.written) - situation.evicted.keys()
    return [one for history in records.values() for one in history if one.is_intent and one.pod_uid in ready]


def _evicted_lately(situation: RetractionSituation, records: RetractionRecords, now: float) -> int:
    left = {(one.at, one.pod_uid) for history in records.values() for one in history if not one.is_intent}
    times = [*(at for at, _ in left), *situation.evicted.values()]
    return sum(0.0 <= now - at < _RATE_SECONDS for at in times)
