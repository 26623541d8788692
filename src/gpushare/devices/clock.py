"""The SM clock over a window: NVML's own samples of it, else what it reads at the window's ends."""

from typing import Any, Final

import pynvml

_EDGE_MHZ: Final = 10_000  # no GPU runs faster; such a reading is wrong


class SmClock:
    """Mean SM clock of one GPU between one call and the next; absent where the driver does not tell it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._last: float | None = None
        self._seen_us = 0  # of the newest sample that was counted
        self._has_samples = True
        try:
            self.max_mhz: int | None = int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            self.max_mhz = None
        self.mean_mhz()  # the first window begins now

    def mean_mhz(self) -> float | None:
        """Return the mean since the call before, MHz; None where the driver does not tell."""
        before, self._last = self._last, self._now()
        sampled = self._sampled()
        if before is None or self._last is None:
            return self._last
        return sum(sampled) / len(sampled) if sampled else (before + self._last) / 2

    def _now(self) -> float | None:
        try:
            mhz = int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            return None
        return float(mhz) if 0 < mhz < _EDGE_MHZ else None

    def _sampled(self) -> list[float]:
        """Return NVML's samples since the call before; none at first, or where the driver keeps none."""
        if not self._has_samples:
            return []
        is_first = not self._seen_us
        try:
            _, samples = pynvml.nvmlDeviceGetSamples(
                self._handle, pynvml.NVML_PROCESSOR_CLK_SAMPLES, self._seen_us
            )
        except pynvml.NVMLError as error:  # "not found": no new one
            self._has_samples = error.value == pynvml.NVML_ERROR_NOT_FOUND
            return []
        fresh = [each for each in samples if each.timeStamp > self._seen_us]
        self._seen_us = max((each.timeStamp for each in fresh), default=self._seen_us)
        read = [float(each.sampleValue.uiVal) for each in fresh if 0 < each.sampleValue.uiVal < _EDGE_MHZ]
        return [] if is_first else read
