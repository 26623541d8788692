"""The device's counters over a window, by NVML's GPU performance monitoring (Hopper and later; facts.md 21)."""

from typing import Any, Final

# Dataset field -> name of NVML's metric id.
_METRICS: Final = {
    "sm_util": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "fp64_util": "NVML_GPM_METRIC_FP64_UTIL",
    "dfma_tensor_util": "NVML_GPM_METRIC_DFMA_TENSOR_UTIL",
    "fp32_util": "NVML_GPM_METRIC_FP32_UTIL",
    "fp16_util": "NVML_GPM_METRIC_FP16_UTIL",
    "hmma_tensor_util": "NVML_GPM_METRIC_HMMA_TENSOR_UTIL",
    "imma_tensor_util": "NVML_GPM_METRIC_IMMA_TENSOR_UTIL",
    "any_tensor_util": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "integer_util": "NVML_GPM_METRIC_INTEGER_UTIL",
    "dram_bw_util": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "graphics_util": "NVML_GPM_METRIC_GRAPHICS_UTIL",
}


class GpmCounters:
    """Counters of GPU 0 between `start` and `stop`; ratios from 0 to 1.

    Raises:
        RuntimeError: no driver, no GPU, or no GPM on this GPU.
    """

    def __init__(self, index: int = 0) -> None:
        import pynvml  # noqa: PLC0415 -- a dry run needs no driver

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            if not pynvml.nvmlGpmQueryDeviceSupport(self._gpu).isSupportedDevice:
                raise RuntimeError("this GPU has no performance monitoring (GPM needs Hopper or later)")
            self._first, self._second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML cannot measure this GPU: {error}") from None

    def about(self) -> dict[str, str]:
        """The header's facts: GPU model and driver."""
        return {
            "gpu_model": _text(self._nvml.nvmlDeviceGetName(self._gpu)),
            "driver": _text(self._nvml.nvmlSystemGetDriverVersion()),
        }

    def start(self) -> None:
        """Take the first sample."""
        self._nvml.nvmlGpmSampleGet(self._gpu, self._first)

    def stop(self) -> dict[str, float]:
        """Take the second sample and read the counters between the two; none where the driver gives none."""
        try:
            return self._read()
        except self._nvml.NVMLError:
            return {}

    def _read(self) -> dict[str, float]:
        self._nvml.nvmlGpmSampleGet(self._gpu, self._second)
        query = self._nvml.c_nvmlGpmMetricsGet_t()
        query.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(_METRICS)
        query.sample1, query.sample2 = self._first, self._second
        for position, metric in enumerate(_METRICS.values()):
            query.metrics[position].metricId = getattr(self._nvml, metric)
        self._nvml.nvmlGpmMetricsGet(query)
        return {
            field: round(float(query.metrics[position].value) / 100.0, 4)
            for position, field in enumerate(_METRICS)
            if query.metrics[position].nvmlReturn == 0
        }

    def memory_by_pid(self) -> dict[int, int]:
        """MiB in use by process, MPS clients included; empty where the driver does not say."""
        listed: dict[int, int] = {}
        for read in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            try:
                for process in getattr(self._nvml, read)(self._gpu):
                    if process.usedGpuMemory:
                        listed[process.pid] = int(process.usedGpuMemory / 2**20)
            except self._nvml.NVMLError:
                continue
        return listed


class NoCounters:
    """Stands in for a GPU in a dry run: no counters."""

    def about(self) -> dict[str, str]:
        """A header that says what it is."""
        return {"gpu_model": "none (dry run)", "driver": "none"}

    def start(self) -> None:
        """Nothing to read."""

    def stop(self) -> dict[str, float]:
        """No counters."""
        return {}

    def memory_by_pid(self) -> dict[int, int]:
        """No processes."""
        return {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
