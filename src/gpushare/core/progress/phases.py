"""Phases of a program: signatures between which it changes, such as training and evaluation.

A window belongs to the phases that explain it best. If no phase explains it, some program does other work than its
signatures cover.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.gpu import Counters
from gpushare.core.progress.attribution import UNINFORMED_MEAN, Attribution, TenantEvidence, attribute
from gpushare.core.progress.clock import at_clock
from gpushare.core.progress.counter_errors import CounterRow, counters_of

# Misfit of a window, in standard errors (docs/measurements/attribution.md). With the right signatures the median
# over measured sets is 0.6, and 95% are below 2.8 and 1.2 (two datasets); with one tenant's signature exchanged
# for another program's, the medians are 4.3 and 1.8.
GOOD_FIT: Final = 1.0
BAD_FIT: Final = 2.0
# For a profile that may be of another cap: windows of the same program miss it by up to 5, other programs' by 9
# and more (same page).
FAR_FIT: Final = 6.0
_BETTER: Final = 0.7  # another phase counts if it lowers the misfit to this part or less
# An inference takes 2 ms with 8 tenants and 4 ms with 16; a window is a second and the budget 1% of a core. After
# this many tries the search continues with the next window; once everything was tried it rests for a while.
MOST_TRIES: Final = 4
REST_SECONDS: Final = 30.0
_REWEIGHTINGS: Final = 3
_LIGHT_RATIO: Final = 0.05  # of the SMs; a tenant below this explains no misfit, whatever its progress


_Place = tuple[int, int]  # (tenant, number of its signature)


@dataclass(frozen=True, slots=True)
class PhaseSearch:
    """State of the search for phases of the same tenants over windows; start with `PhaseSearch()`.

    Attributes:
        phases: the phases that explained the last window best; empty for the usual ones.
        open_places: places still to try.
        recent: places that explained a window, the latest first.
        rest_seconds: how long nothing is tried, unless the misfit gets clearly worse than `misfit`.
        misfit: the misfit that the last search ended with.
    """

    phases: tuple[int, ...] = ()
    open_places: tuple[_Place, ...] = ()
    recent: tuple[_Place, ...] = ()
    rest_seconds: float = 0.0
    misfit: float = 0.0

    def is_resting(self, misfit: float) -> bool:
        """Return whether no other phase should be tried for a window with this misfit."""
        return self.rest_seconds > 0.0 and misfit <= max(GOOD_FIT, self.misfit / _BETTER)

    def places(self, known: Sequence[int], phases: tuple[int, ...]) -> tuple[_Place, ...]:
        """Return the places to try: the usual phases, then those seen last, then the others.

        Args:
            known: number of phases of each tenant.
            phases: the phases of the best inference so far.
        """
        if self.open_places:
            return self.open_places
        usual = [(tenant, 0) for tenant, at in enumerate(phases) if at]
        others = [(tenant, at) for at in range(1, max(known)) for tenant, most in enumerate(known) if at < most]
        return (*usual, *self.recent, *(place for place in others if place not in self.recent))


@dataclass(frozen=True, slots=True)
class PhasedAttribution:
    """The inference of one window.

    Attributes:
        found: by tenant.
        phases: by tenant, the number of the signature that was used.
        misfit: misfit of the window in standard errors; None if it cannot be computed.
        search: to pass with the next window, as long as the tenants, their caps and phases are the same.
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
    """Return by how many standard errors the counters miss the sum of the tenants' work (root mean square).

    None if a tenant has no signature, or uses the GPU and has no progress, or if nothing was measured.
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
    """Infer each tenant's progress with the signatures that explain the window best.

    The usual signatures are used if they explain the window well; another one only if it explains it much better.
    The search starts with the phases of the previous window, and tries the usual ones again from time to time.

    Args:
        choices: evidence for each phase of each tenant, the usual one first.
        search: state after the previous window.
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
    """Return the places of phases other than the present ones; only usual ones if the window is explained."""
    is_explained = best.misfit is not None and best.misfit <= GOOD_FIT
    return [(tenant, at) for tenant, at in places if at != best.phases[tenant] and not (at and is_explained)]


def _counts_instead(other: PhasedAttribution, best: PhasedAttribution, *, is_usual: bool) -> bool:
    """Return whether another inference replaces the best so far."""
    if other.misfit is None or best.misfit is None:
        return False
    if is_usual:
        return other.misfit <= GOOD_FIT or best.misfit > _BETTER * other.misfit
    return other.misfit <= _BETTER * best.misfit


def shape_misfit(
    signature: Counters, seen: Counters, taken_mhz: float | None = None, seen_mhz: float | None = None
) -> float | None:
    """Return by how many standard errors a program's counters alone miss its signature, at the best-fitting speed.

    None if nothing was measured, or the program uses nothing.
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
