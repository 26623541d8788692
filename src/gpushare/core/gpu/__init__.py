"""A GPU as the rest of core sees it: its pipes, health, processes outside MPS, and the Protocol of its devices."""

from gpushare.core.gpu.devices import Devices, DevicesError, GpuHealth, GpuInfo, GpuProcess, GpuSample, Health
from gpushare.core.gpu.outside import Found, OutsideProcess, OutsideWatch, look, pids_outside
from gpushare.core.gpu.pipes import COUNTERS, MIN_SIGNATURE_SECONDS, Counters, mean_counters

__all__ = [
    "COUNTERS",
    "MIN_SIGNATURE_SECONDS",
    "Counters",
    "Devices",
    "DevicesError",
    "Found",
    "GpuHealth",
    "GpuInfo",
    "GpuProcess",
    "GpuSample",
    "Health",
    "OutsideProcess",
    "OutsideWatch",
    "look",
    "mean_counters",
    "pids_outside",
]
