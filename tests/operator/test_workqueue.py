"""The queue: each key once, not before its time, later after each failure."""

from hypothesis import given
from hypothesis import strategies as st

from gpushare_operator.workqueue import BACKOFF, WorkQueue


def test_a_key_waits_once_at_its_earliest_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", 5.0)
    queue.add("a", 9.0)
    queue.add("a", 2.0)
    assert len(queue) == 1
    assert queue.next_due() == 2.0
    assert queue.take(1.9, 10) == []
    assert queue.take(2.0, 10) == ["a"]
    assert queue.next_due() is None
    assert queue.take(100.0, 10) == [], "the later time is forgotten with the key"


def test_the_longest_waiting_come_first() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key, due in [("c", 3.0), ("a", 1.0), ("b", 2.0)]:
        queue.add(key, due)
    assert queue.take(10.0, 2) == ["a", "b"]
    assert queue.take(10.0, 2) == ["c"]


def test_failures_wait_longer_each_time_until_success() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waits = [queue.failed("a", 0.0) for _ in range(10) if queue.take(1e9, 1) or True]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == BACKOFF.longest_seconds
    queue.succeeded("a")
    assert queue.failed("a", 0.0) == 0.5
    assert queue.failed("b", 0.0, at_least_seconds=7.0) == 7.0


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100))))
def test_every_key_added_is_taken_exactly_once(added: list[tuple[int, float]]) -> None:
    queue: WorkQueue[int] = WorkQueue()
    for key, due in added:
        queue.add(key, due)
    earliest = {key: min(due for k, due in added if k == key) for key, _ in added}
    assert queue.next_due() == min(earliest.values(), default=None)
    taken = queue.take(100.0, 1000)
    assert sorted(taken) == sorted(earliest)
    assert [earliest[key] for key in taken] == sorted(earliest.values())
