"""Judge a promise by one window and the estimates, and choose the throttle that keeps it."""

import math
from collections.abc import Mapping
from typing import Final

from gpushare.core.control.relief import KnownTenants, relieved
from gpushare.core.control.response import LEAST_ERROR
from gpushare.core.control.watch_state import GpuWatch
from gpushare.core.control.window import FREE, WatchedTenant, WatchSettings, WatchWindow

# Neighbours slow a tenant down but do not stop it: a tenant without any progress is asleep.
ASLEEP_PROGRESS: Final = 0.02
_LEAST_STEP: Final = 0.05  # of a duty, if no step suffices anyway
_AVERAGED_WINDOWS: Final = 4  # with this many windows or more, their average counts too


def works(state: GpuWatch, tenant: WatchedTenant) -> bool:
    """Return whether the tenant worked in the window, as far as known; a throttled one may progress little."""
    is_asleep = tenant.progress is not None and tenant.progress <= ASLEEP_PROGRESS
    return tenant.active and not (is_asleep and state.tenants[tenant.uid].duty >= FREE)


def is_known(state: GpuWatch, tenant: WatchedTenant) -> bool:
    """Return whether the tenant worked and its progress can be judged: a figure with an error and a promise."""
    figures = (tenant.progress, tenant.error, tenant.promise)
    return works(state, tenant) and all(figure is not None and 0 <= figure < math.inf for figure in figures)


def known_tenants(state: GpuWatch, window: WatchWindow) -> KnownTenants:
    """Return the tenants of a window with what is estimated of them, under the duties that the state has."""
    judged = [each for each in window.tenants if is_known(state, each)]
    responses = {e.uid: response for e in judged if (response := state.tenants[e.uid].response) is not None}
    known = {each.uid: each for each in judged if each.uid in responses}
    working = {each.uid: each for each in window.tenants if works(state, each)}
    return KnownTenants(working, known, responses, {uid: state.tenants[uid].duty for uid in working})


def is_below(known: KnownTenants, uid: str, settings: WatchSettings) -> bool:
    """Return whether this window, or its average with earlier ones, shows the promise broken with confidence.

    The average counts only if this window agrees with it. Averaging removes noise but no constant error, so half
    of a window's error always counts. Without a working neighbour a promise is never counted as broken.
    """
    tenant, response = known.tenants[uid], known.responses[uid]
    if len(known.duties) < 2 or tenant.progress is None or tenant.error is None:
        return False
    if tenant.progress + settings.confidence * max(tenant.error, LEAST_ERROR) < tenant.promise:
        return True
    is_average_below = known.room(uid, known.duties) + doubt_of(known, uid, known.duties, settings) < 0
    return response.windows >= _AVERAGED_WINDOWS and is_average_below and tenant.progress < tenant.promise


def doubt_of(known: KnownTenants, uid: str, duties: Mapping[str, float], settings: WatchSettings) -> float:
    """Return by how much a tenant's estimated progress under these duties may well be wrong (a ratio)."""
    error = max(known.tenants[uid].error or 0.0, LEAST_ERROR)
    return settings.confidence * max(error / 2, known.error(uid, duties))


def is_by_neighbours(known: KnownTenants, uid: str, settings: WatchSettings) -> bool:
    """Return whether the tenant could keep its promise if every neighbour stopped; otherwise no action helps it.

    So a profile that promises too much costs the neighbours no more than one try.
    """
    tenant, response = known.tenants[uid], known.responses[uid]
    doubt = settings.confidence * max((tenant.error or 0.0) / 2, response.running_error({}))
    return response.running({}) + doubt >= tenant.promise


def throttled(
    known: KnownTenants, duties: Mapping[str, float], broken: list[str], settings: WatchSettings
) -> dict[str, float]:
    """Return duties that keep the broken promises by the margin and the doubt, else by less, else nearly.

    What is measured may be too high by the doubt; a throttle that proves too strong is loosened later, one that is
    too weak costs two further windows. The last only if the step is large enough, so that duties which help too
    little do not follow the noise.
    """
    doubt = max(doubt_of(known, uid, duties, settings) for uid in broken)
    plans = []
    for margin in (settings.margin + doubt, settings.margin, settings.margin / 3):
        found = relieved(known, duties, broken, settings, margin=margin, max_step=settings.max_step_down)
        if all(known.room(uid, found) >= margin for uid in broken):
            return found
        plans.append(found)
    _, whole, _ = plans
    return whole if any(duties[uid] - whole[uid] >= _LEAST_STEP for uid in duties) else dict(duties)
