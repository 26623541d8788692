"""The loop and rates that pods report: believed within what the counters leave possible, and given up in vain.

The plant is a training job whose steps depend on how much its neighbours run, inferred wrongly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare.core.api import JobClass, PodSeries, RateSlo
from gpushare.core.control import (
    FREE,
    GpuWatch,
    WatchActions,
    WatchedTenant,
    WatchReason,
    WatchSettings,
    WatchWindow,
    watch,
)
from gpushare.core.control.rate_belief import CLIP_ERRORS, IMPLAUSIBLE_SECONDS, RateBelief, believed
from gpushare.core.control.rate_reading import RateSign, rate_sign, read_target
from gpushare.core.control.slo_reading import (
    CountedAt,
    CounterReading,
    RateWindow,
    SloReason,
    SloRecord,
    SloTrouble,
)
from gpushare.core.control.slo_relief import GIVEN_UP_SECONDS

SETTINGS = WatchSettings()
PROMISE, ALONE_RATE, ERROR = 0.5, 41.3, 0.05
TARGET = RateSlo(PROMISE * ALONE_RATE, PodSeries(9100, "steps"))
READ_SECONDS = 5


@dataclass
class Plant:
    """A job "train" beside throughput tenants; a second is a window, five make a reading of its counter.

    `costs` is what each neighbour takes of its progress while it always runs; the agent infers `bias` more than it
    makes. `lie`: its reported rate in place of the true one. `predicted_error`: a small one leaves the counters
    undecided.
    """

    costs: dict[str, float]
    alone: float = 0.8
    bias: float = 0.0
    predicted_error: float | None = None
    lie: Callable[["Plant"], float] | None = None
    alone_rate: float = ALONE_RATE
    reports: bool = True
    active: bool = True
    neighbours_promise: float = 0.2
    state: GpuWatch = field(default_factory=GpuWatch)
    belief: RateBelief = field(default_factory=RateBelief)
    record: SloRecord = field(default_factory=SloRecord)
    now: float = 0.0
    steps: float = 137.0
    shown: list[WatchedTenant] = field(default_factory=list)
    seen: list = field(default_factory=list)
    left: list[tuple[float, str]] = field(default_factory=list)

    def progress(self) -> float:
        duties = self.state.duties
        return self.alone - sum(cost * duties.get(uid, FREE) for uid, cost in self.costs.items())

    def second(self) -> None:
        self.now += 1.0
        true = self.progress()
        target = RateSlo(PROMISE * self.alone_rate, TARGET.source)
        self.steps += self.lie(self) if self.lie is not None else self.alone_rate * true
        if self.reports and self.now % READ_SECONDS == 0:
            self.record = read_target(self.record, CounterReading(float(int(self.steps))), self.now, target)
        inferred = WatchedTenant(
            "train",
            JobClass.THROUGHPUT,
            PROMISE,
            true + self.bias,
            ERROR,
            1.0,
            active=self.active,
            can_throttle=False,
            alone=self.alone + self.bias,
        )
        duties = self.state.duties
        self.belief, train = believed(
            self.belief,
            inferred,
            rate_sign(self.record, target),
            self.now,
            SETTINGS,
            since=self.state.changed_at + SETTINGS.delay_seconds,
            predicted_error=self.predicted_error,
            beside=self.costs.keys(),
            is_eased=any(uid in duties for uid in self.costs),
        )
        others = [
            WatchedTenant(
                uid, JobClass.THROUGHPUT, self.neighbours_promise, 0.9 * duties.get(uid, FREE), 0.03, 2.0 + number
            )
            for number, uid in enumerate(self.costs)
        ]
        self.state, actions = watch(self.state, WatchWindow(self.now, (train, *others)), self.now, SETTINGS)
        self.shown.append(train)
        self.seen.append(actions)

    def run(self, seconds: int, *, obeys: bool = False) -> "Plant":
        """Run; with `obeys`, whoever is asked to leave does so."""
        for _ in range(seconds):
            self.second()
            leaving = self.seen[-1].retract
            if obeys and leaving is not None:
                self.left.append((self.now, leaving))
                del self.costs[leaving]
        return self

    def notes(self, reason: WatchReason) -> list:
        return [note for actions in self.seen for note in actions.notes if note.reason is reason]


def test_a_promise_that_inference_calls_kept_is_kept_once_steps_are_reported():
    """Inferred 0.1 too high, the most usual reason for a promise broken unseen (loop-bars.md)."""
    blind = Plant({"a": 0.35}, bias=0.1, reports=False).run(120)
    assert blind.progress() == pytest.approx(0.45)
    assert not blind.state.duties
    plant = Plant({"a": 0.35}, bias=0.1).run(120)
    assert plant.state.duties
    assert (
        "of its progress alone by its own count, 0.50 are promised"
        in plant.notes(WatchReason.PROMISE_BROKEN)[0].message
    )
    made = []
    for _ in range(300):
        plant.second()
        made.append(plant.progress())
    assert sum(each < PROMISE - 0.01 for each in made) < 0.1 * len(made)
    assert min(each.duties.get("a", FREE) for each in plant.seen) * 0.9 >= plant.neighbours_promise


def test_a_promise_that_inference_calls_broken_and_is_not_costs_nobody_time():
    blind = Plant({"a": 0.25}, bias=-0.14, reports=False).run(120)
    assert any(actions.duties for actions in blind.seen)
    plant = Plant({"a": 0.25}, bias=-0.14)
    plant.run(20)
    plant.seen.clear()
    plant.run(300)
    assert not any(actions.duties for actions in plant.seen[60:])
    assert plant.progress() >= PROMISE


def test_the_progress_is_the_promise_times_the_rate_by_the_target():
    plant = Plant({"a": 0.1}).run(30)
    assert plant.shown[3].progress == pytest.approx(0.7), "inferred: no window of the counter is complete"
    last = plant.shown[-1]
    assert last.progress == pytest.approx(0.7, rel=0.02)
    assert 0.01 < last.error < 0.03
    assert last.by_report


@pytest.mark.parametrize("sign", [None, RateSign(20.0)])
def test_without_a_window_the_inferred_progress_is_used(sign):
    tenant = WatchedTenant("train", JobClass.THROUGHPUT, PROMISE, 0.4, ERROR, 1.0)
    _, found = believe(tenant, sign)
    assert found == tenant


def believe(tenant, sign, belief=None, now=100.0, since=-math.inf, **given_):
    asked = {"predicted_error": None, "beside": {"a"}, "is_eased": False} | given_
    return believed(belief or RateBelief(), tenant, sign, now, SETTINGS, since=since, **asked)


def reported(progress: float, began_at: float = 90.0) -> RateSign:
    """A report of this progress, by a window of ten seconds."""
    per_second = progress * ALONE_RATE
    return RateSign(TARGET.target_per_second, asked=RateWindow(began_at, began_at + 10.0, per_second, 0.02))


def test_a_window_from_before_a_change_is_not_used():
    tenant = WatchedTenant("train", JobClass.THROUGHPUT, PROMISE, 0.5, ERROR, 1.0)
    assert believe(tenant, reported(0.45), since=90.0)[1].progress == pytest.approx(0.45)
    assert believe(tenant, reported(0.45), since=90.4)[1] == tenant
    assert believe(tenant, reported(0.45), since=math.inf)[1] == tenant, "while neighbours are stopped to read one"


def test_a_pod_that_sleeps_breaks_no_promise_whatever_its_counter_says():
    tenant = WatchedTenant("train", JobClass.THROUGHPUT, PROMISE, 0.0, ERROR, 1.0, active=False)
    assert believe(tenant, reported(0.02))[1] == tenant
    plant = Plant({"a": 0.35}).run(60)
    plant.active = False
    plant.lie = lambda _: 0.0
    plant.run(120)
    assert not plant.state.duties
    assert not plant.seen[-1].broken


def test_a_counter_that_stops_while_the_pod_works_leaves_what_is_inferred():
    """As while it evaluates or writes a checkpoint."""
    plant = Plant({"a": 0.1}, lie=lambda plant: 0.0 if plant.now > 30 else ALONE_RATE * plant.progress()).run(90)
    assert all(each.progress == pytest.approx(0.7, rel=0.03) for each in plant.shown)
    assert not plant.state.duties


@pytest.mark.parametrize(
    ("begins", "ends"),
    [(101, 103), (103, 106), (104, 109), (101, 108), (102, 115), (102, 160), (100, 190)],
    ids=["checkpoint", "over a reading", "five seconds", "seven seconds", "13 s", "evaluation", "long evaluation"],
)
@pytest.mark.parametrize("predicted_error", [None, 0.01], ids=["decided", "undecided"])
def test_a_pause_of_the_program_costs_nobody_time(begins, ends, predicted_error):
    """It goes on using the GPU; the reading in which the pause begins counts a part of a window only."""
    plant = Plant({"a": 0.1, "b": 0.1}, alone=0.9, predicted_error=predicted_error)
    plant.lie = lambda plant: 0.0 if begins < plant.now <= ends else ALONE_RATE * plant.progress()
    plant.run(300)
    assert not plant.notes(WatchReason.PROMISE_BROKEN)
    assert not any(actions.duties or actions.retract for actions in plant.seen)


@pytest.mark.parametrize("alone_rate", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("begins", "ends"), [(207, 222), (202, 262)])
def test_a_slow_program_may_pause_too(begins, ends, alone_rate):
    """Its windows overlap, and each shows a little more of the pause than the one before."""
    plant = Plant({"a": 0.1, "b": 0.1}, alone=0.9, alone_rate=alone_rate)
    plant.lie = lambda plant: 0.0 if begins < plant.now <= ends else alone_rate * plant.progress()
    plant.run(400)
    assert not any(actions.duties for actions in plant.seen)


def test_a_pause_right_after_a_change_leaves_what_is_inferred():
    """No window before it is of the same duties, so that its first part is believed until it stands still."""
    plant = Plant({"a": 0.1, "b": 0.1}, alone=0.9).run(52)
    plant.state = replace(plant.state, changed_at=plant.now)
    plant.lie = lambda plant: 0.0 if 57 < plant.now <= 120 else ALONE_RATE * plant.progress()
    plant.run(8)
    assert plant.shown[-1].progress < PROMISE
    plant.run(40)
    assert not plant.state.tenants["train"].is_broken
    plant.run(80)
    assert not plant.state.duties
    assert not any(actions.retract for actions in plant.seen)


def counted(now: float, *progress: float) -> RateSign:
    """Return the readings of a counter each five seconds, which shows this progress between two of them."""
    trail = [CountedAt(now - 5.0 * len(progress), 100.0)]
    for each in progress:
        trail.append(CountedAt(trail[-1].at + 5.0, trail[-1].total + round(5.0 * ALONE_RATE * each)))
    return RateSign(TARGET.target_per_second, tuple(trail))


def test_a_pod_without_a_profile_may_pause_too():
    tenant = WatchedTenant("train", JobClass.THROUGHPUT, PROMISE, None, None, 1.0)
    belief = believe(tenant, counted(100.0, 0.7, 0.7), now=100.0)[0]
    fallen, found = believe(tenant, counted(105.0, 0.7, 0.1), belief, now=105.0)
    assert found == tenant
    _, found = believe(tenant, counted(110.0, 0.1, 0.7), fallen, now=110.0)
    assert found.progress == pytest.approx(0.7, rel=0.01)
    fallen, found = believe(tenant, counted(110.0, 0.1, 0.1), fallen, now=110.0)
    assert found == tenant
    _, found = believe(tenant, counted(115.0, 0.1, 0.1), fallen, now=115.0)
    assert found.progress == pytest.approx(0.1, rel=0.03)


def test_a_fall_that_lasts_is_believed_from_the_third_reading():
    """Its neighbour takes more from second 100 on, which inference does not see."""
    plant = Plant({"a": 0.2}, alone=0.9).run(100)
    plant.costs["a"], plant.bias = 0.45, 0.25
    plant.run(14)
    assert not plant.state.duties
    plant.run(6)
    assert plant.state.duties
    plant.run(60)
    assert plant.progress() >= PROMISE


@pytest.mark.parametrize(
    ("claimed", "believed_progress"), [(0.05, 0.291), (0.3, 0.3), (0.6, 0.6), (0.9, 0.9), (3.0, 0.909)]
)
def test_a_report_is_believed_within_three_errors_of_what_counters_decide(claimed, believed_progress):
    """Of what is inferred, 0.05, and of the promise that it is measured by, 15% of 0.6: 3 x 0.103."""
    tenant = WatchedTenant("train", JobClass.THROUGHPUT, PROMISE, 0.6, ERROR, 1.0)
    _, found = believe(tenant, reported(claimed))
    assert found.progress == pytest.approx(believed_progress, abs=0.002)
    assert found.error == pytest.approx(0.02 * claimed if claimed == believed_progress else ERROR)
    most = min(claimed, 1.0)  # no tenant runs faster than alone
    for undecided in ({"predicted_error": 0.06}, {"predicted_error": 0.0}):
        assert believe(tenant, reported(claimed), **undecided)[1].progress == pytest.approx(most)
    unknown = replace(tenant, progress=None, error=None)
    assert believe(unknown, reported(claimed))[1].progress == pytest.approx(most)


@pytest.mark.parametrize("predicted_error", [None, 0.01])
@pytest.mark.parametrize("per_second", [1e9, 1e150, 1e300])
def test_a_rate_however_huge_is_at_most_the_whole_progress(per_second, predicted_error):
    """A counter that jumps would else end the reading of every GPU of the node."""
    plant = Plant({"a": 0.1}, predicted_error=predicted_error).run(30)
    plant.lie = lambda _: per_second
    plant.run(30)
    assert plant.shown[-1].progress <= 1.0
    assert 0.0 < plant.shown[-1].error <= 0.2
    assert len(plant.belief.words) < 200
    tenant = plant.shown[0]
    least = RateSign(1e-6, asked=RateWindow(90.0, 100.0, per_second, 0.02))
    assert believe(tenant, least, predicted_error=predicted_error)[1].progress <= 1.0


def test_a_report_that_stays_impossible_is_not_used_and_neighbours_get_their_time_back():
    plant = Plant({"a": 0.1}, lie=lambda _: 0.1 * ALONE_RATE).run(10)
    assert 0.3 < plant.shown[-1].progress < 0.4, "clipped"
    plant.run(150)
    assert plant.belief.is_implausible
    assert plant.belief.words.startswith(
        "by its target it makes 0.10 of its progress alone, and the GPU's counters"
    )
    assert plant.shown[-1].progress == pytest.approx(0.7)
    plant.run(120)
    assert not plant.state.duties
    plant.lie = None
    plant.run(int(IMPLAUSIBLE_SECONDS) - 10)
    assert plant.belief.is_implausible, "not at once"
    plant.run(60)
    assert not plant.belief.is_implausible


def test_who_was_not_believed_is_heard_again_after_an_hour_in_which_counters_decide_nothing():
    """Before: for as long as they decide nothing, so that an honest pod was never believed again."""
    plant = Plant({"a": 0.1}, lie=lambda _: 0.1 * ALONE_RATE).run(160)
    assert plant.belief.is_implausible
    plant.lie, plant.predicted_error = None, 0.01
    plant.run(int(GIVEN_UP_SECONDS) - 90)
    assert plant.belief.is_implausible, "not within the hour, whatever it says: nothing confirms it"
    plant.run(180)
    assert not plant.belief.is_implausible
    assert plant.shown[-1].by_report
    assert not any(actions.retract for actions in plant.seen)


def _is_throttling(actions: WatchActions) -> bool:
    return bool(actions.duties)


def test_a_liar_that_is_heard_again_costs_what_it_costs_at_first():
    """A try of less than a minute, since nothing that its neighbours give brings it nearer to its target."""
    plant = Plant({"a": 0.1}, lie=lambda _: 0.1 * ALONE_RATE).run(160)
    plant.predicted_error = 0.01
    plant.run(int(GIVEN_UP_SECONDS) - 60)
    assert plant.belief.is_implausible
    plant.seen.clear()
    plant.run(600)
    first = Plant({"a": 0.1}, lie=plant.lie, predicted_error=0.01).run(600)
    assert 0 < sum(map(_is_throttling, plant.seen)) <= sum(map(_is_throttling, first.seen)) < 60
    assert not any(actions.retract for actions in plant.seen)
    plant.predicted_error = None
    plant.run(int(IMPLAUSIBLE_SECONDS) + 10)
    assert plant.belief.is_implausible, "a minute in which counters decide suffices again"


def test_a_target_that_the_pod_does_not_reach_alone_is_given_up_for_an_hour():
    """Neighbours gave time in vain: they get it back, and are not asked again until a tenant arrives."""
    plant = Plant({"a": 0.02}, alone=0.42, bias=0.25, predicted_error=0.01).run(90)
    assert plant.notes(WatchReason.THROTTLED), "it was tried"
    plant.run(120)
    assert not plant.state.duties
    assert not plant.notes(WatchReason.RETRACTION_ASKED), "nobody leaves while what was given did not help"
    plant.seen.clear()
    plant.run(1800)
    assert not any(actions.duties for actions in plant.seen), "not again within the hour"
    assert not any(actions.retract for actions in plant.seen)
    assert plant.shown[-1].progress == pytest.approx(plant.progress() + plant.bias)
    assert GIVEN_UP_SECONDS > 1800
    plant.costs["b"] = 0.02
    plant.run(2)
    response = plant.state.tenants["train"].response
    assert response.effect("b") == pytest.approx(response.effect("a"), abs=0.02), "estimates begin anew"
    plant.run(8)
    assert plant.shown[-1].progress == pytest.approx(plant.progress(), abs=0.02), "a newcomer: heard again"


def test_who_is_throttled_with_success_is_not_let_go_for_it():
    plant = Plant({"a": 0.35}, bias=0.1, predicted_error=0.01).run(900)
    assert not plant.belief.is_given_up(plant.now)
    assert plant.state.duties


def test_for_what_a_pod_alone_reports_one_neighbour_an_hour_leaves():
    """Inference sees its promise kept; it says that each neighbour takes a third of what it makes."""
    costs = dict.fromkeys("abc", 0.25)
    plant = Plant(dict(costs), alone=0.9, bias=0.5, predicted_error=0.01, neighbours_promise=0.8)
    plant.run(600, obeys=True)
    assert len(plant.left) == 1, plant.left
    honest = Plant(dict(costs), alone=0.9, reports=False, neighbours_promise=0.8).run(600, obeys=True)
    assert len(honest.left) == 2, "where the counters show it, as ever"


def lying(plant: Plant, seconds: int) -> list[tuple[float, str]]:
    """Return who left while each that leaves is replaced by a newcomer."""
    number = len(plant.costs)
    for second in range(seconds):
        plant.run(1, obeys=True)
        if len(plant.costs) < number:
            plant.costs[f"new-{second}"] = 0.05
    return plant.left


def test_a_promise_that_is_missed_by_less_than_the_error_confirms_no_lie():
    """By the counters it makes 0.48 +- 0.05 of 0.5; it says that it makes 0.3, whoever leaves."""
    plant = Plant(dict.fromkeys("abcd", 0.1), alone=0.88, neighbours_promise=0.85)
    plant.lie = lambda plant: ALONE_RATE * (0.3 + 0.04 * (4 - len(plant.costs)))
    left = plant.run(1200, obeys=True).left
    assert len(left) == 1, left


def test_who_says_low_and_then_high_has_one_neighbour_an_hour_leave():
    """No throttle was found that keeps its promise, for 20 s; in the window that decides it says it is kept."""
    plant = Plant(dict.fromkeys("ab", 0.05), alone=0.9, predicted_error=0.01, neighbours_promise=0.85)
    plant.lie = lambda plant: ALONE_RATE * (0.3 if plant.now % 30 < 25 else 0.6)
    left = lying(plant, 1200)
    assert len(left) <= 1, left


def test_a_throttle_that_lasts_for_a_lie_has_one_neighbour_an_hour_leave():
    """It says that each neighbour takes 0.3 while it runs; each takes 0.05."""
    plant = Plant(dict.fromkeys("abc", 0.05), alone=0.9, predicted_error=0.01)
    plant.lie = lambda plant: (
        ALONE_RATE * max(0.02, 0.95 - 0.3 * sum(plant.state.duties.get(uid, FREE) for uid in plant.costs))
    )
    left = lying(plant, 1000)
    assert len(left) == 1, left
    assert "so that train keeps its promise" in plant.notes(WatchReason.RETRACTION_ASKED)[0].message


@pytest.mark.parametrize(("by_report", "most"), [(True, 1), (False, 3)])
def test_who_says_that_it_makes_more_has_one_neighbour_an_hour_leave(by_report, most):
    """Throttled for each newcomer, it says that it would gain more without it than the newcomer makes."""
    state, left, newcomer = GpuWatch(), [], 0
    for now in range(1, 1200):
        duty = state.duties.get("liar", FREE)
        liar = WatchedTenant("liar", JobClass.THROUGHPUT, 0.1, duty, 0.02, 1.0, by_report=by_report)
        uid = f"honest-{newcomer}"
        made = 0.6 - 0.5 * duty
        other = WatchedTenant(
            uid, JobClass.THROUGHPUT, 0.3, made, 0.02, 2.0 + newcomer, can_throttle=False, alone=0.6
        )
        state, actions = watch(state, WatchWindow(float(now), (liar, other)), float(now), SETTINGS)
        if actions.retract is not None:
            left.append((now, actions.retract))
            newcomer += 1
    assert len(left) == most, left


def test_nothing_is_heard_while_a_page_cannot_be_read():
    plant = Plant({"a": 0.35}, bias=0.1).run(60)
    trouble = SloTrouble(SloReason.UNREACHABLE, "refused")
    plant.reports = False
    plant.record = read_target(plant.record, trouble, plant.now, TARGET)
    plant.run(80)
    assert plant.shown[-1].progress == pytest.approx(plant.progress(), abs=0.03), (
        "corrected by what it last showed"
    )
    plant.run(20)
    assert plant.shown[-1].progress == pytest.approx(plant.progress() + 0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(min_value=0.0, max_value=2000.0), min_size=1, max_size=12),
    st.floats(min_value=0.0, max_value=0.4),
    st.one_of(st.none(), st.floats(min_value=0.01, max_value=0.3)),
)
def test_whatever_is_reported_neighbours_keep_their_promise_and_the_counters_bound_it(
    rates, cost, predicted_error
):
    plant = Plant({"a": cost, "b": 0.1}, predicted_error=predicted_error, alone=0.9)
    plant.lie = lambda plant: rates[int(plant.now // 17) % len(rates)]
    plant.run(240)
    for actions in plant.seen:
        assert all(0.9 * duty >= plant.neighbours_promise for duty in actions.duties.values())
    if predicted_error is None:
        for shown, actions in zip(plant.shown[1:], plant.seen, strict=False):
            true = 0.9 - cost * actions.duties.get("a", FREE) - 0.1 * actions.duties.get("b", FREE)
            assert abs(shown.progress - true) <= CLIP_ERRORS * math.hypot(ERROR, 0.15 * true) + 1e-9
