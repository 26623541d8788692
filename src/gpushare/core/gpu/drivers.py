"""Which of NVIDIA's drivers gpushare works with."""

import re
from typing import Final

from gpushare.core.gpu.devices import DevicesError

MINIMUM_DRIVER: Final = 525
"""The first series of CUDA 12, whose NVML has the counters (GPM) that are read on Hopper. Only 580 was tested."""


def check_driver(version: str | None) -> None:
    """Refuse a driver below the minimum; one whose version is unknown passes.

    Raises:
        DevicesError: it is too old.
    """
    series = re.match(r"\d+", version or "")
    if series is not None and int(series[0]) < MINIMUM_DRIVER:
        raise DevicesError(
            f"the driver is {version}, and gpushare needs {MINIMUM_DRIVER} or later", retryable=False
        )
