"""The estimated cost of each tenant's running to another one, updated with every window.

If a tenant is frozen for part of the time, its neighbours run in a mixture of the sets with and without it.
Tenants are frozen one after the other. So a neighbour's progress while it runs is linear in the presence of the
others: the parts of its own running time in which they run as well (`core.control.freeze_turns`).

    progress while running = alone - sum over the others of effect * presence

A Kalman filter estimates the level `alone` and the effects together. At first an effect is about as likely
large as small, so the first windows divide what is missing from `alone` evenly among the neighbours, and each
change of a neighbour's presence shows its effect. Of a neighbour that hardly uses the GPU it is known
beforehand that it costs next to nothing. Plain floats: the agent loads no numpy.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Final

# Prior: error of the level that the cap curve gives, and cost of a neighbour. Over the pairs, triples and fours of
# the H200's table a neighbour costs 0.14, 0.09 and 0.12 +- 0.16, 0.17 and 0.12 (bench/table_plant.py).
_LEVEL_ERROR: Final = 0.1
_EFFECT: Final = 0.12
_EFFECT_ERROR: Final = 0.2
# The same of a neighbour that uses less than 1% of the SMs; a launch of its own may still delay another's.
_LIGHT_EFFECT: Final = 0.01
_LIGHT_ERROR: Final = 0.03
# Drift from one window to the next, as standard deviations.
_LEVEL_DRIFT: Final = 0.005
_EFFECT_DRIFT: Final = 0.003
# A window that misses the expectation by this many standard deviations shows another phase of a program or, if
# duties have just changed, that the effects were estimated wrongly from the level alone.
_SURPRISE: Final = 3.0
_PHASE_CHANGE: Final = 0.1
_WRONG_EFFECTS: Final = 0.3
_TELLING_CHANGE: Final = 0.1  # of a duty; a smaller change explains no surprise
_IMPOSSIBLE: Final = 0.3  # a level or an effect outside 0 to 1 by more than this is impossible
LEAST_ERROR: Final = 0.02  # no inference is more exact (core.progress.attribution)

_Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Response:
    """Dependence of one tenant's progress on its neighbours' presence.

    Attributes:
        neighbours: their uids, in the order of `mean[1:]`.
        mean: the level, then the effect of each neighbour.
        covariance: of `mean`.
        windows: number of windows since its neighbours last changed.
        row: 1, then the negated presence of the neighbours in the last window; empty before the first window.
        light: neighbours that are known to hardly use the GPU, which `mean` takes into account.
    """

    neighbours: tuple[str, ...]
    mean: tuple[float, ...]
    covariance: _Matrix
    windows: int = 0
    row: tuple[float, ...] = ()
    light: frozenset[str] = frozenset()

    @classmethod
    def unseen(cls, alone: float) -> "Response":
        """Return the prior estimate for a tenant without neighbours."""
        return cls((), (alone,), ((_LEVEL_ERROR**2,),))

    @property
    def level(self) -> float:
        """Return the progress while it runs without neighbours."""
        return self.mean[0]

    def effect(self, neighbour: str) -> float:
        """Return what an unthrottled neighbour costs this tenant, as a ratio of at least 0."""
        return max(0.0, self.mean[1 + self.neighbours.index(neighbour)]) if neighbour in self.neighbours else 0.0

    def costs(self) -> dict[str, float]:
        """Return the effects above 0, by neighbour."""
        effects = zip(self.neighbours, self.mean[1:], strict=True)
        return {uid: effect for uid, effect in effects if effect > 0.0}

    def effect_error(self, neighbour: str) -> float:
        """Return the standard error of `effect`."""
        if neighbour not in self.neighbours:
            return 0.0
        index = 1 + self.neighbours.index(neighbour)
        return math.sqrt(max(0.0, self.covariance[index][index]))

    def beside(self, present: Iterable[str], light: Collection[str] = ()) -> "Response":
        """Return the estimate for other neighbours, keeping what is known about those that stay.

        Args:
            light: those that hardly use the GPU. One that no longer does so counts as new.
        """
        wanted = tuple(present)
        found, heavier = self, self.light.difference(light)
        if wanted != self.neighbours or heavier:
            found = self._kept(wanted, frozenset(self.neighbours) - heavier)
        for uid in wanted:
            if uid in light and uid not in found.light:
                found = found.told_light(uid)
        return found

    def _kept(self, wanted: tuple[str, ...], kept: Collection[str]) -> "Response":
        old = [0] + [1 + self.neighbours.index(uid) if uid in kept else -1 for uid in wanted]
        mean = tuple(self.mean[index] if index >= 0 else _EFFECT for index in old)
        covariance = tuple(
            tuple(
                self.covariance[one][other] if min(one, other) >= 0 else _EFFECT_ERROR**2 if row == column else 0.0
                for column, other in enumerate(old)
            )
            for row, one in enumerate(old)
        )
        return Response(wanted, mean, covariance, 0, light=self.light.intersection(kept, wanted))

    def told_light(self, uid: str) -> "Response":
        """Return the estimate once a neighbour is known to be light, as after measuring its effect alone."""
        row = [float(each == uid) for each in ("", *self.neighbours)]
        spread = _spread(self.covariance, row)
        expected = _dot(row, spread) + _LIGHT_ERROR**2
        missed = _LIGHT_EFFECT - _dot(row, self.mean)
        mean, covariance = _corrected(
            self.mean, self.covariance, spread, [each / expected for each in spread], missed
        )
        return replace(self, mean=mean, covariance=covariance, light=self.light | {uid})

    @property
    def is_impossible(self) -> bool:
        """Return whether noise and changes of phase have led to impossible figures."""
        return not all(-_IMPOSSIBLE <= value <= 1.0 + _IMPOSSIBLE for value in self.mean)

    def running(self, presence: Mapping[str, float]) -> float:
        """Return the expected progress while it runs, with its neighbours present for these parts of that time."""
        level, *effects = self.mean
        lost = 0.0
        for uid, effect in zip(self.neighbours, effects, strict=True):
            if effect > 0.0:
                lost += effect * presence.get(uid, 0.0)
        return max(0.0, level - lost)

    def running_error(self, presence: Mapping[str, float]) -> float:
        """Return the standard error of `running`."""
        row = self._row(presence)
        return math.sqrt(max(0.0, _dot(row, _spread(self.covariance, row))))

    def change_error(
        self, before: Mapping[str, float], after: Mapping[str, float], *, own: tuple[float, float]
    ) -> float:
        """Return the standard error of its change of progress from some presence of its neighbours to another.

        Args:
            own: its own duty before and after.
        """
        rows = zip(self._row(before), self._row(after), strict=True)
        row = [own[1] * later - own[0] * former for former, later in rows]
        return math.sqrt(max(0.0, _dot(row, _spread(self.covariance, row))))

    def after(self, presence: Mapping[str, float], progress: float, error: float) -> "Response":
        """Return the estimate after a window.

        Args:
            presence: of the neighbours while it ran; 0 for a neighbour that slept.
            progress: measured progress while it ran.
            error: standard error of `progress`.
        """
        row, noise = self._row(presence), max(LEAST_ERROR, error) ** 2
        before = _widened(self.covariance, _LEVEL_DRIFT, _EFFECT_DRIFT)
        spread = _spread(before, row)
        missed = progress - _dot(row, self.mean)
        if self.windows and missed**2 > _SURPRISE**2 * (_dot(row, spread) + noise):
            before = _doubted(before, self.row, row)
            spread = _spread(before, row)
        expected = _dot(row, spread) + noise
        mean, covariance = _corrected(self.mean, before, spread, [each / expected for each in spread], missed)
        return Response(self.neighbours, mean, covariance, self.windows + 1, tuple(row), self.light)

    def _row(self, presence: Mapping[str, float]) -> list[float]:
        return [1.0, *(-presence.get(uid, 0.0) for uid in self.neighbours)]


def _corrected(
    mean: tuple[float, ...], covariance: _Matrix, spread: list[float], gain: list[float], missed: float
) -> tuple[tuple[float, ...], _Matrix]:
    corrected = tuple([value + part * missed for value, part in zip(mean, gain, strict=True)])
    less = tuple(
        [
            tuple([value - part * other for value, other in zip(line, spread, strict=True)])
            for line, part in zip(covariance, gain, strict=True)
        ]
    )
    return corrected, less


def _doubted(covariance: _Matrix, last: tuple[float, ...], row: list[float]) -> _Matrix:
    """Return the covariance after a surprising window.

    If a duty has just changed, the earlier windows remain explained: only changes of level and effects that cancel
    out in the last window become more uncertain.
    """
    changed = [at for at, duty in enumerate(last) if abs(duty - row[at]) >= _TELLING_CHANGE and duty < 0]
    if not changed:
        return _widened(covariance, _PHASE_CHANGE, _PHASE_CHANGE / 2)
    direction = [1.0] + [0.0] * (len(row) - 1)
    for index in changed:
        direction[index] = -1.0 / (len(changed) * last[index])
    return tuple(
        tuple(value + _WRONG_EFFECTS**2 * one * other for value, other in zip(line, direction, strict=True))
        for line, one in zip(covariance, direction, strict=True)
    )


def _spread(covariance: _Matrix, row: Sequence[float]) -> list[float]:
    return [_dot(line, row) for line in covariance]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    total: float = sum(map(mul, one, other))  # takes a third of a generator's time; both are equally long
    return total


def _widened(covariance: _Matrix, level: float, effect: float) -> _Matrix:
    drift = [level**2] + [effect**2] * (len(covariance) - 1)
    return tuple(
        [(*line[:at], line[at] + drift[at], *line[at + 1 :]) for at, line in enumerate(covariance)],
    )
