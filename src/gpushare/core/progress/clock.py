"""Conversion of counters to another SM clock.

A counter is a ratio of cycles, so a pipe that does the same work each second reads less at a higher clock.
Attribution needs work per second, so a signature is converted to the clock of the window that it is compared with.
"""

from collections.abc import Mapping
from typing import Final

from gpushare.core.gpu import Counters

# Exponent of the clock ratio by which a counter changes at equal progress: 1 for counters of work on the SMs'
# pipes, 0 for DRAM, which has its own clock. The time in which the SMs hold a warp lies between: compute-bound
# kernels take a number of cycles, memory-bound kernels a number of seconds.
CLOCK_EXPONENTS: Final[Mapping[str, float]] = {
    "fp64_util": 1.0,
    "dfma_tensor_util": 1.0,
    "fp32_util": 1.0,
    "fp16_util": 1.0,
    "hmma_tensor_util": 1.0,
    "imma_tensor_util": 1.0,
    "any_tensor_util": 1.0,
    "integer_util": 1.0,
    "sm_util": 0.5,
    "sm_occupancy": 0.5,
}
# Clocks of a working GPU differ by less than this factor (an H200: 1,200 to 1,980 MHz); beyond it, the GPU was
# idle.
_MOST_CHANGE: Final = 2.0


def at_clock(counters: Counters, taken_mhz: float | None, now_mhz: float | None) -> Counters:
    """Convert counters taken at one SM clock to another, for the same work per second.

    Args:
        taken_mhz: mean clock of the counters; None if unknown, then nothing changes.
        now_mhz: mean clock to convert to; None likewise.
    """
    if not taken_mhz or not now_mhz:
        return counters
    change = min(_MOST_CHANGE, max(1.0 / _MOST_CHANGE, taken_mhz / now_mhz))
    return Counters(
        **{name: value * change ** CLOCK_EXPONENTS.get(name, 0.0) for name, value in counters.as_dict().items()}
    )
