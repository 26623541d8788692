"""Pods in trouble: how they are found, and which one is replaced now."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import GroupReplacements, JobClass, TroubleKind
from gpushare.core.control import (
    HygieneAction,
    HygieneLook,
    HygieneSettings,
    HygieneWatch,
    ReplacementAsk,
    Replacements,
    Resident,
    count_replacement,
    lately_replaced,
    plan_replacement,
)
from gpushare.core.control.hygiene import FAULT_SECONDS, FORGOTTEN_SECONDS, PAUSE, QUARANTINE_SECONDS
from gpushare.core.control.retraction import SILENT_SECONDS

SETTINGS = HygieneSettings(stalled_seconds=600.0)
BOTH = frozenset({"a", "b"})
NOW = 10_000.0


def looked(*looks: tuple[float, HygieneLook]) -> HygieneWatch:
    watch = HygieneWatch()
    for now, look in looks:
        watch = watch.after(look, now)
    return watch


def idle(*uids: str) -> HygieneLook:
    return HygieneLook(BOTH, BOTH, frozenset(uids), 5.0)


def test_a_pod_that_does_nothing_for_long_is_stalled_and_one_that_works_once_is_not():
    looks = [*((at, idle("a", "b")) for at in range(0, 300, 5)), (300, idle("a"))]
    looks += [(at, idle("a", "b")) for at in range(305, 910, 5)]
    assert looked(*((at, look) for at, look in looks if at < 600)).stalled(SETTINGS) == frozenset()
    assert looked(*((at, look) for at, look in looks if at <= 600)).stalled(SETTINGS) == {"a"}
    assert looked(*looks).stalled(SETTINGS) == BOTH


def test_time_in_which_nothing_was_measured_is_no_idle_time():
    unknown = HygieneLook(BOTH, BOTH)
    looks = [(0, idle("a", "b")), *((at, unknown) for at in range(5, 3600, 5)), (3600, idle("a", "b"))]
    assert looked(*looks).stalled(SETTINGS) == frozenset()
    looks = [*looks, *((at, idle("a")) for at in range(3605, 4195, 5))]
    assert looked(*looks).stalled(SETTINGS) == frozenset()
    assert looked(*looks, (4195, idle("a"))).stalled(SETTINGS) == {"a"}, "what was measured before still counts"


def test_a_window_that_is_looked_at_twice_counts_once():
    looks = [(at, idle("a")) for at in range(0, 400, 5) for _ in range(2)]
    assert looked(*looks).stalled(SETTINGS) == frozenset()


def test_who_left_is_forgotten():
    looks = [(at, idle("a")) for at in range(0, 605, 5)]
    watch = looked(*looks, (605, HygieneLook(BOTH, BOTH)))
    assert watch.stalled(SETTINGS) == {"a"}, "what was found holds while nothing is measured"
    watch = watch.after(HygieneLook(frozenset({"b"})), 610.0).after(idle("a"), 615.0)
    assert watch.stalled(SETTINGS) == frozenset()


@given(st.lists(st.tuples(st.sampled_from(["idle", "works", "unknown"]), st.sampled_from([1.0, 5.0, 200.0]))))
def test_idle_time_is_never_longer_than_the_measured_windows_in_which_it_did_nothing(looks):
    watch, now, most = HygieneWatch(), 0.0, 0.0
    for kind, seconds in looks:
        now += seconds
        found = {"idle": frozenset("a"), "works": frozenset(), "unknown": None}[kind]
        watch = watch.after(HygieneLook(BOTH, BOTH, found, min(seconds, 5.0)), now)
        most = {"idle": most + min(seconds, 5.0), "works": 0.0, "unknown": most}[kind]
        assert watch.idle_seconds.get("a", 0.0) <= most


def fault(count: int, *connected: str) -> HygieneLook:
    return HygieneLook(BOTH, frozenset(connected), faults=count, fault_pods=BOTH)


def test_pods_that_a_fault_left_without_a_process_are_lost_after_a_while():
    watch = looked((0.0, fault(3, "a", "b")), (10.0, fault(4)), (20.0, fault(4, "b")))
    assert watch.lost(10.0 + FAULT_SECONDS - 1) == frozenset()
    assert watch.lost(10.0 + FAULT_SECONDS) == {"a"}
    assert watch.after(fault(4, "a", "b"), 500.0).lost(500.0) == frozenset()


def test_faults_from_before_the_agent_and_of_a_gate_that_began_anew_are_none():
    assert looked((0.0, fault(3)), (5.0, fault(3)), (6.0, fault(0))).lost(10_000.0) == frozenset()
    assert not looked((0.0, fault(3)), (6.0, fault(0))).is_quarantined(6.0)


def test_pods_that_a_fault_from_before_the_agent_left_without_a_process_are_lost_too():
    """Before: a fault while no agent ran, or two minutes before one started, left no trouble behind."""
    look = HygieneLook(BOTH, frozenset(), faults=4, lost_pods=frozenset({"a", "elsewhere"}))
    watch = looked((0.0, HygieneLook(frozenset(), faults=4, lost_pods=look.lost_pods)), (10.0, look), (20.0, look))
    assert watch.lost(10.0 + FAULT_SECONDS - 1) == frozenset()
    assert watch.lost(10.0 + FAULT_SECONDS) == {"a"}
    back = replace(look, connected=frozenset({"a"}), lost_pods=frozenset())
    assert watch.after(back, 30.0).after(look, 31.0).lost(31.0 + FAULT_SECONDS - 1) == frozenset()


def test_a_fault_from_before_the_agent_quarantines_its_gpu_for_the_rest_of_ten_minutes():
    watch = looked((5.0, replace(fault(3), fault_age_seconds=60.0)), (6.0, fault(3)))
    assert watch.is_quarantined(QUARANTINE_SECONDS - 56.0)
    assert not watch.is_quarantined(QUARANTINE_SECONDS - 55.0)
    for age in (-5.0, None):  # the node's clock was set; never a fault
        assert not looked((5.0, replace(fault(3), fault_age_seconds=age))).is_quarantined(5.0)


def test_a_client_list_from_before_the_fault_was_noticed_does_not_end_the_trouble():
    watch = looked((0.0, fault(0, "a")), (1.0, fault(1, "a")), (2.0, fault(1)))
    assert watch.lost(1.0 + FAULT_SECONDS) == BOTH


def test_a_fault_quarantines_its_gpu_for_ten_minutes():
    watch = looked((0.0, fault(0)), (10.0, fault(1)))
    assert watch.is_quarantined(10.0)
    assert watch.is_quarantined(9.0 + QUARANTINE_SECONDS)
    assert not watch.is_quarantined(10.0 + QUARANTINE_SECONDS)


def test_each_kind_has_its_action():
    chosen = HygieneSettings(HygieneAction.REPLACE, HygieneAction.DRAIN, HygieneAction.REPORT)
    assert [chosen.action_of(kind) for kind in TroubleKind] == [
        HygieneAction.REPLACE,
        HygieneAction.DRAIN,
        HygieneAction.REPORT,
    ]


def ask(uid: str = "a", gpu: str = "G", **more) -> ReplacementAsk:
    return ReplacementAsk(uid, gpu, TroubleKind.STALLED, "does nothing", **more)


def resident(uid: str = "a", **more) -> Resident:
    return Resident(uid, f"shop/{uid}", JobClass.THROUGHPUT, **more)


def plan(asks, residents, done=None, now=NOW, per_minute=2):
    on_gpu = {"G": tuple(residents)}
    return plan_replacement(
        asks, on_gpu, done or Replacements(), per_minute=per_minute, calm_seconds=60.0, now=now
    )


def test_a_pod_in_trouble_is_evicted():
    assert plan([ask()], [resident(), resident("b")]).evict == "a"
    assert plan([ask()], [resident()]).evict == "a", "a pod alone on its GPU too"
    kept = resident("b", leaving=True, ended=True)
    assert plan([ask()], [resident(), kept]).evict == "a", "beside one that a finalizer keeps"


@pytest.mark.parametrize(
    ("asked", "residents", "done", "why"),
    [
        (ask(), [resident(replaceable=False)], Replacements(), "no controller"),
        (ask(), [resident(is_last_try=True)], Replacements(), "its Job has no retry left"),
        (ask(is_confirmed=False), [resident()], Replacements(), "has not written"),
        (ask(), [resident(), resident("b", leaving=True)], Replacements(), "a pod leaves its GPU"),
        (ask(), [resident()], Replacements(last_left={"G": NOW - 59}), "left it moments ago"),
        (ask(), [resident()], Replacements(refused=["a"]), "just asked for"),
        (ask(), [resident()], Replacements(evicted={"a": NOW - 1}), "just asked for"),
        (ask(), [resident()], Replacements({"shop/a": (1, NOW - 299)}), "replaced lately"),
        (ask(), [resident()], Replacements(evicted={"x": NOW - 1, "y": NOW - 59}), "within a minute"),
        (ask(), [replace(resident(), share="")], Replacements(), "has no GpuShare yet"),
    ],
)
def test_why_one_stays(asked, residents, done, why):
    found = plan([asked], residents, done)
    assert found.evict is None
    assert why in {**found.waiting, **found.never}["a"]


@pytest.mark.parametrize(
    ("evicted", "why"),
    [({"x": NOW - 1}, "1 pod was evicted within a minute"), ({"x": NOW, "y": NOW}, "2 pods were evicted within")],
)
def test_the_rate_is_named_in_words(evicted, why):
    """Before: "1 pods were evicted within a minute"."""
    assert plan([ask()], [resident()], Replacements(evicted=evicted), per_minute=1).waiting["a"].startswith(why)


def test_a_clock_that_was_set_back_does_not_keep_a_gpu_calm():
    """Before: whoever was to be replaced waited until the clock had come back."""
    assert plan([ask()], [resident()], Replacements(last_left={"G": NOW + 60.0})).evict == "a"


@pytest.mark.parametrize(
    ("asked", "residents"),
    [
        (ask(silent_seconds=SILENT_SECONDS + 1), [resident()]),
        (ask(), [resident(leaving=True)]),
        (ask(), [resident(ended=True)]),
        (ask(), [resident("b")]),
    ],
)
def test_absent_and_unknown_pods_are_not_part_of_the_plan(asked, residents):
    found = plan([asked], residents)
    assert (found.evict, found.waiting, found.never) == (None, {}, {})


def test_a_group_in_trouble_again_and_again_is_replaced_ever_more_rarely():
    done, now, at = None, NOW, []
    for _ in range(4):
        while (
            plan([ask()], [resident()], Replacements({} if done is None else {"shop/a": done}), now).evict is None
        ):
            now += 10.0
        done = count_replacement(done, now)
        at.append(now)
        now += 10.0
    pauses = [later - earlier for earlier, later in itertools.pairwise(at)]
    assert pauses == [PAUSE.first_seconds, 2 * PAUSE.first_seconds, 4 * PAUSE.first_seconds]
    assert count_replacement(done, now + FORGOTTEN_SECONDS)[0] == 1


uids = st.sampled_from(["a", "b", "c"])


@given(
    st.lists(st.builds(ask, uids, st.sampled_from(["G", "H"])), max_size=4),
    st.lists(
        st.builds(resident, uids, leaving=st.booleans(), replaceable=st.booleans()), unique_by=lambda r: r.uid
    ),
    st.dictionaries(st.sampled_from(["x", "y", "z"]), st.floats(NOW - 200, NOW)),
    st.integers(1, 3),
)
def test_at_most_one_within_the_rate_and_only_who_may(asks, residents, evicted, per_minute):
    found = plan(asks, residents, Replacements(evicted=evicted), per_minute=per_minute)
    if found.evict is None:
        return
    [pod] = [one for one in residents if one.uid == found.evict]
    assert pod.replaceable
    assert not any(one.leaving for one in residents)
    assert sum(NOW - at < 60 for at in evicted.values()) < per_minute


@pytest.mark.parametrize(
    ("ago_seconds", "counts"),
    [(FORGOTTEN_SECONDS, False), (FORGOTTEN_SECONDS - 1, True), (0.0, True), (-60.0, True), (-3600.0, False)],
)
def test_replacements_are_remembered_for_a_day_by_a_clock_that_may_be_set_back(ago_seconds, counts):
    kept = GroupReplacements(2, "2026-12-01T00:00:00Z")
    assert lately_replaced(kept, NOW, lambda _: NOW - ago_seconds) == (kept if counts else None)
    assert lately_replaced(None, NOW, lambda _: NOW) is None
