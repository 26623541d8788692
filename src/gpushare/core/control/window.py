"""What the loop sees of one GPU in one window, and what it does about it (docs/design.md 5)."""

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
        promise: progress that it may count on.
        progress: inferred over the window, throttles included; None: unknown.
        error: standard error of `progress`; None: unknown, and then the progress counts as unknown too.
        order: rises with arrival; the newest tenant has the highest.
        active: whether it works at all; a tenant that sleeps, has finished or has no client is nobody's fault.
        can_throttle: whether the MPS host can freeze it.
        alone: what it would make with every neighbour stopped, under its cap; 1 where that is unknown.
        slo: what is read of its own latency target; None where it has none, or nothing can be read.
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


@dataclass(frozen=True, slots=True)
class WatchWindow:
    """One window of one GPU.

    Attributes:
        ends_at: seconds of a monotonic clock.
        usable: whether its figures may be acted on; not where counters stand still or a reading stopped tenants.
        why_not: why it is not usable, in words.
        seconds: how long it was; it began at `ends_at - seconds`.
    """

    ends_at: float
    tenants: tuple[WatchedTenant, ...]
    usable: bool = True
    why_not: str = ""
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How the loop watches and acts.

    Attributes:
        windows_to_act: windows in a row that have to show a broken promise before anything is done.
        confidence: errors that a window's progress has to be below the promise to count as broken, and that what
            all would gain by a departure has to be above nothing where only that speaks for it.
        margin: progress above a promise that a throttle aims at, and that a throttled tenant keeps.
        room: progress above the margin that has to be left when a throttle is let go.
        min_duty: least duty that is asked for.
        max_step_down, max_step_up: most that a duty falls at once, or is let go at once.
        let_go_seconds: least time between any change and letting go.
        delay_seconds: how long queued work runs on after a freeze (docs/facts.md 25); a window that begins earlier
            after a change of duties says nothing.
        retract_after_seconds: how long a promise may be broken, or a throttle last with which sharing surely costs
            more than it brings, before a tenant is retracted.
        lasting_duty: a throttle milder than this may last.
        hopeless_seconds: how long no throttle may be found that keeps a promise before a tenant is retracted.
        settle_seconds: least time between the end of one retraction and the next.
        blind_seconds: without a usable window for so long, everyone runs free.
        can_throttle: whether the MPS host can freeze at all; without it the loop goes straight to retraction.
    """

    windows_to_act: int = 2
    confidence: float = 1.0
    margin: float = 0.03
    room: float = 0.02
    min_duty: float = 0.1
    max_step_down: float = 0.5
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
    """Why the loop says something: the reason of an event."""

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
    """What is in force from now on.

    Attributes:
        duties: part of the time that a tenant may run, by uid; who is not listed runs free.
        retract: the tenant that should leave the GPU, as long as that holds; None: nobody.
        retract_why: one sentence with figures.
        broken: tenants whose promise is broken: since two windows in a row showed it, until it is kept again.
        missed: tenants that miss their own latency target, while their neighbours may be why.
        notes: what was done in this call.
    """

    duties: Mapping[str, float] = field(default_factory=dict)
    retract: str | None = None
    retract_why: str = ""
    broken: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    notes: tuple[WatchNote, ...] = ()
