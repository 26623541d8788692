"""GPM: counters of one GPU between two samples, from NVML on Hopper and later (docs/facts.md 21)."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, Final

import pynvml

from gpushare.core.gpu import Counters
from gpushare.devices.driver import driver_errors

MIN_WINDOW_SECONDS: Final = 0.1
_PERCENT: Final = 100.0
# Percent; the edges of a window can push a reading slightly above 100; beyond this it is wrong.
_EDGE: Final = 150.0

# GPM's metric for each of our counters.
METRICS: Final[dict[str, int]] = {
    "graphics_util": pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm_util": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "integer_util": pynvml.NVML_GPM_METRIC_INTEGER_UTIL,
    "any_tensor_util": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dfma_tensor_util": pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL,
    "hmma_tensor_util": pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL,
    "imma_tensor_util": pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL,
    "dram_bw_util": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "fp64_util": pynvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32_util": pynvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16_util": pynvml.NVML_GPM_METRIC_FP16_UTIL,
}


def counters_of(values: dict[str, tuple[int, float]]) -> Counters:
    """Convert NVML's answer, name -> (return code, percent), to counters; failed and invalid ones are absent."""
    read: dict[str, float] = {}
    for name, (code, percent) in values.items():
        if code == pynvml.NVML_SUCCESS and math.isfinite(percent) and 0 <= percent <= _EDGE:
            read[name] = min(1.0, percent / _PERCENT)
    return Counters(**read)


class GpmWindow:
    """The window between the last two marks on one GPU.

    Raises:
        DevicesError: the driver does not answer, in every method but `close`.
    """

    def __init__(self, uuid: str, handle: Any) -> None:
        self._handle = handle
        self._trouble = f"counters of GPU {uuid} cannot be read"
        with driver_errors(self._trouble):
            self._last = pynvml.nvmlGpmSampleAlloc()
            self._next = pynvml.nvmlGpmSampleAlloc()
        self._query = pynvml.c_nvmlGpmMetricsGet_t()  # kept, as it takes 19 kB
        self._query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._query.numMetrics = len(METRICS)
        for slot, metric in enumerate(METRICS.values()):
            self._query.metrics[slot].metricId = metric

    def mark(self) -> None:
        """End the present window and begin the next one."""
        with driver_errors(self._trouble):
            pynvml.nvmlGpmSampleGet(self._handle, self._next)
        self._last, self._next = self._next, self._last

    def values(self) -> dict[str, tuple[int, float]]:
        """Read NVML's metrics of the window: counter -> (return code, percent)."""
        query = self._query
        query.sample1, query.sample2 = self._next, self._last
        with driver_errors(self._trouble):
            pynvml.nvmlGpmMetricsGet(query)
        read = zip(METRICS, query.metrics, strict=False)  # the other slots are not used
        return {name: (int(metric.nvmlReturn), float(metric.value)) for name, metric in read}

    def counters(self) -> Counters:
        """Return the counters over the window."""
        return counters_of(self.values())

    def close(self) -> None:
        """Free both samples; a lost GPU may refuse."""
        for sample in (self._last, self._next):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)


class GpmSampler:
    """Counters of a GPU between two calls.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, window: GpmWindow, clock: Callable[[], float]) -> None:
        self._window = window
        self._clock = clock
        self._marked_at: float | None = None

    def sample(self) -> tuple[Counters, float] | None:
        """Return the counters since the previous call and the window's seconds; None at first or too soon.

        Raises:
            DevicesError: the driver does not answer; the next call starts anew.
        """
        now = self._clock()
        if self._marked_at is not None and now - self._marked_at < MIN_WINDOW_SECONDS:
            return None
        before, self._marked_at = self._marked_at, None  # a failure below must not leave an open window
        self._window.mark()
        self._marked_at = now
        return None if before is None else (self._window.counters(), now - before)

    def close(self) -> None:
        """Free the window."""
        self._window.close()
