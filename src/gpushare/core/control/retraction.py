"""Retraction: which pod is evicted now for a neighbour's promise, and what is remembered of it (docs/design.md 5).

An agent asks for it when throttling cannot keep a promise. The steps of one retraction: an *intent* is written in
the pod's GpuShare, the pod is evicted, and once it leaves, the intent becomes a *record* with a back-off: until
then no pod of the group is put beside these neighbours. `plan_retractions` takes every step from what the API
holds, so an operator that was killed between two steps goes on where it was: an intent whose pod has left becomes
a record, one whose pod stays is tried again.

Times are seconds of the wall clock, as arguments.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.core.api import JobClass

FIRST_BACKOFF_SECONDS: Final = 3600.0
LONGEST_BACKOFF_SECONDS: Final = 86_400.0
REMEMBERED_SECONDS: Final = 86_400.0
"""How long a record outlives its back-off; within it, the next back-off between the same workloads is doubled."""
SILENT_SECONDS: Final = 150.0
"""An ask counts while its agent writes: it writes at least every 60 s, a changed figure every 10 s."""
MOST_RECORDS: Final = 32  # as in the schema
MOST_NEIGHBOURS: Final = 100  # likewise
_MOST_DOUBLINGS: Final = 30
_RATE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class RetractionSettings:
    """What the chart says.

    Attributes:
        evicts: False: asks are shown, nobody is evicted.
        per_minute: evictions over the whole cluster.
        calm_seconds: how long a GPU is left alone once a pod has left it, so that its agent sees what it changed.
    """

    evicts: bool = True
    per_minute: int = 2
    calm_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class RetractionAsk:
    """An agent's wish that a pod be moved away.

    Attributes:
        reason: the agent's sentence, with its figures.
        silent_seconds: since the agent last wrote, by the reader's clock; the agent's own clock is not asked.
        is_confirmed: the agent has written since this process first saw its GpuNode, which may be days old.
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
        leaving: it is being deleted, by whomever.
        ended: its containers have ended for good; it waits to be deleted.
        replaceable: it has a controller, which makes another pod in its place.
    """

    uid: str
    share: str
    job_class: JobClass
    leaving: bool = False
    ended: bool = False
    replaceable: bool = True


@dataclass(frozen=True, slots=True)
class RetractionRecord:
    """An intent, or a retraction that was done.

    Attributes:
        neighbours: GpuShares of the other tenants, as namespace/name, sorted.
        at: when it was intended, and then when the pod left.
        until: end of the back-off; None: only intended so far.
        count: how often it came to this between these workloads.
    """

    neighbours: tuple[str, ...]
    at: float
    pod_uid: str
    gpu: str
    until: float | None = None
    count: int = 1

    @property
    def is_intent(self) -> bool:
        """Return whether the pod has not left yet."""
        return self.until is None


RetractionRecords = Mapping[str, tuple[RetractionRecord, ...]]


@dataclass(frozen=True, slots=True)
class RetractionSituation:
    """What is known now.

    Attributes:
        asks: the agents' wishes.
        residents: every pod placed on a GPU that an ask or an intent names, by GPU.
        records: what the GpuShares hold, by namespace/name; a GpuShare that is gone is left out.
        written: uids of pods whose intent the API has accepted: only they are evicted.
        evicted: when the API accepted a pod's eviction, by uid; pods that still seem to stay.
        last_left: when a pod was last seen leaving a GPU, by its UUID.
    """

    asks: tuple[RetractionAsk, ...] = ()
    residents: Mapping[str, tuple[Resident, ...]] = field(default_factory=dict)
    records: RetractionRecords = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    evicted: Mapping[str, float] = field(default_factory=dict)
    last_left: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RetractionPlan:
    """What to do now.

    Attributes:
        records: by GpuShare, what it shall hold instead; only those that change.
        evict: uid of the one pod to evict now.
        done: GpuShare and record of each pod that has left now.
        waiting: why an ask is not followed now, by the pod's uid; never: why it is not followed at all.
    """

    records: RetractionRecords
    evict: str | None = None
    done: tuple[tuple[str, RetractionRecord], ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    never: Mapping[str, str] = field(default_factory=dict)


def plan_retractions(situation: RetractionSituation, settings: RetractionSettings, now: float) -> RetractionPlan:
    """Decide the next steps; at most one pod is evicted."""
    records = {share: remembered(history, now) for share, history in situation.records.items()}
    done: list[tuple[str, RetractionRecord]] = []
    asks = {ask.pod_uid: ask for ask in situation.asks if not ask.is_stale}
    # 1. Intents: the pod has left, so it is a record; or nobody asks any more, or may not, so it is dropped.
    for share, history in list(records.items()):
        for intent in [record for record in history if record.is_intent]:
            resident = _resident(situation, intent.gpu, intent.pod_uid)
            if resident is None or resident.leaving:
                record = _recorded(intent, records[share], now)
                done.append((share, record))
                records[share] = _with(records[share], record, now)
            elif intent.pod_uid not in situation.evicted and (
                intent.pod_uid not in asks or resident.ended or _objection(resident, settings) is not None
            ):
                records[share] = tuple(one for one in records[share] if one != intent)
    # 2. New intents: one on a GPU that is calm, for asks that may be followed.
    waiting: dict[str, str] = {}
    never: dict[str, str] = {}
    for uid, ask in sorted(asks.items(), key=lambda item: (item[1].gpu, item[0])):
        resident = _resident(situation, ask.gpu, uid)
        if resident is None or resident.leaving or resident.ended or _is_intended(records, uid):
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
    # 3. Evict: the oldest intent that the API holds and whose agent is alive, within the cluster's rate.
    heard = {uid for uid, ask in asks.items() if ask.is_confirmed}
    due = _due(situation, records, heard)
    evict = None
    if _evicted_lately(situation, records, now) < settings.per_minute:
        evict = min(due, key=lambda one: (one.at, one.pod_uid)).pod_uid if due else None
    else:
        waiting |= {one.pod_uid: f"{settings.per_minute} pods were retracted within a minute" for one in due}
    changed = {share: history for share, history in records.items() if history != situation.records.get(share, ())}
    return RetractionPlan(changed, evict, tuple(done), waiting, never)


def backoff_seconds(count: int, first_seconds: float = FIRST_BACKOFF_SECONDS) -> float:
    """Return how long two workloads are kept apart after the count-th retraction between them."""
    doublings = min(count - 1, _MOST_DOUBLINGS)
    return min(LONGEST_BACKOFF_SECONDS, first_seconds * 2.0**doublings)


def remembered(records: Iterable[RetractionRecord], now: float) -> tuple[RetractionRecord, ...]:
    """Return the records without those whose back-off ended long ago."""
    return tuple(one for one in records if one.until is None or now < one.until + REMEMBERED_SECONDS)


def _recorded(intent: RetractionRecord, history: Iterable[RetractionRecord], now: float) -> RetractionRecord:
    """Return what an intent becomes once its pod leaves: counted on from the same neighbours' last time."""
    before = [one.count for one in history if not one.is_intent and set(one.neighbours) & set(intent.neighbours)]
    count = 1 + max(before, default=0)
    return replace(intent, at=now, until=now + backoff_seconds(count), count=count)


def _with(history: Iterable[RetractionRecord], new: RetractionRecord, now: float) -> tuple[RetractionRecord, ...]:
    """Return the records with a new one: each neighbour is named by its newest record alone."""
    kept = []
    for one in history:
        if one.is_intent:
            if one.pod_uid != new.pod_uid:
                kept.append(one)
            continue
        others = tuple(name for name in one.neighbours if name not in new.neighbours)
        if others:
            kept.append(replace(one, neighbours=others))
    return _newest(remembered((*kept, new), now))


def _newest(records: Iterable[RetractionRecord]) -> tuple[RetractionRecord, ...]:
    """Return at most `MOST_RECORDS`, the intents last; the oldest are dropped."""
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
    """Return why an ask is not believed now."""
    if not ask.is_confirmed:
        return "its node's agent has not written since the operator started"
    return None if _neighbours(situation, ask) else "no other pod is on its GPU"


def _objection(resident: Resident, settings: RetractionSettings) -> str | None:
    """Return why a pod is never evicted, however long its agent asks."""
    if not settings.evicts:
        return "policy.retraction is none"
    if resident.job_class is not JobClass.THROUGHPUT:
        return f"pods of class {resident.job_class.value} are not retracted"
    if not resident.replaceable:
        return "it has no controller that would make another pod in its place"
    if not resident.share:
        return "it has no GpuShare yet"
    return None


def _unrest(
    situation: RetractionSituation, records: RetractionRecords, gpu: str, settings: RetractionSettings, now: float
) -> str | None:
    """Return why a GPU is left alone now: one pod at a time, and a look at what its leaving changed."""
    if any(one.leaving for one in situation.residents.get(gpu, ())):
        return "another pod is leaving its GPU"
    on_gpu = [one for history in records.values() for one in history if one.gpu == gpu]
    if any(one.is_intent for one in on_gpu):
        return "another pod of its GPU is being retracted"
    left = [one.at for one in on_gpu] + [situation.last_left.get(gpu, float("-inf"))]
    if any(0.0 <= now - at < settings.calm_seconds for at in left):
        return f"a pod left its GPU less than {settings.calm_seconds:g} s ago"
    return None


def _due(
    situation: RetractionSituation, records: RetractionRecords, heard: AbstractSet[str]
) -> list[RetractionRecord]:
    """Return the intents whose pod may be evicted now."""
    ready = (heard & situation.written) - situation.evicted.keys()
    return [
        one
        for history in records.values()
        for one in history
        if one.is_intent
        and one.pod_uid in ready
        and not any(other.leaving for other in situation.residents.get(one.gpu, ()))
    ]


def _evicted_lately(situation: RetractionSituation, records: RetractionRecords, now: float) -> int:
    left = [one.at for history in records.values() for one in history if not one.is_intent]
    return sum(0.0 <= now - at < _RATE_SECONDS for at in [*left, *situation.evicted.values()])
