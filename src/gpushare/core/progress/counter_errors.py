"""Error model of attribution: how far a GPU's counters are from the sum of its tenants' work.

Errors are relative to work, not to the scale: a tenant that uses a pipe much adds much error to it, and one that
does not use it adds none. So a pipe that only one tenant uses determines that tenant's progress almost alone.

The figures are rounded and near the least error of inferred progress over 588 sets of 2 to 8 programs on an H200
(src/gpushare/data/h200-colocation.jsonl) with programs that the interference model never saw. The minimum is flat:
halving or doubling any column adds at most 6% to the error (docs/measurements/attribution.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.core.gpu import Counters


@dataclass(frozen=True, slots=True)
class CounterErrors:
    """Errors of one counter: ratios, one standard deviation.

    Attributes:
        floor: error of the counter itself.
        work: relative error of a tenant's work per unit of progress, if measured under the tenant's cap.
        guessed: the same, if taken from the work at 100% threads.
        gap: how much the device reads above the sum of the tenants' work, relative to it, per neighbour.
        gap_error: error of the gap; it grows with the square root of the number of neighbours.
    """

    floor: float
    work: float
    guessed: float
    gap: float
    gap_error: float


_PIPE: Final = CounterErrors(floor=0.003, work=0.04, guessed=0.1, gap=0.0, gap_error=0.02)
# Neighbours evict each other's cache lines, which adds DRAM traffic, and waiting kernels stay resident for longer.
# Activity and occupancy measure time, which overlaps, and depend on the kernels that libraries choose by cap.
COUNTER_ERRORS: Final[Mapping[str, CounterErrors]] = {
    "fp64_util": _PIPE,
    "dfma_tensor_util": _PIPE,
    "fp32_util": _PIPE,
    "fp16_util": _PIPE,
    "hmma_tensor_util": _PIPE,
    "imma_tensor_util": _PIPE,
    "integer_util": CounterErrors(floor=0.003, work=0.02, guessed=0.1, gap=0.005, gap_error=0.02),
    # Median excess above the sum: 0.05, 0.14 and 0.16 over 1,759 sets of two, three and four (both datasets).
    "dram_bw_util": CounterErrors(floor=0.003, work=0.02, guessed=0.1, gap=0.05, gap_error=0.05),
    "sm_util": CounterErrors(floor=0.01, work=0.04, guessed=0.3, gap=0.01, gap_error=0.06),
    "sm_occupancy": CounterErrors(floor=0.01, work=0.1, guessed=0.6, gap=0.08, gap_error=0.06),
}
_MOST_GAP: Final = 0.2  # the gap grows less than in proportion to the number of neighbours


@dataclass(frozen=True, slots=True)
class CounterRow:
    """One counter of a set of tenants.

    Attributes:
        seen: the device's reading.
        design: by tenant, the reading per unit of progress, gap included.
        errors: errors of the entries of `design`.
        floor: error of the counter itself.
        gap_error: relative error of the sum.
    """

    seen: float
    design: tuple[float, ...]
    errors: tuple[float, ...]
    floor: float
    gap_error: float

    @classmethod
    def of(
        cls, name: str, device: Counters, works: Sequence[Counters], is_guessed: Sequence[bool]
    ) -> "CounterRow":
        """Return the row of a counter that the device and every tenant have.

        Args:
            works: the tenants' counters per unit of progress.
            is_guessed: by tenant, whether they were not measured under its cap.
        """
        law = COUNTER_ERRORS[name]
        neighbours = len(works) - 1
        drawn = [float(getattr(work, name)) for work in works]
        return cls(
            float(getattr(device, name)),
            tuple((1.0 + min(_MOST_GAP, law.gap * neighbours)) * each for each in drawn),
            tuple(
                (law.guessed if guessed else law.work) * each
                for guessed, each in zip(is_guessed, drawn, strict=True)
            ),
            law.floor,
            law.gap_error * neighbours**0.5,
        )

    def variance(self, progress: Sequence[float]) -> float:
        """Return the variance of the counter's residual at this progress."""
        total = sum(value * p for value, p in zip(self.design, progress, strict=True))
        own = sum((error * p) ** 2 for error, p in zip(self.errors, progress, strict=True))
        return self.floor**2 + (self.gap_error * total) ** 2 + own


def counters_of(device: Counters, works: Sequence[Counters]) -> tuple[str, ...]:
    """Return the names of the counters that the device and every tenant have."""
    return tuple(
        name
        for name in COUNTER_ERRORS
        if getattr(device, name) is not None and all(getattr(work, name) is not None for work in works)
    )
