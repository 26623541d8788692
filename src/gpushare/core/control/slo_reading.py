"""Whether a pod's own latency target is met, judged from readings of its requests (docs/adr/0145).

The record, and what becomes of it without a reading, are those of a rate too (`rate_reading`).

Pure: readings and the reader's monotonic time are arguments. Clocks of the pod or of Prometheus are never compared
with ours: a window is the time between two readings, by our clock.
"""

import itertools
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from gpushare.core.api import ConditionStatus, Slo, in_time

LEAST_REQUESTS: Final = 20  # in a window; fewer say nothing about a quantile
LONGEST_WINDOW_SECONDS: Final = 60.0  # a window that has too few requests by then is discarded
WINDOWS_TO_DECIDE: Final = 2  # in a row with the same result, until the verdict changes
LOOKBACK_SECONDS: Final = 60.0  # a value from a query or summary is taken to cover this long
TROUBLE_SECONDS: Final = 15.0  # without a reading, the last verdict stays for this long
SIGN_SECONDS: Final = LONGEST_WINDOW_SECONDS + TROUBLE_SECONDS  # the loop forgets the last verdict after this long
BORDERLINE_SECONDS: Final = 150.0  # undecided for this long: the pod is about at its target
STALE_SECONDS: Final = 30.0  # Prometheus' evaluation time must advance within this time
# Requests above the target are too many if they exceed the expected number by this many standard deviations and
# half a request; 1 in 20 windows of a pod exactly at its target do, 1 in 400 pairs of windows.
_CONFIDENCE: Final = 1.64
_MOST_RESETS: Final = 6  # a reset adds 2, a window takes 1: two processes on one port reset every other time


class SloReason(StrEnum):
    """Reason for which a target is met, missed or unknown, as in the condition `SLOMet`."""

    MET = "Met"
    MISSED = "Missed"
    STARTING = "Starting"
    BORDERLINE = "Borderline"
    TOO_FEW_REQUESTS = "TooFewRequests"
    UNREACHABLE = "Unreachable"
    TOO_LARGE = "TooLarge"
    TOO_COSTLY = "TooCostly"
    BAD_ANSWER = "BadAnswer"
    NO_SERIES = "NoSeries"
    NOT_A_NUMBER = "NotANumber"
    BUCKETS = "BucketsBelowTarget"
    STALE = "Stale"
    NO_PROMETHEUS = "NoPrometheus"
    HOST_NETWORK = "HostNetwork"
    NOT_LATENCY = "NotLatency"
    NOT_THROUGHPUT = "NotThroughput"
    IDLE = "Idle"
    IMPLAUSIBLE = "Implausible"


# Reasons of a reading that yielded nothing.
SLO_TROUBLES: Final = (
    SloReason.UNREACHABLE,
    SloReason.TOO_LARGE,
    SloReason.TOO_COSTLY,
    SloReason.BAD_ANSWER,
    SloReason.NO_SERIES,
    SloReason.NO_PROMETHEUS,
    SloReason.HOST_NETWORK,
    SloReason.NOT_LATENCY,
    SloReason.NOT_THROUGHPUT,
)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """A histogram of request times since the pod's process began.

    Attributes:
        bounds_seconds: upper bounds of the buckets, ascending, without the infinite one.
        cumulative: number of requests up to each bound.
        total: all requests.
    """

    bounds_seconds: tuple[float, ...]
    cumulative: tuple[float, ...]
    total: float


@dataclass(frozen=True, slots=True)
class QuantileSample:
    """A quantile computed by the source: by a summary, or by a Prometheus query.

    Attributes:
        total: requests since the pod's process began; None if unknown.
        stamp: the source's own time of the value; only compared with other stamps of the source.
    """

    seconds: float
    total: float | None = None
    stamp: float | None = None


@dataclass(frozen=True, slots=True)
class SloTrouble:
    """Reason for which a reading yielded nothing."""

    reason: SloReason
    detail: str


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Count of a pod since its process began; reading it took `took_seconds`."""

    total: float
    took_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RateSample:
    """A rate computed by a Prometheus query; `stamp` as of a quantile."""

    per_second: float
    stamp: float | None = None


SloReading = RequestCounts | QuantileSample | CounterReading | RateSample | SloTrouble


@dataclass(frozen=True, slots=True)
class CountedAt:
    """A counter as read at a moment of our clock, when the page had come; reading it took `took_seconds`."""

    at: float
    total: float
    took_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RateWindow:
    """The rate between two readings; `error_ratio` is relative to it, one standard deviation."""

    began_at: float
    ends_at: float
    per_second: float
    error_ratio: float


@dataclass(frozen=True, slots=True)
class SloSign:
    """The state of a tenant's target, as passed to the loop of its GPU.

    Attributes:
        is_missed: whether the last windows in a row missed it; otherwise they met it.
        began_at: start of the last window, by the clock of the windows.
        measured_seconds: the quantile in that window.
        target_seconds: what it should be at most.
        words: target and figures, worded to follow a pod's name.
    """

    is_missed: bool
    began_at: float
    measured_seconds: float
    target_seconds: float
    words: str


@dataclass(frozen=True, slots=True)
class SloRecord:
    """State of one pod's target; start with `SloRecord()`.

    Attributes:
        met: the last verdict.
        in_a_row: number of windows in a row that missed the target; negative for windows that met it.
        base: the counts at the start of the present window, read at `base_at`.
        window: begin and end of the last window that could be judged.
        stamp: the last new stamp of the source, read at `stamp_at`.
        trouble_at: since when readings fail; None while they work.
        resets: score of recent resets of the counts, see `_MOST_RESETS`.
        undecided_at: end of the first undecided window; None if the target is decided or no window has come.
        trail: of a rate, the readings of the last minute, oldest first.
        asked: of a rate by a query, the window of its last value.
        measured_per_second: the rate in the last window that was judged.
    """

    met: ConditionStatus = ConditionStatus.UNKNOWN
    reason: SloReason = SloReason.STARTING
    detail: str = "no window was read yet"
    in_a_row: int = 0
    measured_seconds: float | None = None
    target_seconds: float = math.nan
    base: RequestCounts | float | None = None
    base_at: float = -math.inf
    window: tuple[float, float] = (-math.inf, -math.inf)
    stamp: float = -math.inf
    stamp_at: float = -math.inf
    trouble_at: float | None = None
    resets: int = 0
    undecided_at: float | None = None
    trail: tuple[CountedAt, ...] = ()
    asked: RateWindow | None = None
    measured_per_second: float | None = None

    @property
    def goes_back(self) -> bool:
        """Return whether its counts go back again and again, so that a rise between two readings means nothing."""
        return self.resets >= _MOST_RESETS - 1

    def sign(self, now: float) -> SloSign | None:
        """Return the state to pass to the loop; None while it is unknown, or if no window has come for long."""
        if now - self.window[1] > SIGN_SECONDS:
            return None
        if self.met is ConditionStatus.UNKNOWN or self.trouble_at is not None or self.measured_seconds is None:
            return None
        is_missed = self.met is ConditionStatus.FALSE
        return SloSign(is_missed, self.window[0], self.measured_seconds, self.target_seconds, self.detail)


def read_slo(record: SloRecord, reading: SloReading, now: float, slo: Slo) -> SloRecord:
    """Return the record after a reading.

    A window is judged once it has enough requests: missed if more requests were slow than chance explains, met if
    no more were slow than the target allows. Two such windows in a row change the verdict; otherwise it stays.
    Without a readable value, or with too few requests for a minute, the verdict is unknown.
    """
    if isinstance(reading, SloTrouble):
        return after_trouble(record, reading, now)
    if isinstance(reading, CounterReading | RateSample):
        wrong = SloTrouble(SloReason.NO_SERIES, "the series is a counter, not a histogram or summary")
        return after_trouble(record, wrong, now)
    stamp = reading.stamp if isinstance(reading, QuantileSample) else None
    problem = _problem(reading, slo) or staleness(record, stamp, now)
    if problem is not None:
        return after_trouble(record, problem, now)
    record = renewed(record)
    if isinstance(reading, QuantileSample):
        if reading.stamp is not None and reading.stamp == record.stamp:
            return record  # nothing new yet
        if reading.stamp is not None:
            record = replace(record, stamp=reading.stamp, stamp_at=now)
        if reading.total is None:
            verdict = 1 if reading.seconds >= slo.target_seconds else -1
            window = (now - LOOKBACK_SECONDS, now)
            return _judged(record, slo, verdict=verdict, seconds=reading.seconds, window=window)
    return _after_counts(record, reading, now, slo)


def _after_counts(record: SloRecord, reading: RequestCounts | QuantileSample, now: float, slo: Slo) -> SloRecord:
    counted = reading if isinstance(reading, RequestCounts) else float(reading.total or 0.0)
    if not _continues(record.base, counted):
        return reset(replace(record, base=counted, base_at=now), was_read=record.base is not None)
    requests = _total(counted) - _total(record.base)
    if requests < LEAST_REQUESTS:
        if now - record.base_at < LONGEST_WINDOW_SECONDS:
            return record
        few = SloTrouble(SloReason.TOO_FEW_REQUESTS, f"fewer than {LEAST_REQUESTS} requests in a minute")
        return unknown(replace(record, in_a_row=0, base=counted, base_at=now), few)
    window = (record.base_at, now)
    after = replace(record, base=counted, base_at=now)
    seen = f" over {window[1] - window[0]:.0f} s, {requests:.0f} requests"
    if isinstance(reading, RequestCounts) and isinstance(record.base, RequestCounts):
        slow = requests - _up_to(record.base, reading, slo.target_seconds)
        verdict = _verdict(requests, slow, slo)
        quantile = _quantile(record.base, reading, slo.quantile_ratio)
        return _judged(after, slo, verdict=verdict, seconds=quantile, window=window, seen=seen)
    seconds = reading.seconds if isinstance(reading, QuantileSample) else math.nan
    window = (min(record.base_at, now - LOOKBACK_SECONDS), now)
    verdict = 1 if seconds >= slo.target_seconds else -1
    return _judged(after, slo, verdict=verdict, seconds=seconds, window=window, seen=seen)


def _judged(
    record: SloRecord, slo: Slo, *, verdict: int, seconds: float, window: tuple[float, float], seen: str = ""
) -> SloRecord:
    """Return the record after a window; `verdict` is 1 for missed, -1 for met, 0 for neither."""
    percent = f"p{slo.quantile_ratio * 100:.6g}"
    detail = f"{percent} is {in_time(seconds)}{seen}, the target is {in_time(slo.target_seconds)}"
    record = judged(record, verdict=verdict, window=window, detail=detail)
    return replace(record, measured_seconds=seconds, target_seconds=slo.target_seconds)


def judged(record: SloRecord, *, verdict: int, window: tuple[float, float], detail: str) -> SloRecord:
    """Return the record after a window, without its figure; `verdict`: 1 for missed, -1 for met, 0 for neither."""
    in_a_row = 0 if verdict == 0 else verdict + (record.in_a_row if verdict * record.in_a_row > 0 else 0)
    in_a_row = max(-WINDOWS_TO_DECIDE, min(WINDOWS_TO_DECIDE, in_a_row))
    met, reason, undecided_at = record.met, record.reason, None
    if abs(in_a_row) == WINDOWS_TO_DECIDE:
        is_met = in_a_row < 0
        met = ConditionStatus.TRUE if is_met else ConditionStatus.FALSE
        reason = SloReason.MET if is_met else SloReason.MISSED
    elif met is ConditionStatus.UNKNOWN:
        undecided_at = window[1] if record.undecided_at is None else record.undecided_at
        is_long = window[1] - undecided_at >= BORDERLINE_SECONDS
        reason = SloReason.BORDERLINE if is_long else SloReason.STARTING
    return replace(
        record,
        met=met,
        reason=reason,
        detail=detail,
        in_a_row=in_a_row,
        window=window,
        resets=max(0, record.resets - 1),
        undecided_at=undecided_at,
    )


def renewed(record: SloRecord) -> SloRecord:
    """Return the record once something can be read, as after trouble."""
    if record.trouble_at is not None and record.met is ConditionStatus.UNKNOWN:
        record = replace(record, reason=SloReason.STARTING, detail="read again, no window is complete yet")
    return replace(record, trouble_at=None)


def reset(record: SloRecord, *, was_read: bool) -> SloRecord:
    """Return the record whose counts begin anew, as of a restarted process; unknown if they do again and again."""
    resets = min(_MOST_RESETS, record.resets + 2) if was_read else record.resets
    record = replace(record, resets=resets, in_a_row=0)
    if resets < _MOST_RESETS:
        return record
    why = "its counts go back again and again: do several processes answer on the port?"
    return unknown(record, SloTrouble(SloReason.BAD_ANSWER, why))


def after_trouble(record: SloRecord, trouble: SloTrouble, now: float) -> SloRecord:
    """Keep the last verdict for a moment, then say why it is unknown; the next window starts anew."""
    since = now if record.trouble_at is None else record.trouble_at
    record = replace(record, trouble_at=since, base=None, in_a_row=0)
    if record.met is not ConditionStatus.UNKNOWN and now - since < TROUBLE_SECONDS:
        return record
    return unknown(record, trouble)


def unknown(record: SloRecord, why: SloTrouble) -> SloRecord:
    """Return the record of a target of which nothing is known, for a reason."""
    return replace(
        record,
        met=ConditionStatus.UNKNOWN,
        reason=why.reason,
        detail=why.detail,
        measured_seconds=None,
        measured_per_second=None,
        undecided_at=None,
    )


def staleness(record: SloRecord, stamp: float | None, now: float) -> SloTrouble | None:
    """Return the trouble with a source whose clock does not advance; its difference from ours does not matter."""
    if stamp is None or stamp > record.stamp:
        return None
    if stamp < record.stamp - STALE_SECONDS:  # its clock was set back; continue from there
        return None
    if now - record.stamp_at < STALE_SECONDS:
        return None
    return SloTrouble(SloReason.STALE, f"Prometheus' own time stands still for {STALE_SECONDS:.0f} s and more")


def _problem(reading: RequestCounts | QuantileSample, slo: Slo) -> SloTrouble | None:
    """Return what is wrong with the figures of a reading; None if nothing is."""
    if isinstance(reading, QuantileSample):
        numbers = (reading.seconds, reading.total or 0.0)
        if not all(0.0 <= figure < math.inf for figure in numbers):
            return SloTrouble(
                SloReason.NOT_A_NUMBER, "the quantile is not a number: no requests, or a wrong series"
            )
        return None
    figures = (*reading.cumulative, reading.total)
    rising = all(a <= b for a, b in itertools.pairwise(figures))
    bounds = reading.bounds_seconds
    if not bounds or len(bounds) != len(reading.cumulative):
        return SloTrouble(SloReason.BAD_ANSWER, "the histogram has no buckets")
    if not rising or not all(0.0 <= figure < math.inf for figure in figures):
        return SloTrouble(SloReason.NOT_A_NUMBER, "the histogram's buckets are no rising counts")
    if slo.target_seconds > bounds[-1]:
        why = f"the histogram's largest bound, {in_time(bounds[-1])}, is below the target"
        return SloTrouble(SloReason.BUCKETS, why)
    return None


def _total(counted: RequestCounts | float | None) -> float:
    return counted.total if isinstance(counted, RequestCounts) else counted or 0.0


def _continues(base: RequestCounts | float | None, counted: RequestCounts | float) -> bool:
    """Return whether counts continue the earlier ones; after a restart of the pod's process they start anew."""
    if isinstance(counted, RequestCounts):
        return (
            isinstance(base, RequestCounts)
            and base.bounds_seconds == counted.bounds_seconds
            and base.total <= counted.total
            and all(old <= new for old, new in zip(base.cumulative, counted.cumulative, strict=True))
        )
    return isinstance(base, float) and base <= counted


def _verdict(requests: float, slow: float, slo: Slo) -> int:
    """Return 1 (missed) if more requests were slow than chance explains, -1 (met) if at most the allowed, or 0."""
    allowed = (1.0 - slo.quantile_ratio) * requests
    doubt = _CONFIDENCE * math.sqrt(allowed * slo.quantile_ratio) + 0.5
    if slow > allowed + doubt:
        return 1
    return -1 if slow <= allowed else 0


def _within(base: RequestCounts, now: RequestCounts) -> list[tuple[float, float]]:
    """Return each bucket's upper bound and the window's requests up to it."""
    counts = (new - old for old, new in zip(base.cumulative, now.cumulative, strict=True))
    return list(zip(now.bounds_seconds, counts, strict=True))


def _up_to(base: RequestCounts, now: RequestCounts, seconds: float) -> float:
    """Return the window's requests up to a time; within a bucket they are assumed to be spread evenly."""
    lower, below = 0.0, 0.0
    for bound, count in _within(base, now):
        if seconds <= bound:
            part = (seconds - lower) / (bound - lower) if bound > lower else 1.0
            return below + (count - below) * max(0.0, part)
        lower, below = bound, count
    return below


def _quantile(base: RequestCounts, now: RequestCounts, ratio: float) -> float:
    """Return a quantile of the window as Prometheus' histogram_quantile does: at most the largest bound."""
    wanted = ratio * (now.total - base.total)
    lower, below = 0.0, 0.0
    for bound, count in _within(base, now):
        if count >= wanted:
            part = (wanted - below) / (count - below) if count > below else 1.0
            return lower + (bound - lower) * part
        lower, below = bound, count
    return lower
