"""The best caps for a set of tenants, the best number of tenants, and the share that `auto` means."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.api import JobClass
from gpushare.core.interference.model import Forecast, InterferenceModel
from gpushare.core.interference.profile import Array, Profile, cap_progress
from gpushare.core.progress import NO_LOSS, least_alone

CAPS: Final = (15, 25, 33, 50, 67, 75, 100)
_MOST_COMBINATIONS: Final = 20_000  # above this many combinations, each tenant gets fewer caps to choose from
_AUTO_STEP: Final = 5
_AUTO_LEAST: Final = 10


@dataclass(frozen=True, slots=True)
class Wish:
    """One tenant to place.

    Attributes:
        max_slowdown: tolerated slowdown, 1.0 or more.
    """

    profile: Profile
    job_class: JobClass = JobClass.THROUGHPUT
    max_slowdown: float = 2.0


@dataclass(frozen=True, slots=True)
class Advice:
    """Caps and the forecasts under them, in the order of the wishes.

    Attributes:
        within_tolerance: whether every tenant's slowdown stays within its tolerance, as `best_caps` judges it.
    """

    thread_percentages: tuple[int, ...]
    forecasts: tuple[Forecast, ...]
    within_tolerance: bool

    @property
    def summed_progress(self) -> float:
        """Return the throughput of the GPU, relative to one tenant that runs alone."""
        return sum(forecast.progress for forecast in self.forecasts)


def best_caps(model: InterferenceModel, wishes: Sequence[Wish], *, cautious: bool = True) -> Advice:
    """Choose the caps that maximise summed progress within every tenant's tolerance (Pan 2021's open question).

    Latency tenants run uncapped (docs/design.md 5). If no combination keeps every tolerance, the one that breaks
    them least is returned, with `within_tolerance` False.

    Args:
        cautious: judge tolerances by progress that is reached five times out of six (`Prediction.likely`), not by
            the expected progress.
    """
    if not wishes:
        return Advice((), (), True)
    choices = _choices(wishes)
    combinations = list(itertools.product(*choices))
    cells = sorted({(at, cap) for combination in combinations for at, cap in enumerate(combination)})
    row = {cell: number for number, cell in enumerate(cells)}
    table = model.table([wishes[at].profile for at, _ in cells], [cap for _, cap in cells])
    index = np.array([[row[at, cap] for at, cap in enumerate(each)] for each in combinations])
    prediction = model.predict_sets(table, index)
    floors = np.array([1 / wish.max_slowdown for wish in wishes])
    judged = prediction.likely if cautious else prediction.progress
    best = preferred(prediction.progress, judged, floors)
    return Advice(
        combinations[best],
        tuple(
            Forecast(float(p), float(low), float(high))
            for p, low, high in zip(
                prediction.progress[best], prediction.lower[best], prediction.upper[best], strict=True
            )
        ),
        bool((judged[best] >= floors).all()),
    )


def preferred(progress: Array, judged: Array, floors: Array) -> int:
    """Return the set with the most summed progress among those within every tolerance; if none is, the closest.

    Args:
        progress: expected progress, sets x tenants.
        judged: progress that is compared with the floors, sets x tenants.
        floors: least tolerated progress of each tenant.
    """
    lacking = np.maximum(floors - judged, 0.0).sum(axis=1)
    return int(np.lexsort((-progress.sum(axis=1), np.round(lacking, 3)))[0])


def best_number(model: InterferenceModel, wishes: Sequence[Wish]) -> tuple[Advice, ...]:
    """Return advice for the first wish, the first two, and so on; `recommended_number` picks the best."""
    return tuple(best_caps(model, wishes[:count]) for count in range(1, len(wishes) + 1))


def recommended_number(advices: Sequence[Advice]) -> int:
    """Return how many tenants to put together: those with the most summed progress within tolerance, or 1."""
    kept = [(advice.summed_progress, len(advice.forecasts)) for advice in advices if advice.within_tolerance]
    return max(kept)[1] if kept else 1


def auto_share(profile: Profile, *, max_slowdown: float, job_class: JobClass) -> int:
    """Return the percentage that `gpushare.io/fraction: auto` means for a profile: 10 to 100 in steps of 5.

    For a throughput tenant, this is the smallest cap at which it is fast enough alone, in each of its phases, to
    leave room for neighbours within its tolerated slowdown (`gpushare.core.progress.least_alone`). For a latency
    tenant, it is the smallest cap at which it loses nothing measurable.
    """
    floor = NO_LOSS if job_class is JobClass.LATENCY else least_alone(max_slowdown)
    for percent in range(_AUTO_LEAST, 100, _AUTO_STEP):
        if min(cap_progress(each, percent / 100) for each in (profile, *profile.phases)) >= floor:
            return percent
    return 100


def _choices(wishes: Sequence[Wish]) -> list[tuple[int, ...]]:
    caps: tuple[int, ...] = CAPS
    free = sum(wish.job_class is JobClass.THROUGHPUT for wish in wishes)
    while len(caps) > 2 and len(caps) ** free > _MOST_COMBINATIONS:
        caps = caps[1::2] if len(caps) > 3 else (caps[0], caps[-1])
    return [(100,) if wish.job_class is JobClass.LATENCY else caps for wish in wishes]
