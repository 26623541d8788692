"""Relief for a tenant that misses its own latency target: its neighbours give up time, step by step.

The target is measured, not inferred, so no model of the neighbours' effects is needed: after each step, a window
of requests that began later shows whether it helped (docs/adr/0145). If nothing that the neighbours gave up
helped, they are not the cause and get their time back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.backoff import Backoff
from gpushare.core.control.freeze_turns import presence
from gpushare.core.control.relief import KnownTenants, may_be_throttled
from gpushare.core.control.slo_reading import SloSign
from gpushare.core.control.window import WatchedTenant, WatchSettings

_STEP: Final = 0.2  # most of a duty that is taken at once
_LEAST_STEP: Final = 0.05
HELPED: Final = 0.8  # a quantile at or below this part of the first one: stopping neighbours helps
EASED: Final = 0.5  # of what the first was above the target: worth keeping, too little to move a pod for
_LEAST_COST: Final = 0.05  # progress lost to neighbours, as estimated, that suffices if no step could be tried
CALM: Final = Backoff(first_seconds=30.0, longest_seconds=600.0)  # longer after each relapse
GIVEN_UP_SECONDS: Final = 3600.0  # until the next try, unless a tenant arrives
_RELAPSE_SECONDS: Final = 120.0  # a miss this soon after a throttle was loosened: it was loosened too early


@dataclass(frozen=True, slots=True)
class SloRelief:
    """The loop's state about one tenant's target.

    Attributes:
        is_missed: the last verdict.
        first_seconds: the quantile when its neighbours first gave up time; None if they have not.
        now_seconds: the last quantile.
        target_seconds: what it should be at most.
        missed_at: when it was last missed.
        stuck_seconds: how long it has been missed while no neighbour had time left to give.
        given_up_at: when neighbours were found not to be the cause.
        relapses: how often it was missed again soon after neighbours got time back.
        let_go_at: when they last got some back.
        asked_seconds: the quantile when a neighbour was asked to leave; None if none was, or once that is judged.
        left_at: when that neighbour had left.
    """

    is_missed: bool = False
    first_seconds: float | None = None
    now_seconds: float = 0.0
    target_seconds: float = 0.0
    missed_at: float = float("-inf")
    stuck_seconds: float = 0.0
    given_up_at: float = float("-inf")
    relapses: int = 0
    let_go_at: float = float("-inf")
    asked_seconds: float | None = None
    left_at: float = float("-inf")

    @property
    def calm_seconds(self) -> float:
        """Return how long the target must be met before the neighbours get their time back."""
        return CALM.seconds(self.relapses + 1)

    @property
    def has_helped(self) -> bool:
        """Return whether the quantile fell when its neighbours gave up time."""
        return self.first_seconds is not None and self.now_seconds <= HELPED * self.first_seconds

    @property
    def has_eased(self) -> bool:
        """Return whether the quantile came nearer to the target when its neighbours gave up time."""
        if self.first_seconds is None or not self.now_seconds < self.first_seconds:
            return False
        return self.now_seconds - self.target_seconds <= EASED * (self.first_seconds - self.target_seconds)

    def is_pressing(self, now: float) -> bool:
        """Return whether it is missed and neighbours may be the cause."""
        return self.is_missed and now - self.given_up_at >= GIVEN_UP_SECONDS

    def holds(self, now: float) -> bool:
        """Return whether throttles must stay: the target is missed, or has not been met for long enough."""
        if now - self.given_up_at < GIVEN_UP_SECONDS:
            return False
        return self.is_missed or now - self.missed_at < self.calm_seconds

    def beside_others(self) -> "SloRelief":
        """Start anew after a tenant arrived: what was tried with other neighbours no longer counts."""
        return replace(self.beside_fewer(), given_up_at=float("-inf"))

    def beside_fewer(self) -> "SloRelief":
        """Reset progress timers after a tenant left; keep the verdict that neighbours are not the cause."""
        return replace(self, first_seconds=None, stuck_seconds=0.0, asked_seconds=None)

    def without_one(self, now: float) -> "SloRelief":
        """Return the record after the neighbour that was asked to leave has left."""
        return replace(self, first_seconds=None, stuck_seconds=0.0, left_at=now)

    def given_up(self, now: float) -> "SloRelief":
        """Return the record after neighbours were found not to be the cause."""
        return replace(self, given_up_at=now, stuck_seconds=0.0, first_seconds=None, asked_seconds=None)

    def is_after_leaving(self, sign: SloSign) -> bool:
        """Return whether the requests of this window came after the neighbour had left, if one was asked to."""
        return sign.began_at >= self.left_at

    def after_departure(self, now: float) -> "SloRelief":
        """Stop blaming neighbours if the quantile did not fall after the one that was asked to leave had left.

        Call it with later requests measured; without such a departure the record stays as it is.
        """
        if self.asked_seconds is None or self.left_at == float("-inf"):
            return self
        if self.now_seconds > HELPED * self.asked_seconds:
            return self.given_up(now)
        return replace(self, asked_seconds=None)

    def heard(self, sign: SloSign | None, now: float) -> "SloRelief":
        """Return the record after a window; None means that the target's state is unknown."""
        if sign is None:
            if not (self.is_missed or self.stuck_seconds) and self.first_seconds is self.asked_seconds is None:
                return self
            return replace(self, is_missed=False, first_seconds=None, stuck_seconds=0.0, asked_seconds=None)
        if not sign.is_missed:
            now_seconds = sign.measured_seconds
            return replace(self, is_missed=False, now_seconds=now_seconds, stuck_seconds=0.0, asked_seconds=None)
        relapsed = not self.is_missed and now - self.let_go_at < _RELAPSE_SECONDS
        was_long_ago = now - self.missed_at > 3 * CALM.longest_seconds
        relapses = 0 if was_long_ago else self.relapses + relapsed
        return replace(
            self,
            is_missed=True,
            now_seconds=sign.measured_seconds,
            target_seconds=sign.target_seconds,
            missed_at=now,
            relapses=relapses,
        )


def gives_a_step(
    known: KnownTenants, duties: Mapping[str, float], spared: Iterable[str], settings: WatchSettings
) -> dict[str, float] | None:
    """Return the duties after one more step, or None if no tenant has time left to give.

    The throughput tenant furthest above its own promise gives; none falls below its own promise plus the margin.

    Args:
        spared: tenants that must not give, because their own promise is broken.
    """
    kept = set(spared)
    donors = sorted(
        (uid for uid, tenant in known.tenants.items() if uid not in kept and may_be_throttled(tenant, settings)),
        key=lambda uid: (known.height(uid, duties), uid),
        reverse=True,
    )
    for uid in donors:
        own = duties[uid] - (known.room(uid, duties) - settings.margin) / known.slope(uid, duties)
        lower = max(settings.min_duty, own, duties[uid] - _STEP)
        if duties[uid] - lower >= _LEAST_STEP:
            return {**duties, uid: round(lower, 3)}
    return None


def is_neighbours_doing(known: KnownTenants, uid: str, relief: SloRelief) -> bool:
    """Return whether neighbours seem to be why the target is missed.

    Either it helped when they gave up time or, if none could give, they are estimated to cost the tenant progress.
    """
    if relief.first_seconds is not None:
        return relief.has_helped or relief.has_eased
    response = known.responses.get(uid)
    if response is None:
        return False
    beside = presence(known.duties, uid)
    return response.running({}) - response.running(beside) >= _LEAST_COST


def signs_of(tenants: Iterable[WatchedTenant]) -> dict[str, SloSign]:
    """Return the state of each tenant's target, by uid."""
    return {tenant.uid: tenant.slo for tenant in tenants if tenant.slo is not None}
