"""A pod's own latency target: when it is met, missed and unknown, from readings and the reader's clock."""

import math
from bisect import bisect_left
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.api import ConditionStatus, PodSeries, Slo
from gpushare.core.control.slo_reading import (
    BORDERLINE_SECONDS,
    LEAST_REQUESTS,
    LONGEST_WINDOW_SECONDS,
    SIGN_SECONDS,
    STALE_SECONDS,
    TROUBLE_SECONDS,
    QuantileSample,
    RequestCounts,
    SloReason,
    SloRecord,
    SloTrouble,
    read_slo,
)

SLO = Slo(0.99, 0.05, PodSeries(8080, "request_seconds"))
BOUNDS = (0.01, 0.05, 0.1, 1.0)
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
DEAD = SloTrouble(SloReason.UNREACHABLE, "refused")


class Server:
    """A pod's histogram of request times."""

    def __init__(self):
        self.counts = [0] * (len(BOUNDS) + 1)

    def serve(self, *times):
        for time in times:
            self.counts[bisect_left(BOUNDS, time)] += 1
        return self

    def page(self):
        cumulative = [float(sum(self.counts[: n + 1])) for n in range(len(self.counts))]
        return RequestCounts(BOUNDS, tuple(cumulative[:-1]), cumulative[-1])


def read(readings, record=None, start=0.0, step=5.0, slo=SLO):
    """Read one after another, five seconds apart; return the record after each."""
    record, seen = record or SloRecord(), []
    for number, reading in enumerate(readings):
        record = read_slo(record, reading, start + step * number, slo)
        seen.append(record)
    return seen


def windows(*loads, server=None):
    """Readings of a server that served these requests between them."""
    server = server or Server()
    pages = [server.page()]
    pages.extend(server.serve(*load).page() for load in loads)
    return pages


FAST, SLOW = [0.02] * 200, [0.02] * 150 + [0.3] * 50


def test_two_windows_in_a_row_decide_in_either_direction():
    seen = read(windows(FAST, FAST, SLOW, FAST, SLOW, SLOW, FAST, FAST))
    assert [each.met for each in seen] == [UNKNOWN, UNKNOWN, TRUE, TRUE, TRUE, TRUE, FALSE, FALSE, TRUE]
    assert seen[6].reason is SloReason.MISSED
    assert "200 requests" in seen[6].detail
    assert "50ms" in seen[6].detail


def test_the_sign_says_when_its_requests_began():
    seen = read(windows(SLOW, SLOW), start=100.0)
    sign = seen[-1].sign(110.0)
    assert sign is not None
    assert sign.is_missed
    assert sign.began_at == 105.0
    assert 0.1 < sign.measured_seconds <= 1.0
    assert seen[0].sign(100.0) is None


def test_a_sign_without_new_windows_ends():
    last = read(windows(SLOW, SLOW))[-1]
    assert last.met is FALSE
    assert last.sign(10.0 + SIGN_SECONDS) is not None
    assert last.sign(11.0 + SIGN_SECONDS) is None
    assert SIGN_SECONDS >= LONGEST_WINDOW_SECONDS, "a window may take so long"


def test_windows_that_decide_nothing_are_borderline_after_a_while():
    """Two in a hundred are slow where one may be: more than allowed, and no more than chance explains."""
    borderline = [0.02] * 98 + [0.3] * 2
    seen = read(windows(*[borderline] * 40))
    assert all(each.met is UNKNOWN for each in seen)
    reasons = [each.reason for each in seen]
    begins = reasons.index(SloReason.BORDERLINE)
    assert 5.0 * begins == 5.0 + BORDERLINE_SECONDS
    assert set(reasons[:begins]) == {SloReason.STARTING}
    assert set(reasons[begins:]) == {SloReason.BORDERLINE}
    after = read(windows(FAST, FAST, borderline), replace(seen[-1], base=None), start=300.0)
    assert [each.reason for each in after[2:]] == [SloReason.MET, SloReason.MET]


def test_a_few_slow_requests_are_chance():
    """At the target itself one request in a hundred is slow; more count once chance cannot explain them."""
    at_the_target = [0.02] * 198 + [0.3] * 2
    a_little_more = [0.02] * 196 + [0.3] * 4
    seen = read(windows(at_the_target, at_the_target, *[a_little_more] * 5))
    assert seen[2].met is TRUE
    assert seen[-1].met is TRUE


def test_too_few_requests_are_gathered_and_then_unknown():
    few = [0.3] * (LEAST_REQUESTS // 4)
    seen = read(windows(*[few] * 12))
    assert [each.met for each in seen if each.met is not UNKNOWN][:1] == [FALSE]
    assert seen[4].measured_seconds is not None  # four readings make one window
    rare = read(windows(*[[0.3]] * 30))
    assert all(each.met is UNKNOWN for each in rare)
    assert rare[-1].reason is SloReason.TOO_FEW_REQUESTS


def test_a_pod_without_requests_is_no_longer_missed():
    server = Server()
    seen = read(windows(SLOW, SLOW, server=server))
    assert seen[-1].met is FALSE
    idle = read([server.page()] * 20, seen[-1], start=15.0)
    assert idle[-1].met is UNKNOWN
    assert idle[-1].reason is SloReason.TOO_FEW_REQUESTS
    assert idle[-1].sign(15.0 + 5 * 19) is None
    assert 15.0 + 5 * [each.met for each in idle].index(UNKNOWN) <= 10 + LONGEST_WINDOW_SECONDS + 5


def test_a_failed_reading_keeps_what_was_said_for_moments_and_gives_the_loop_nothing():
    seen = read(windows(SLOW, SLOW))
    dead = read([DEAD] * 5, seen[-1], start=15.0)
    assert [each.met for each in dead] == [FALSE, FALSE, FALSE, UNKNOWN, UNKNOWN]
    assert all(each.sign(15.0 + 5 * n) is None for n, each in enumerate(dead))
    assert dead[-1].reason is SloReason.UNREACHABLE
    assert dead[-1].detail == "refused"
    assert TROUBLE_SECONDS == 15.0


def test_what_can_be_read_again_begins_with_a_window_of_its_own():
    server = Server()
    dead = read([DEAD] * 5, read(windows(SLOW, SLOW, server=server))[-1], start=15.0)
    again = read(windows(FAST, FAST, server=server), dead[-1], start=40.0)
    assert [each.met for each in again] == [UNKNOWN, UNKNOWN, TRUE]
    assert [each.reason for each in again] == [SloReason.STARTING, SloReason.STARTING, SloReason.MET]


def test_a_restarted_process_counts_from_zero():
    seen = read([*windows(SLOW), *windows(SLOW, SLOW)])
    assert [each.met for each in seen] == [UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, FALSE]


def test_counts_that_go_back_again_and_again_are_said():
    one, other = windows(SLOW)[-1], windows(FAST, FAST)[-1]
    seen = read([one, other] * 10)
    assert all(each.met is UNKNOWN for each in seen)
    assert any("several processes" in each.detail and each.reason is SloReason.BAD_ANSWER for each in seen)


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (RequestCounts((), (), 5.0), SloReason.BAD_ANSWER),
        (RequestCounts((0.1,), (math.nan,), 5.0), SloReason.NOT_A_NUMBER),
        (RequestCounts((0.1,), (1.0,), math.nan), SloReason.NOT_A_NUMBER),
        (RequestCounts((0.1,), (6.0,), 5.0), SloReason.NOT_A_NUMBER),
        (RequestCounts((0.1,), (-1.0,), 5.0), SloReason.NOT_A_NUMBER),
        (RequestCounts((0.01,), (1.0,), 5.0), SloReason.BUCKETS),
        (QuantileSample(math.nan, 100.0), SloReason.NOT_A_NUMBER),
        (QuantileSample(math.inf), SloReason.NOT_A_NUMBER),
        (QuantileSample(-0.1), SloReason.NOT_A_NUMBER),
    ],
)
def test_figures_that_cannot_be_are_unknown(reading, reason):
    [*_, last] = read([reading] * 2)
    assert last.met is UNKNOWN
    assert last.reason is reason
    assert last.detail


def test_a_summary_counts_only_with_requests():
    seen = read([QuantileSample(0.2, 100.0 * n) for n in range(4)])
    assert [each.met for each in seen] == [UNKNOWN, UNKNOWN, FALSE, FALSE]
    silent = read([QuantileSample(0.2, 100.0)] * 30)
    assert all(each.met is UNKNOWN for each in silent)


@pytest.mark.parametrize("skew", [0.0, 86_400.0, -86_400.0])
def test_a_query_is_taken_by_its_own_clock_however_wrong(skew):
    samples = [QuantileSample(0.2, stamp=1e9 + skew + 5 * n) for n in range(3)]
    assert [each.met for each in read(samples)] == [UNKNOWN, FALSE, FALSE]


def test_a_query_whose_clock_stands_still_is_stale():
    seen = read([QuantileSample(0.2, stamp=1e9 + min(n, 2)) for n in range(20)])
    assert seen[3].met is FALSE
    unknown_at = 5 * [each.met is UNKNOWN for each in seen[2:]].index(True)
    assert STALE_SECONDS <= unknown_at <= STALE_SECONDS + TROUBLE_SECONDS + 10
    assert seen[-1].reason is SloReason.STALE
    assert all(abs(each.in_a_row) <= 2 for each in seen)


def test_the_same_value_of_a_query_twice_is_one_window():
    seen = read([QuantileSample(0.2, stamp=5.0), QuantileSample(0.2, stamp=5.0)])
    assert seen[-1].met is UNKNOWN


def test_a_clock_that_was_set_back_goes_on_from_there():
    stamps = [1000.0, 1005.0, 10.0, 15.0, 20.0]
    assert read([QuantileSample(0.01, stamp=stamp) for stamp in stamps])[-1].met is TRUE


times = st.lists(st.floats(min_value=0.0, max_value=2.0), max_size=60)


@given(st.lists(times, min_size=1, max_size=12))
def test_it_is_missed_only_where_requests_were_slow_and_met_only_where_they_were_not(loads):
    seen = read(windows(*loads))
    served = [time for load in loads for time in load]
    if all(time <= SLO.target_seconds for time in served):
        assert all(each.met is not FALSE for each in seen)
    if all(time > SLO.target_seconds for time in served):
        assert all(each.met is not TRUE for each in seen)
    for record in seen:
        assert record.measured_seconds is None or 0 <= record.measured_seconds <= BOUNDS[-1]


figures = st.one_of(st.floats(), st.floats(min_value=0, max_value=1e6))
anything = st.one_of(
    st.just(DEAD),
    st.builds(QuantileSample, figures, st.one_of(st.none(), figures), st.one_of(st.none(), figures)),
    st.builds(RequestCounts, st.just(BOUNDS), st.tuples(*[figures] * len(BOUNDS)), figures),
)


@given(st.lists(anything, max_size=15), st.floats(min_value=0.1, max_value=120.0))
def test_whatever_is_read_the_record_stays_sound(readings, step):
    for number, record in enumerate(read(readings, step=step)):
        sign = record.sign(step * number)
        assert record.reason
        if sign is not None:
            assert math.isfinite(sign.measured_seconds)
            assert sign.is_missed is (record.met is FALSE)
        if record.met is not UNKNOWN:
            assert record.reason in {SloReason.MET, SloReason.MISSED}
