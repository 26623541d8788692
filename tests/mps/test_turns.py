from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.mps.turns import (
    LEAST_TURN_SECONDS,
    MAX_ACCOUNTS,
    MAX_FROZEN_SECONDS,
    WASTE_SECONDS,
    WASTED_TURN_BACKOFF,
    Turn,
    TurnAccounts,
)

STEP_SECONDS = 0.05


def test_who_paid_least_goes_first_and_who_waits_long_goes_before_him():
    accounts = TurnAccounts()
    accounts.note_client("busy", 0.8, 100.0)
    assert accounts.rank("new", 0.0, 100.0) < accounts.rank("busy", 0.0, 100.0)
    assert accounts.rank("busy", 20.0, 120.0) < accounts.rank("new", 0.0, 120.0)


def test_connections_that_waited_for_long_do_not_take_turn_after_turn_ahead_of_a_newcomer():
    """Before: ten that were 1200 s old all went first, and the newcomer waited 24.8 s instead of 1.9 s."""
    accounts, now = TurnAccounts(), 1200.0
    accounts.note_client("old", 2.5, 0.0)
    assert accounts.rank("old", 1200.0, now) < accounts.rank("new", 0.0, now), "the first has waited all the time"
    for note in (accounts.note_client, accounts.note_broken_off, accounts.note_refusal):
        now += 600.0
        note("old", 2.5, now)
        assert accounts.rank("old", 1800.0, now) > accounts.rank("new", 0.0, now)
        assert accounts.rank("old", 1800.0, now + 60.0) < accounts.rank("new", 0.0, now + 60.0), "not for ever"


@given(st.lists(st.floats(0.05, 24.0), min_size=1, max_size=40))
def test_a_pod_that_takes_turns_goes_on_beside_newcomers_without_end(turns):
    accounts, now = TurnAccounts(), 0.0
    for seconds in turns:
        accounts.note_client("busy", seconds, now)
        now += 150.0
        assert accounts.rank("busy", now, now) < accounts.rank("new", 0.0, now)


def test_who_exits_just_before_the_timeout_has_wasted_it_and_waits_behind_the_others():
    """Before: a process that ended counted as good conduct, and its pod was next again."""
    accounts = TurnAccounts()
    accounts.note_waste("bad", 7.9, 0.0, has_left=True)
    assert accounts.is_backing_off("bad", 0.5)
    assert accounts.rank("bad", 60.0, 0.0) > accounts.rank("good", 0.0, 0.0)
    accounts.note_waste("bad", 7.9, 2.0, has_left=True)
    assert accounts.is_backing_off("bad", 3.5)


def test_a_process_that_only_looks_is_no_waste():
    accounts = TurnAccounts()
    for second in range(20):
        accounts.note_waste("looks", 0.05, float(second), has_left=True)
        assert not accounts.is_backing_off("looks", float(second))


def test_only_a_listed_client_is_good_conduct_and_it_does_not_wash_off_what_was_wasted():
    accounts = TurnAccounts()
    accounts.note_waste("a", 3.0, 0.0, has_left=False)
    accounts.note_client("a", 0.1, 0.0)
    assert not accounts.is_backing_off("a", 0.0)
    assert accounts.allowance_seconds("a", 0.0) == LEAST_TURN_SECONDS
    assert accounts.allowance_seconds("new", 0.0) == WASTE_SECONDS


@given(st.lists(st.tuples(st.floats(0.01, 24.0), st.floats(0.0, 5.0), st.booleans()), min_size=1, max_size=40))
def test_while_others_wait_a_pod_wastes_about_three_seconds(turns):
    """Each turn is cut at the allowance; what is wasted beyond the budget is one least turn at a time."""
    accounts, now, wasted, beyond = TurnAccounts(), 0.0, 0.0, 0
    for wanted, pause, has_left in turns:
        allowance = accounts.allowance_seconds("bad", now)
        beyond += wasted >= WASTE_SECONDS
        seconds = min(wanted, allowance)
        now += seconds
        wasted += seconds
        accounts.note_waste("bad", seconds, now, has_left=has_left)
        # Somebody who came later than all of this goes first.
        if wasted >= WASTE_SECONDS:
            assert accounts.rank("good", 0.0, now) < accounts.rank("bad", 10.0, now)
        now += pause
    fading = 0.5 * sum(pause + min(wanted, WASTE_SECONDS) for wanted, pause, _ in turns) / 100
    assert wasted <= WASTE_SECONDS + LEAST_TURN_SECONDS * (beyond + 1) + fading


@dataclass
class Queue:
    """A pod that always has a process ready to sit in a turn, and newcomers, each with a turn of a usual start.

    Attributes:
        sitting: seconds of the pod's turns in which a newcomer waited.
        waits: each newcomer's seconds until its turn, as far as the pod was in its own.
    """

    arrivals: deque[float]
    sits_seconds: float
    start_seconds: float = 0.2
    now: float = 0.0
    sitting: float = 0.0
    waits: list[float] = field(default_factory=list)
    accounts: TurnAccounts = field(default_factory=TurnAccounts)
    _waiting: dict[str, tuple[float, float]] = field(default_factory=dict)
    _ready_since: float = 0.0

    def play(self, seconds: float) -> None:
        while self.now < seconds:
            self._newcomers_come()
            opened = {"bad": self._ready_since} | {pod: at for pod, (at, _) in self._waiting.items()}
            ready = [pod for pod in opened if not self.accounts.is_backing_off(pod, self.now)]
            if not ready:
                self.now += STEP_SECONDS
                continue
            rank = self.accounts.rank
            pod = min(ready, key=lambda each: (rank(each, self.now - opened[each], self.now), opened[each]))
            if pod == "bad":
                self._bad_sits()
            else:
                self.waits.append(self.sitting - self._waiting.pop(pod)[1])
                self.now += self.start_seconds
                self.accounts.note_client(pod, self.start_seconds, self.now)

    def _newcomers_come(self) -> None:
        while self.arrivals and self.arrivals[0] <= self.now:
            self._waiting[f"good-{len(self.arrivals)}"] = (self.arrivals.popleft(), self.sitting)

    def _bad_sits(self) -> None:
        turn = Turn((1, 1), "bad", self.now, waits_since=self.now, step_at=self.now)
        while self.now - turn.started < self.sits_seconds:
            if self._waiting and turn.is_spent(self.now, self.accounts.allowance_seconds("bad", self.now)):
                break
            self.now += STEP_SECONDS
            self.sitting += STEP_SECONDS * bool(self._waiting)
            self._newcomers_come()
        self.accounts.note_waste("bad", self.now - turn.started, self.now, has_left=True)
        self._ready_since = self.now


def arriving(*gaps: float) -> deque[float]:
    return deque(accumulate(gaps))


@pytest.mark.parametrize("sits_seconds", [0.9, 2.9, 7.9])
def test_while_somebody_always_waits_a_pod_sits_three_seconds_in_all(sits_seconds):
    """Before: 19 s, again and again. Two newcomers come in the time that one of them takes."""
    queue = Queue(arriving(*[0.1] * 600), sits_seconds)
    queue.play(60.0)
    assert len(queue.waits) > 270
    assert queue.sitting <= WASTE_SECONDS + LEAST_TURN_SECONDS


@given(
    st.lists(st.one_of(st.floats(0.0, 0.5), st.floats(0.0, 90.0)), min_size=1, max_size=60),
    st.floats(0.05, 24.0),
)
def test_no_newcomer_waits_longer_than_three_seconds_for_a_pod_that_sits_in_its_turns(gaps, sits_seconds):
    queue = Queue(arriving(*gaps), sits_seconds)
    queue.play(sum(gaps) + 60.0)
    assert len(queue.waits) == len(gaps)
    assert max(queue.waits) <= WASTE_SECONDS + 2 * STEP_SECONDS


def test_a_pod_that_the_daemon_always_refuses_lets_others_go_first():
    """Before: a turn that broke off left no trace, so the same pod was picked again at once, for ever."""
    accounts = TurnAccounts()
    accounts.note_client("served", 0.2, 0.0)
    accounts.note_refusal("refused", 0.05, 0.0)
    assert accounts.is_backing_off("refused", 0.5)
    for _ in range(20):
        accounts.note_refusal("refused", 0.05, 10.0)
    assert accounts.is_backing_off("refused", 10.0 + WASTED_TURN_BACKOFF.longest_seconds - 1)
    assert not accounts.is_backing_off("refused", 11.0 + WASTED_TURN_BACKOFF.longest_seconds)
    accounts.note_broken_off("unlucky", 0.05, 0.0)
    assert not accounts.is_backing_off("unlucky", 0.0)
    assert accounts.rank("unlucky", 0.0, 0.0) > accounts.rank("other", 0.0, 0.0)


def test_what_is_remembered_is_bounded():
    """Before: every pod that ever had a turn was remembered for ever."""
    accounts = TurnAccounts()
    for number in range(3 * MAX_ACCOUNTS):
        accounts.note_client(f"p{number}", 0.1 + number, 0.0)
    accounts.forget_idle(["p0"], 0.0)
    assert len(accounts) == MAX_ACCOUNTS
    accounts.forget_idle(["p0"], 86400.0)
    assert len(accounts) <= 1


def test_a_turn_is_spent_when_its_allowance_is_but_not_in_the_second_after_a_step():
    turn = Turn((1, 1), "a", 0.0, waits_since=10.0, step_at=10.0)
    assert not turn.is_spent(12.9, WASTE_SECONDS)
    assert turn.is_spent(13.1, WASTE_SECONDS)
    turn.step_at = 12.9
    assert not turn.is_spent(13.8, WASTE_SECONDS), "the server may list it any moment"
    assert turn.is_spent(14.0, WASTE_SECONDS)
    assert not turn.is_spent(14.0, WASTE_SECONDS, 2.0)
    assert turn.is_spent(15.2, WASTE_SECONDS, 2.0)
    turn.step_at = 15.0
    assert turn.is_spent(15.1, WASTE_SECONDS), "steps do not add up for ever"
    turn.served_seconds = 10.0
    assert not turn.is_spent(15.1, WASTE_SECONDS), "the daemon's time is not the tenant's"


def test_what_we_froze_of_a_turn_is_neither_its_time_nor_charged():
    turn = Turn((1, 1), "a", 9.0, waits_since=10.0, step_at=10.0, frozen_seconds=1.2)
    excused = turn.excused_seconds(is_starvation_excused=False)
    assert turn.is_spent(12.1, LEAST_TURN_SECONDS)
    assert not turn.is_spent(12.1, LEAST_TURN_SECONDS, excused)
    assert turn.charged_seconds(12.2) == pytest.approx(2.0)
    turn.frozen_seconds = 100.0
    assert turn.excused_seconds(is_starvation_excused=False) == MAX_FROZEN_SECONDS, "others wait no longer for it"
    assert turn.charged_seconds(20.0) == 0.0
