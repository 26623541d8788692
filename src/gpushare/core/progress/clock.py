"""Counters at another SM clock than they were taken at.

A counter is a ratio of cycles, so a pipe that does the same work each second reads less of it at a higher clock.
What is attributed is work each second: a signature is brought to the clock of the window that it is compared with.
"""

from collections.abc import Mapping
from typing import Final

from gpushare.core.gpu import Counters

# By how much of the clock's change a counter changes at the same progress, as an exponent: all of it for what
# counts work of the SMs' pipes, none for DRAM, whose clock is its own. The time in which the SMs hold a warp lies
# between: kernels that compute last for a number of cycles, kernels that wait for memory for a number of seconds.
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
# GPUs at work stay within this of each other (an H200: 1,200 to 1,980 MHz); what lies beyond is a GPU that idled.
_MOST_CHANGE: Final = 2.0


def at_clock(counters: Counters, taken_mhz: float | None, now_mhz: float | None) -> Counters:
    """Return what counters taken at one SM clock read at another, for the same work each second.

    Args:
        taken_mhz, now_mhz: mean clocks; None for one that is not known, and then nothing changes.
    """
    if not taken_mhz or not now_mhz:
        return counters
    change = min(_MOST_CHANGE, max(1.0 / _MOST_CHANGE, taken_mhz / now_mhz))
    return Counters(
        **{name: value * change ** CLOCK_EXPONENTS.get(name, 0.0) for name, value in counters.as_dict().items()}
    )
