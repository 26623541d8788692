"""GPUs: pipes and counters, health, processes outside MPS, and the Protocol of the devices."""

from gpushare.core.gpu.artefact import (
    ARTEFACT,
    ARTEFACT_VERSION,
    CHECKSUM,
    SHORTFALLS,
    ArtefactError,
    artefact_from_json,
    artefact_problem,
    checksum,
)
from gpushare.core.gpu.devices import (
    ComputeMode,
    Devices,
    DevicesError,
    GpuHealth,
    GpuInfo,
    GpuProcess,
    GpuSample,
    Health,
)
from gpushare.core.gpu.drivers import MINIMUM_DRIVER, check_driver
from gpushare.core.gpu.exclusive import ModeChange, mode_change
from gpushare.core.gpu.likeness import FITTED_ON, calibration_warning, interval_widening
from gpushare.core.gpu.outside import AGAIN_SECONDS, Found, OutsideProcess, OutsideWatch, look, pids_outside
from gpushare.core.gpu.pipes import COUNTERS, MIN_SIGNATURE_SECONDS, Counters, mean_counters
from gpushare.core.gpu.still import Standstill

__all__ = [
    "AGAIN_SECONDS",
    "ARTEFACT",
    "ARTEFACT_VERSION",
    "CHECKSUM",
    "COUNTERS",
    "FITTED_ON",
    "MINIMUM_DRIVER",
    "MIN_SIGNATURE_SECONDS",
    "SHORTFALLS",
    "ArtefactError",
    "ComputeMode",
    "Counters",
    "Devices",
    "DevicesError",
    "Found",
    "GpuHealth",
    "GpuInfo",
    "GpuProcess",
    "GpuSample",
    "Health",
    "ModeChange",
    "OutsideProcess",
    "OutsideWatch",
    "Standstill",
    "artefact_from_json",
    "artefact_problem",
    "calibration_warning",
    "check_driver",
    "checksum",
    "interval_widening",
    "look",
    "mean_counters",
    "mode_change",
    "pids_outside",
]
