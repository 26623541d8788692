"""The loop of one GPU: watch the promises, throttle, loosen throttles, ask for a retraction (docs/design.md 5).

Pure: windows and time are arguments, the state is a value.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from gpushare.core.control.freeze_turns import presence
from gpushare.core.control.judgement import (
    doubt_of,
    is_below,
    is_by_neighbours,
    is_known,
    known_tenants,
    throttled,
    works,
)
from gpushare.core.control.relief import (
    KnownTenants,
    given_back,
    let_go,
    may_be_throttled,
    may_leave,
    newest,
    relieved,
)
from gpushare.core.control.response import Response
from gpushare.core.control.slo_reading import SloSign
from gpushare.core.control.slo_relief import (
    GIVEN_UP_SECONDS,
    SloRelief,
    gives_a_step,
    is_neighbours_doing,
    signs_of,
)
from gpushare.core.control.watch_state import GpuWatch, LeavingCause, TenantWatch
from gpushare.core.control.window import (
    FREE,
    WatchActions,
    WatchedTenant,
    WatchNote,
    WatchReason,
    WatchSettings,
    WatchWindow,
)

# The most by which a newcomer's work precedes the window that shows it: the gate writes its clients each second,
# and the agent reads them in the next round.
_UNSEEN_SECONDS: Final = 2.0
_LONGEST_GAP_SECONDS: Final = 5.0  # a gap between windows longer than this counts as this long


def watch(
    state: GpuWatch, window: WatchWindow | None, now: float, settings: WatchSettings
) -> tuple[GpuWatch, WatchActions]:
    """Return the state after a window, and the actions in force from now on.

    1. Update the set of tenants, which come and go at any time; a tenant that is alone runs free.
    2. Ignore a window that is unusable, was seen before, or began before the last change took effect. If no window
       was usable for long, all tenants run free.
    3. A tenant that may no longer be throttled runs free.
    4. Update the estimates of the tenants' effects on each other.
    5. Judge promises: broken when windows in a row show it with confidence, kept again when windows in a row do.
    6. Change duties: up for a throttled tenant that fell below its own promise, down for a broken promise or a
       missed latency target, and slowly up where there is room or where the throttle helps no broken promise.
    7. If no duty helps, or a throttle lasts, ask one tenant to leave.

    Args:
        window: the newest window of the GPU; None if none came and only time passed.
        now: seconds, by the clock of the windows.
    """
    state = _in_time(state, now)
    ends_at = min(window.ends_at, now) if window is not None else now
    if window is None or not window.usable or ends_at <= state.last_ends_at:
        return _without_window(state, window, now, settings)
    elapsed = max(window.seconds, min(_LONGEST_GAP_SECONDS, ends_at - state.last_ends_at))
    anew = {
        each.uid: state.tenants[each.uid].anew()
        for each in window.tenants
        if each.is_anew and each.uid in state.tenants
    }
    state = _with_present(replace(state, tenants={**state.tenants, **anew}), window, now, settings)
    state = replace(state, last_ends_at=ends_at, seen_at=now)
    state, exempted = _with_exempt_free(state, window, now, settings)
    if ends_at - window.seconds < state.changed_at + settings.delay_seconds:
        return state, _actions(state, now, exempted)
    state = _observed(state, window, elapsed)
    known = known_tenants(state, window)
    state, judged = _judged(state, known, elapsed, settings)
    state = _heard(state, window, now)
    state, moved = _with_duties(state, known, settings, window=window, now=now, elapsed=elapsed)
    state, rested = _with_sleepers_free(state, now, settings)
    state = _with_throttled_seconds(state, known, elapsed, settings)
    state, asked = _retraction(state, known, now, elapsed, settings)
    return state, _actions(state, now, (*judged, *moved, *rested, *asked))


def _actions(state: GpuWatch, now: float, notes: tuple[WatchNote, ...] = ()) -> WatchActions:
    tenants = sorted(state.tenants.items())
    broken = tuple(uid for uid, each in tenants if each.is_broken)
    missed = tuple(uid for uid, each in tenants if len(tenants) > 1 and each.slo.is_pressing(now))
    return WatchActions(state.duties, state.retract, state.retract_why, broken, missed, notes)


def _in_time(state: GpuWatch, now: float) -> GpuWatch:
    """Return the state with no time stamp later than now, as after a clock that was set back."""
    if (
        max(state.changed_at, state.last_ends_at, state.seen_at, state.retracted_at, state.left_for_target_at)
        <= now
    ):
        return state
    return replace(
        state,
        changed_at=now,
        last_ends_at=min(now, state.last_ends_at),
        seen_at=min(now, state.seen_at),
        retracted_at=min(now, state.retracted_at),
        left_for_target_at=min(now, state.left_for_target_at),
    )


def _without_window(
    state: GpuWatch, window: WatchWindow | None, now: float, settings: WatchSettings
) -> tuple[GpuWatch, WatchActions]:
    """Let all tenants run free, and ask none to leave, if no window was usable for long; else change nothing."""
    if state.seen_at == -math.inf:
        state = replace(state, seen_at=now)
    blind = now - state.seen_at
    is_acting = state.duties or state.retract is not None or any(each.is_broken for each in state.tenants.values())
    if not is_acting or blind < settings.blind_seconds:
        return state, _actions(state, now)
    why = f": {window.why_not}" if window is not None and window.why_not else ""
    unseen = f"nothing was seen for {blind:.0f} s{why}"
    notes = [
        WatchNote(uid, WatchReason.LET_GO, f"runs free from {duty:.0%} of the time: {unseen}")
        for uid, duty in sorted(state.duties.items())
    ]
    if state.retract is not None:
        notes.append(WatchNote(state.retract, WatchReason.RETRACTION_DROPPED, f"may stay: {unseen}"))
    tenants = {
        uid: replace(
            tenant,
            duty=FREE,
            below=0,
            kept=0,
            is_broken=False,
            broken_seconds=0.0,
            hopeless_seconds=0.0,
            throttled_seconds=0.0,
        )
        for uid, tenant in state.tenants.items()
    }
    state = replace(
        state, tenants=tenants, changed_at=now, retract=None, retract_why="", retract_for=None, calm_seconds=0.0
    )
    return state, _actions(state, now, tuple(notes))


def _with_present(state: GpuWatch, window: WatchWindow, now: float, settings: WatchSettings) -> GpuWatch:
    """Keep records of the present tenants, and restart the timers that lead to a retraction when the set changes.

    A newcomer is not blamed for what was seen before it came, nor the others for what a tenant that left caused.
    The window in which a tenant came or left mixes both sets, so it is not used; the next one is.
    """
    present = {tenant.uid for tenant in window.tenants}
    if present == state.tenants.keys():
        return state
    left = state.tenants.keys() - present
    tenants = {uid: state.tenants.get(uid, TenantWatch()) for uid in sorted(present)}
    tenants = {
        uid: replace(
            tenant,
            hopeless_seconds=0.0,
            broken_seconds=0.0,
            throttled_seconds=0.0 if left else tenant.throttled_seconds,
        )
        for uid, tenant in tenants.items()
    }
    came = present - state.tenants.keys()
    is_ours = left == {state.retract} and not came

    def beside_these(uid: str, slo: SloRelief) -> SloRelief:
        if is_ours and uid == state.retract_for:
            return slo.without_one(now)
        return slo.beside_others() if came else slo.beside_fewer()

    tenants = {uid: replace(tenant, slo=beside_these(uid, tenant.slo)) for uid, tenant in tenants.items()}
    if len(tenants) == 1:
        tenants = {uid: replace(tenant, duty=FREE) for uid, tenant in tenants.items()}
    changed_at = max(state.changed_at, now - settings.delay_seconds) if state.tenants else state.changed_at
    state = replace(state, tenants=tenants, changed_at=changed_at)
    if state.retract is not None and state.retract in left:
        is_for_target = state.retract_for is not None
        relieved = {
            uid: replace(each, relieved_at=now) for uid, each in tenants.items() if uid == state.retract_for
        }
        state = replace(
            state,
            tenants={**tenants, **relieved},
            retract=None,
            retract_why="",
            retract_for=None,
            calm_seconds=0.0,
            retracted_at=now,
            left_for_target_at=now if is_for_target else state.left_for_target_at,
        )
    return state


def _observed(state: GpuWatch, window: WatchWindow, elapsed: float) -> GpuWatch:
    """Update the estimate of every tenant whose progress the window shows.

    The window in which a newcomer that slept, as while it loads its model, begins to work shows a part of its
    progress only. Its own estimate begins with the next one. The windows just before may show the others beside it
    already, as if they were alone, so what those said of the others is taken back (docs/adr/0251).
    """
    starting = {each.uid for each in window.tenants if _is_starting(state, each)}
    ran = {each.uid: state.tenants[each.uid].duty if works(state, each) else 0.0 for each in window.tenants}
    light = frozenset(each.uid for each in window.tenants if each.is_light)
    tenants = dict(state.tenants)
    for each in window.tenants:
        record = tenants[each.uid]
        is_at_work = works(state, each)
        record = replace(
            record,
            asleep_seconds=0.0 if is_at_work else record.asleep_seconds + elapsed,
            slept=record.slept or not is_at_work,
            begun=record.begun or is_at_work,
        )
        if not is_known(state, each) or each.uid in starting or each.progress is None or each.error is None:
            unknown = record.unknown_seconds + elapsed if is_at_work else 0.0
            tenants[each.uid] = replace(record, unknown_seconds=unknown)
            continue
        beside = tuple(uid for uid in ran if uid != each.uid)
        before, lately = record.response, record.since(window.ends_at - window.seconds - _UNSEEN_SECONDS)
        if lately and starting - {each.uid}:
            before = lately[0][1]
            lately = tuple((ends_at, before) for ends_at, _ in lately)
        response = (before or Response.unseen(each.alone)).beside(beside, light)
        others = presence({**ran, each.uid: record.duty}, each.uid)
        error = each.error / record.duty
        running = min(each.progress / record.duty, 1.0 + 2 * error)  # no tenant runs faster than alone
        response = response.after(others, running, error)
        if response.is_impossible:
            response = Response.unseen(each.alone).beside(beside, light).after(others, running, error)
        lately = (*lately, (window.ends_at, before))
        tenants[each.uid] = replace(record, response=response, lately=lately, unknown_seconds=0.0)
    return replace(state, tenants=tenants)


def _is_starting(state: GpuWatch, tenant: WatchedTenant) -> bool:
    """Return whether a tenant that has slept since it came works now."""
    record = state.tenants[tenant.uid]
    return works(state, tenant) and record.slept and not record.begun


def _judged(
    state: GpuWatch, known: KnownTenants, elapsed: float, settings: WatchSettings
) -> tuple[GpuWatch, list[WatchNote]]:
    """Judge every promise; one whose progress is unknown is neither broken nor kept."""
    tenants, notes = dict(state.tenants), []
    for uid, record in state.tenants.items():
        if uid not in known.tenants:
            still = record.is_broken and 0.0 < record.unknown_seconds < settings.blind_seconds
            tenants[uid] = replace(record, below=0, kept=0, is_broken=still)
            continue
        is_short = is_below(known, uid, settings)
        is_kept = not is_short and known.room(uid, known.duties) >= 0
        below, kept = (record.below + 1 if is_short else 0), (record.kept + 1 if is_kept else 0)
        is_broken = below >= settings.windows_to_act or (record.is_broken and kept < settings.windows_to_act)
        tenants[uid] = replace(
            record,
            below=below,
            kept=kept,
            is_broken=is_broken,
            broken_seconds=record.broken_seconds + elapsed if is_broken else 0.0,
            hopeless_seconds=_hopeless(known, uid, record, elapsed, settings) if is_broken else 0.0,
        )
        if is_broken != record.is_broken:
            reason = WatchReason.PROMISE_BROKEN if is_broken else WatchReason.PROMISE_KEPT
            notes.append(WatchNote(uid, reason, _figures(known, uid)))
    return replace(state, tenants=tenants), notes


def _hopeless(
    known: KnownTenants, uid: str, record: TenantWatch, elapsed: float, settings: WatchSettings
) -> float:
    """Return for how many seconds no known throttle could keep this tenant's promise.

    Only windows that show the promise missed count, because the estimate may lag behind the measurements.
    """
    best = relieved(known, {**known.duties, uid: FREE}, [uid], settings, margin=0.0, max_step=FREE)
    if known.room(uid, best) + doubt_of(known, uid, best, settings) >= 0:
        return max(0.0, record.hopeless_seconds - elapsed)
    progress = known.tenants[uid].progress
    is_missed = progress is not None and progress < known.tenants[uid].promise
    return record.hopeless_seconds + (elapsed if is_missed else 0.0)


def _heard(state: GpuWatch, window: WatchWindow, now: float) -> GpuWatch:
    """Record the state of the tenants' latency targets."""
    signs = signs_of(window.tenants)
    tenants = {}
    for uid, one in state.tenants.items():
        slo = one.slo.heard(signs.get(uid), now)
        tenants[uid] = one if slo is one.slo else replace(one, slo=slo)
    return replace(state, tenants=tenants)


def _figures(known: KnownTenants, uid: str) -> str:
    tenant = known.tenants[uid]
    made = f"makes {tenant.progress:.2f} +- {tenant.error:.2f} of its progress alone"
    made = f"{made} by its own count" if tenant.by_report else made
    return f"{made}, {tenant.promise:.2f} are promised"


def _with_duties(
    state: GpuWatch,
    known: KnownTenants,
    settings: WatchSettings,
    *,
    window: WatchWindow,
    now: float,
    elapsed: float,
) -> tuple[GpuWatch, list[WatchNote]]:
    """Change the duties if anything calls for it."""
    before = known.duties
    broken = [
        uid for uid in known.tenants if state.tenants[uid].is_broken and is_by_neighbours(known, uid, settings)
    ]
    unseen = {uid for uid, each in state.tenants.items() if each.unknown_seconds >= settings.blind_seconds}
    duties = {uid: FREE if uid in unseen else duty for uid, duty in before.items()}
    duties = given_back(known, duties, broken, margin=settings.margin)
    waits = any(
        (uid in before and 0 < each.unknown_seconds < settings.blind_seconds) or each.slo.holds(now)
        for uid, each in state.tenants.items()
    )
    state, pressing, stepped = _slo_step(state, known, duties, settings, window=window, now=now, elapsed=elapsed)
    if any(known.room(uid, duties) < settings.margin / 2 for uid in broken):
        duties = throttled(known, duties, broken, settings)
    elif stepped is not None:
        duties = stepped
    # Not while a broken promise is about to be kept again: what changed would be taken for the throttle's effect.
    waits = waits or not all(state.tenants[uid].below for uid in broken)
    is_settled = stepped is None and duties == before and now - state.changed_at >= settings.let_go_seconds
    if is_settled and not waits:
        duties = let_go(known, duties, settings, margin=settings.margin + settings.room, broken=broken)
    changed = {uid: duty for uid, duty in duties.items() if duty != before[uid]}
    if not changed:
        return state, []
    lacking = min(broken, key=lambda uid: known.height(uid, before), default=None)
    why = f"; {lacking} {_figures(known, lacking)}" if lacking is not None else ""
    if not why and pressing:
        why = "".join(f"; {uid} misses its target: {sign.words}" for uid, sign in pressing.items())
    notes = [_change_note(known, uid, before[uid], duty, why) for uid, duty in sorted(changed.items())]
    is_let_go = not pressing and any(duty > before[uid] for uid, duty in changed.items())
    tenants = {
        uid: replace(
            tenant,
            duty=changed.get(uid, tenant.duty),
            slo=replace(tenant.slo, let_go_at=now) if is_let_go else tenant.slo,
        )
        for uid, tenant in state.tenants.items()
    }
    return replace(state, tenants=tenants, changed_at=now), notes


def _with_exempt_free(
    state: GpuWatch, window: WatchWindow, now: float, settings: WatchSettings
) -> tuple[GpuWatch, tuple[WatchNote, ...]]:
    """Let a throttled tenant run free that may not be stopped any more: the host does not stop it either.

    As its class was changed, or the host refuses. The window may mix both, so it is not used.
    """
    exempt = [
        each.uid
        for each in window.tenants
        if state.tenants[each.uid].duty < FREE and not may_be_throttled(each, settings)
    ]
    return _freed(state, dict.fromkeys(exempt, "it cannot be stopped any more"), now)


def _with_sleepers_free(
    state: GpuWatch, now: float, settings: WatchSettings
) -> tuple[GpuWatch, tuple[WatchNote, ...]]:
    """Let a throttled tenant that has not worked for long run free: it may start anew, or compute on CPUs.

    One that works again before then finds its throttle as it was; a later one is judged anew.
    """
    sleepers = {
        uid: f"it has not used the GPU for {each.asleep_seconds:.0f} s"
        for uid, each in state.tenants.items()
        if each.duty < FREE and each.asleep_seconds >= settings.blind_seconds
    }
    return _freed(state, sleepers, now)


def _freed(state: GpuWatch, why: Mapping[str, str], now: float) -> tuple[GpuWatch, tuple[WatchNote, ...]]:
    """Let these throttled tenants run free, each for a reason."""
    if not why:
        return state, ()
    notes = tuple(
        WatchNote(uid, WatchReason.LET_GO, f"runs free from {state.tenants[uid].duty:.0%} of the time: {reason}")
        for uid, reason in sorted(why.items())
    )
    free = {uid: replace(state.tenants[uid], duty=FREE, throttled_seconds=0.0) for uid in why}
    return replace(state, tenants={**state.tenants, **free}, changed_at=now), notes


def _slo_step(
    state: GpuWatch,
    known: KnownTenants,
    duties: dict[str, float],
    settings: WatchSettings,
    *,
    window: WatchWindow,
    now: float,
    elapsed: float,
) -> tuple[GpuWatch, dict[str, SloSign], dict[str, float] | None]:
    """Return the tenants that miss a target in requests after the last change, and the duties after one more step.

    A target is measured: who misses it works, however little progress is inferred, as beside few requests. If no
    tenant can give more time, and nothing shows that neighbours are the cause, the target is given up.
    """
    pressing = {
        uid: sign for uid, sign in signs_of(window.tenants).items() if state.tenants[uid].slo.is_pressing(now)
    }
    if not any(known.duties.keys() - {uid} for uid in pressing):
        return state, {}, None
    fresh = {
        uid: sign
        for uid, sign in pressing.items()
        if (not state.duties or sign.began_at >= state.changed_at + settings.delay_seconds)
        and state.tenants[uid].slo.is_after_leaving(sign)
    }
    broken = [uid for uid, tenant in state.tenants.items() if tenant.is_broken]
    stepped = gives_a_step(known, duties, [*pressing, *broken], settings)
    tenants = dict(state.tenants)
    for uid, sign in fresh.items():
        relief = tenants[uid].slo.after_departure(now)
        if not relief.is_pressing(now):
            tenants[uid] = replace(tenants[uid], slo=relief)
            continue
        if stepped is not None:
            first = sign.measured_seconds if relief.first_seconds is None else relief.first_seconds
            relief = replace(relief, first_seconds=first, stuck_seconds=0.0)
        else:
            relief = replace(relief, stuck_seconds=relief.stuck_seconds + elapsed)
        if relief.stuck_seconds >= settings.hopeless_seconds and not is_neighbours_doing(known, uid, relief):
            relief = relief.given_up(now)
        tenants[uid] = replace(tenants[uid], slo=relief)
    fresh = {uid: sign for uid, sign in fresh.items() if tenants[uid].slo.is_pressing(now)}
    return replace(state, tenants=tenants), fresh, stepped if fresh else None


def _change_note(known: KnownTenants, uid: str, before: float, after: float, why: str) -> WatchNote:
    change = f"runs {after:.0%} of the time, before {before:.0%}"
    own = _figures(known, uid) if uid in known.tenants else "its progress is unknown"
    if after > before:
        return WatchNote(uid, WatchReason.LET_GO, f"{change}; it {own}")
    return WatchNote(uid, WatchReason.THROTTLED, f"{change}{why}; it {own}")


def _retraction(
    state: GpuWatch,
    known: KnownTenants,
    now: float,
    elapsed: float,
    settings: WatchSettings,
) -> tuple[GpuWatch, list[WatchNote]]:
    """Ask one tenant to leave if no duty helps, or drop that request when nothing calls for it any more."""
    cause = _cause(state, known, now, settings)
    if state.retract is not None:
        calm = 0.0 if cause is not None else state.calm_seconds + elapsed
        if calm < settings.hopeless_seconds:
            return replace(state, calm_seconds=calm), []
        note = WatchNote(state.retract, WatchReason.RETRACTION_DROPPED, f"may stay: calm for {calm:.0f} s")
        return replace(state, retract=None, retract_why="", retract_for=None, calm_seconds=0.0), [note]
    if cause is None or now - state.retracted_at < settings.settle_seconds:
        return state, []
    if not known.duties.keys() - {cause.target_of or cause.leaving}:
        return state, []
    tenants = dict(state.tenants)
    if cause.target_of is not None:
        relief = tenants[cause.target_of].slo
        relief = replace(relief, asked_seconds=relief.now_seconds if relief.is_missed else None, left_at=-math.inf)
        tenants[cause.target_of] = replace(tenants[cause.target_of], slo=relief)
    state = replace(
        state,
        tenants=tenants,
        retract=cause.leaving,
        retract_why=cause.why,
        retract_for=cause.target_of,
        calm_seconds=0.0,
    )
    message = f"is the newest tenant that can leave: {cause.why}"
    return state, [WatchNote(cause.leaving, WatchReason.RETRACTION_ASKED, message)]


def _with_throttled_seconds(
    state: GpuWatch, known: KnownTenants, elapsed: float, settings: WatchSettings
) -> GpuWatch:
    tenants = {}
    for uid, tenant in state.tenants.items():
        seconds = tenant.throttled_seconds + (elapsed if uid in known.duties else 0.0)
        seconds = seconds if tenant.duty < settings.lasting_duty else 0.0
        tenants[uid] = (
            tenant if seconds == tenant.throttled_seconds else replace(tenant, throttled_seconds=seconds)
        )
    return replace(state, tenants=tenants)


def _cause(state: GpuWatch, known: KnownTenants, now: float, settings: WatchSettings) -> LeavingCause | None:
    """Return which tenant should leave, and why; None if nothing calls for a retraction.

    A throttle that keeps the promise may last as long as sharing gains more than it costs. For what a tenant
    reports itself, a latency target or a promise that the counters see kept, at most one an hour leaves a GPU:
    whoever has waited longest is next, else one that always asks would keep the others from it for good.
    """
    causes = [*_broken_promises(state, known, now, settings), *_missed_targets(state, known, now, settings)]
    return min(causes, key=state.relieved_at, default=None) or _lasting_throttle(state, known, now, settings)


def _broken_promises(
    state: GpuWatch, known: KnownTenants, now: float, settings: WatchSettings
) -> Iterator[LeavingCause]:
    """Return which tenant should leave for each broken promise that no throttle keeps."""
    limit = settings.retract_after_seconds
    for uid, tenant in state.tenants.items():
        if uid not in known.tenants or not tenant.is_broken or not is_by_neighbours(known, uid, settings):
            continue
        if tenant.hopeless_seconds >= settings.hopeless_seconds:
            why = f"{uid} {_figures(known, uid)}, and no throttle would keep the promise"
        elif tenant.broken_seconds >= limit and tenant.below:
            why = f"{uid} {_figures(known, uid)}, for {tenant.broken_seconds:.0f} s"
        else:
            continue
        by_report, in_vain = known.tenants[uid].by_report, known.tenants[uid].in_vain
        if by_report and (in_vain or now - state.left_for_target_at < GIVEN_UP_SECONDS):
            continue
        leaving = next(iter(may_leave(known, uid, known.duties)), None)
        if leaving is not None:
            yield LeavingCause(leaving, why, uid if by_report else None)


def _missed_targets(
    state: GpuWatch, known: KnownTenants, now: float, settings: WatchSettings
) -> Iterator[LeavingCause]:
    """Return which tenant should leave for each target that is missed while no neighbour can give more time."""
    if now - state.left_for_target_at < GIVEN_UP_SECONDS:
        return
    for uid, tenant in state.tenants.items():
        relief = tenant.slo
        if not relief.is_missed or relief.stuck_seconds < settings.hopeless_seconds:
            continue
        if relief.first_seconds is not None and not relief.has_helped:  # it has eased, or is given up
            continue
        believed = may_leave(known, uid, known.duties) if uid in known.tenants else []
        gave = [other for other in newest(known) if other != uid and known.duties[other] < FREE]
        if relief.has_helped:  # measured, so it overrides the estimates: one of those that gave time
            believed = [other for other in believed if other in gave] or gave
        if believed:
            seconds = relief.stuck_seconds
            why = f"{uid} has missed its latency target for {seconds:.0f} s with nobody left who could give time"
            yield LeavingCause(believed[0], why, uid)


def _lasting_throttle(
    state: GpuWatch, known: KnownTenants, now: float, settings: WatchSettings
) -> LeavingCause | None:
    """Return which tenant should leave because a lasting throttle certainly costs more than sharing gains."""
    limit = settings.retract_after_seconds
    lasting = {uid: each for uid, each in state.tenants.items() if each.throttled_seconds >= limit}
    if not lasting or not known.tenants:
        return None
    longest = max(lasting, key=lambda uid: (lasting[uid].throttled_seconds, uid))
    free = {**known.duties, **dict.fromkeys(lasting, FREE)}
    victim, what = min(known.tenants, key=lambda uid: (known.room(uid, free), uid)), "keeps its promise"
    target_of = next((uid for uid, each in state.tenants.items() if each.slo.holds(now)), None)
    if target_of is not None:
        if target_of not in known.tenants:
            return None
        victim, what = target_of, "meets its latency target"
    else:  # one that reports its progress may lie about what it makes, and what its neighbours cost it
        target_of = next((uid for uid, each in known.tenants.items() if each.by_report), None)
    if target_of is not None and now - state.left_for_target_at < GIVEN_UP_SECONDS:
        return None
    joint = sum(known.progress(uid, known.duties) for uid in known.tenants)
    gains = {uid: known.gain({**free, uid: 0.0}) for uid in may_leave(known, victim, free)}
    surely = (uid for uid, (gain, error) in gains.items() if gain > settings.confidence * error)
    leaving = next(surely, None)
    if leaving is None:
        return None
    duty, seconds = lasting[longest].duty, lasting[longest].throttled_seconds
    throttle = f"{longest} has run {duty:.0%} of the time for {seconds:.0f} s so that {victim} {what}"
    why = f"{throttle}, and all make {joint:.2f} together, {joint + gains[leaving][0]:.2f} without {leaving}"
    return LeavingCause(leaving, why, target_of)
