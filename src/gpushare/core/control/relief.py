"""The duties that keep the promises on one GPU, given estimates of the tenants' effects on each other.

A duty is the part of the time that a tenant runs; 1 is unthrottled.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.api import JobClass
from gpushare.core.control.freeze_turns import freeze_overlap_factor, overlap, presence
from gpushare.core.control.response import Response
from gpushare.core.control.window import FREE, WatchedTenant, WatchSettings

_STEP: Final = 0.02
# Freezing a neighbour whose effect is smaller than this helps nobody, and no window can show the effect.
LEAST_EFFECT: Final = 0.02


@dataclass(frozen=True, slots=True)
class KnownTenants:
    """The tenants of one GPU in one window, and the estimates of their effects on each other.

    Attributes:
        working: all tenants that work; a sleeping tenant costs its neighbours nothing.
        tenants: the working tenants whose progress is known.
        responses: the estimated responses of the same tenants.
        duties: duty of each working tenant during the window.
        costs: by tenant, what each neighbour costs it; neighbours that cost nothing are left out.
    """

    working: Mapping[str, WatchedTenant]
    tenants: Mapping[str, WatchedTenant]
    responses: Mapping[str, Response]
    duties: Mapping[str, float]
    costs: Mapping[str, Mapping[str, float]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the costs once: the search reads each of them many times."""
        object.__setattr__(self, "costs", {uid: each.costs() for uid, each in self.responses.items()})

    def progress(self, uid: str, duties: Mapping[str, float]) -> float:
        """Return a tenant's expected progress under these duties."""
        return self.progress_at(uid, duties[uid], duties)

    def progress_at(self, uid: str, own: float, duties: Mapping[str, float]) -> float:
        """Return a tenant's expected progress under its `own` duty and the others' duties."""
        made = own * self.responses[uid].level
        overlap_factor = freeze_overlap_factor(own if other == uid else duty for other, duty in duties.items())
        for other, cost in self.costs[uid].items():
            if other in duties:
                made -= cost * overlap(own, duties[other], overlap_factor)
        return max(0.0, made)

    def error(self, uid: str, duties: Mapping[str, float]) -> float:
        """Return the standard error of `progress`."""
        return duties[uid] * self.responses[uid].running_error(presence(duties, uid))

    def room(self, uid: str, duties: Mapping[str, float]) -> float:
        """Return how far the tenant's expected progress is above its promise; negative if below."""
        return self.progress(uid, duties) - self.tenants[uid].promise

    def gain(self, after: Mapping[str, float]) -> tuple[float, float]:
        """Return how much the total progress changes from the present duties to others, and its standard error."""
        more = sum(self.progress(uid, after) - self.progress(uid, self.duties) for uid in self.tenants)
        errors = [
            each.change_error(presence(self.duties, uid), presence(after, uid), own=(self.duties[uid], after[uid]))
            for uid, each in self.responses.items()
        ]
        return more, math.hypot(*errors)

    def slope(self, uid: str, duties: Mapping[str, float]) -> float:
        """Return how much progress a tenant gains per time that it runs more: others run then, too."""
        own = duties[uid]
        costs = sum(cost for other, cost in self.costs[uid].items() if own + duties.get(other, 0.0) >= 1.0)
        return max(_STEP, self.responses[uid].level - costs)

    def height(self, uid: str, duties: Mapping[str, float]) -> float:
        """Return the expected progress as a multiple of the promise."""
        return self.progress(uid, duties) / max(_STEP, self.tenants[uid].promise)


def may_be_throttled(tenant: WatchedTenant, settings: WatchSettings) -> bool:
    """Return whether this tenant may ever be frozen."""
    return settings.can_throttle and tenant.can_throttle and tenant.job_class is JobClass.THROUGHPUT


def relieved(
    known: KnownTenants,
    duties: Mapping[str, float],
    broken: Collection[str],
    settings: WatchSettings,
    *,
    margin: float,
    max_step: float,
) -> dict[str, float]:
    """Return duties that are expected to keep the broken promises by `margin`, or come as close as possible.

    Greedy in small steps: the tenant furthest below its promise is helped by the throughput tenant furthest above
    its own promise, among those that cost it anything, until no tenant lacks progress or none can give more.
    Tenants far above their promises thus end up equally far above. No tenant is throttled below its own promise
    plus the margin, by more than `max_step`, or while its own promise is broken.

    Args:
        duties: present duty of every working tenant.
        broken: the known tenants to help.
    """
    found = dict(duties)
    progress = {uid: known.progress(uid, duties) for uid in known.responses}
    enough = {uid: tenant.promise + margin for uid, tenant in known.tenants.items()}
    if all(progress[uid] >= enough[uid] for uid in broken):
        return _rounded(found)
    lowest = {
        uid: max(settings.min_duty, duties[uid] - max_step)
        for uid, tenant in sorted(known.tenants.items())
        if uid not in broken and may_be_throttled(tenant, settings)
    }
    helpers = {
        victim: [donor for donor in lowest if known.costs[victim].get(donor, 0.0) >= LEAST_EFFECT]
        for victim in broken
    }
    scale = {uid: max(_STEP, tenant.promise) for uid, tenant in known.tenants.items()}

    def best_of(donors: Iterable[str]) -> str | None:
        """Return the donor furthest above its promise that can give a step (most of the search's time)."""
        best, highest = None, -math.inf
        for uid in donors:
            duty, height = found[uid], progress[uid] / scale[uid]
            lower = max(lowest[uid], duty - _STEP)
            if lower < duty and height >= highest and known.progress_at(uid, lower, found) >= enough[uid]:
                best, highest = uid, height
        return best

    while lacking := [uid for uid in broken if progress[uid] < enough[uid]]:
        lacking.sort(key=lambda uid: (progress[uid] / scale[uid], uid))
        donor = next(filter(None, (best_of(helpers[victim]) for victim in lacking)), None)
        if donor is None:
            break
        found[donor] = max(lowest[donor], found[donor] - _STEP)
        for uid, costs in known.costs.items():
            if donor in costs or uid == donor:
                progress[uid] = known.progress(uid, found)
    return _rounded(found)


def _rounded(duties: Mapping[str, float]) -> dict[str, float]:
    return {uid: round(duty, 3) for uid, duty in duties.items()}


def given_back(
    known: KnownTenants, duties: Mapping[str, float], broken: Collection[str], *, margin: float
) -> dict[str, float]:
    """Return duties that restore every throttled tenant that fell below its own promise.

    A tenant in `broken` gets more time already when it is less than half of `margin` above its promise.
    """
    found = dict(duties)
    for uid in known.responses:
        room = known.room(uid, duties)
        if duties[uid] < FREE and room < (margin / 2 if uid in broken else 0.0):
            needed = duties[uid] + (margin - room) / known.slope(uid, duties)
            found[uid] = round(min(FREE, max(duties[uid], needed)), 3)
    return found


def let_go(
    known: KnownTenants,
    duties: Mapping[str, float],
    settings: WatchSettings,
    *,
    margin: float,
    broken: Collection[str] = (),
) -> dict[str, float]:
    """Return duties with one throttle loosened by a step, if all promises then hold by `margin`; else the same.

    No throttle that helps a promise in `broken` is loosened; `relieved` chooses none of the others again. The
    tenant nearest its own promise comes first. Other throttled tenants get back what this costs them. A step is
    the largest allowed one or half of it; smaller ones are not worth it, except the last.
    """
    throttled = [uid for uid in known.responses if duties[uid] < FREE]
    for uid in sorted(throttled, key=lambda uid: (known.height(uid, duties), uid)):
        for step in (settings.max_step_up, settings.max_step_up / 2):
            raised = {**duties, uid: round(min(FREE, duties[uid] + step), 3)}
            raised = given_back(known, raised, throttled, margin=settings.margin)
            more = [each for each in throttled if raised[each] > duties[each]]
            if any(known.responses[uid].effect(each) >= LEAST_EFFECT for uid in broken for each in more):
                continue
            affected = [
                other
                for other, response in known.responses.items()
                if raised[other] >= FREE and any(response.effect(each) >= LEAST_EFFECT for each in more)
            ]
            if all(known.room(other, raised) >= margin for other in affected):
                return raised
    return dict(duties)


def newest(known: KnownTenants) -> list[str]:
    """Return the throughput tenants that work, newest first."""
    batch = [(each.order, uid) for uid, each in known.working.items() if each.job_class is JobClass.THROUGHPUT]
    return [uid for _, uid in sorted(batch, reverse=True)]


def may_leave(known: KnownTenants, victim: str, duties: Mapping[str, float]) -> list[str]:
    """Return the throughput tenants, newest first, whose leaving may suffice for the victim, or else may help it.

    The victim itself may be among them.
    """
    response = known.responses[victim]
    helps, suffices = [], []
    for uid, tenant in known.working.items():
        if tenant.job_class is not JobClass.THROUGHPUT:
            continue
        without = {**duties, uid: 0.0}
        if uid == victim or response.effect(uid) + response.effect_error(uid) >= LEAST_EFFECT:
            helps.append((tenant.order, uid))
        if uid == victim or known.room(victim, without) + known.error(victim, without) >= 0:
            suffices.append((tenant.order, uid))
    leaving = [each for each in suffices if each in helps] or helps
    return [uid for _, uid in sorted(leaving, reverse=True)]
