"""When a throttled pod runs and when it is frozen; pure, time is an argument.

The cycle is corrected over time: a pod is owed the frozen time that its duty asks for, less what it had, and the
next run compensates for a look that came late. The limits come from probes on a real kubelet (docs/facts.md 27):
freezes of 0.5 s failed no probe with a time-out of 1 s, 0.8 s of each second failed one once, 0.9 s restarted the
pod.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gpushare.mps.asks import ThrottleAsk, ThrottleAsks

PERIOD_SECONDS: Final = 1.0  # work queued on the GPU runs on for 0.2 to 0.4 s (docs/facts.md 25)
MAX_FREEZE_SECONDS: Final = 0.5
MAX_STOP_SECONDS: Final = 1.2  # for a reading: half a second until the counters are right, then a window
MIN_FREEZE_SECONDS: Final = 0.02
MIN_DUTY_RATIO: Final = 0.1  # the lowest that was measured (docs/facts.md 24); lower duties are raised to it
MEMORY_SECONDS: Final = 2 * MAX_STOP_SECONDS
_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Cycle:
    """State of one pod in its cycle.

    Attributes:
        since: when it was last frozen or thawed.
        owed_seconds: frozen time that its duty asks for and that it has not had yet; below 0 it had too much.
        rest_seconds: how long it must run before it may be frozen again.
        is_stopped: whether a reading froze it, or kept it frozen.
        seen_at: time of the last look.
    """

    is_frozen: bool
    since: float
    owed_seconds: float
    rest_seconds: float
    is_stopped: bool
    seen_at: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The present schedule: which pods are frozen, and when to look next (infinity: when the asks change)."""

    cycles: Mapping[str, Cycle]
    look_at: float

    @property
    def frozen(self) -> frozenset[str]:
        """Return the uids of the pods that are frozen now."""
        return frozenset(uid for uid, cycle in self.cycles.items() if cycle.is_frozen)


NOBODY: Final = Schedule({}, math.inf)


def duty_in_force(ask: ThrottleAsk) -> float:
    """Return the duty that is applied for an ask, at least the lowest that was measured."""
    return max(MIN_DUTY_RATIO, ask.duty_ratio)


def schedule(before: Schedule, asks: ThrottleAsks, now: float) -> Schedule:
    """Return which pods are frozen from now on, and when to look next.

    1. Asks without a live lease are ignored.
    2. A pod without an ask runs; its last freeze is remembered for a while, so that an ask that comes and goes
       freezes a pod no longer than one that stays.
    3. A frozen pod is thawed once it has had the frozen time it is owed, or after the longest freeze.
    4. A running pod is frozen once it has run long enough since its last freeze and is owed a whole freeze.
    5. It waits for the end of another pod's freeze, as long as its own duty is kept all the same: one pod after
       the other, as placement assumes (`core.placement.duties`). Together, those that they disturb would be alone
       for a part of the time and beside all of them for the rest, which helps them less than it costs the frozen.
       A reading neither waits nor lets others wait.
    """
    live = asks.live(now)
    cycles: dict[str, Cycle] = {}
    looks = [asks.lease_ends_at] if live else []
    for uid, cycle in before.cycles.items():
        if uid not in live and (cycle.is_frozen or now - cycle.since < MEMORY_SECONDS):
            thawed = _thaw(cycle, now, math.inf) if cycle.is_frozen else cycle
            cycles[uid] = replace(thawed, owed_seconds=0.0, seen_at=now)
    for uid, ask in live.items():
        cycles[uid] = _until_now(before.cycles.get(uid) or _new(ask, now), ask, now)
    taken = any(cycles[uid].is_frozen and not _is_stop(ask, now) for uid, ask in live.items())
    for uid, ask in sorted(live.items(), key=lambda each: _can_wait_seconds(cycles[each[0]], each[1])):
        cycle = cycles[uid]
        if _may_begin(cycle, ask, now) and (_is_stop(ask, now) or not (taken and _can_postpone(cycle))):
            cycles[uid] = replace(cycle, is_frozen=True, since=now, is_stopped=_is_stop(ask, now))
            taken = taken or not _is_stop(ask, now)
    looks.extend(_look_at(cycles[uid], ask, now, taken) for uid, ask in live.items())
    return Schedule(cycles, min(looks, default=math.inf))


def let_go(before: Schedule, uids: Collection[str], now: float) -> Schedule:
    """Record thaws by others: cancel the frozen time that is owed, and pause as long as the freeze lasted."""
    cycles = dict(before.cycles)
    for uid in uids:
        if (cycle := cycles.get(uid)) is not None and cycle.is_frozen:
            frozen = replace(cycle, since=max(cycle.since, now - MAX_STOP_SECONDS))
            cycles[uid] = replace(_thaw(frozen, now, math.inf), owed_seconds=0.0, seen_at=now)
    return replace(before, cycles=cycles)


def _freeze_seconds(duty: float) -> float:
    """Return the length of one freeze; a smaller duty shortens the runs between freezes, not the freezes."""
    return max(MIN_FREEZE_SECONDS, min(MAX_FREEZE_SECONDS, (1.0 - duty) * PERIOD_SECONDS))


def _due_seconds(duty: float) -> float:
    """Return the owed time at which a freeze begins, chosen so that nothing is owed at its end."""
    return duty * _freeze_seconds(duty)


def _new(ask: ThrottleAsk, now: float) -> Cycle:
    due = _due_seconds(duty_in_force(ask))
    return Cycle(
        is_frozen=False, since=-math.inf, owed_seconds=due, rest_seconds=0.0, is_stopped=False, seen_at=now
    )


def _is_stop(ask: ThrottleAsk, now: float) -> bool:
    return ask.stopped_until is not None and now < ask.stopped_until


def _until_now(cycle: Cycle, ask: ThrottleAsk, now: float) -> Cycle:
    """Return the cycle with what was owed since the last look; thawed if its freeze is over."""
    duty = duty_in_force(ask)
    elapsed = max(0.0, now - cycle.seen_at)
    owed = cycle.owed_seconds + (1.0 - duty) * elapsed - (elapsed if cycle.is_frozen else 0.0)
    owed = max(-MAX_FREEZE_SECONDS, min(MAX_FREEZE_SECONDS, owed)) if duty < 1.0 else 0.0
    stop, spent = _is_stop(ask, now), now - cycle.since
    cycle = replace(cycle, owed_seconds=owed, seen_at=now)
    if cycle.is_frozen:
        limit = MAX_STOP_SECONDS if stop else MAX_FREEZE_SECONDS
        if spent < limit - _EPSILON and (stop or owed > _EPSILON):
            return replace(cycle, is_stopped=cycle.is_stopped or stop)
        return _thaw(cycle, now, duty / (1.0 - duty) if duty < 1.0 else math.inf)
    return cycle


def _may_begin(cycle: Cycle, ask: ThrottleAsk, now: float) -> bool:
    """Return whether the pod runs, has run for long enough, and is owed a whole freeze or to be read."""
    duty = duty_in_force(ask)
    is_due = _is_stop(ask, now) or (duty < 1.0 and cycle.owed_seconds >= _due_seconds(duty) - _EPSILON)
    return not cycle.is_frozen and is_due and now - cycle.since >= cycle.rest_seconds - _EPSILON


def _can_postpone(cycle: Cycle) -> bool:
    """Return whether the owed time is below the longest freeze, so that none of it is lost by a delay."""
    return cycle.owed_seconds < MAX_FREEZE_SECONDS - _EPSILON


def _can_wait_seconds(cycle: Cycle, ask: ThrottleAsk) -> float:
    """Return for how long a running pod's freeze can be put off."""
    duty = duty_in_force(ask)
    return (MAX_FREEZE_SECONDS - cycle.owed_seconds) / (1.0 - duty) if duty < 1.0 else math.inf


def _thaw(cycle: Cycle, now: float, run_per_freeze: float) -> Cycle:
    """Let the pod run: after a freeze for at least half of the usual run, after a reading for its length."""
    spent = now - cycle.since
    rest = spent if cycle.is_stopped else spent * min(1.0, run_per_freeze / 2)
    return replace(cycle, is_frozen=False, since=now, rest_seconds=rest, is_stopped=False)


def _look_at(cycle: Cycle, ask: ThrottleAsk, now: float, taken: bool) -> float:
    duty, stop = duty_in_force(ask), _is_stop(ask, now)
    if cycle.is_frozen and stop:
        return min(ask.stopped_until or now, cycle.since + MAX_STOP_SECONDS)
    if cycle.is_frozen:
        return min(cycle.since + MAX_FREEZE_SECONDS, now + cycle.owed_seconds / duty)
    rested = cycle.since + cycle.rest_seconds
    if stop:
        return max(now, rested)
    if duty >= 1.0:
        return math.inf
    begins = now + (_due_seconds(duty) - cycle.owed_seconds) / (1.0 - duty)
    if taken and begins <= now + _EPSILON:  # it waits; the other's thaw brings a look of its own
        begins = now + _can_wait_seconds(cycle, ask)
    return max(now, rested, begins)
