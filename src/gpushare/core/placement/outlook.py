"""The outlook: how likely further tenants are, what free GPU is worth to them, and a newcomer's best cap.

The likelihood that a free share is taken while a newcomer runs is the part of the cluster's GPUs that have a
tenant: in an idle cluster others go elsewhere, in a full one there is nowhere else. Arrivals are assumed to be
like the present tenants. Both are read from the state, so that every process decides alike on the same state.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from gpushare.core.api import SHARES_PER_GPU
from gpushare.core.placement.caps import UNCAPPED_PERCENT
from gpushare.core.placement.forecasts import ForecastTable, Member
from gpushare.core.placement.judge import EMPTY, Judge, Newcomer, TenantSet, most_beside, rows_of
from gpushare.core.placement.state import ClusterState, FloatArray

# All of these are chosen (docs/adr/0121 gives the reasons of `ALONE`, `MOST_IMAGINED` and `SAME`). Each was tried
# smaller and larger in three simulations (`gpushare sim jobs --truth table`, 60 jobs on 6 GPUs, load 1.5, seeds 1
# to 3). `ALONE` (0.125 and 0.5), `_COMPANY_STEP` (1/16) and the bounds of the worth (0.25, 6) changed nothing.
# `FILLINGS` (3, 12), `MOST_KINDS` (4, 16), `MOST_IMAGINED` (2, 5), `SAME` (0.002, 0.05) and `_WORTH_STEP` (1/8)
# moved the mean throughput from 1.26 GPUs to between 1.25 and 1.37, nearly all of it in the first seed: three are
# too few to choose by.
ALONE: Final = 0.25
"""Below this likelihood that a neighbour arrives, a tenant of an empty GPU is not capped."""
MOST_KINDS: Final = 8
"""Number of kinds of tenants in the mix, the most common ones."""
FILLINGS: Final = 6
"""Number of hypothetical ways to fill a GPU's free share."""
MOST_IMAGINED: Final = 3
"""Most tenants that arrive in one of them."""
# Steps and bounds of an `Outlook`: with coarse steps rankings stay valid while the load hardly changes.
_COMPANY_STEP: Final = 1 / 8
_WORTH_STEP: Final = 0.25
_LEAST_WORTH: Final = 0.5
_MOST_WORTH: Final = 3.0
SAME: Final = 0.01
"""Expected progress, in GPUs, that differs by no more is equal: far below the model's error."""
_GOLDEN: Final = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Outlook:
    """Load of the cluster, in coarse steps; rankings of GPUs stay valid while it is equal.

    Attributes:
        company: likelihood that a free share is taken soon, 0 to 1.
        worth: progress that a whole GPU's share makes where it is in use, in GPUs.
    """

    company: float
    worth: float

    @property
    def share_worth(self) -> float:
        """Return what a free GPU is worth, in GPUs of progress."""
        return self.company * self.worth


def outlook_of(judge: Judge, state: ClusterState) -> Outlook:
    """Return the present outlook of a cluster."""
    summed, shares = judge.totals(state)
    worth = SHARES_PER_GPU * summed / shares if shares else 1.0
    worth = min(max(worth, _LEAST_WORTH), _MOST_WORTH)
    return Outlook(_stepped(company_of(state), _COMPANY_STEP), _stepped(worth, _WORTH_STEP))


def company_of(state: ClusterState, more: int = 0) -> float:
    """Return the fraction of healthy GPUs that have a tenant, counting `more` of the empty ones as taken."""
    usable = int((state.present & state.healthy).sum())
    return min(1.0, (int((state.present & (state.clients > 0)).sum()) + more) / max(1, usable))


@dataclass(frozen=True, slots=True)
class MixKind:
    """A kind of tenant in the cluster, under its smallest cap, and its part of all tenants."""

    member: Member
    weight: float


def mix_of(judge: Judge, state: ClusterState, newcomer: Newcomer, gpu_model: str) -> tuple[MixKind, ...]:
    """Return the kinds of tenants that are likely to arrive; if the cluster has none, the newcomer's own kind."""
    found: Counter[Member] = Counter()
    for model, member, count in judge.kinds(state, MOST_KINDS):
        if member.share_percent < SHARES_PER_GPU and not member.wants_own:
            found[member if model == gpu_model else replace(member, key="", profile=None)] += count
    if not found:
        found[newcomer.member(gpu_model, newcomer.share_percent).under_least_cap()] = 1
    total = found.total()
    return tuple(MixKind(member, count / total) for member, count in found.items())


def best_cap(judge: Judge, state: ClusterState, newcomer: Newcomer, slot: int, row: int) -> int:
    """Return the cap under which a newcomer starts on a GPU that takes it.

    It is the cap with the most expected summed progress, now and with likely arrivals, among those under which
    every promise can be kept; of nearly equal ones the smallest, which leaves most to others.
    """
    number = int(judge.resident_sets(state)[slot, row])
    gpu_model = state.model_names[int(state.model_ids[slot, row])]
    tenants = TenantSet(gpu_model, judge.set_at(number).members)
    return caps_beside(judge, state, newcomer, tenants, company=company_of(state, int(number == EMPTY))).best


@dataclass(frozen=True, slots=True)
class CapOutlook:
    """A tenant's caps beside the other tenants of its GPU, by what they are worth.

    Attributes:
        best: the cap under which it should start, 1 to 100.
        expected: by cap, the expected summed progress of the GPU, in GPUs; -inf where a promise cannot be kept;
            empty if nothing had to be compared.
    """

    best: int
    expected: Mapping[int, float] = field(default_factory=dict)


def caps_beside(
    judge: Judge,
    state: ClusterState,
    tenant: Newcomer,
    others: TenantSet,
    *,
    company: float,
    present: int | None = None,
) -> CapOutlook:
    """Return the outlook of a tenant's caps beside the other tenants of its GPU.

    Args:
        others: the tenants of the GPU without this one, and its model.
        company: likelihood that the GPU's free share is taken soon, 0 to 1.
        present: the cap that it has, to be compared with the others if it may have it; None for a newcomer.
    """
    if tenant.known is not None and tenant.known.wants_own:
        return CapOutlook(UNCAPPED_PERCENT)
    gpu_model = others.gpu_model
    choices = tenant.caps(gpu_model)
    if len(choices) == 1:
        return CapOutlook(choices[0])
    free = SHARES_PER_GPU - sum(member.share_percent for member in others.members) - tenant.share_percent
    fillings = _fillings(mix_of(judge, state, tenant, gpu_model), free)
    company = company if fillings else 0.0
    if not others.members and company < ALONE:
        return CapOutlook(UNCAPPED_PERCENT)
    most = most_beside(others, tenant)
    choices = tuple(cap for cap in choices if cap <= most)
    caps = choices
    if present is not None and choices[0] <= present <= most:
        caps = tuple(sorted({*choices, present}))
    starts = [(tenant.member(gpu_model, cap), *others.members) for cap in caps]
    expected = _expected(judge.table(gpu_model), starts, fillings, company)
    worth = dict(zip(caps, expected.tolist(), strict=True))
    reached = [cap for cap in choices if np.isfinite(worth[cap])]
    top = max((worth[cap] for cap in reached), default=-np.inf)
    best = next((cap for cap in reached if worth[cap] >= top - SAME), choices[0])
    return CapOutlook(best, worth)


def _expected(
    table: ForecastTable,
    starts: Sequence[tuple[Member, ...]],
    fillings: Sequence[tuple[Member, ...]],
    company: float,
) -> FloatArray:
    """Return the expected summed progress of each set; -inf where a promise cannot be kept now.

    Args:
        fillings: ways in which the free share may be filled; all equally likely.
    """
    sets = [*starts]
    for filling in fillings:
        sets += [(*start, *filling[:count]) for start in starts for count in range(1, len(filling) + 1)]
    forecast = table.forecast(rows_of(table, sets))
    summed = np.where(forecast.kept, forecast.summed, -np.inf)
    now = summed[: len(starts)]
    later = np.zeros(len(starts))
    at = len(starts)
    for filling in fillings:
        ends = summed[at : at + len(starts) * len(filling)].reshape(len(starts), len(filling))
        at += ends.size
        # A tenant that would break a promise is not admitted, nor is any after it: the set before it remains.
        comes = np.isfinite(ends).cumprod(axis=1).sum(axis=1)
        last = np.where(comes > 0, ends[np.arange(len(starts)), np.maximum(comes - 1, 0)], now)
        later += last / len(fillings)
    kept = np.isfinite(now)
    expected = np.full(len(starts), -np.inf)
    expected[kept] = (1.0 - company) * now[kept] + company * later[kept] if fillings else now[kept]
    return expected


def _fillings(mix: Sequence[MixKind], free: int) -> list[tuple[Member, ...]]:
    """Return ways to fill a free share with tenants drawn evenly from the mix, in turn while they fit."""
    fitting = [kind for kind in mix if kind.member.share_percent <= free]
    if not fitting:
        return []
    edges = np.cumsum([kind.weight for kind in fitting]) / sum(kind.weight for kind in fitting)
    found: list[tuple[Member, ...]] = []
    position = 0.5
    for _ in range(FILLINGS):
        left = free
        chosen: list[Member] = []
        for _ in range(2 * MOST_IMAGINED):
            position = (position + _GOLDEN) % 1.0
            member = fitting[min(int(np.searchsorted(edges, position, side="right")), len(fitting) - 1)].member
            if member.share_percent <= left and len(chosen) < MOST_IMAGINED:
                chosen.append(member)
                left -= member.share_percent
        if chosen:
            found.append(tuple(chosen))
    return found


def _stepped(value: float, step: float) -> float:
    return round(value / step) * step
