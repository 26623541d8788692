import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import LEAST_PROCESS_PERCENT
from gpushare.mps.grants import (
    EXHAUSTED_MIB,
    SETTLE_LIMIT_SECONDS,
    SETTLE_SECONDS,
    UNCOUNTED_MIB,
    ProcessMemory,
    grant_mib,
    grant_percentage,
    to_end,
)

LIMIT = st.integers(1, 200_000)
MEMORY = st.integers(0, 50_000)


def process(pid: int, granted: int | None, used: int | None, granted_at: float = 0.0, changed_at: float = 0.0):
    return ProcessMemory(pid, granted, used, granted_at, changed_at)


def test_a_lone_process_gets_the_whole_limit():
    assert grant_mib(8192, [], 0.0) == 8192


def test_the_next_process_gets_what_its_settled_siblings_leave():
    assert grant_mib(8192, [process(1, 8192, 3000)], 10.0) == 5192


def test_a_sibling_that_still_allocates_is_waited_for_but_not_for_ever():
    busy = process(1, 8192, 3000, granted_at=0.0, changed_at=4.2)
    assert grant_mib(8192, [busy], 4.2 + SETTLE_SECONDS / 2) is None
    assert grant_mib(8192, [busy], SETTLE_LIMIT_SECONDS) == 5192


def test_when_nobody_can_tell_what_is_used_grants_count_in_full():
    assert grant_mib(8192, [process(1, 8000, None)], 0.0) == 192
    assert grant_mib(8192, [process(1, 8192, None)], 0.0) == EXHAUSTED_MIB


def test_a_process_of_which_neither_use_nor_grant_is_known_may_hold_the_whole_limit():
    assert grant_mib(8192, [process(1, None, None)], 0.0) == EXHAUSTED_MIB
    assert grant_mib(8192, [process(1, None, 1000)], 10.0) == 7192


def test_nobody_is_ended_over_memory_that_nobody_measured():
    old, unknown, new = process(1, 8192, 5000, 1.0), process(2, 8192, None, 3.0), process(3, 3000, 4000, 2.0)
    assert to_end(8192, [old, unknown]) == ()
    assert to_end(8192, [unknown, process(4, 1, None, 4.0)]) == ()
    assert to_end(8192, [old, unknown, new]) == (3,)  # what is known passes the limit without it


def test_the_newest_process_of_a_pod_beyond_its_limit_is_ended():
    old, new = process(1, 8192, 7000, 1.0), process(2, 6000, 5000, 2.0)
    assert to_end(8192, [new, old]) == (2,)
    assert to_end(12000, [new, old]) == ()


def test_a_lone_process_stays_whatever_was_decided_since():
    assert to_end(100, [process(1, 8192, 7000)]) == ()


def test_a_process_with_more_than_its_own_ceiling_is_ended_even_if_it_is_alone():
    """A second context in one process is a client of its own, with the whole ceiling again."""
    assert to_end(4096, [process(1, 4096, 4096 + UNCOUNTED_MIB)]) == ()
    assert to_end(4096, [process(1, 4096, 4097 + UNCOUNTED_MIB)]) == (1,)
    beyond, other = process(1, 4096, 6000, 1.0), process(2, 100, 90, 2.0)
    assert to_end(4096, [beyond, other]) == (1,), "not the newest, which did nothing"


@given(LIMIT, st.lists(st.tuples(st.none() | MEMORY, st.none() | MEMORY), max_size=6))
def test_the_less_is_known_the_less_is_granted(limit, rows):
    """Unknown is the cautious side: learning what a process uses (within its grant) only ever frees memory."""
    unknown = [process(pid, granted, None) for pid, (granted, _) in enumerate(rows)]
    told = [
        process(pid, granted, None if used is None else min(used, limit if granted is None else granted))
        for pid, (granted, used) in enumerate(rows)
    ]
    cautious, informed = grant_mib(limit, unknown, 100.0), grant_mib(limit, told, 100.0)
    assert cautious is not None
    assert informed is not None
    assert EXHAUSTED_MIB <= cautious <= informed


@given(LIMIT, st.lists(st.tuples(MEMORY, MEMORY), max_size=6))
def test_at_every_grant_use_and_grant_together_are_within_the_limit(limit, siblings):
    processes = [process(pid, granted, used) for pid, (granted, used) in enumerate(siblings)]
    granted = grant_mib(limit, processes, 100.0)
    assert granted is not None
    used = sum(p.used_mib or 0 for p in processes)
    assert granted == EXHAUSTED_MIB or used + granted <= limit
    assert granted >= EXHAUSTED_MIB


@given(LIMIT, st.lists(st.tuples(MEMORY, st.floats(0, 100)), max_size=6))
def test_what_stays_is_within_the_limit_or_alone_and_older_than_what_ends(limit, rows):
    processes = [process(pid, None, used, at) for pid, (used, at) in enumerate(rows)]
    ended = to_end(limit, processes)
    staying = [p for p in processes if p.pid not in ended]
    assert len(staying) <= 1 or sum(p.used_mib or 0 for p in staying) <= limit
    for pid in ended:
        assert all(p.granted_at <= processes[pid].granted_at for p in staying)


@given(st.integers(1000, 100_000), st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_processes_that_come_one_after_the_other_never_pass_the_limit(limit, appetites):
    """Each takes a part of its grant once and stays: the sum holds without anybody being ended."""
    running: list[ProcessMemory] = []
    for pid, appetite in enumerate(appetites):
        granted = grant_mib(limit, running, 1000.0)
        assert granted is not None
        # With the smallest grant no context fits: such a process ends with CUDA's out of memory.
        if granted > EXHAUSTED_MIB:
            running.append(process(pid, granted, int(granted * appetite)))
        assert sum(p.used_mib or 0 for p in running) <= limit
    assert to_end(limit, running) == ()


def percentages(cap: int, processes: int, arrivals: int) -> list[int]:
    """Start so many processes of a pod, one after the other; who gets nothing waits."""
    granted: list[int] = []
    for _ in range(arrivals):
        if (percentage := grant_percentage(cap, processes, granted)) is not None:
            granted.append(percentage)
    return granted


@pytest.mark.parametrize(
    ("cap", "processes", "granted"),
    [
        (20, 1, [20]),
        (20, 3, [7, 7, 6]),
        (50, 4, [13, 13, 12, 12]),
        (20, 16, [6, 6, 6]),  # the pod of an "auto" share that became too small for its processes
        (5, 1, [5]),
        (1, 4, [1]),
        (99, 2, [50, 49]),
        (100, 1, [100] * 20),  # not capped: nothing to divide
    ],
)
def test_a_pods_cap_is_divided_evenly_and_whoever_comes_too_late_waits(cap, processes, granted):
    assert percentages(cap, processes, 20) == granted


def test_who_comes_after_one_has_left_gets_what_is_free():
    assert grant_percentage(20, 1, [8]) == 12
    assert grant_percentage(20, 2, [8]) == 12
    assert grant_percentage(20, 1, [15]) is None  # 5% would be rounded up to 8 SMs, beyond the cap


def test_a_client_whose_percentage_nobody_knows_counts_as_the_whole_cap():
    assert grant_percentage(40, 2, [None]) is None


@given(st.integers(1, 99), st.integers(1, 48), st.lists(st.one_of(st.none(), st.integers(1, 100)), max_size=48))
def test_whatever_runs_the_next_process_stays_within_the_pods_cap(cap, processes, siblings):
    percentage = grant_percentage(cap, processes, siblings)
    if percentage is not None:
        others = sum(cap if p is None else max(p, LEAST_PROCESS_PERCENT) for p in siblings)
        assert others + percentage <= cap
        assert percentage >= min(cap, LEAST_PROCESS_PERCENT)


@given(st.integers(1, 99), st.data())
def test_as_many_processes_as_admission_allows_all_get_their_part(cap, data):
    processes = data.draw(st.integers(1, max(1, cap // LEAST_PROCESS_PERCENT)))
    assert sum(granted := percentages(cap, processes, processes)) == cap
    assert len(granted) == processes
    assert max(granted) - min(granted) <= 1
