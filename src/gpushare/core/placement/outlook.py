"""Who is likely to come, what free GPU is worth to them, and the cap that is best for a newcomer in view of that.

The likelihood that a free share is taken while a newcomer runs is the part of the cluster's GPUs that hold
somebody: in an idle cluster others go elsewhere, in a full one there is nowhere else. Who comes is drawn from the
tenants that the cluster has now. Both are read from the state as it is, so that whoever decides on the same state
decides alike.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gpushare.core.api import SHARES_PER_GPU
from gpushare.core.placement.caps import UNCAPPED_PERCENT
from gpushare.core.placement.forecasts import Member
from gpushare.core.placement.judge import EMPTY, Judge, Newcomer, most_beside, rows_of
from gpushare.core.placement.state import ClusterState

ALONE: Final = 0.25
"""Below this likelihood of company a tenant of an empty GPU is not capped."""
MOST_KINDS: Final = 8
"""Kinds of tenants, the commonest, of which the mix consists."""
FILLINGS: Final = 6
"""Ways in which a GPU's free share is imagined to be filled."""
MOST_IMAGINED: Final = 3
"""Tenants that come in one of them at most."""
_GRAIN: Final = 1 / 8
_LEAST_WORTH, _MOST_WORTH, _WORTH_GRAIN = 0.5, 3.0, 0.25
_SAME: Final = 0.01
_GOLDEN: Final = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Outlook:
    """How full and how busy the cluster is, in coarse steps: rankings of GPUs stay valid while it does not change.

    Attributes:
        company: likelihood that a free share is taken soon, 0 to 1.
        worth: progress that a whole GPU's share makes where it is in use, in GPUs.
    """

    company: float
    worth: float

    @property
    def share_worth(self) -> float:
        """What a free GPU is worth, in GPUs of progress."""
        return self.company * self.worth


def outlook_of(judge: Judge, state: ClusterState) -> Outlook:
    """What a cluster is like now."""
    summed, shares = judge.totals(state)
    worth = SHARES_PER_GPU * summed / shares if shares else 1.0
    worth = min(max(worth, _LEAST_WORTH), _MOST_WORTH)
    return Outlook(_steps(company_of(state), _GRAIN), _steps(worth, _WORTH_GRAIN))


def company_of(state: ClusterState, more: int = 0) -> float:
    """Return the fraction of healthy GPUs that have a tenant, counting `more` of the empty ones as taken."""
    usable = int((state.present & state.healthy).sum())
    return min(1.0, (int((state.present & (state.clients > 0)).sum()) + more) / max(1, usable))


@dataclass(frozen=True, slots=True)
class MixKind:
    """A kind of tenant that the cluster has, under the least cap that it may have, and its part of all."""

    member: Member
    weight: float


def mix_of(judge: Judge, state: ClusterState, newcomer: Newcomer, gpu_model: str) -> tuple[MixKind, ...]:
    """The kinds of tenants that are likely to come; where the cluster has none, more of the newcomer's."""
    found: Counter[Member] = Counter()
    for model, member, count in judge.kinds(state, MOST_KINDS):
        if member.share_percent < SHARES_PER_GPU and not member.wants_own:
            found[member if model == gpu_model else replace(member, key="", profile=None)] += count
    if not found:
        found[newcomer.member(gpu_model, newcomer.share_percent).under_least_cap()] = 1
    total = found.total()
    return tuple(MixKind(member, count / total) for member, count in found.items())


def best_cap(judge: Judge, state: ClusterState, newcomer: Newcomer, slot: int, row: int) -> int:
    """The cap under which a newcomer starts on a GPU that takes it.

    The one with the most summed progress to expect, now and with whom is likely to come, of those under which
    every promise can be kept; of equal ones the least, which leaves most to others.
    """
    if newcomer.known is not None and newcomer.known.wants_own:
        return UNCAPPED_PERCENT
    number = int(judge.resident_sets(state)[slot, row])
    gpu_model = state.model_names[int(state.model_ids[slot, row])]
    caps = newcomer.caps(gpu_model)
    if len(caps) == 1:
        return caps[0]
    tenants = judge.set_at(number)
    taken = sum(member.share_percent for member in tenants.members)
    free = SHARES_PER_GPU - taken - newcomer.share_percent
    fillings = _fillings(mix_of(judge, state, newcomer, gpu_model), free)
    company = company_of(state, int(number == EMPTY)) if fillings else 0.0
    if number == EMPTY and company < ALONE:
        return UNCAPPED_PERCENT
    table = judge.table(gpu_model)
    caps = tuple(cap for cap in caps if cap <= most_beside(tenants, newcomer))
    starts = [(newcomer.member(gpu_model, cap), *tenants.members) for cap in caps]
    sets = [*starts]
    for filling in fillings:
        sets += [(*start, *filling[:count]) for start in starts for count in range(1, len(filling) + 1)]
    forecast = table.forecast(rows_of(table, sets))
    summed = np.where(forecast.kept, forecast.summed, -np.inf)
    now = summed[: len(caps)]
    later = np.zeros(len(caps))
    at = len(caps)
    for filling in fillings:
        ends = summed[at : at + len(caps) * len(filling)].reshape(len(caps), len(filling))
        at += ends.size
        # Who would break a promise is not let in, nor is anybody after: what was there before remains.
        comes = np.isfinite(ends).cumprod(axis=1).sum(axis=1)
        last = np.where(comes > 0, ends[np.arange(len(caps)), np.maximum(comes - 1, 0)], now)
        later += last / len(fillings)
    kept = np.flatnonzero(np.isfinite(now))
    if not len(kept):
        return caps[0]
    expected = now[kept]
    if fillings:
        expected = (1.0 - company) * expected + company * later[kept]
    return caps[int(kept[(expected >= expected.max() - _SAME).argmax()])]


def _fillings(mix: Sequence[MixKind], free: int) -> list[tuple[Member, ...]]:
    """Ways to fill a free share, drawn from the mix evenly: each taken in turn while it fits."""
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


def _steps(value: float, grain: float) -> float:
    return round(value / grain) * grain
