"""Whose turn it is among waiting pods, beside a plain look at all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from gpushare.core.api import PodView
from gpushare.core.placement import MOST_EXAMINED, due_changes_at, is_due
from gpushare.extender import due
from gpushare.extender.due import DuePods, Waiter
from gpushare.extender.queued import QueuedPods

AFTER = 30.0
START = 1_700_000_000
LONGEST = AFTER * 200  # three windows and their pauses

MOMENTS = st.one_of(
    st.integers(0, int(LONGEST)).map(float),
    st.floats(0, LONGEST),
    # where turns begin and end for pods that are created at whole seconds, and a hair beside
    st.builds(
        lambda edge, second, hair: edge * AFTER + second + hair,
        st.sampled_from([1, 13, 25, 49, 73]),
        st.integers(0, 3),
        st.sampled_from([-1e-6, 0.0, 1e-6]),
    ),
)


def pod(uid: str, created: int, priority: int, unschedulable: bool, gated: bool) -> PodView:
    at = np.datetime_as_string(np.datetime64(START + created, "s"))
    conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}] if unschedulable else []
    view = PodView.from_object(
        {
            "metadata": {"uid": uid, "name": uid, "creationTimestamp": f"{at}Z"},
            "spec": {"priority": priority, "schedulingGates": [{"name": "wait"}] if gated else []},
            "status": {"conditions": conditions},
        }
    )
    assert view.gated == gated
    return view


UIDS = st.sampled_from([f"p{number}" for number in range(6)])
MOSTLY = st.sampled_from([True, True, True, False])
STEPS = st.builds(
    lambda turns, second, hair: max(0.0, turns * AFTER + second + hair),
    st.sampled_from([0, 0, 1, 11, 12, 24]),
    st.sampled_from([0, 0, 1, -1]),
    st.sampled_from([-1e-6, 0.0, 0.0, 1e-6, 0.5]),
)


@dataclass(frozen=True)
class SetBack:
    """The clock is set to so many seconds after the start."""

    moment: float


OPERATIONS = st.one_of(
    st.builds(pod, UIDS, st.integers(0, 3), st.integers(0, 2), MOSTLY, MOSTLY.map(lambda ready: not ready)),
    STEPS,
    st.tuples(UIDS, st.booleans()) | st.builds(SetBack, MOMENTS),
)


@pytest.mark.parametrize("few", [0, 100])
def test_it_is_the_turn_of_the_pods_that_a_plain_look_at_all_finds(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due, "_FEW", few)
    compare()


@given(st.lists(OPERATIONS, max_size=40))
@settings(max_examples=200)
def compare(operations: list[PodView | tuple[str, bool] | SetBack | float]) -> None:
    queue = QueuedPods(AFTER)
    now = float(START)
    for operation in operations:
        match operation:
            case PodView():
                queue.put(operation, now)
            case (uid, is_bound):
                known = queue._unbound.get(uid)
                if is_bound and known is not None:
                    queue.put(replace(known, node="n1"), now)
                else:
                    queue.drop(uid)
            case SetBack(moment):
                now = START + moment
            case step:
                now += step
        plain = sorted(
            (-each.priority, queue.since(each), each.uid)
            for each in queue._unbound.values()
            if each.waits_for_room and is_due(now - queue.since(each), AFTER)
        )
        assert list(queue._due.at(now)) == [uid for *_, uid in plain]


@given(MOMENTS)
def test_the_answer_changes_where_it_is_said_to(waited: float) -> None:
    then = due_changes_at(waited, AFTER)
    assert then > waited
    assert is_due(then, AFTER) != is_due(waited, AFTER)
    between = np.linspace(waited, then, 50, endpoint=False)
    assert {is_due(each, AFTER) for each in between.tolist()} == {is_due(waited, AFTER)}


def test_only_pods_for_which_time_has_changed_something_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    monkeypatch.setattr(due, "is_due", lambda waited, after: looked_at.append(waited) or is_due(waited, after))
    pods = DuePods(AFTER)
    for number in range(1000):
        pods.put(Waiter(0, float(number), f"p{number}"))
    assert len(list(pods.at(999.0))) > MOST_EXAMINED
    looked_at.clear()
    for second in range(1000, 1100):
        list(pods.at(float(second)))
    # three pods a second begin or end a window (at 30, 390 and 750 s); each is looked at a second before and then
    assert len(looked_at) <= 100 * 3 * 2 + 6


def test_what_is_kept_of_pods_that_come_and_go_stays_small() -> None:
    pods = DuePods(AFTER)
    for number in range(10_000):
        pods.put(Waiter(0, 0.0, "one"))
        pods.put(Waiter(-number, 0.0, "one"))
        assert list(pods.at(AFTER + number * 1e-3)) == ["one"]
        pods.drop("one")
    assert len(pods._changes) < 1000
    assert not pods._due
    assert not pods._waiters


def test_nothing_is_tracked_where_nothing_is_kept_for_anybody() -> None:
    pods = DuePods(0.0)
    pods.put(Waiter(0, 0.0, "one"))
    assert list(pods.at(1e9)) == []
    assert not pods._waiters
