"""Phases of a program: signatures between which it changes, such as training and evaluation.

A window belongs to the phases that explain it best. One that none explains says that some program does other work
than its signatures know of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.gpu import Counters
from gpushare.core.progress.attribution import UNINFORMED_MEAN, Attribution, TenantEvidence, attribute
from gpushare.core.progress.clock import at_clock
from gpushare.core.progress.counter_errors import CounterRow, counters_of

# Misfits of a window, in errors (docs/measurements/attribution.md): of measured sets with the right signatures the
# median is 0.6, and 95% are below 2.8 and 1.2 (two datasets); with one tenant's signature exchanged for another
# program's the medians are 4.3 and 1.8.
GOOD_FIT: Final = 1.0
BAD_FIT: Final = 2.0
# Where all that is known is a profile, perhaps of another cap: the same program's windows miss it by up to 5,
# other programs' by 9 and more (the same page).
FAR_FIT: Final = 6.0
_BETTER: Final = 0.7  # of the misfit, that another phase has to leave at most
# One inference takes 2 ms with 8 tenants and 4 with 16, of a window of a second and a budget of 1% of a core. What
# is left to try after this many goes on with the next window; after all of it nothing is tried for a while.
MOST_TRIES: Final = 4
REST_SECONDS: Final = 30.0
_REWEIGHTINGS: Final = 3
_LIGHT_RATIO: Final = 0.05  # of the SMs: whatever the progress of such a tenant, it explains no misfit


_Place = tuple[int, int]  # a tenant, and one of its signatures


@dataclass(frozen=True, slots=True)
class PhaseSearch:
    """What the windows before told of the phases of the same tenants; start with `PhaseSearch()`.

    Attributes:
        phases: that explained the last window best; empty: the usual ones.
        open_places: still to be tried; recent: phases that explained a window, the latest one first.
        rest_seconds: in which nothing is tried, unless the misfit gets worse than this one.
    """

    phases: tuple[int, ...] = ()
    open_places: tuple[_Place, ...] = ()
    recent: tuple[_Place, ...] = ()
    rest_seconds: float = 0.0
    misfit: float = 0.0

    def is_resting(self, misfit: float) -> bool:
        """Return whether nothing else is to be tried for a window with this misfit."""
        return self.rest_seconds > 0.0 and misfit <= max(GOOD_FIT, self.misfit / _BETTER)

    def places(self, known: Sequence[int], phases: tuple[int, ...]) -> tuple[_Place, ...]:
        """Return what is to be tried: the usual phases, then those seen last, then the others.

        Args:
            known: number of each tenant's phases; phases: those of the best inference so far.
        """
        if self.open_places:
            return self.open_places
        usual = [(tenant, 0) for tenant, at in enumerate(phases) if at]
        others = [(tenant, at) for at in range(1, max(known)) for tenant, most in enumerate(known) if at < most]
        return (*usual, *self.recent, *(place for place in others if place not in self.recent))


@dataclass(frozen=True, slots=True)
class PhasedAttribution:
    """What was inferred of one window.

    Attributes:
        found: by tenant; phases: the place of the signature that each was taken with.
        misfit: of the window, in errors; None where it cannot be told.
        search: to be passed with the next window, while the tenants, their caps and phases are the same.
    """

    found: tuple[Attribution, ...]
    phases: tuple[int, ...]
    misfit: float | None
    search: PhaseSearch = PhaseSearch()


def misfit(
    device: Counters,
    tenants: Sequence[TenantEvidence],
    progress: Sequence[float | None],
    sm_clock_mhz: float | None = None,
) -> float | None:
    """Return by how many errors the counters miss the sum of the tenants' work; the root of the mean square.

    None where somebody has no signature, or no progress though it uses the GPU, or nothing was measured.
    """
    works = [_work(tenant, sm_clock_mhz) for tenant in tenants]
    known = [work for work in works if work is not None]
    made = [
        UNINFORMED_MEAN if each is None else each
        for each, work in zip(progress, works, strict=True)
        if each is not None or (work is not None and work.activity_ratio() < _LIGHT_RATIO)
    ]
    names = counters_of(device, known)
    if not works or len(known) < len(works) or len(made) < len(works) or not names:
        return None
    is_guessed = [tenant.is_capped and tenant.capped_work is None for tenant in tenants]
    rows = [CounterRow.of(name, device, known, is_guessed) for name in names]
    misses = [
        (sum(drawn * p for drawn, p in zip(row.design, made, strict=True)) - row.seen) ** 2 / row.variance(made)
        for row in rows
    ]
    return math.sqrt(sum(misses) / len(misses))


def attribute_phases(
    device: Counters,
    choices: Sequence[Sequence[TenantEvidence]],
    sm_clock_mhz: float | None = None,
    search: PhaseSearch | None = None,
    window_seconds: float = 1.0,
) -> PhasedAttribution:
    """Infer each tenant's progress with those of its signatures that explain the window best.

    The first ones count where they explain it well; another one only where it explains it much better. A window
    begins with the phases of the one before, and the usual ones are tried again once in a while.

    Args:
        choices: what may be known of each tenant, at least one each, the usual one first.
        search: of the window before.
    """

    def tried(phases: tuple[int, ...]) -> PhasedAttribution:
        tenants = [each[at] for each, at in zip(choices, phases, strict=True)]
        found = attribute(device, tenants, sm_clock_mhz)
        missed = misfit(device, tenants, [each.progress_ratio for each in found], sm_clock_mhz)
        return PhasedAttribution(found, phases, missed)

    before = search or PhaseSearch()
    before = replace(before, rest_seconds=max(0.0, before.rest_seconds - window_seconds))
    best = tried(before.phases or (0,) * len(choices))
    if best.misfit is None or before.is_resting(best.misfit):
        return replace(best, search=before)
    start, recent, tries = best.phases, before.recent, 0
    places = _worth_trying(best, before.places([len(each) for each in choices], start))
    while places and tries < MOST_TRIES:
        (tenant, at), *places = places
        other = tried((*best.phases[:tenant], at, *best.phases[tenant + 1 :]))
        tries += 1
        if _counts_instead(other, best, is_usual=at == 0):
            best = other
            recent = ((tenant, at), *(each for each in recent if each != (tenant, at))) if at else recent
            places = _worth_trying(best, places)
    worst = max(before.misfit, best.misfit or 0.0) if before.open_places and best.phases == start else best.misfit
    rest = REST_SECONDS if tries and not places else 0.0
    return replace(best, search=PhaseSearch(best.phases, tuple(places), recent, rest, worst or 0.0))


def _worth_trying(best: PhasedAttribution, places: Sequence[_Place]) -> list[_Place]:
    """Return the places of other phases than the present ones: only usual ones where those explain the window."""
    is_explained = best.misfit is not None and best.misfit <= GOOD_FIT
    return [(tenant, at) for tenant, at in places if at != best.phases[tenant] and not (at and is_explained)]


def _counts_instead(other: PhasedAttribution, best: PhasedAttribution, *, is_usual: bool) -> bool:
    """Return whether another inference takes the place of the best so far."""
    if other.misfit is None or best.misfit is None:
        return False
    if is_usual:
        return other.misfit <= GOOD_FIT or best.misfit > _BETTER * other.misfit
    return other.misfit <= _BETTER * best.misfit


def shape_misfit(
    signature: Counters, seen: Counters, taken_mhz: float | None = None, seen_mhz: float | None = None
) -> float | None:
    """Return by how many errors a program's counters alone miss its signature, whatever its speed.

    None where nothing was measured, or nothing is drawn.
    """
    work = at_clock(signature, taken_mhz, seen_mhz)
    rows = [CounterRow.of(name, seen, [work], [False]) for name in counters_of(seen, [work])]
    if not any(row.design[0] for row in rows):
        return None
    speed = 1.0
    for _ in range(_REWEIGHTINGS):
        weights = [1.0 / row.variance([speed]) for row in rows]
        drawn = sum(w * row.design[0] ** 2 for w, row in zip(weights, rows, strict=True))
        speed = sum(w * row.design[0] * row.seen for w, row in zip(weights, rows, strict=True)) / drawn
    return misfit(seen, [TenantEvidence(work)], [speed])


def _work(tenant: TenantEvidence, now_mhz: float | None) -> Counters | None:
    work = tenant.capped_work or tenant.signature
    return None if work is None else at_clock(work, tenant.sm_clock_mhz, now_mhz)
