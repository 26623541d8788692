"""The throttle's cycle: hypothesis drives it over any asks, and over looks that come late."""

import itertools
import json
import math

import pytest
from blocks import blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.mps.asks import LEASE_SECONDS, ThrottleAsk, ThrottleAsks
from gpushare.mps.duty import (
    MAX_FREEZE_SECONDS,
    MAX_STOP_SECONDS,
    MIN_DUTY_RATIO,
    NOBODY,
    PERIOD_SECONDS,
    schedule,
)

START = 1000.0
TOLERANCE = 1e-3
UIDS = ("a", "b", "c")


class Run:
    """The schedule driven over time; keeps when each pod was frozen, and from when to when."""

    def __init__(self) -> None:
        self.now, self.state = START, NOBODY
        self.began: dict[str, float] = {}
        self.freezes: dict[str, list[tuple[float, float]]] = {uid: [] for uid in UIDS}

    def look(self, asks: ThrottleAsks) -> None:
        self.state = schedule(self.state, asks, self.now)
        for uid in UIDS:
            if uid in self.state.frozen:
                self.began.setdefault(uid, self.now)
            elif (began := self.began.pop(uid, None)) is not None:
                self.freezes[uid].append((began, self.now))

    def until(self, end: float, asks: ThrottleAsks, late=lambda: 0.0) -> None:
        """Look whenever the schedule asks to, each time a bit late."""
        looks = 0
        while self.now < end:
            self.look(asks)
            assert self.state.look_at > self.now, "a look that asks for itself at once never ends"
            self.now = min(end, self.state.look_at + late())
            looks += 1
            assert looks < 100 * (end - START + 1), "looks too often"
        self.look(asks)

    def frozen_seconds(self, uid: str) -> float:
        return sum(end - begin for begin, end in self.freezes[uid])

    def longest(self, uid: str) -> float:
        return max((end - begin for begin, end in self.freezes[uid]), default=0.0)


def beating(asks: dict[str, ThrottleAsk], now: float) -> ThrottleAsks:
    return ThrottleAsks(asks, now)


def drive(run: Run, asks: dict[str, ThrottleAsk], seconds: float, late=lambda: 0.0) -> None:
    """A live agent: it stamps its asks every second."""
    end = run.now + seconds
    while run.now < end:
        run.until(min(end, run.now + 1.0), beating(asks, run.now), late)


duties = st.floats(0, 1)


@given(duties, st.randoms(use_true_random=False))
def test_the_duty_is_kept_though_looks_come_late(duty, random):
    run = Run()
    drive(run, {"a": ThrottleAsk(duty)}, 30.0, lambda: random.uniform(0, 0.02))
    drive(run, {}, 1.0)
    running = 1 - run.frozen_seconds("a") / 30.0
    assert running == pytest.approx(max(MIN_DUTY_RATIO, duty), abs=0.04)


@given(duties)
def test_without_lateness_the_duty_is_exact_and_no_freeze_is_longer_than_half_a_second(duty):
    run = Run()
    drive(run, {"a": ThrottleAsk(duty)}, 30.0)
    drive(run, {}, 1.0)
    assert 1 - run.frozen_seconds("a") / 30.0 == pytest.approx(max(MIN_DUTY_RATIO, duty), abs=0.02)
    assert run.longest("a") <= MAX_FREEZE_SECONDS + TOLERANCE


several = st.lists(st.floats(MIN_DUTY_RATIO, 1), min_size=2, max_size=len(UIDS))


@settings(max_examples=40)
@given(several, st.randoms(use_true_random=False))
def test_every_duty_is_kept_though_one_waits_for_the_other(wishes, random):
    run, asks = Run(), dict(zip(UIDS, map(ThrottleAsk, wishes), strict=False))
    drive(run, asks, 30.0, lambda: random.uniform(0, 0.02))
    drive(run, {}, 1.0)
    running = [1 - run.frozen_seconds(uid) / 30.0 for uid in asks]
    assert running == pytest.approx(wishes, abs=0.04)


@settings(max_examples=40)
@given(several, st.randoms(use_true_random=False))
def test_little_more_is_frozen_together_than_the_duties_need(wishes, random):
    """Of each second, the frozen times beyond one second overlap. At the same phase 0.5 of two halves would."""
    run, asks = Run(), dict(zip(UIDS, map(ThrottleAsk, wishes), strict=False))
    drive(run, asks, 10.0)  # until they have found their order
    begun = run.now
    drive(run, asks, 30.0, lambda: random.uniform(0, 0.02))
    drive(run, {}, 1.0)
    ends = [
        (at, step)
        for pairs in run.freezes.values()
        for pair in pairs
        for at, step in zip(pair, (1, -1), strict=True)
    ]
    overlapping, frozen, before = 0.0, 0, begun
    for at, step in sorted(ends):
        overlapping += max(0.0, at - max(before, begun)) * max(0, frozen - 1)
        frozen, before = frozen + step, at
    needed = max(0.0, sum(1 - wish for wish in wishes) - 1)
    assert overlapping / 30.0 <= needed + 0.15


def test_a_reading_lets_nobody_wait_and_waits_for_nobody():
    run = Run()
    run.look(beating({"a": ThrottleAsk(0.5), "b": ThrottleAsk(stopped_until=START + 1.0)}, START))
    assert run.state.frozen == {"a", "b"}
    run = Run()
    run.look(beating({"a": ThrottleAsk(stopped_until=START + 1.0), "b": ThrottleAsk(0.5)}, START))
    assert run.state.frozen == {"a", "b"}


@pytest.mark.parametrize(("duty", "freeze", "period"), [(0.5, 0.5, 1.0), (0.8, 0.2, 1.0), (0.1, 0.5, 0.5 / 0.9)])
def test_small_duties_shorten_the_run_and_not_lengthen_the_freeze(duty, freeze, period):
    run = Run()
    drive(run, {"a": ThrottleAsk(duty)}, 10.0)
    begun, lengths = [b for b, _ in run.freezes["a"]], [e - b for b, e in run.freezes["a"]]
    assert lengths[2:-1] == pytest.approx([freeze] * len(lengths[2:-1]), abs=TOLERANCE)
    gaps = [later - sooner for sooner, later in itertools.pairwise(begun[1:])]
    assert gaps == pytest.approx([period] * len(gaps), abs=TOLERANCE)
    assert max(gaps) <= PERIOD_SECONDS + TOLERANCE


offsets = st.one_of(st.none(), st.floats(-2, 5))
any_ask = st.builds(lambda duty, offset: (duty, offset), duties, offsets)
any_asks = st.dictionaries(st.sampled_from(UIDS), any_ask, max_size=3)
steps = st.lists(st.tuples(any_asks, st.floats(0.01, 8)), min_size=1, max_size=12)


@given(steps)
def test_whatever_is_asked_nobody_stands_still_for_too_long_or_without_being_asked_for(sequence):
    run, stop_wished = Run(), dict.fromkeys(UIDS, False)
    for wishes, seconds in sequence:
        asks = {
            uid: ThrottleAsk(duty, None if offset is None else run.now + offset)
            for uid, (duty, offset) in wishes.items()
        }
        for uid, ask in asks.items():
            stop_wished[uid] |= ask.stopped_until is not None
        written = beating(asks, run.now)
        run.look(written)
        assert run.state.frozen <= asks.keys()
        run.until(run.now + seconds, written)
        if seconds > LEASE_SECONDS:
            assert run.state.frozen == frozenset()
    run.look(ThrottleAsks())
    assert run.state.frozen == frozenset()
    for uid in UIDS:
        limit = MAX_STOP_SECONDS if stop_wished[uid] else MAX_FREEZE_SECONDS
        assert run.longest(uid) <= limit + TOLERANCE


@given(any_asks)
def test_a_silent_agents_lease_ends_on_time(wishes):
    asks = beating({uid: ThrottleAsk(duty) for uid, (duty, _) in wishes.items()}, START)
    run = Run()
    run.until(START + LEASE_SECONDS, asks)
    assert run.state.frozen == frozenset()
    run.until(START + 60.0, asks)
    assert all(end <= START + LEASE_SECONDS for freezes in run.freezes.values() for _, end in freezes)
    assert run.state.look_at == math.inf
    assert not run.state.cycles, "forgotten"


@pytest.mark.parametrize("beat", [START + 2.0, START - LEASE_SECONDS, -math.inf])
def test_a_stamp_of_another_boot_or_too_old_freezes_nobody(beat):
    assert schedule(NOBODY, ThrottleAsks({"a": ThrottleAsk(0.1)}, beat), START).frozen == frozenset()


def test_a_stop_begins_at_once_and_ends_when_asked():
    run = Run()
    drive(run, {"a": ThrottleAsk(stopped_until=START + 0.9)}, 3.0)
    assert run.freezes["a"] == [pytest.approx((START, START + 0.9))]


def test_a_stop_that_is_renewed_for_ever_leaves_the_pod_half_of_the_time_in_pieces():
    run = Run()
    while run.now < START + 24.0:
        run.until(run.now + 0.1, beating({"a": ThrottleAsk(stopped_until=run.now + 5)}, run.now))
    lengths = [end - begin for begin, end in run.freezes["a"]]
    assert lengths == pytest.approx([MAX_STOP_SECONDS] * 10, abs=TOLERANCE)


def test_asks_that_come_and_go_leave_the_pod_time_to_run_between():
    run = Run()
    for _ in range(40):
        run.look(beating({"a": ThrottleAsk(0.1)}, run.now))
        run.now += 0.25
        run.look(beating({}, run.now))
        run.now += 0.001
    assert run.frozen_seconds("a") <= 0.75 * (run.now - START)


@given(st.dictionaries(st.uuids().map(str), st.builds(ThrottleAsk, duties, offsets), max_size=4), duties)
def test_asks_read_back_as_written_and_unknown_fields_are_ignored(pods, beat):
    asks = ThrottleAsks(pods, beat)
    data = json.loads(json.dumps(asks.to_json()))
    data["of_a_later_version"] = 1
    for value in data["pods"].values():
        value["too"] = "this"
    assert ThrottleAsks.from_json(data) == asks


def test_the_file_on_the_page_about_the_gate_is_read_as_the_page_says():
    (page,) = [block.text for block in blocks("json") if block.page == "docs/gate.md"]
    asks = ThrottleAsks.from_json(json.loads(page))
    assert [*asks.pods.values()] == [ThrottleAsk(0.4), ThrottleAsk(1.0, stopped_until=4712.2)]
    assert asks.lease_ends_at == asks.beat + 5
    assert json.loads(page) == asks.to_json()


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"version": 2, "beat": 1, "pods": {}},
        {"version": 1, "beat": 1},
        {"version": 1, "beat": None, "pods": {}},
        {"version": 1, "beat": float("nan"), "pods": {}},
        {"version": 1, "beat": True, "pods": {}},
        *(
            {"version": 1, "beat": 1, "pods": {"a": ask}}
            for ask in (
                None,
                {"duty_ratio": 1.1},
                {"duty_ratio": float("nan")},
                {"duty_ratio": "0.5"},
                {"duty_ratio": True},
                {"stopped_until": "soon"},
                {"stopped_until": float("inf")},
            )
        ),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(data):
    with pytest.raises(ValueError):
        ThrottleAsks.from_json(data)
