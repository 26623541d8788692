"""Progress of a workload alone under a cap, from its counters there and with all threads.

Work per unit of progress hardly depends on the cap: the same instructions, the same bytes. So the ratio of each
counter of work under the cap to that with all threads is the progress. The SMs' activity and occupancy are no
work but time, which falls with the cap (to 0.4 of what the progress says under a quarter of the threads). Where
libraries choose other kernels for fewer SMs single counters are wrong, so those that disagree lose weight.
Where the counters say little, the law for counters under a cap alone (`alone.progress_under`) decides.

Plain floats, as in `attribution`: the agent loads no numpy.
"""

from dataclasses import dataclass
from typing import Final

from gpushare.core.gpu import Counters
from gpushare.core.progress.alone import progress_under
from gpushare.core.progress.clock import at_clock
from gpushare.core.progress.counter_errors import COUNTER_ERRORS

# Standard deviations, near the least error over 138 capped solo runs of 53 programs; the minimum is flat
# (docs/measurements/signatures.md).
_LAW_ERROR: Final = 0.2
_WORK_ERROR: Final = 0.05  # relative, of a counter's work per unit of progress
# Degrees of freedom of Student's t for these errors: a counter of other kernels is far off, the others are not.
_FREEDOM: Final = 2.0
_REWEIGHTINGS: Final = 5
_TIMES: Final = frozenset({"sm_util", "sm_occupancy"})


@dataclass(frozen=True, slots=True)
class _Shown:
    """Progress as one source has it, and the variance of its error."""

    progress: float
    variance: float

    def weight(self, agreed: float | None = None) -> float:
        """Return the weight in a mean; less if it is far from `agreed`."""
        missed = 0.0 if agreed is None else (self.progress - agreed) ** 2 / self.variance
        return 1.0 / (self.variance * (1.0 + missed / _FREEDOM))


def progress_shown(
    whole: Counters,
    seen: Counters,
    cap: float,
    *,
    whole_mhz: float | None = None,
    seen_mhz: float | None = None,
) -> float:
    """Infer progress alone under a cap (0 to 1), relative to all threads, from the counters under both.

    Args:
        whole: counters alone with all threads.
        seen: counters alone under the cap.
        whole_mhz: mean SM clock while `whole` was measured; None if unknown.
        seen_mhz: mean SM clock while `seen` was measured; None if unknown.

    Source: docs/measurements/signatures.md has its error and that of the law.
    """
    readings = [_Shown(progress_under(seen, cap), _LAW_ERROR**2)]
    for name, used in at_clock(whole, whole_mhz, seen_mhz).as_dict().items():
        now = getattr(seen, name)
        if name not in COUNTER_ERRORS or name in _TIMES or now is None or used <= 0:
            continue
        ratio = now / used
        floor = COUNTER_ERRORS[name].floor / used
        readings.append(_Shown(ratio, (_WORK_ERROR * ratio) ** 2 + floor**2 * (1.0 + ratio**2)))
    agreed = None
    for _ in range(1 + _REWEIGHTINGS):
        weights = [each.weight(agreed) for each in readings]
        agreed = sum(each.progress * weight for each, weight in zip(readings, weights, strict=True)) / sum(weights)
    assert agreed is not None
    return min(1.0, agreed)
