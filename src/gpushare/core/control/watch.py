"""The loop of one GPU: watch the promises, throttle, let go, ask for a retraction (docs/design.md 5).

Pure: windows and time are arguments, the state is a value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpushare.core.api import JobClass
from gpushare.core.control.window import (
    FREE,
    WatchActions,
    WatchedTenant,
    WatchNote,
    WatchReason,
    WatchSettings,
    Window,
)


@dataclass(frozen=True, slots=True)
class GpuWatch:
    """What the loop remembers of one GPU; keep it as it is between calls, start with `GpuWatch()`.

    Attributes:
        duties: in force, by uid; only of tenants that are throttled.
        below: windows in a row that showed a tenant below its promise, by uid.
        broken: tenants whose promise is broken, with the time since when.
        changed_at: when duties last changed.
        last_ends_at: end of the last window that was looked at.
    """

    duties: Mapping[str, float] = field(default_factory=dict)
    below: Mapping[str, int] = field(default_factory=dict)
    broken: Mapping[str, float] = field(default_factory=dict)
    changed_at: float = -math.inf
    last_ends_at: float = -math.inf


def watch(
    state: GpuWatch, window: Window | None, now: float, settings: WatchSettings
) -> tuple[GpuWatch, WatchActions]:
    """Return the state after a window and what is in force from now on.

    Args:
        window: the newest window of the GPU; None: none came, only time passed.
        now: seconds of the windows' clock.
    """
    if window is None or not window.usable or window.ends_at <= state.last_ends_at:
        return state, _actions(state, ())
    present = {tenant.uid: tenant for tenant in window.tenants}
    state = replace(
        state,
        duties={uid: duty for uid, duty in state.duties.items() if uid in present},
        below={uid: _below(state, tenant, settings) for uid, tenant in present.items()},
        last_ends_at=window.ends_at,
    )
    if window.ends_at - window.seconds < state.changed_at + settings.delay_seconds:
        return state, _actions(state, ())
    broken = {
        uid: state.broken.get(uid, now) for uid, count in state.below.items() if count >= settings.windows_to_act
    }
    notes = [
        WatchNote(
            uid,
            WatchReason.PROMISE_BROKEN,
            f"makes {present[uid].progress:.2f} of what it makes alone, promised are {present[uid].promise:.2f}",
        )
        for uid in broken
        if uid not in state.broken
    ]
    state = replace(state, broken=broken)
    donor = _furthest_above(present, broken, state.duties, settings)
    if broken and donor is not None:
        duty = max(settings.min_duty, round(state.duties.get(donor.uid, FREE) - settings.max_step_up, 2))
        notes.append(WatchNote(donor.uid, WatchReason.THROTTLED, f"may run {duty:.0%} of the time"))
        state = replace(state, duties={**state.duties, donor.uid: duty}, changed_at=now)
    return state, _actions(state, tuple(notes))


def _below(state: GpuWatch, tenant: WatchedTenant, settings: WatchSettings) -> int:
    if not tenant.active or tenant.progress is None or tenant.error is None:
        return 0
    is_below = tenant.progress + settings.confidence * tenant.error < tenant.promise
    return state.below.get(tenant.uid, 0) + 1 if is_below else 0


def _furthest_above(
    present: Mapping[str, WatchedTenant],
    broken: Mapping[str, float],
    duties: Mapping[str, float],
    settings: WatchSettings,
) -> WatchedTenant | None:
    """Return the throughput tenant furthest above its own promise, or None where none has something to give."""
    if not settings.can_throttle:
        return None
    able = [
        (tenant.progress / max(tenant.promise, 1e-6), tenant.uid)
        for tenant in present.values()
        if tenant.job_class is JobClass.THROUGHPUT
        and tenant.active
        and tenant.can_throttle
        and tenant.uid not in broken
        and tenant.progress is not None
        and tenant.error is not None
        and tenant.progress * (1 - settings.max_step_up) > tenant.promise + settings.margin
        and duties.get(tenant.uid, FREE) > settings.min_duty
    ]
    return present[max(able)[1]] if able else None


def _actions(state: GpuWatch, notes: tuple[WatchNote, ...]) -> WatchActions:
    return WatchActions(duties=dict(state.duties), broken=tuple(sorted(state.broken)), notes=notes)
