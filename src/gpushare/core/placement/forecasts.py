"""Predictions of the interference model for many sets of tenants, compared with their promises."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from gpushare.core.api import JobClass
from gpushare.core.interference import (
    InterferenceModel,
    Profile,
    TenantTable,
    mixtures,
    phase_rows,
    promised_progress,
)
from gpushare.core.placement.caps import thread_percentage
from gpushare.core.placement.duties import are_kept, first_of_least, with_stops
from gpushare.core.placement.standin import STAND_IN
from gpushare.core.placement.state import BoolArray, FloatArray, IntArray

MOST_STOPPING: Final = 8
"""Largest set for which throttling is planned; larger sets must keep their promises without it."""
UNAIDED: Final = 0.5
"""Part of the way from expected to likely progress at which promises must be kept without throttling. A lasting
throttle ends in a retraction, so throttling is only planned for unlikely cases."""
_LEAST: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Member:
    """One tenant of a set.

    Attributes:
        key: key of the workload's profile; "" if the workload is not known on this GPU model.
        thread_percentage: its cap, 1 to 100.
        wants_own: whether it needs a GPU of its own (retracted twice).
        is_auto: whether its share was chosen by `auto`.
    """

    key: str
    share_percent: int
    job_class: JobClass
    max_slowdown: float
    thread_percentage: int
    wants_own: bool = False
    is_auto: bool = False
    profile: Profile | None = field(default=None, compare=False, repr=False)

    @property
    def is_known(self) -> bool:
        """Return whether the model can predict it."""
        return self.profile is not None

    def under_least_cap(self) -> "Member":
        """Return the same tenant under the smallest cap that it may have."""
        return replace(self, thread_percentage=thread_percentage(self.share_percent, self.job_class))

    def order(self) -> tuple[str, int, int, str, float, bool, bool]:
        """Return the sort key for the members of a set."""
        return (
            self.key,
            self.thread_percentage,
            self.share_percent,
            self.job_class.value,
            self.max_slowdown,
            self.wants_own,
            self.is_auto,
        )

    def likeness(self) -> tuple[object, ...]:
        """Return the sort key for kinds of members: their properties first, and their name last."""
        counters = self.profile.counters.as_dict().values() if self.profile is not None else ()
        named, *rest = self.order()
        return *rest, tuple(-1.0 if value is None else value for value in counters), named


@dataclass(frozen=True, slots=True)
class SetForecasts:
    """Outcomes of sets, throttling included; every array has one entry per set.

    Attributes:
        kept: whether every promise is kept: probably without throttling, and five times out of six with it.
        summed: expected progress, summed over the tenants.
        least: of the tenant that is worst off relative to its promise, the progress reached five times out of six.
        promised: that tenant's promise.
        at: that tenant's place.
    """

    kept: BoolArray
    summed: FloatArray
    least: FloatArray
    promised: FloatArray
    at: IntArray


class ForecastTable:
    """All tenants judged on one GPU model so far, each prepared for the model once.

    Args:
        headroom_ratio: part of a throughput tenant's tolerated slowdown that is not planned with, below 1.

    Attributes:
        floors: least progress that each member must keep, by row.
    """

    def __init__(self, model: InterferenceModel, headroom_ratio: float = 0.0) -> None:
        self._model = model
        self._headroom_ratio = headroom_ratio
        self._table: TenantTable | None = None
        self._row: dict[Member, int] = {}
        self.floors: FloatArray = np.zeros(0)
        self._scale: FloatArray = np.zeros(0)
        self._is_known: BoolArray = np.zeros(0, bool)
        self._can_stop: BoolArray = np.zeros(0, bool)
        self._phases: IntArray = np.zeros((0, 0), np.int64)

    def __len__(self) -> int:
        return len(self._row)

    def rows(self, members: Sequence[Member]) -> IntArray:
        """Return the rows of members, adding those that are new."""
        new = [member for member in dict.fromkeys(members) if member not in self._row]
        if new:
            begin = len(self.floors)
            self._row.update((member, begin + number) for number, member in enumerate(new))
            profiles = [m.profile or STAND_IN for m in new]
            others, phases = phase_rows(profiles, begin + len(new), self._phases.shape[1])
            new += [member for member, profile in zip(new, profiles, strict=True) for _ in profile.phases]
            caps = [m.thread_percentage if m.is_known else m.share_percent for m in new]
            more = self._model.table([*profiles, *others], caps)
            self._phases = _stacked(self._phases, phases, len(others))
            self._table = more if self._table is None else self._table.with_more(more)
            expected = self._model.predict_sets(more, np.arange(len(new))[:, None]).progress[:, 0]
            known = np.array([member.is_known for member in new])
            shares = np.array([member.share_percent / 100 for member in new])
            self.floors = np.concatenate([self.floors, _floors(new, expected, self._headroom_ratio)])
            scale = np.where(known, 1.0, shares / np.maximum(expected, _LEAST))
            self._scale = np.concatenate([self._scale, scale])
            self._is_known = np.concatenate([self._is_known, known])
            can_stop = np.array([member.job_class is JobClass.THROUGHPUT for member in new])
            self._can_stop = np.concatenate([self._can_stop, can_stop])
        return np.array([self._row[member] for member in members], np.int64)

    def forecast(self, index: IntArray, *, stops: bool = True) -> SetForecasts:
        """Return the outcomes of sets.

        Args:
            index: sets x places, rows of this table; -1 for an empty place.
            stops: whether tenants may be stopped.
        """
        assert self._table is not None, "rows come from members"
        present = index >= 0
        floors = np.where(present, self.floors[index], 0.0)
        expected, judged = self._predict(index)
        unaided = are_kept(expected - UNAIDED * (expected - judged), floors)
        if stops:
            is_broken = unaided & ~are_kept(judged, floors)
            self._stop(index, np.flatnonzero(is_broken & (present.sum(axis=1) <= MOST_STOPPING)), floors, judged)
        ratio = np.where(present, judged / np.maximum(floors, _LEAST), np.inf)
        worst = first_of_least(ratio)
        lines = np.arange(len(index))
        scale = np.where(present, self._scale[index], 0.0)
        return SetForecasts(
            unaided & are_kept(judged, floors),
            (expected * scale).sum(axis=1),
            (judged * scale)[lines, worst],
            (floors * scale)[lines, worst],
            worst,
        )

    def _predict(self, index: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return expected progress, and the progress that is compared with promises.

        The latter is reached five times out of six by known workloads, and is the expected one for others. Both
        are the least over the mixtures of the tenants' phases.
        """
        expected, judged = self._predict_rows(index)
        if self._phases.shape[1]:
            for lines, sets in mixtures(index, self._phases):
                progress, kept = self._predict_rows(sets)
                expected[lines] = np.minimum(expected[lines], progress)
                judged[lines] = np.minimum(judged[lines], kept)
        return expected, judged

    def _predict_rows(self, index: IntArray) -> tuple[FloatArray, FloatArray]:
        assert self._table is not None
        predicted = self._model.predict_sets(self._table, index)
        return predicted.progress, np.where(self._is_known[index], predicted.likely, predicted.progress)

    def _stop(self, index: IntArray, broken: IntArray, floors: FloatArray, judged: FloatArray) -> None:
        """Let tenants above their promise be stopped in the sets with a broken one; updates `judged` in place.

        The sets are packed first: what is tried for one must not depend on how large the others are.
        """
        packed = np.argsort(index[broken] < 0, axis=1, kind="stable")[:, :MOST_STOPPING]
        some = np.take_along_axis(index[broken], packed, axis=1)
        places = some.shape[1]
        can_stop = np.where(some >= 0, self._can_stop[some], False)
        lines, stopped = np.nonzero(can_stop)
        if not len(lines):
            return
        fewer = some[lines]
        fewer[np.arange(len(lines)), stopped] = -1
        without = np.zeros((len(some), places, places))
        without[lines, stopped] = self._predict(fewer)[1]
        mine = broken[:, None]
        judged[mine, packed] = with_stops(judged[mine, packed], without, floors[mine, packed], can_stop)


def _stacked(above: IntArray, below: IntArray, more: int) -> IntArray:
    """Return the phase rows of earlier members, later members and `more` phases, which have none themselves."""
    found = np.full((len(above) + len(below) + more, below.shape[1]), -1, np.int64)
    found[: len(above), : above.shape[1]] = above
    found[len(above) : len(above) + len(below)] = below
    return found


def _floors(members: Sequence[Member], alone: FloatArray, headroom_ratio: float) -> FloatArray:
    """Return the least progress that each member must keep: its promise, or the stand-in's if it is unknown.

    With headroom it is the promise of a tenant that tolerates less.
    """
    planned = [_planned(member, headroom_ratio) for member in members]
    return np.array(
        [
            promised_progress(member.profile, member.share_percent, slowdown, is_auto=member.is_auto)
            if member.is_known
            else min(1.0, progress) / slowdown
            for member, slowdown, progress in zip(members, planned, alone.tolist(), strict=True)
        ]
    )


def _planned(member: Member, headroom_ratio: float) -> float:
    """Return the slowdown that is planned with; class latency tolerates too little to leave any of it."""
    if member.job_class is not JobClass.THROUGHPUT:
        return member.max_slowdown
    return 1.0 + (1.0 - headroom_ratio) * (member.max_slowdown - 1.0)
