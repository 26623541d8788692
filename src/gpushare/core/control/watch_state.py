"""State of the loop of one GPU between two windows (gpushare.core.control.watch)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpushare.core.control.response import Response
from gpushare.core.control.slo_relief import SloRelief
from gpushare.core.control.window import FREE


@dataclass(frozen=True, slots=True)
class TenantWatch:
    """The loop's state about one tenant.

    Attributes:
        duty: the duty in force; 1 means it runs free.
        below: number of windows in a row that showed it below its promise.
        kept: number of windows in a row that showed a broken promise kept again.
        is_broken: whether its promise is broken.
        broken_seconds: how long it has been broken, in windows that showed its progress.
        hopeless_seconds: how long no throttle was found that keeps the promise.
        throttled_seconds: how long its duty has been below `WatchSettings.lasting_duty`.
        unknown_seconds: time since its progress was last known, while it worked.
        asleep_seconds: how long it has not worked, in windows that were used.
        slept: whether a window has shown it asleep; begun: whether one has shown it at work.
        response: how its progress depends on its neighbours' duties; None before the first window
            that shows it.
        lately: for each of the last windows that showed it, when it ended, and `response` before it; for windows
            that were taken back, `response` before the first of them.
        slo: the state of its own latency target.
        relieved_at: when a tenant last left for what it reports itself: its latency target, or its rate.
    """

    duty: float = FREE
    below: int = 0
    kept: int = 0
    is_broken: bool = False
    broken_seconds: float = 0.0
    hopeless_seconds: float = 0.0
    throttled_seconds: float = 0.0
    unknown_seconds: float = 0.0
    asleep_seconds: float = 0.0
    slept: bool = False
    begun: bool = False
    response: Response | None = None
    lately: tuple[tuple[float, Response | None], ...] = ()
    slo: SloRelief = field(default_factory=SloRelief)
    relieved_at: float = -math.inf

    def anew(self) -> "TenantWatch":
        """Drop the estimates, since its progress is measured otherwise from now on, and what they led to."""
        return replace(self, response=None, lately=(), broken_seconds=0.0, hopeless_seconds=0.0)

    def since(self, moment: float) -> tuple[tuple[float, Response | None], ...]:
        """Return when each window ended that ended after a moment, with the estimate before it."""
        return tuple(each for each in self.lately if each[0] > moment)


@dataclass(frozen=True, slots=True)
class LeavingCause:
    """Tenant that should leave, with the reason (a sentence) and the latency target that it is for, if any."""

    leaving: str
    why: str
    target_of: str | None = None


@dataclass(frozen=True, slots=True)
class GpuWatch:
    """The loop's state about one GPU; start with `GpuWatch()` and pass it back unchanged.

    Attributes:
        tenants: by uid.
        changed_at: when duties or the set of tenants last changed.
        last_ends_at: end of the last window that was used.
        seen_at: when a usable window last came.
        retract: the tenant that should leave.
        retract_why: why it should leave.
        calm_seconds: how long nothing has called for the retraction any more.
        retract_for: the tenant whose latency target it should leave for; None if for a promise.
        retracted_at: when the last retracted tenant had left.
        left_for_target_at: when the last one had left for a latency target.
    """

    tenants: Mapping[str, TenantWatch] = field(default_factory=dict)
    changed_at: float = -math.inf
    last_ends_at: float = -math.inf
    seen_at: float = -math.inf
    retract: str | None = None
    retract_why: str = ""
    retract_for: str | None = None
    calm_seconds: float = 0.0
    retracted_at: float = -math.inf
    left_for_target_at: float = -math.inf

    @property
    def duties(self) -> dict[str, float]:
        """Return the duties of the throttled tenants."""
        return {uid: tenant.duty for uid, tenant in self.tenants.items() if tenant.duty < FREE}

    def relieved_at(self, cause: LeavingCause) -> float:
        """Return when a tenant last left for who reports a cause; -inf if never, or if counters show it."""
        return -math.inf if cause.target_of is None else self.tenants[cause.target_of].relieved_at
