"""GPM: counters of one GPU between two samples, by NVML on Hopper and later (docs/facts.md 21)."""

import math
from collections.abc import Callable
from typing import Any, Final

from gpushare.core.gpu.pipes import Counters

MIN_WINDOW_SECONDS: Final = 0.1
_PERCENT: Final = 100.0
_EDGE: Final = 150.0  # percent; a window's edges may push a reading a little above 100, more is a broken reading

# NVML_GPM_METRIC_* of nvml.h, by our counter.
METRICS: Final[dict[str, int]] = {
    "graphics_util": 1, "sm_util": 2, "sm_occupancy": 3, "integer_util": 4, "any_tensor_util": 5,
    "dfma_tensor_util": 6, "hmma_tensor_util": 7, "imma_tensor_util": 9, "dram_bw_util": 10,
    "fp64_util": 11, "fp32_util": 12, "fp16_util": 13,
}  # fmt: skip


def counters_of(values: dict[str, tuple[int, float]]) -> Counters:
    """Counters from NVML's answer: name -> (return code, percent); what failed or makes no sense is absent."""
    read: dict[str, float] = {}
    for name, (code, percent) in values.items():
        if code == 0 and math.isfinite(percent) and 0 <= percent <= _EDGE:
            read[name] = min(1.0, percent / _PERCENT)
    return Counters(**read)


class GpmSampler:
    """Two sample buffers of one GPU, used in turn.

    Args:
        nvml: `gpushare.devices.nvml_library` (or pynvml); device: its handle; clock: monotonic seconds.
    """

    def __init__(self, nvml: Any, device: Any, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._device = device
        self._clock = clock
        self._last = nvml.nvmlGpmSampleAlloc()
        self._next = nvml.nvmlGpmSampleAlloc()
        self._query = nvml.c_nvmlGpmMetricsGet_t()
        self._taken_at: float | None = None

    def sample(self) -> tuple[Counters, float] | None:
        """Counters since the call before and the window's seconds; None at first or when asked too soon."""
        now = self._clock()
        if self._taken_at is not None and now - self._taken_at < MIN_WINDOW_SECONDS:
            return None
        before, self._taken_at = self._taken_at, None  # a failure below must not leave half a pair behind
        self._nvml.nvmlGpmSampleGet(self._device, self._next)
        self._last, self._next = self._next, self._last
        self._taken_at = now
        if before is None:
            return None
        query = self._query
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(METRICS)
        query.sample1, query.sample2 = self._next, self._last
        for slot, metric in enumerate(METRICS.values()):
            query.metrics[slot].metricId = metric
        self._nvml.nvmlGpmMetricsGet(query)
        values = {
            name: (int(query.metrics[slot].nvmlReturn), float(query.metrics[slot].value))
            for slot, name in enumerate(METRICS)
        }
        return counters_of(values), now - before

    def close(self) -> None:
        """Free both buffers."""
        for buffer in (self._last, self._next):
            self._nvml.nvmlGpmSampleFree(buffer)
