"""What the loop of one GPU remembers between two windows (gpushare.core.control.watch)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpushare.core.control.response import Response
from gpushare.core.control.slo_relief import SloRelief
from gpushare.core.control.window import FREE


@dataclass(frozen=True, slots=True)
class TenantWatch:
    """What the loop remembers of one tenant.

    Attributes:
        duty: in force; 1: it runs free.
        below: windows in a row that showed it below its promise.
        kept: windows in a row that showed a broken promise kept again.
        is_broken: whether its promise is broken.
        broken_seconds: for how long, in windows that showed its progress.
        hopeless_seconds: for how long no throttle was found that keeps it.
        throttled_seconds: for how long its duty has been below `WatchSettings.lasting_duty`.
        unknown_seconds: since its progress was last known, while it worked.
        response: how it answers to its neighbours' duties; None: never seen.
        slo: its own latency target.
    """

    duty: float = FREE
    below: int = 0
    kept: int = 0
    is_broken: bool = False
    broken_seconds: float = 0.0
    hopeless_seconds: float = 0.0
    throttled_seconds: float = 0.0
    unknown_seconds: float = 0.0
    response: Response | None = None
    slo: SloRelief = field(default_factory=SloRelief)


@dataclass(frozen=True, slots=True)
class LeavingCause:
    """Why a tenant should leave: a sentence, and whose latency target that is for."""

    leaving: str
    why: str
    target_of: str | None = None


@dataclass(frozen=True, slots=True)
class GpuWatch:
    """What the loop remembers of one GPU; start with `GpuWatch()`, and hand it back as it came.

    Attributes:
        tenants: by uid.
        changed_at: when duties last changed, or who is there.
        last_ends_at: end of the last window that was looked at.
        seen_at: when a usable window last came.
        retract: the tenant that should leave.
        retract_why: why.
        calm_seconds: for how long nothing has called for the retraction any more.
        retract_for: whose latency target that is for; None: for a promise.
        retracted_at: when the last such tenant had left.
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
        """Return the duties in force of the tenants that are throttled."""
        return {uid: tenant.duty for uid, tenant in self.tenants.items() if tenant.duty < FREE}
