"""The mean SM clock over a window, from several readings.

NVML returns the present clock only; its buffer of samples has none of the clock on an H200, and GPM of driver 580
does not count cycles. A tenant that is stopped for a part of each second makes the clock go up and down: readings
at the ends of a window of a second were wrong by 6% on average and 24% at worst, readings every 0.08 s by 0.8%
(docs/facts.md 34).

Each reading wakes a thread up, which costs more than the reading. A simulation with the throttle's own schedule
(a script that was not kept; duties of 0.15 to 0.8, a clock between 1,425 and 1,980 MHz, queued work of 0.2 to
0.4 s) has windows of a second wrong by 0.9% on average with readings every 0.08 s, 1.1% with 0.10, 1.4% with 0.12
and 1.7% with 0.16; windows of two seconds, which most are while somebody is throttled, by 0.6, 0.8, 1.0 and 1.2%.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import pynvml

MOVING_SECONDS: Final = 0.12  # between two readings of a clock that changed lately; one reading takes 0.05 ms
CALM_READINGS: Final = 4  # readings of changing clocks for each reading of constant ones: 2.1 a second
_LATELY_SECONDS: Final = 5.0
# A GPU's clock fluctuates by steps of 15 MHz; a tenant that is stopped and continued changes it by 100 MHz and
# more.
_MOVE_RATIO: Final = 0.02
_EDGE_MHZ: Final = 10_000  # no GPU runs faster; such a reading is wrong


class SmClock:
    """Mean SM clock of one GPU between two calls; None if the driver does not report it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, handle: Any, clock: Callable[[], float]) -> None:
        self._handle = handle
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, float] | None = None  # (time of reading, MHz)
        self._sum = self._seconds = 0.0  # sum of MHz x seconds since the previous call
        self._moved_at = clock()
        self.read()

    @property
    def is_moving(self) -> bool:
        """Return whether the clock had changed lately at the last reading."""
        with self._lock:
            return self._last is not None and self._last[0] - self._moved_at < _LATELY_SECONDS

    def read(self) -> None:
        """Read the clock."""
        with self._lock:
            now, mhz = self._clock(), self._read()
            if mhz is None:
                self._last, self._sum, self._seconds = None, 0.0, 0.0
                return
            if self._last is not None:
                before_at, before = self._last
                self._sum += (now - before_at) * (mhz + before) / 2
                self._seconds += now - before_at
                if abs(mhz - before) > _MOVE_RATIO * before:
                    self._moved_at = now
            self._last = (now, mhz)

    def mean_mhz(self) -> float | None:
        """Return the mean since the previous call, MHz; None if the driver does not report the clock."""
        self.read()
        with self._lock:
            total, seconds = self._sum, self._seconds
            self._sum = self._seconds = 0.0
            if seconds > 0:
                return total / seconds
            return None if self._last is None else self._last[1]

    def _read(self) -> float | None:
        try:
            mhz = int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            return None
        return float(mhz) if 0 < mhz < _EDGE_MHZ else None


class ClockRounds:
    """Reads changing clocks often and the others rarely, all at the same time.

    Args:
        clocks: by GPU, a live view.
    """

    def __init__(self, clocks: Mapping[str, SmClock]) -> None:
        self._clocks = clocks
        self._left = 0  # readings of the changing ones until all are read

    def step(self) -> float:
        """Read the clocks that are due; return the seconds until the next reading."""
        clocks = tuple(self._clocks.values())
        is_full = self._left == 0
        self._left = CALM_READINGS - 1 if is_full else self._left - 1
        for clock in clocks:
            if is_full or clock.is_moving:
                clock.read()
        if any(clock.is_moving for clock in clocks):
            return MOVING_SECONDS
        pause, self._left = MOVING_SECONDS * (1 + self._left), 0
        return pause


class ClockPolling:
    """Reads clocks in its own thread until `close`.

    Args:
        clocks: by GPU, a live view.
    """

    def __init__(self, clocks: Mapping[str, SmClock]) -> None:
        self._rounds = ClockRounds(clocks)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sm-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._rounds.step()):
            pass
