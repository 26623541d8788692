"""A workload's signature, as stored in a GpuShare or GpuNode."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from gpushare.core.api.schema import ATOMIC_LIST, described, list_map
from gpushare.core.gpu import COUNTERS, MIN_SIGNATURE_SECONDS, Counters

LONGER_WINDOW: Final = 4.0
"""A signature replaces one whose window is this many times shorter, so 5 s to 120 s takes three writes."""
MOST_OTHER_PHASES: Final = 3
"""Kinds of work that are kept besides the usual one: four in all."""
_RATIO: Final[dict[str, Any]] = {"minimum": 0, "maximum": 1}
# (part, whole): no pipe is busier than the SMs, except the integer pipe, of which an SM has more than one unit; no
# tensor pipe is busier than all tensor pipes together.
_PARTS: Final = (
    *((name, "sm_util") for name in ("sm_occupancy", "fp64_util", "fp32_util", "fp16_util", "any_tensor_util")),
    *((name, "any_tensor_util") for name in ("dfma_tensor_util", "hmma_tensor_util", "imma_tensor_util")),
)
_PART_SLACK: Final = 0.02
_CURVE_SLACK: Final = 0.5


@dataclass(frozen=True, slots=True)
class CapPoint:
    """One point of a cap curve."""

    thread_percentage: int = described(
        "MPS thread percentage.", default=100, required=True, minimum=1, maximum=100
    )
    progress_ratio: float = described(
        "Progress under it relative to 100%.", default=1.0, name="progress", required=True, minimum=0
    )


class PhaseReading(StrEnum):
    """Way a signature was measured."""

    ALONE = "Alone"
    IN_PLACE = "InPlace"  # beside neighbours that were stopped for a moment


@dataclass(frozen=True, slots=True)
class WorkloadPhase:
    """Other work that a workload does for part of the time, with a signature of its own (docs/adr/0156)."""

    counters: Mapping[str, float] = described(
        "Device counters at 100% threads during this work, as in the profile.",
        default_factory=dict,
        items=_RATIO,
        required=True,
        maxProperties=32,
    )
    time_ratio: float | None = described(
        "Part of the workload's time spent on this work, 0 to 1, as observed by the agent that measured it.",
        default=None,
        minimum=0,
        maximum=1,
    )
    reading: PhaseReading = described(
        "Alone: the pod was the only one on its GPU; InPlace: its neighbours were stopped for a moment.",
        default=PhaseReading.ALONE,
    )
    thread_percentage: int | None = described(
        "Thread percentage that it was measured under; absent: all threads.", default=None, minimum=1, maximum=99
    )
    cap_curve: tuple[CapPoint, ...] = described(
        "Progress of this work under lower thread percentages where measured.",
        default=(),
        maxItems=8,
        **list_map("threadPercentage"),
    )
    window_seconds: float | None = described("How long it was measured.", default=None, minimum=0)
    sm_clock_mhz: float | None = described(
        "Mean clock of the SMs meanwhile, MHz; absent: not known.",
        default=None,
        name="smClockMHz",
        minimum=1,
        maximum=10_000,
    )

    def as_signature(self, gpu_model: str) -> "WorkloadSignature":
        """Return the signature that the workload would have if it did nothing else."""
        return WorkloadSignature(
            gpu_model,
            self.counters,
            cap_curve=self.cap_curve,
            window_seconds=self.window_seconds,
            thread_percentage=self.thread_percentage,
            sm_clock_mhz=self.sm_clock_mhz,
        )


@dataclass(frozen=True, slots=True)
class WorkloadSignature:
    """The signature of the workload, taken alone or beside neighbours that were stopped (docs/design.md 4)."""

    gpu_model: str = described("GPU model it was taken on.", default="")
    counters: Mapping[str, float] = described(
        "Device counters at 100% threads, ratios from 0 to 1, by the names of the colocation dataset: "
        f"{', '.join(COUNTERS)}. What the device cannot measure is absent. For a signature taken under a cap they "
        "are extrapolated from those measured under it, and the cap curve has the progress under it.",
        default_factory=dict,
        items=_RATIO,
        maxProperties=32,
    )
    iterations_per_second: float | None = described(
        "The workload's own rate where it reports one.", default=None, minimum=0
    )
    memory_peak_mib: int | None = described(
        "Most device memory that a pod of it was seen to use on a GPU of this model, MiB; written again once it "
        "is a twentieth higher. Absent: not known.",
        default=None,
        name="memoryPeakMiB",
        minimum=0,
    )
    cap_curve: tuple[CapPoint, ...] = described(
        "Progress under lower thread percentages where measured.",
        default=(),
        maxItems=100,
        **list_map("threadPercentage"),
    )
    window_seconds: float | None = described("Length of the measurement.", default=None, minimum=0)
    taken_at: str | None = described("When the measurement ended.", default=None, format="date-time")
    thread_percentage: int | None = described(
        "Thread percentage that it was taken under; absent: all threads.", default=None, minimum=1, maximum=99
    )
    sm_clock_mhz: float | None = described(
        "Mean clock of the SMs while it was taken, MHz, since counters are ratios of cycles; absent: not known.",
        default=None,
        name="smClockMHz",
        minimum=1,
        maximum=10_000,
    )

    revision: int | None = described(
        "How often the workload had changed its work for long, so that a new signature was taken; absent: never.",
        default=None,
        minimum=1,
        maximum=1_000_000,
    )
    phases: tuple[WorkloadPhase, ...] = described(
        "Other work that the workload does for part of the time, such as evaluation between epochs, each with a "
        "signature of its own. What is promised and predicted holds for the worst of them.",
        default=(),
        maxItems=MOST_OTHER_PHASES,
        **ATOMIC_LIST,
    )
    reading: PhaseReading | None = described(
        "Alone: the pod was the only one on its GPU; InPlace: its neighbours were stopped for a moment, so that "
        "profile.windowSeconds does not count. Absent: not known.",
        default=None,
    )

    @property
    def cap(self) -> int:
        """Return the thread percentage that it was taken under."""
        return 100 if self.thread_percentage is None else self.thread_percentage

    def as_counters(self) -> Counters:
        """Return the counters as a value; unknown names are left out."""
        return Counters(**{name: self.counters[name] for name in COUNTERS if name in self.counters})

    def seen_counters(self) -> Counters:
        """Return the counters as they were measured under its cap."""
        progress = next(
            (each.progress_ratio for each in self.cap_curve if each.thread_percentage == self.cap), 1.0
        )
        whole = self.as_counters()
        under = Counters(**{name: progress * value for name, value in whole.as_dict().items()})
        return replace(under, graphics_util=whole.graphics_util)

    def is_usable(self) -> bool:
        """Return whether the interference model can use it: SM use known, window long, not contradictory."""
        window = self.window_seconds
        is_long = window is None or window >= MIN_SIGNATURE_SECONDS
        return "sm_util" in self.counters and is_long and not self.contradiction()

    def contradiction(self) -> str:
        """Return a sentence on what cannot be true of this signature; empty if nothing contradicts.

        All 2,657 measured runs of the H200's three datasets pass: no part is above its whole, and no program's
        progress falls by more than 0.33 as its cap rises (one that serves bursts, in short windows).
        """
        wrong = sorted(name for name, ratio in self.counters.items() if not 0 <= ratio <= 1)
        if wrong:
            return f"{wrong[0]} is {self.counters[wrong[0]]:g}, and a counter is from 0 to 1"
        for part, whole in _PARTS:
            if self.counters.get(part, 0.0) > self.counters.get(whole, 1.0) + _PART_SLACK:
                return f"{part} is {self.counters[part]:g}, above {whole}, which is {self.counters[whole]:g}"
        points = sorted((point.thread_percentage, point.progress_ratio) for point in self.cap_curve)
        for (low, more), (high, less) in itertools.pairwise([*points, (100, 1.0)]):
            if not math.isfinite(more) or more > less + _CURVE_SLACK:
                return f"progress is {more:g} under {low}% of the threads and {less:g} under {high}%"
        return ""

    def gives_way(self, other: "WorkloadSignature") -> bool:
        """Return whether another signature should replace this one. The first rule that applies decides.

        1. An empty or contradictory signature is replaced by any other.
        2. The later revision wins.
        3. One more than twice as active wins, however short: the other covers the program's start, or a pause.
        4. The one taken under more threads wins.
        5. One with a known clock replaces one without, unless it is much shorter; never the other way round.
        6. Otherwise the new window must be `LONGER_WINDOW` times as long.

        Rules 2 to 5 are never undone by the opposite change, so two nodes do not replace each other's for ever.
        """
        own, others = self.as_counters(), other.as_counters()
        if not self.counters or self.contradiction():
            return True
        if (self.revision or 0) != (other.revision or 0):
            return (other.revision or 0) > (self.revision or 0)
        if others.is_far_more_active(own):
            return True
        if own.is_far_more_active(others):
            return False
        if self.cap != other.cap:
            return other.cap > self.cap
        longer = (other.window_seconds or 0.0) / max(self.window_seconds or 0.0, 1.0)
        if (self.sm_clock_mhz is None) != (other.sm_clock_mhz is None):
            return self.sm_clock_mhz is None and longer * LONGER_WINDOW >= 1.0
        return longer >= LONGER_WINDOW
