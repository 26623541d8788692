"""Input and output of the loop of one GPU: windows, settings and actions (docs/design.md 5)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from gpushare.core.api import JobClass
from gpushare.core.control.slo_reading import SloSign

FREE: Final = 1.0  # the duty of a tenant that is not throttled


@dataclass(frozen=True, slots=True)
class WatchedTenant:
    """One tenant of one GPU in one window; progress is relative to running alone on the whole GPU.

    Attributes:
        promise: promised progress.
        progress: inferred over the window, throttles included; None if unknown.
        error: standard error of `progress`; None if unknown, and then the progress counts as unknown too.
        order: rises with arrival; the newest tenant has the highest.
        active: whether it works at all; False if it sleeps, has finished or has no client.
        can_throttle: whether the MPS host can freeze it.
        alone: its progress under its cap with every neighbour stopped; 1 if unknown.
        is_light: whether it is only known to hardly use the GPU.
        slo: state of its own latency target; None if it has none, or nothing can be read.
        by_report: whether `progress` is what its program reports, and the counters alone do not surely show its
            promise missed (`rate_belief`).
        in_vain: whether what neighbours gave up has not brought its reported rate nearer to its target so far.
        is_anew: whether `progress` is measured otherwise than in the windows before, so that estimates begin anew.
    """

    uid: str
    job_class: JobClass
    promise: float
    progress: float | None
    error: float | None
    order: float
    active: bool = True
    can_throttle: bool = True
    alone: float = 1.0
    slo: SloSign | None = None
    is_light: bool = False
    by_report: bool = False
    in_vain: bool = False
    is_anew: bool = False


@dataclass(frozen=True, slots=True)
class WatchWindow:
    """One window of one GPU.

    Attributes:
        ends_at: end of the window, in seconds of a monotonic clock.
        usable: whether its figures may be acted on; False if counters stood still or a reading stopped tenants.
        why_not: why it is not usable, in words.
        seconds: length of the window, which began at `ends_at - seconds`.
    """

    ends_at: float
    tenants: tuple[WatchedTenant, ...]
    usable: bool = True
    why_not: str = ""
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Settings of the loop.

    Attributes:
        windows_to_act: windows in a row that must show a broken promise before the loop acts.
        confidence: number of standard errors that make a finding certain: that progress is below a promise, and
            that all tenants together gain if one leaves.
        margin: progress above a promise that a throttle aims at, and that a throttled tenant keeps.
        room: progress above the margin that must remain when a throttle is loosened.
        min_duty: smallest duty.
        max_step_down: most that a duty falls at once.
        max_step_up: most that a duty rises at once.
        let_go_seconds: least time between any change and loosening a throttle.
        delay_seconds: how long queued work runs on after a freeze (docs/facts.md 25); a window that begins within
            this time after a change of duties is not used.
        retract_after_seconds: how long a promise may be broken, or a throttle last that certainly costs more than
            sharing gains, before a tenant is retracted.
        lasting_duty: throttles with at least this duty may last.
        hopeless_seconds: how long no throttle may be found that keeps a promise before a tenant is retracted.
        settle_seconds: least time between the end of one retraction and the next.
        blind_seconds: without a usable window for this long, all tenants run free.
        can_throttle: whether the MPS host can freeze at all; if not, the loop goes straight to retraction.
    """

    windows_to_act: int = 2
    confidence: float = 1.0
    margin: float = 0.03
    room: float = 0.02
    min_duty: float = 0.1
    max_step_down: float = 0.7
    max_step_up: float = 0.2
    let_go_seconds: float = 10.0
    delay_seconds: float = 0.4
    retract_after_seconds: float = 300.0
    lasting_duty: float = 0.9
    hopeless_seconds: float = 20.0
    settle_seconds: float = 60.0
    blind_seconds: float = 30.0
    can_throttle: bool = True


class WatchReason(StrEnum):
    """Reason of an event of the loop."""

    PROMISE_BROKEN = "PromiseBroken"
    PROMISE_KEPT = "PromiseKept"
    THROTTLED = "Throttled"
    LET_GO = "LetGo"
    RETRACTION_ASKED = "RetractionAsked"
    RETRACTION_DROPPED = "RetractionDropped"


@dataclass(frozen=True, slots=True)
class WatchNote:
    """One event of one tenant: a sentence with its figures."""

    uid: str
    reason: WatchReason
    message: str


@dataclass(frozen=True, slots=True)
class WatchActions:
    """The actions in force from now on.

    Attributes:
        duties: by uid, part of the time that a tenant may run; tenants that are not listed run free.
        retract: the tenant that should leave the GPU, as long as this lasts; None if none should.
        retract_why: one sentence with figures.
        broken: tenants whose promise is broken, from two windows in a row that show it until it is kept again.
        missed: tenants that miss their own latency target while neighbours may be the cause.
        notes: events of this call.
    """

    duties: Mapping[str, float] = field(default_factory=dict)
    retract: str | None = None
    retract_why: str = ""
    broken: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    notes: tuple[WatchNote, ...] = ()
