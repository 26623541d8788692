"""A pod's rate: how fast it counts its steps, judged from readings of its counter (docs/adr/0261).

Pure, as `slo_reading`: readings and the reader's monotonic time are arguments. A rate is the difference of two
readings by the time between them; which two is chosen by whoever asks, since a rate counts only after the last
change on its GPU.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.api import RateSlo, Slo
from gpushare.core.control.slo_reading import (
    LONGEST_WINDOW_SECONDS,
    LOOKBACK_SECONDS,
    TROUBLE_SECONDS,
    CountedAt,
    CounterReading,
    RateSample,
    RateWindow,
    RequestCounts,
    SloReading,
    SloReason,
    SloRecord,
    SloTrouble,
    after_trouble,
    judged,
    read_slo,
    renewed,
    reset,
    staleness,
    unknown,
)

# What the rate of a steady program scatters by at least: the windows of 1.5 s of the H200's table scatter by 0.04
# (docs/measurements/loop-bars.md), and one between two readings is three times as long.
_STEADY_ERROR: Final = 0.02
# How many changes from one reading to the next show what a rate scatters by: more are then due to chance than to
# what the loop does, which changes a rate for good.
_LEAST_CHANGES: Final = 6
_MEDIAN_CHANGE: Final = 0.6745 * math.sqrt(2)  # of the difference of two normal figures, by their deviation
# Prometheus has a sample each 15 to 30 s and extrapolates to the ends of a window of a minute.
_QUERY_ERROR: Final = 0.05
# A count that is cut off at either end of a window, each evenly between none and a whole one.
_CUT_ERROR: Final = math.sqrt(1 / 6)
_TIMING_ERROR: Final = math.sqrt(1 / 12)  # of a page that was written at some time while it was read
_GOOD_ERROR: Final = 0.04  # relative; a window as certain as this needs not be longer
_WORST_ERROR: Final = 0.2  # relative; a window less certain than this is not used
_STILL_COUNTS: Final = 5.0  # so many counts must be missing until a counter stands still, not only waits
_MOST_READINGS: Final = 32
_CONFIDENCE: Final = 1.64  # as of requests: 1 in 20 windows of a pod exactly at its target


@dataclass(frozen=True, slots=True)
class RateSign:
    """Readings of a pod's rate, as passed to the loop of its GPU.

    Attributes:
        target_per_second: its target.
        trail: the readings of its counter, oldest first; empty for a query.
        asked: the window of a query's value.
    """

    target_per_second: float
    trail: tuple[CountedAt, ...] = ()
    asked: RateWindow | None = None

    def since(self, moment: float, now: float) -> RateWindow | None:
        """Return the newest window that began after a moment; None if there is none that may be used now."""
        window = self.asked if self.asked is not None else rate_since(self.trail, moment)
        if window is None or window.began_at < moment or window.error_ratio > _WORST_ERROR:
            return None
        is_old = now - window.ends_at > max(TROUBLE_SECONDS, window.ends_at - window.began_at)
        return None if is_old else window

    @property
    def has_stopped(self) -> bool:
        """Return whether its counter stands still."""
        return is_still(self.trail)


def read_target(record: SloRecord, reading: SloReading, now: float, slo: Slo | RateSlo) -> SloRecord:
    """Return the record after a reading, of either kind of target."""
    return read_slo(record, reading, now, slo) if isinstance(slo, Slo) else read_rate(record, reading, now, slo)


def read_rate(record: SloRecord, reading: SloReading, now: float, slo: RateSlo) -> SloRecord:
    """Return the record after a reading of a rate.

    A window is judged once its error is small or a minute has passed: missed if the rate is below the target by
    more than chance explains, met if it is not below. Two windows in a row change the verdict. A counter that
    stands still for a minute says nothing: the pod waits, evaluates, or has ended.
    """
    if isinstance(reading, RateSample):
        if not 0.0 <= reading.per_second < math.inf:
            problem: SloTrouble | None = SloTrouble(SloReason.NOT_A_NUMBER, "the rate is not a number")
        else:
            problem = staleness(record, reading.stamp, now)
        return after_trouble(record, problem, now) if problem is not None else _asked(record, reading, now, slo)
    if isinstance(reading, SloTrouble):
        return after_trouble(replace(record, trail=()), reading, now)
    if not isinstance(reading, CounterReading):
        kind = "a histogram" if isinstance(reading, RequestCounts) else "a summary"
        wrong = SloTrouble(SloReason.NO_SERIES, f"the series is {kind}, not a counter")
        return after_trouble(replace(record, trail=()), wrong, now)
    if not 0.0 <= reading.total < math.inf:
        return after_trouble(
            replace(record, trail=()), SloTrouble(SloReason.NOT_A_NUMBER, "the counter is not a number"), now
        )
    return _counted(renewed(record), reading, now, slo)


def _asked(record: SloRecord, reading: RateSample, now: float, slo: RateSlo) -> SloRecord:
    record = renewed(record)
    if reading.stamp is not None:
        if reading.stamp == record.stamp:
            return record  # nothing new yet
        record = replace(record, stamp=reading.stamp, stamp_at=now)
    if not reading.per_second:
        idle = SloTrouble(SloReason.IDLE, "by the query's value it stands still")
        return unknown(replace(record, in_a_row=0, asked=None), idle)
    window = RateWindow(now - LOOKBACK_SECONDS, now, reading.per_second, _QUERY_ERROR)
    return _judged(replace(record, asked=window), window, slo)


def _counted(record: SloRecord, reading: CounterReading, now: float, slo: RateSlo) -> SloRecord:
    trail = record.trail
    latest = CountedAt(now, reading.total, reading.took_seconds)
    if not trail or reading.total < trail[-1].total:
        return reset(replace(record, trail=(latest,)), was_read=bool(trail))
    if reading.total > trail[-1].total and (is_still(trail) or _has_not_begun(trail)):
        trail = ()  # it begins or goes on at some moment between the two readings
    # The reading before the last minute stays, so that the trail covers a minute.
    begin = next((n for n, each in enumerate(trail) if now - each.at < LONGEST_WINDOW_SECONDS), len(trail))
    trail = (*trail[max(0, begin - 1) :][1 - _MOST_READINGS :], latest)
    record = replace(record, trail=trail)
    if latest.at - _last_count_at(trail) >= LONGEST_WINDOW_SECONDS:
        return unknown(replace(record, in_a_row=0), SloTrouble(SloReason.IDLE, "its counter stands still"))
    if record.goes_back:
        return replace(record, resets=record.resets - 1)
    unjudged = [each.at - each.took_seconds for each in trail if each.at >= record.window[1]]
    window = rate_since(trail, min(unjudged, default=now))
    if window is None:
        return record
    is_long = window.ends_at - window.began_at >= LONGEST_WINDOW_SECONDS
    if not is_long and window.error_ratio > _GOOD_ERROR:
        return record
    return _judged(record, window, slo)


def _judged(record: SloRecord, window: RateWindow, slo: RateSlo) -> SloRecord:
    surely = window.per_second * (1 + _CONFIDENCE * window.error_ratio)
    verdict = 1 if surely < slo.target_per_second else -1 if window.per_second >= slo.target_per_second else 0
    seconds = window.ends_at - window.began_at
    detail = f"it counts {window.per_second:.4g} a second over {seconds:.0f} s"
    detail = f"{detail}, the target is {slo.target_per_second:.10g}"
    record = judged(record, verdict=verdict, window=(window.began_at, window.ends_at), detail=detail)
    return replace(record, measured_per_second=window.per_second)


def rate_sign(record: SloRecord, slo: RateSlo) -> RateSign | None:
    """Return what to pass to the loop; None while nothing can be read."""
    if record.trouble_at is not None or record.goes_back or not (record.trail or record.asked):
        return None
    return RateSign(slo.target_per_second, record.trail, record.asked)


def rate_since(trail: tuple[CountedAt, ...], moment: float) -> RateWindow | None:
    """Return the shortest window up to the last reading whose error is small, else the longest, after a moment.

    None if the counter stands still, or was not read twice since then.
    """
    if len(trail) < 2 or is_still(trail):
        return None
    last, grain, best = trail[-1], _grain(trail), None
    scatter = _scatter(trail, grain)
    for first in reversed(trail[:-1]):
        began_at, counts, seconds = first.at - first.took_seconds, last.total - first.total, last.at - first.at
        if began_at < moment:
            break
        if counts <= 0 or seconds <= 0:
            continue
        timing = _TIMING_ERROR * math.hypot(first.took_seconds, last.took_seconds) / seconds
        varying = max(_STEADY_ERROR, scatter * math.sqrt(seconds) / counts)
        error = math.hypot(varying, _CUT_ERROR * grain / counts, timing)
        best = RateWindow(began_at, last.at, counts / seconds, error)
        if error <= _GOOD_ERROR:
            break
    return best


def is_still(trail: tuple[CountedAt, ...]) -> bool:
    """Return whether the counter has stopped: by its rate before, several counts are missing since then."""
    if not trail:
        return False
    until = next(n for n, each in enumerate(trail) if each.total == trail[-1].total)
    silent, before = trail[-1].at - trail[until].at, trail[: until + 1]
    if silent <= 0 or len(before) < 2:
        return False
    seconds = before[-1].at - before[0].at
    missing = (before[-1].total - before[0].total) / max(seconds, 1e-9) * silent
    return missing >= _STILL_COUNTS * _grain(before)


def _has_not_begun(trail: tuple[CountedAt, ...]) -> bool:
    """Return whether the counter has not moved since it was first read, as while its program loads."""
    return trail[-1].total == 0 or (len(trail) > 1 and trail[0].total == trail[-1].total)


def _last_count_at(trail: tuple[CountedAt, ...]) -> float:
    """Return when the last total was first read."""
    return next(each.at for each in trail if each.total == trail[-1].total)


def _scatter(trail: tuple[CountedAt, ...], grain: float) -> float:
    """Return what the count of a second scatters by, one standard deviation, beyond what its error has already.

    Programs vary: the tokens of a step, the time of one. By the median of the changes from one interval between
    readings to the next, so that a rate that changed for good does not count. 0 while there are few.
    """
    changes = []
    for (one, middle), (_, last) in itertools.pairwise(itertools.pairwise(trail)):
        before, after = middle.at - one.at, last.at - middle.at
        if min(before, after) <= 0:
            continue
        rates = (middle.total - one.total) / before, (last.total - middle.total) / after
        took = max(one.took_seconds, middle.took_seconds, last.took_seconds)
        # of an even program the counts of two intervals differ by a grain, or by what a slow page leaves open
        even = (grain + max(rates) * took) * (1 / before + 1 / after) / 2
        changes.append(max(0.0, abs(rates[1] - rates[0]) - even) / math.sqrt((1 / before + 1 / after) / 2))
    if len(changes) < _LEAST_CHANGES:
        return 0.0
    return sorted(changes)[(len(changes) - 1) // 2] / _MEDIAN_CHANGE


def _grain(trail: tuple[CountedAt, ...]) -> float:
    """Return by how much the counter moves at once, as far as its readings show.

    A counter of samples moves by a batch at once, one that is written with each log line by a hundred steps: what
    all of its totals are multiples of. One that is seen to wait between two moves moves by what it moved least.
    """
    moves = [after.total - before.total for before, after in itertools.pairwise(trail)]
    waits = any(not move and any(moves[:place]) and any(moves[place + 1 :]) for place, move in enumerate(moves))
    least = min((move for move in moves if move > 0), default=0.0)
    if not all(each.total.is_integer() for each in trail):
        return least if waits else 0.0
    common = float(math.gcd(*(int(each.total) for each in trail)))
    return max(common, least) if waits else min(common, least)
