"""Which pod is retracted when, and what is remembered of it; time is an argument."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpushare.core.api import GpuShareStatus, JobClass, PodPlacement, Retraction
from gpushare.core.control.retraction import (
    KEPT_APART,
    MOST_RECORDS,
    REMEMBERED_SECONDS,
    SILENT_SECONDS,
    Resident,
    RetractionAsk,
    RetractionPlan,
    RetractionRecord,
    RetractionSettings,
    RetractionSituation,
    fails_with_next,
    plan_retractions,
)

SETTINGS = RetractionSettings(per_minute=2, calm_seconds=60.0)
NEWCOMER = Resident("new", "shop/new", JobClass.THROUGHPUT)
VICTIM = Resident("old", "shop/old", JobClass.LATENCY)
ASK = RetractionAsk("new", "GPU-1", "old makes 0.52, promised are 0.60")


def situation(*residents: Resident, asks: Iterable[RetractionAsk] = (ASK,), **more: object) -> RetractionSituation:
    none_yet = {resident.share: () for resident in residents if resident.share}
    known = RetractionSituation(asks=tuple(asks), residents={"GPU-1": residents}, records=none_yet)
    return replace(known, **more)  # type: ignore[arg-type]


def plan(known: RetractionSituation, now: float = 1000.0, wish: RetractionSettings = SETTINGS) -> RetractionPlan:
    return plan_retractions(known, wish, now)


def test_an_intent_is_written_before_the_pod_is_evicted_and_becomes_a_record_once_it_leaves() -> None:
    first = plan(situation(NEWCOMER, VICTIM))
    intent = RetractionRecord(("shop/old",), 1000.0, "new", "GPU-1")
    assert (first.records, first.evict) == ({"shop/new": (intent,)}, None)

    records = {"shop/new": (intent,), "shop/old": ()}
    unwritten = plan(situation(NEWCOMER, VICTIM, records=records), 1001.0)
    assert (unwritten.records, unwritten.evict) == ({}, None)
    written = plan(situation(NEWCOMER, VICTIM, records=records, written=frozenset({"new"})), 1001.0)
    assert (written.records, written.evict) == ({}, "new")

    accepted = situation(
        NEWCOMER, VICTIM, records=records, written=frozenset({"new"}), evicted={"new": 1001.0}, asks=()
    )
    assert plan(accepted, 1002.0) == RetractionPlan({}), "the watch is about to say that it leaves"
    for gone in [(replace(NEWCOMER, leaving=True), VICTIM), (VICTIM,)]:
        left = plan(situation(*gone, records=records, asks=()), 1003.0)
        record = RetractionRecord(("shop/old",), 1003.0, "new", "GPU-1", 1003.0 + KEPT_APART.first_seconds, 1)
        assert left.records == {"shop/new": (record,)}
        assert left.done == (("shop/new", (record,)),)
        assert left.evict is None


@pytest.mark.parametrize(
    ("residents", "wish", "why"),
    [
        ((replace(NEWCOMER, job_class=JobClass.LATENCY), VICTIM), SETTINGS, "pods of class latency"),
        ((replace(NEWCOMER, replaceable=False), VICTIM), SETTINGS, "no controller"),
        ((replace(NEWCOMER, is_last_try=True), VICTIM), SETTINGS, "its Job has no retry left"),
        ((NEWCOMER, VICTIM), replace(SETTINGS, evicts=False), "policy.retraction is none"),
    ],
)
def test_some_are_never_retracted_and_it_is_said_why(
    residents: tuple[Resident, ...], wish: RetractionSettings, why: str
) -> None:
    found = plan(situation(*residents), wish=wish)
    assert (found.records, found.evict) == ({}, None)
    assert why in found.never["new"]
    intent = RetractionRecord(("shop/old",), 900.0, "new", "GPU-1")
    pending = situation(*residents, records={"shop/new": (intent,)}, written=frozenset({"new"}))
    assert plan(pending, wish=wish).records == {"shop/new": ()}, "an intent from before is dropped"


def disruptions(action: str) -> dict[str, Any]:
    rule = {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}, rule]}


@pytest.mark.parametrize(
    ("spec", "failed", "fails"),
    [
        ({"backoffLimit": 0}, None, True),
        ({"backoffLimit": 6}, 5, False),
        ({"backoffLimit": 6}, 6, True),
        ({}, 5, False),
        ({"backoffLimit": 0, "podFailurePolicy": disruptions("Ignore")}, None, False),
        ({"backoffLimit": 6, "podFailurePolicy": disruptions("FailJob")}, None, True),
        ({"backoffLimit": 6, "podFailurePolicy": disruptions("Count")}, 6, True),
    ],
)
def test_who_has_no_retry_left_fails_next(spec: dict[str, Any], failed: int | None, fails: bool) -> None:
    status = {} if failed is None else {"failed": failed}
    assert fails_with_next({"spec": spec, "status": status}) is fails


def codes(action: str, operator: str, *values: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": operator, "values": list(values)}}


def conditions(action: str, status: str = "True") -> dict[str, Any]:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": status}]}


@pytest.mark.parametrize(
    ("rules", "fails"),
    [
        ([codes("FailJob", "NotIn", 40, 41), conditions("Ignore")], True),
        ([codes("FailIndex", "In", 1, 137), conditions("Ignore")], True),
        ([codes("FailJob", "NotIn", 137, 143), conditions("Ignore")], False),
        ([codes("FailJob", "In", 1, 42), conditions("Ignore")], False),
        ([codes("Ignore", "In", 143), conditions("FailJob")], True),
        ([conditions("Ignore"), codes("FailJob", "NotIn", 40)], False),
        ([conditions("FailJob", "False")], False),
        ([conditions("Ignore", "False"), conditions("FailJob")], True),
        ([conditions("Reschedule"), conditions("FailJob")], True),
        ([conditions("Count"), conditions("FailJob")], False),
    ],
)
def test_the_first_rule_that_an_evicted_pod_meets_decides(rules: list[dict[str, Any]], fails: bool) -> None:
    """Its containers end by SIGTERM or SIGKILL; a rule of an action that nobody knows yet is skipped."""
    assert fails_with_next({"spec": {"backoffLimit": 6, "podFailurePolicy": {"rules": rules}}}) is fails


@pytest.mark.parametrize(
    ("spec", "status", "fails"),
    [
        ({}, {"failed": 1, "uncountedTerminatedPods": {"failed": ["a"]}}, True),
        ({}, {"failed": 1, "uncountedTerminatedPods": {"succeeded": ["a"]}}, False),
        ({}, {"failed": 1, "terminating": 1}, False),  # those are counted when they are deleted
        ({"podReplacementPolicy": "Failed"}, {"failed": 1, "terminating": 1}, True),
        ({"podFailurePolicy": {"rules": [conditions("Count")]}}, {"failed": 1, "terminating": 1}, True),
    ],
)
def test_pods_that_are_about_to_count_as_failed_count(
    spec: dict[str, Any], status: dict[str, Any], fails: bool
) -> None:
    assert fails_with_next({"spec": {"backoffLimit": 2, **spec}, "status": status}) is fails


@pytest.mark.parametrize(
    ("spec", "of_index", "fails"),
    [
        ({"backoffLimitPerIndex": 0}, 0, True),
        ({"backoffLimitPerIndex": 1}, 0, False),
        ({"backoffLimitPerIndex": 1}, 1, True),
        ({"backoffLimitPerIndex": 1, "maxFailedIndexes": 5}, 1, True),
        ({"backoffLimitPerIndex": 3, "backoffLimit": 2**31 - 1}, 2, False),
        ({"backoffLimitPerIndex": 3, "backoffLimit": 9}, 2, True),
        ({"backoffLimitPerIndex": 1, "podFailurePolicy": disruptions("Ignore")}, 1, False),
        ({"backoffLimitPerIndex": 1, "podFailurePolicy": disruptions("Count")}, 1, True),
        ({"backoffLimitPerIndex": 5, "podFailurePolicy": disruptions("FailIndex")}, 0, True),
        ({"backoffLimit": 20}, 30, False),
    ],
)
def test_an_index_of_a_job_has_retries_of_its_own(spec: dict[str, Any], of_index: int, fails: bool) -> None:
    """The Job's own limit stays beside them; all indexes of this one have failed nine times."""
    assert fails_with_next({"spec": spec, "status": {"failed": 9}}, of_index) is fails


@pytest.mark.parametrize(
    ("residents", "asks"),
    [
        ((NEWCOMER,), (ASK,)),  # nobody else is there
        ((NEWCOMER, replace(VICTIM, ended=True)), (ASK,)),
        ((replace(NEWCOMER, leaving=True), VICTIM), (ASK,)),
        ((replace(NEWCOMER, ended=True), VICTIM), (ASK,)),
        ((VICTIM,), (ASK,)),
        ((NEWCOMER, replace(VICTIM, leaving=True)), (ASK,)),
        ((NEWCOMER, VICTIM), (replace(ASK, silent_seconds=SILENT_SECONDS + 1),)),
        ((NEWCOMER, VICTIM), (replace(ASK, is_confirmed=False),)),
        ((NEWCOMER, VICTIM), ()),
    ],
)
def test_nothing_is_intended_without_need(
    residents: tuple[Resident, ...], asks: tuple[RetractionAsk, ...]
) -> None:
    assert plan(situation(*residents, asks=asks)).records == {}


def test_an_intent_is_dropped_when_nobody_asks_any_more_and_kept_until_its_agent_is_heard() -> None:
    intent = RetractionRecord(("shop/old",), 900.0, "new", "GPU-1")
    earlier = RetractionRecord(("shop/b",), 10.0, "x", "GPU-7", 310.0)
    records = {"shop/new": (earlier, intent), "shop/old": ()}
    written = frozenset({"new"})
    assert plan(situation(NEWCOMER, VICTIM, asks=(), records=records)).records == {"shop/new": (earlier,)}
    stale = replace(ASK, silent_seconds=SILENT_SECONDS + 1)
    silent = situation(NEWCOMER, VICTIM, asks=(stale,), records=records, written=written)
    assert plan(silent).records == {"shop/new": (earlier,)}
    restarted = replace(ASK, is_confirmed=False)
    waits = plan(situation(NEWCOMER, VICTIM, asks=(restarted,), records=records, written=written))
    assert (waits.records, waits.evict) == ({}, None)
    ended = situation(replace(NEWCOMER, ended=True), VICTIM, records=records, written=written)
    assert plan(ended).records == {"shop/new": (earlier,)}, "it has finished by itself"


def test_a_pod_that_kubelet_gave_another_gpu_is_not_retracted_from_the_first() -> None:
    """Before: it seemed to have left, so it was kept apart from pods that it had never been beside."""
    intent = RetractionRecord(("shop/old",), 990.0, "new", "GPU-1")
    records: dict[str, tuple[RetractionRecord, ...]] = {"shop/new": (intent,), "shop/old": ()}
    asked_anew = RetractionAsk("new", "GPU-2", "other makes 0.52, promised are 0.60")
    other = Resident("other", "shop/other", JobClass.LATENCY)
    known = situation(
        VICTIM, asks=(asked_anew,), records=records, written=frozenset({"new"}), corrected={"new": NEWCOMER}
    )
    known = replace(known, residents={"GPU-1": (VICTIM,), "GPU-2": (NEWCOMER, other)})
    assert plan(known) == RetractionPlan({"shop/new": ()}), (
        "no record, no eviction, and no intent in the same step"
    )
    by_somebody = replace(known, corrected={"new": replace(NEWCOMER, leaving=True)})
    assert plan(by_somebody) == RetractionPlan({"shop/new": ()})
    after = replace(known, records={"shop/new": ()}, written=frozenset(), corrected={})
    assert plan(after).records == {"shop/new": (RetractionRecord(("shop/other",), 1000.0, "new", "GPU-2"),)}


def test_a_pod_that_was_evicted_before_its_gpu_was_corrected_was_retracted() -> None:
    intent = RetractionRecord(("shop/old",), 990.0, "new", "GPU-1")
    known = situation(VICTIM, records={"shop/new": (intent,)}, asks=(), evicted={"new": 999.0})
    assert plan(replace(known, corrected={"new": NEWCOMER})) == RetractionPlan({})
    leaving = plan(replace(known, corrected={"new": replace(NEWCOMER, leaving=True)}))
    assert [(share, one.is_intent) for share, [one] in leaving.records.items()] == [("shop/new", False)]
    assert plan(known).done == leaving.done, "as when it is gone"


def test_never_two_at_a_time_on_a_gpu_nor_before_it_is_calm() -> None:
    second = Resident("second", "shop/second", JobClass.THROUGHPUT)
    asks = (ASK, RetractionAsk("second", "GPU-1", "too"))
    both = plan(situation(NEWCOMER, second, VICTIM, asks=asks))
    assert list(both.records) == ["shop/new"]
    assert both.waiting == {"second": "another pod of its GPU is being retracted"}

    leaving = replace(NEWCOMER, leaving=True)
    known = situation(leaving, second, VICTIM, asks=asks, written=frozenset({"second"}))
    assert plan(known).records == {}, "it leaves for another reason"
    intent = RetractionRecord(("shop/old",), 990.0, "second", "GPU-1")
    pending = plan(replace(known, records={"shop/second": (intent,)}))
    assert (pending.evict, pending.waiting["second"]) == (None, "another pod is leaving its GPU")

    done = {"shop/new": (RetractionRecord(("shop/old",), 950.0, "new", "GPU-1", 1250.0),), "shop/second": ()}
    rest = situation(second, VICTIM, asks=asks[1:], records=done)
    assert plan(rest, 1009.0).records == {}
    assert list(plan(rest, 1011.0).records) == ["shop/second"]
    lately = replace(rest, last_left={"GPU-1": 1000.0})
    assert plan(lately, 1059.0).records == {}, "its containers took their time to end"
    assert list(plan(lately, 1061.0).records) == ["shop/second"]


def test_a_clock_that_was_set_back_does_not_hold_up_what_was_seen_before() -> None:
    """The operator's own clock was an hour ahead when it evicted two pods, one of them from this GPU."""
    ahead = 4600.0
    records = {
        f"shop/{uid}": (RetractionRecord(("shop/x",), ahead, uid, gpu, ahead + 300.0),)
        for uid, gpu in (("one", "GPU-1"), ("two", "GPU-2"))
    }
    seen = situation(NEWCOMER, VICTIM, last_left={"GPU-1": ahead}, evicted={"one": ahead, "two": ahead})
    known = replace(seen, records={**seen.records, **records})
    [intent] = plan(known).records["shop/new"]
    written = replace(known, records={**known.records, "shop/new": (intent,)}, written=frozenset({"new"}))
    assert plan(written, 1001.0).evict == "new"


def test_who_has_ended_and_is_only_kept_by_a_finalizer_holds_nobody_up() -> None:
    """Its containers are gone, and with them its memory, its clients and its part of the GPU."""
    dead = Resident("dead", "shop/dead", JobClass.THROUGHPUT, leaving=True, ended=True)
    [intent] = plan(situation(NEWCOMER, VICTIM, dead)).records["shop/new"]
    assert intent.neighbours == ("shop/old",)
    records = {"shop/new": (intent,)}
    assert plan(situation(NEWCOMER, VICTIM, dead, records=records, written=frozenset({"new"}))).evict == "new"


def test_the_clusters_rate_holds_and_who_waits_longest_comes_first() -> None:
    residents, asks, records = {}, [], {}
    for number in range(4):
        pod, gpu = f"p{number}", f"GPU-{number}"
        residents[gpu] = (Resident(pod, f"shop/{pod}", JobClass.THROUGHPUT), VICTIM)
        asks.append(RetractionAsk(pod, gpu, ""))
        records[f"shop/{pod}"] = (RetractionRecord(("shop/old",), 990.0 - number, pod, gpu),)
    known = RetractionSituation(tuple(asks), residents, records, frozenset(residents_of(residents)))
    assert plan(known).evict == "p3", "who waits longest"
    one = replace(known, evicted={"p3": 1000.0})
    assert plan(one, 1001.0).evict == "p2"
    full = replace(known, evicted={"p3": 1000.0, "p2": 1001.0})
    assert plan(full, 1002.0).evict is None
    assert plan(full, 1002.0).waiting == dict.fromkeys(["p0", "p1"], "2 pods were retracted within a minute")
    strict = replace(SETTINGS, per_minute=1)
    assert set(plan_retractions(one, strict, 1001.0).waiting.values()) == {"1 pod was retracted within a minute"}
    left = {**records, "shop/p3": (RetractionRecord(("shop/old",), 1000.0, "p3", "GPU-3", 1300.0),)}
    left["shop/p2"] = (RetractionRecord(("shop/old",), 1001.0, "p2", "GPU-2", 1300.0),)
    after_restart = replace(known, records=left)
    assert plan(after_restart, 1059.0).evict is None, "what the API holds counts, so a restart forgets nothing"
    assert plan(after_restart, 1060.5).evict == "p1"


def residents_of(by_gpu: dict[str, tuple[Resident, ...]]) -> set[str]:
    return {resident.uid for residents in by_gpu.values() for resident in residents}


def test_the_backoff_of_two_workloads_doubles_up_to_a_day_and_is_forgotten_a_day_later() -> None:
    counts = (1, 2, 3, 5, 6, 10_000)
    assert [KEPT_APART.seconds(n) for n in counts] == [3600, 7200, 14_400, 57_600, 86_400, 86_400]
    before = RetractionRecord(("shop/a", "shop/old"), 100.0, "x", "GPU-9", 700.0, 2)
    intent = RetractionRecord(("shop/old",), 990.0, "new", "GPU-1")
    found = plan(situation(VICTIM, asks=(), records={"shop/new": (before, intent)}))
    kept, new = found.records["shop/new"]
    assert kept == replace(before, neighbours=("shop/a",)), "each neighbour is named by its newest record"
    assert (new.neighbours, new.count, new.until) == (("shop/old",), 3, 1000.0 + 14_400.0)
    other = RetractionRecord(("shop/b",), 100.0, "x", "GPU-9", 700.0, 2)
    found = plan(situation(VICTIM, asks=(), records={"shop/new": (other, intent)}))
    assert found.records["shop/new"][-1].count == 1, "another pair of workloads"

    long_ago = 700.0 + REMEMBERED_SECONDS + 1
    assert plan(situation(VICTIM, asks=(), records={"shop/new": (before,)}), long_ago).records == {"shop/new": ()}


def as_written(record: RetractionRecord) -> Retraction:
    return Retraction(
        record.neighbours,
        "2026-11-22T11:58:00Z",
        None if record.is_intent else "2026-11-22T12:03:00Z",
        record.count,
        retractions=record.retractions,
    )


def after_leaving(
    records: tuple[RetractionRecord, ...], neighbours: tuple[str, ...], now: float
) -> tuple[RetractionRecord, ...]:
    intent = RetractionRecord(neighbours, now - 10.0, f"pod-{now:.0f}", "GPU-1")
    return plan(situation(VICTIM, asks=(), records={"shop/new": (*records, intent)}), now).records["shop/new"]


def test_the_backoff_is_counted_for_each_neighbour_by_itself() -> None:
    often = RetractionRecord(("shop/a",), 100.0, "x", "GPU-9", 700.0, 4, 4)
    records = after_leaving((often,), ("shop/a", "shop/b", "shop/c"), 1000.0)
    assert [(one.neighbours, one.count, one.until) for one in records if one.neighbours] == [
        (("shop/a",), 5, 1000.0 + 57_600.0),
        (("shop/b", "shop/c"), 1, 1000.0 + 3600.0),
    ]


def test_a_retraction_from_many_neighbours_counts_once_for_a_gpu_of_its_own() -> None:
    records: tuple[RetractionRecord, ...] = ()
    for number, name in enumerate("bcd", start=1):
        records = after_leaving(records, ("shop/a", f"shop/{name}"), 10_000.0 * number)
        assert sum(one.stands_for for one in map(as_written, records)) == number
    three = tuple(PodPlacement(f"uid-{number}", f"pod-{number}") for number in range(3))
    assert not GpuShareStatus(retractions=tuple(map(as_written, records)), placements=three).needs_own_gpu
    for number in range(4, 7):
        records = after_leaving(records, ("shop/a",), 10_000.0 * number)
    assert GpuShareStatus(retractions=tuple(map(as_written, records)), placements=three).needs_own_gpu


def test_one_pod_that_left_several_neighbours_is_one_of_the_two_a_minute() -> None:
    often = RetractionRecord(("shop/a",), 100.0, "x", "GPU-9", 700.0, 4, 4)
    records = after_leaving((often,), ("shop/a", "shop/b"), 1000.0)
    intent = RetractionRecord(("shop/old",), 999.0, "new", "GPU-1")
    known = situation(
        NEWCOMER, VICTIM, records={"shop/new": (intent,), "shop/x": records}, written=frozenset({"new"})
    )
    assert plan(known, 1001.0).evict == "new"


def test_a_record_that_another_replaced_says_for_a_minute_when_its_gpu_was_left() -> None:
    first = RetractionRecord(("shop/old",), 990.0, "x", "GPU-9", 4590.0)
    intent = RetractionRecord(("shop/old",), 999.0, "new", "GPU-1")
    found = plan(situation(VICTIM, asks=(), records={"shop/new": (first, intent)}))
    left, new = found.records["shop/new"]
    assert (left.neighbours, left.gpu, left.at, left.until) == ((), "GPU-9", 990.0, 1050.0)
    assert (new.neighbours, new.count) == (("shop/old",), 2)
    asked = (RetractionAsk("second", "GPU-9", ""),)
    others = (Resident("second", "shop/second", JobClass.THROUGHPUT), VICTIM)
    again = RetractionSituation(asked, {"GPU-9": others}, {"shop/new": (left, new), "shop/second": ()})
    assert list(plan(again, 1049.0).records) == [], "an operator that was restarted knows no more than this"
    assert plan(again, 1050.5).records["shop/new"] == (new,)
    assert "shop/second" in plan(again, 1050.5).records
    written = tuple(map(as_written, (left, new)))
    assert [one.stands_for for one in written] == [0, 2]
    two = tuple(PodPlacement(f"uid-{number}", f"pod-{number}") for number in range(2))
    assert GpuShareStatus(retractions=written).needs_own_gpu
    assert not GpuShareStatus(
        retractions=(*written, replace(written[1], retractions=1)), placements=two
    ).needs_own_gpu


def test_a_gpushare_holds_no_more_than_its_schema_allows() -> None:
    many = tuple(
        RetractionRecord((f"shop/n{at}",), 900.0 + at, "x", "GPU-9", 5000.0) for at in range(MOST_RECORDS)
    )
    found = plan(situation(NEWCOMER, VICTIM, records={"shop/new": many, "shop/old": ()}))
    kept = found.records["shop/new"]
    assert (len(kept), kept[-1].is_intent, kept[0]) == (MOST_RECORDS, True, many[1])


def test_two_retractions_on_record_mean_a_gpu_of_its_own_and_an_intent_is_none() -> None:
    once = Retraction(("shop/a", "shop/b"), "2026-11-22T11:58:00Z", "2026-11-22T12:03:00Z")
    ended = Retraction(("shop/c",), "2026-11-22T11:00:00Z", "2026-11-22T11:05:00Z")
    intent = Retraction(("shop/d",), "2026-11-22T12:00:00Z", count=7)
    assert not GpuShareStatus(retractions=(once,)).needs_own_gpu
    assert not GpuShareStatus(retractions=(intent,)).needs_own_gpu
    assert GpuShareStatus(retractions=(once, intent)).needs_own_gpu, "its successor may come before the record"
    assert GpuShareStatus(retractions=(once, ended)).needs_own_gpu
    assert GpuShareStatus(retractions=(replace(once, count=2),)).needs_own_gpu
    three = tuple(PodPlacement(f"uid-{number}", f"pod-{number}") for number in range(3))
    assert not GpuShareStatus(retractions=(replace(once, count=5),), placements=three).needs_own_gpu
    assert GpuShareStatus(retractions=(replace(once, count=6),), placements=three).needs_own_gpu


# -- a whole cluster, step by step


@dataclass
class Cluster:
    """Pods on two GPUs whose agents ask at random; an operator that may be killed at any step."""

    now: float = 1000.0
    records: dict[str, tuple[RetractionRecord, ...]] = field(default_factory=dict)
    wanted: dict[str, tuple[RetractionRecord, ...]] = field(default_factory=dict)
    pods: dict[str, tuple[str, Resident]] = field(default_factory=dict)
    evicted: dict[str, float] = field(default_factory=dict)
    evictions: list[tuple[float, str, str]] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    asks: set[str] = field(default_factory=set)

    def step(self, *, writes: bool, refuses: bool) -> None:
        residents: dict[str, tuple[Resident, ...]] = {"A": (), "B": ()}
        for gpu, resident in self.pods.values():
            residents[gpu] += (resident,)
        for gpu, residents_there in residents.items():
            if any(resident.leaving for resident in residents_there):
                self.left[gpu] = self.now
        asks = [RetractionAsk(uid, self.pods[uid][0], "") for uid in sorted(self.asks & self.pods.keys())]
        records = {**{resident.share: () for _, resident in self.pods.values()}, **self.records, **self.wanted}
        written = {one.pod_uid for each in self.records.values() for one in each if one.is_intent}
        known = RetractionSituation(
            tuple(asks), residents, records, frozenset(written), dict(self.evicted), dict(self.left)
        )
        found = plan_retractions(known, SETTINGS, self.now)
        self.wanted |= found.records
        for _, (record, *_) in found.done:
            self.evicted.pop(record.pod_uid, None)
        if found.evict is not None and not refuses:
            gpu, resident = self.pods[found.evict]
            assert found.evict in written
            assert not any(other.leaving for other in residents[gpu])
            self.evictions.append((self.now, gpu, found.evict))
            self.evicted[found.evict] = self.now
            self.pods[found.evict] = gpu, replace(resident, leaving=True)
        if writes:
            self.records |= self.wanted
            self.wanted = {}

    def kill(self) -> None:
        """Kill the operator: what the API does not hold is lost."""
        self.wanted, self.evicted, self.left = {}, {}, {}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "unwritten", "refused", "kill", "gone", "ask", "drop", "wait"]),
        st.integers(0, 5),
    ),
    max_size=80,
)


TWO_OF_ONE_GROUP = [
    *[("ask", 2), ("step", 0), ("step", 0), ("ask", 5), ("step", 0), ("step", 0)],
    *[("kill", 0), ("gone", 0), ("ask", 0), ("step", 0), ("step", 0)],
]


@given(EVENTS)
@example(TWO_OF_ONE_GROUP)
@settings(deadline=None)
def test_whatever_happens_one_pod_leaves_a_gpu_at_a_time_at_most_two_a_minute_and_once(
    events: list[tuple[str, int]],
) -> None:
    cluster = Cluster()
    for number in range(6):
        pod = Resident(f"p{number}", f"shop/s{number % 3}", JobClass.THROUGHPUT)
        cluster.pods[pod.uid] = ("AB"[number % 2], pod)
    for event, number in events:
        uid = f"p{number}"
        match event:
            case "kill":
                cluster.kill()
            case "gone":
                cluster.pods = {u: each for u, each in cluster.pods.items() if not each[1].leaving}
            case "ask":
                cluster.asks.add(uid)
            case "drop":
                cluster.asks.discard(uid)
            case "wait":
                cluster.now += 10.0 * number
            case _:
                cluster.now += 1.0
                cluster.step(writes=event != "unwritten", refuses=event == "refused")
    uids = [uid for _, _, uid in cluster.evictions]
    assert len(uids) == len(set(uids)), "nobody is evicted twice"
    for at, gpu, uid in cluster.evictions:
        others = [(t, g, u) for t, g, u in cluster.evictions if u != uid]
        assert sum(0 <= at - t < 60 for t, _, _ in others) < SETTINGS.per_minute
        assert not any(g == gpu and abs(at - t) < SETTINGS.calm_seconds for t, g, _ in others)
