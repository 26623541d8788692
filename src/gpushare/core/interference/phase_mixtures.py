"""Workloads with phases in sets: the mixtures of phases that a prediction must hold for (ADR 0156)."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from gpushare.core.interference.model import Forecast, InterferenceModel
from gpushare.core.interference.profile import Profile

MOST_MIXTURES: Final = 16
"""Most mixtures of one set; with more, only those with one tenant, or with all tenants, at other work are used."""
Rows = npt.NDArray[np.int64]


def mixtures(index: Rows, phases: Rows) -> Iterator[tuple[Rows, Rows]]:
    """Yield the mixtures of each set, except the usual one, as (lines of `index`, sets).

    A mixture is a set in which some tenants are replaced by one of their phases.

    Args:
        index: sets x places, rows of a table; -1 for an empty place.
        phases: for each row, the rows of its phases, padded with -1; rows x most phases.
    """
    own = np.where((index >= 0)[:, :, None], phases[index], -1)
    counts = (own >= 0).sum(axis=2)
    total = np.prod(1 + counts, axis=1)
    few = np.flatnonzero((total > 1) & (total <= MOST_MIXTURES))
    blocks = [(few, index[few])] if len(few) else []
    for place in range(index.shape[1]):
        blocks += [block for lines, sets in blocks for block in _moved(lines, sets, own, place)]
    yield from blocks[1:]
    many = np.flatnonzero(total > MOST_MIXTURES)
    if len(many):
        for place in range(index.shape[1]):
            yield from _moved(many, index[many], own, place)
        for number in range(phases.shape[1]):
            yield many, np.where(own[many, :, number] >= 0, own[many, :, number], index[many])


def _moved(lines: Rows, sets: Rows, own: Rows, place: int) -> Iterator[tuple[Rows, Rows]]:
    """Yield the sets with the tenant at one place replaced by each of its phases."""
    for number in range(own.shape[2]):
        other = own[lines, place, number]
        some = other >= 0
        if some.any():
            moved = sets[some].copy()
            moved[:, place] = other[some]
            yield lines[some], moved


def phase_rows(profiles: Sequence[Profile], begin: int, after: int) -> tuple[list[Profile], Rows]:
    """Return all phases of these profiles, and their rows by profile: profiles x most phases, padded with -1.

    Args:
        begin: the row of the first phase.
        after: least number of columns.
    """
    most = max([after, *(len(profile.phases) for profile in profiles)])
    rows = np.full((len(profiles), most), -1, np.int64)
    others: list[Profile] = []
    for at, profile in enumerate(profiles):
        rows[at, : len(profile.phases)] = np.arange(len(profile.phases)) + begin + len(others)
        others += profile.phases
    return others, rows


def predict_worst(model: InterferenceModel, tenants: Sequence[tuple[Profile, int]]) -> tuple[Forecast, ...]:
    """Return each tenant's forecast, under its cap (1 to 100), in the worst mixture of the set's phases."""
    profiles, caps = [profile for profile, _ in tenants], [cap for _, cap in tenants]
    others, rows = phase_rows(profiles, len(tenants), 0)
    if not others:
        return model.predict(tenants)
    caps += [cap for profile, cap in tenants for _ in profile.phases]
    table = model.table([*profiles, *others], caps)
    rows = np.concatenate([rows, np.full((len(others), rows.shape[1]), -1)])
    usual = np.arange(len(tenants))[None, :]
    sets = np.concatenate([usual, *(moved for _, moved in mixtures(usual, rows))])
    predicted = model.predict_sets(table, sets)
    worst = [each.min(axis=0).tolist() for each in (predicted.progress, predicted.lower, predicted.upper)]
    return tuple(Forecast(*each) for each in zip(*worst, strict=True))
