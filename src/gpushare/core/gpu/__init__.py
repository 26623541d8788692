"""A GPU as the rest of core sees it: its pipes, its health, and the Protocol of its devices."""

from gpushare.core.gpu.devices import Devices, DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample, Health
from gpushare.core.gpu.pipes import COUNTERS, MIN_SIGNATURE_SECONDS, Counters, mean_counters

__all__ = [
    "COUNTERS",
    "MIN_SIGNATURE_SECONDS",
    "Counters",
    "Devices",
    "DevicesError",
    "GpuHealth",
    "GpuInfo",
    "GpuProcess",
    "GpuSample",
    "Health",
    "mean_counters",
]
