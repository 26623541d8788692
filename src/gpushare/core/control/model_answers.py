"""What the interference model expects of the tenants of one GPU, and of those that run while others are stopped.

Plain floats: the agent loads no numpy and asks a process that ends; the simulator of jobs asks the model itself.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.core.progress import Prior, TenantLoad

# A signature that moves by less counts as the same: the windows behind it differ by as much.
SAME_RATIO: Final = 0.03
# Error of a prediction while tenants are stopped for the whole of the time in sum: near the least error of
# inference in three recorded sessions on an H200 (docs/measurements/loop-h200.md).
THROTTLE_ERROR: Final = 0.3
MOST_WHOLE: Final = 5  # tenants of which every set that may run together is asked about: 31 sets; chosen
# Chosen: of a tenant that hardly runs, at least this part of the error counts. With it `_nearly`, which leaves
# out that two are stopped at once, differs from the mixture of all subsets by less than 0.001 in the mean and
# 0.02 at most, and in its errors by less than 0.005 in the mean (five programs of the shipped dataset, two of
# them throttled: tests/core/control/test_answers_for_large_sets.py).
_LEAST_ERROR_PART: Final = 0.1

Priors = tuple[Prior | None, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """The tenants of one GPU as input of the model.

    Attributes:
        tenants: pod uids; loads: in the same order, under the caps in force.
        duties: part of the time that each of them may run; empty if none is throttled.
    """

    gpu_model: str
    tenants: tuple[str, ...]
    loads: tuple[TenantLoad, ...]
    duties: tuple[float, ...] = ()

    def is_about_the_same(self, other: "Question") -> bool:
        """Return whether the other has the same tenants under the same caps."""
        return (self.gpu_model, self.tenants, self.caps) == (other.gpu_model, other.tenants, other.caps)

    def is_near(self, other: "Question") -> bool:
        """Return whether the other's answer is still good: the same tenants, and no signature changed much."""
        return self.is_about_the_same(other) and all(
            _is_near(one, two) for one, two in zip(self.loads, other.loads, strict=True)
        )

    @property
    def caps(self) -> tuple[int, ...]:
        """Return the thread percentages of the loads."""
        return tuple(load.thread_percentage for load in self.loads)

    def of(self, running: Sequence[int]) -> "Question":
        """Return the question about the tenants at these positions, while the others are stopped."""
        return Question(
            self.gpu_model, tuple(self.tenants[at] for at in running), tuple(self.loads[at] for at in running)
        )

    def parts(self) -> list[tuple[int, ...]]:
        """Return the sets that run while others are stopped: all of them, or those that lack one tenant."""
        everyone = range(len(self.loads))
        fewest = 1 if len(everyone) <= MOST_WHOLE else max(1, len(everyone) - 1)
        sizes = range(fewest, len(everyone))
        return [running for size in sizes for running in itertools.combinations(everyone, size)]


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The predictions for a question's tenants.

    Attributes:
        priors: with all running; parts: for each set that runs while others are stopped (`Question.parts`).
    """

    question: Question
    priors: Priors
    parts: Mapping[tuple[int, ...], Priors]

    def under(self, duties: Sequence[float]) -> Priors:
        """Return the predictions under these duties: the mixture of the sets with and without each tenant.

        They are less certain than those of the sets: a stopped tenant's queued work continues (docs/facts.md 25),
        and it is unknown whether two tenants are stopped at the same moments.
        """
        throttled = [at for at, duty in enumerate(duties) if duty < 1.0]
        if not throttled or not self.parts:
            return self.priors
        more = THROTTLE_ERROR * min(1.0, sum(1.0 - duties[at] for at in throttled))
        if len(self.priors) <= MOST_WHOLE:
            weighted = _mixture(duties, throttled)
            mixed = [self._mixed(at, weighted) for at in range(len(self.priors))]
        else:
            mixed = [self._nearly(at, duties, throttled) for at in range(len(self.priors))]
        return tuple(prior and Prior(prior.mean, math.hypot(prior.error, more)) for prior in mixed)

    def _in(self, running: tuple[int, ...], at: int) -> Prior | None:
        if at not in running:
            return _STOPPED
        priors = self.priors if len(running) == len(self.priors) else self.parts[running]
        return priors[running.index(at)]

    def _mixed(self, at: int, weighted: Sequence[tuple[float, tuple[int, ...]]]) -> Prior | None:
        found = [(weight, self._in(running, at)) for weight, running in weighted if running]
        known = [(weight, prior) for weight, prior in found if prior is not None]
        if len(known) < len(found):
            return None
        return Prior(sum(w * p.mean for w, p in known), sum(w * p.error for w, p in known))

    def _nearly(self, at: int, duties: Sequence[float], throttled: Sequence[int]) -> Prior | None:
        """Return the mixture as if two tenants were never stopped at once; for sets too large for all subsets."""
        whole = self.priors[at]
        if whole is None:
            return None
        mean = whole.mean
        for other in throttled:
            rest = self._in(tuple(each for each in range(len(self.priors)) if each != other), at)
            if other != at and rest is not None:
                mean += (1.0 - duties[other]) * (rest.mean - whole.mean)
        duty = duties[at]
        return Prior(duty * min(1.0, mean), max(duty, _LEAST_ERROR_PART) * whole.error)


_STOPPED: Final = Prior(0.0, 0.0)


def _mixture(duties: Sequence[float], throttled: Sequence[int]) -> list[tuple[float, tuple[int, ...]]]:
    """Return the sets that run together, each with its part of the time."""
    found = []
    for stopped in itertools.product((False, True), repeat=len(throttled)):
        absent = {at for at, is_stopped in zip(throttled, stopped, strict=True) if is_stopped}
        weight = math.prod(1.0 - duties[at] if at in absent else duties[at] for at in throttled)
        found.append((weight, tuple(at for at in range(len(duties)) if at not in absent)))
    return found


def _is_near(one: TenantLoad, two: TenantLoad) -> bool:
    mine, theirs = _figures(one), _figures(two)
    return mine.keys() == theirs.keys() and all(
        abs(value - theirs[name]) <= SAME_RATIO * max(1.0, abs(value)) for name, value in mine.items()
    )


def _figures(load: TenantLoad) -> dict[str, float]:
    curve = {f"cap {cap}": progress for cap, progress in load.cap_curve.items()}
    rate = {"rate": load.iterations_per_s} if load.iterations_per_s else {}
    return {**load.signature.as_dict(), **curve, **rate}
