"""Turn the rate that a pod reports into progress, within what the counters leave possible (docs/adr/0261).

A target is worth a pod's promise, so its progress is the promise times its rate by the target. What a pod reports
moves its neighbours: outside of what the device's counters leave possible it is not believed, and where nothing
that they gave up brought it nearer to the target, the counters alone count for an hour.
"""

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.control.rate_reading import RateSign
from gpushare.core.control.response import LEAST_ERROR
from gpushare.core.control.sharing import is_decided
from gpushare.core.control.slo_reading import RateWindow
from gpushare.core.control.slo_relief import EASED, GIVEN_UP_SECONDS, HELPED
from gpushare.core.control.window import WatchedTenant, WatchSettings

CLIP_ERRORS: Final = 3.0
"""Errors of the inferred progress that a report may differ by: 1 in 370 honest ones differs by more."""
IMPLAUSIBLE_SECONDS: Final = 60.0
"""After this long outside, a report is not used until it was inside for as long, or until nothing has shown it
outside for an hour (`GIVEN_UP_SECONDS`), as where the counters decide nothing any more."""
RATIO_SECONDS: Final = 90.0
"""Between two reports the inferred progress is corrected by what the last one showed, for so long: a query's value
covers a minute, so that the first one after a change comes later than that."""
# A fall by more than this is believed once it lasts: between two readings, a pause of a second explains it.
_SUDDEN_FALL: Final = 0.2
# Relative, of the promise that a young profile gives: 0.06 of 0.4 (docs/measurements/jobs.md).
_PROMISE_ERROR: Final = 0.15
_MOST_PROGRESS: Final = 1.0  # no tenant runs faster than alone, whatever its counter says
_LONGEST_GAP_SECONDS: Final = 5.0  # a longer time between two windows counts as this long, as in `watch`


@dataclass(frozen=True, slots=True)
class RateBelief:
    """State of what one tenant reports; start with `RateBelief()`.

    Attributes:
        beside: its neighbours at the last window; heard_at: when that was.
        factor: reported by inferred progress in the last such window that showed both; factor_at: when that was.
        made: the progress in the last window that others are compared with, which ended at used_at; is_first:
            whether it was the first after a change on the GPU.
        fell_at: end of the first window that shows a sudden fall; None if the last one shows none.
        is_used: whether the last window's progress was a report, or corrected by one.
        outside_seconds: how long reports lay outside of what the counters leave possible, up to the longest.
        is_implausible: whether they are not used for that.
        claimed, lowest, highest: the last report that lay outside, and what was possible; progress. outside_at:
            when that was.
        first_ratio: its rate by the target when neighbours first gave time for it.
        tried_seconds: for how long they have, in windows that show it still short.
        has_helped: whether its rate rose by a quarter since, or by half of what was missing.
        given_up_at: when they were found not to be the cause.
    """

    beside: frozenset[str] = frozenset()
    factor: float | None = None
    factor_at: float = float("-inf")
    made: float = 0.0
    used_at: float = float("-inf")
    is_first: bool = True
    fell_at: float | None = None
    is_used: bool = False
    heard_at: float = float("-inf")
    outside_seconds: float = 0.0
    is_implausible: bool = False
    claimed: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    outside_at: float = float("-inf")
    first_ratio: float | None = None
    tried_seconds: float = 0.0
    has_helped: bool = True
    given_up_at: float = float("-inf")

    def is_given_up(self, now: float) -> bool:
        """Return whether neighbours are not the cause, as was found within the last hour."""
        return now - self.given_up_at < GIVEN_UP_SECONDS

    @property
    def words(self) -> str:
        """Return why the reports are not used, worded to follow a pod's name."""
        claimed = f"{self.claimed:.2f}" if self.claimed < 1000 else f"{self.claimed:.3g}"
        made = f"by its target it makes {claimed} of its progress alone"
        return f"{made}, and the GPU's counters leave {self.lowest:.2f} to {self.highest:.2f} possible"


def believed(
    belief: RateBelief,
    tenant: WatchedTenant,
    sign: RateSign | None,
    now: float,
    settings: WatchSettings,
    *,
    since: float,
    predicted_error: float | None,
    beside: AbstractSet[str],
    is_eased: bool,
) -> tuple[RateBelief, WatchedTenant]:
    """Return the state, and the tenant with the progress that it reports in place of the inferred one.

    As inferred where there was no usable report for long, while the tenant sleeps, and where reports are not
    believed. Between two reports, as after each change of a duty, the inferred progress is corrected by what the
    last one showed: else the loop would take the jump from one to the other for the effect of its change. So it is
    where a counter has fallen suddenly, until it is certain that its program did not merely pause.

    Args:
        tenant: with its inferred progress.
        since: when duties on its GPU last changed, or a reading in place ended.
        predicted_error: of the model's prediction that its progress was inferred with; None without one.
        beside: its neighbours' uids; is_eased: whether one of them is throttled.
    """
    if beside - belief.beside:
        belief = replace(belief, first_ratio=None, tried_seconds=0.0, given_up_at=float("-inf"))
    elapsed = max(0.0, min(_LONGEST_GAP_SECONDS, now - belief.heard_at))
    belief = replace(belief, beside=frozenset(beside), heard_at=now)
    if belief.is_implausible and now - belief.outside_at >= GIVEN_UP_SECONDS:
        belief = replace(belief, is_implausible=False, outside_seconds=0.0)
    window = sign.since(since, now) if sign is not None and tenant.active else None
    if belief.is_first and sign is not None and sign.has_stopped:
        belief = replace(belief, factor=None)  # the window may have shown a part of the pause
    ratio = window.per_second / sign.target_per_second if sign is not None and window is not None else 0.0
    is_query = sign is not None and sign.asked is not None
    if window is not None and not is_query:
        belief = _with_fall(belief, tenant, tenant.promise * ratio, window, now, since=since)
    if window is None or (belief.fell_at is not None and window.began_at <= belief.fell_at):
        found = _corrected(belief, tenant, now, predicted_error)
    else:
        made, error = tenant.promise * ratio, window.error_ratio
        belief, found = _clipped(
            belief, tenant, made, error, now, elapsed=elapsed, predicted_error=predicted_error
        )
        progress, error = found.progress or 0.0, found.error or 0.0
        if not belief.is_given_up(now):
            short = progress + settings.confidence * max(error, LEAST_ERROR) < tenant.promise
            belief = _tried(belief, ratio, now, elapsed, settings, is_short=short, is_eased=is_eased)
        belief = _remembered(belief, tenant, progress, window, now, since=since, is_query=is_query)
    if belief.is_implausible or belief.is_given_up(now):
        found = tenant
    is_used = found is not tenant
    is_switched = is_used != belief.is_used and found.progress is not None and tenant.active
    belief = replace(belief, is_used=is_used) if is_switched else belief
    by_report = is_used and not _is_surely_short(tenant, settings)
    in_vain = belief.tried_seconds > 0 and not belief.has_helped
    return belief, replace(found, by_report=by_report, in_vain=in_vain, is_anew=is_switched)


def _is_surely_short(tenant: WatchedTenant, settings: WatchSettings) -> bool:
    """Return whether the promise is below what is inferred by more than its error."""
    if tenant.progress is None or tenant.error is None:
        return False
    return tenant.progress + settings.confidence * max(tenant.error, LEAST_ERROR) < tenant.promise


def _with_fall(
    belief: RateBelief, tenant: WatchedTenant, made: float, window: RateWindow, now: float, *, since: float
) -> RateBelief:
    """Return the state after a window was compared with what the last one leads to expect.

    The last one has to be of the same duties. A query's value falls slowly in any case.
    """
    is_comparable = belief.used_at >= since and now - belief.used_at <= RATIO_SECONDS
    if not is_comparable or made >= (1 - _SUDDEN_FALL) * _expected(belief, tenant):
        return replace(belief, fell_at=None)
    return replace(belief, fell_at=window.ends_at) if belief.fell_at is None else belief


def _remembered(
    belief: RateBelief,
    tenant: WatchedTenant,
    progress: float,
    window: RateWindow,
    now: float,
    *,
    since: float,
    is_query: bool,
) -> RateBelief:
    """Return the state after a window was used, with which later ones are compared from now on.

    Windows of a slow counter overlap, and each shows a little more of a pause than the one before: a lower one
    that overlaps the last one is not remembered. A query's value always is.
    """
    is_same, is_higher = window.ends_at == belief.used_at, progress >= _expected(belief, tenant)
    if not (is_same or is_higher or is_query or window.began_at >= belief.used_at):
        return belief
    is_first = belief.is_first if is_same else belief.used_at < since
    belief = replace(belief, made=progress, used_at=window.ends_at, is_first=is_first)
    return replace(belief, factor=progress / tenant.progress, factor_at=now) if tenant.progress else belief


def _expected(belief: RateBelief, tenant: WatchedTenant) -> float:
    """Return the progress that the last window and the counters of now lead to expect; 0 if there is none."""
    return belief.made if tenant.progress is None else tenant.progress * (belief.factor or 0.0)


def _corrected(
    belief: RateBelief, tenant: WatchedTenant, now: float, predicted_error: float | None
) -> WatchedTenant:
    """Return the tenant with its inferred progress corrected by the last report, if that is not long ago."""
    is_late = now - belief.factor_at > RATIO_SECONDS
    if belief.factor is None or is_late or tenant.progress is None or not tenant.active:
        return tenant
    progress = tenant.progress * belief.factor
    lowest, highest = _possible(tenant, predicted_error)
    return replace(tenant, progress=min(max(progress, lowest), highest, _most(tenant)))


def _possible(tenant: WatchedTenant, predicted_error: float | None) -> tuple[float, float]:
    """Return the lowest and the highest progress that the counters leave possible, in terms of the promise."""
    if tenant.progress is None or tenant.error is None or not is_decided(tenant.error, predicted_error):
        return 0.0, math.inf
    error = math.hypot(max(tenant.error, LEAST_ERROR), _PROMISE_ERROR * tenant.progress)
    return max(0.0, tenant.progress - CLIP_ERRORS * error), tenant.progress + CLIP_ERRORS * error


def _clipped(
    belief: RateBelief,
    tenant: WatchedTenant,
    reported: float,
    error_ratio: float,
    now: float,
    *,
    elapsed: float,
    predicted_error: float | None,
) -> tuple[RateBelief, WatchedTenant]:
    """Return the state, and the tenant with the reported progress within what the counters leave possible."""
    lowest, highest = _possible(tenant, predicted_error)
    if highest < math.inf:
        belief = _compared(belief, reported, now, elapsed=elapsed, lowest=lowest, highest=highest)
    progress = min(reported, _most(tenant))
    error = progress * error_ratio
    if not lowest <= reported <= highest:
        progress, error = min(max(progress, lowest), highest), max(error, tenant.error or 0.0)
    return belief, replace(tenant, progress=progress, error=error)


def _most(tenant: WatchedTenant) -> float:
    """Return the most progress that is believed."""
    return max(_MOST_PROGRESS, tenant.progress or 0.0)


def _compared(
    belief: RateBelief, progress: float, now: float, *, elapsed: float, lowest: float, highest: float
) -> RateBelief:
    """Return the state after a report was compared with what the counters leave possible."""
    if lowest <= progress <= highest:
        seconds = max(0.0, belief.outside_seconds - elapsed)
        return replace(belief, outside_seconds=seconds, is_implausible=belief.is_implausible and seconds > 0)
    seconds = min(IMPLAUSIBLE_SECONDS, belief.outside_seconds + elapsed)
    is_implausible = belief.is_implausible or seconds >= IMPLAUSIBLE_SECONDS
    return replace(
        belief,
        outside_seconds=seconds,
        is_implausible=is_implausible,
        claimed=progress,
        lowest=lowest,
        highest=highest,
        outside_at=now,
    )


def _tried(
    belief: RateBelief,
    ratio: float,
    now: float,
    elapsed: float,
    settings: WatchSettings,
    *,
    is_short: bool,
    is_eased: bool,
) -> RateBelief:
    """Return the state after a window: given up if what neighbours gave did not bring the rate nearer.

    As of latency targets, which a fifth less time helps: a quarter more, or half of what was missing.
    """
    if not is_short:  # while they give, what it was before stays what they are judged by
        first_kept = belief.first_ratio if is_eased else None
        return replace(belief, first_ratio=first_kept, tried_seconds=0.0, has_helped=True)
    if not is_eased:
        return replace(belief, first_ratio=ratio) if belief.tried_seconds == 0.0 else belief
    first = ratio if belief.first_ratio is None else belief.first_ratio
    tried = belief.tried_seconds + elapsed
    has_helped = ratio * HELPED >= first or (ratio > first and 1.0 - ratio <= EASED * (1.0 - first))
    if tried < settings.hopeless_seconds or has_helped:
        return replace(belief, first_ratio=first, tried_seconds=tried, has_helped=has_helped)
    return replace(belief, first_ratio=None, tried_seconds=0.0, given_up_at=now)
