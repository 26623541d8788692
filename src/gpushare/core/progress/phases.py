"""Phases of a program: signatures between which it changes, such as training and evaluation.

A window belongs to the phases that explain it best. One that none explains says that some program does other work
than its signatures know of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
_BETTER: Final = 0.7  # of the misfit, that another phase has to leave at most
_REWEIGHTINGS: Final = 3
_LIGHT_RATIO: Final = 0.05  # of the SMs: whatever the progress of such a tenant, it explains no misfit


@dataclass(frozen=True, slots=True)
class PhasedAttribution:
    """What was inferred of one window.

    Attributes:
        found: by tenant; phases: the place of the signature that each was taken with.
        misfit: of the window, in errors; None where it cannot be told.
    """

    found: tuple[Attribution, ...]
    phases: tuple[int, ...]
    misfit: float | None


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
    device: Counters, choices: Sequence[Sequence[TenantEvidence]], sm_clock_mhz: float | None = None
) -> PhasedAttribution:
    """Infer each tenant's progress with those of its signatures that explain the window best.

    The first ones count where they explain it well; another one only where it explains it much better.

    Args:
        choices: what may be known of each tenant, at least one each, the usual one first.
    """

    def tried(phases: tuple[int, ...]) -> PhasedAttribution:
        tenants = [each[at] for each, at in zip(choices, phases, strict=True)]
        found = attribute(device, tenants, sm_clock_mhz)
        missed = misfit(device, tenants, [each.progress_ratio for each in found], sm_clock_mhz)
        return PhasedAttribution(found, phases, missed)

    best = tried((0,) * len(choices))
    for tenant, known in enumerate(choices):
        for at in range(1, len(known)):
            if best.misfit is None or best.misfit <= GOOD_FIT:
                return best
            other = tried((*best.phases[:tenant], at, *best.phases[tenant + 1 :]))
            if other.misfit is not None and other.misfit <= _BETTER * best.misfit:
                best = other
    return best


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
