"""What was seen of a workload under a cap: its average use while alone or read in place, and its other phases."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.core.api import CapPoint, PhaseReading, WorkloadPhase
from gpushare.core.control.sharing import SoloSignature
from gpushare.core.gpu import COUNTERS, Counters, GpuSample
from gpushare.core.progress import BAD_FIT, at_full_threads, shape_misfit

MIN_SECONDS: Final = 5.0  # of running alone, before the average counts as a signature
MIN_READINGS: Final = 2  # with its neighbours stopped, each the settled end of about a second
MIN_READING_SECONDS: Final = 1.0
# Older windows fade, so that a workload's later phases replace its first ones, or after a GpuShare's own window.
MEMORY_SECONDS: Final = 120.0
DIGITS: Final = 4  # of a counter on the wire
IDLE_RATIO: Final = 0.01  # of the SMs: a client that only waits uses less, and tells nothing about its workload
LIGHT_READINGS: Final = 6  # that show so little use, until a program counts as one that uses no more
START_SECONDS: Final = 30.0  # longest start of a program; PyTorch's client idles for 7 to 9 s
PHASE_SECONDS: Final = 10.0  # of other work than the signature knows of, until it counts as a phase of the program


@dataclass(frozen=True, slots=True)
class SoloUse:
    """A workload's average use while alone.

    Attributes:
        pod_uid: the pod observed last.
        start_seconds: seconds of this pod left out because they look like its start; None once it works.
        may_hold_start: whether it is a single window, whose first part may be the start.
        readings: number of windows in which its neighbours were stopped.
        sm_clock_mhz: mean SM clock; None: not known for all of it.
        alone_seconds: part of `seconds` in which it was alone.
    """

    counters: Counters
    seconds: float
    pod_uid: str
    start_seconds: float | None = None
    may_hold_start: bool = False
    readings: int = 0
    sm_clock_mhz: float | None = None
    alone_seconds: float = 0.0

    @property
    def is_signature(self) -> bool:
        """Return whether it shows a program that works, for long enough."""
        is_read = self.readings >= MIN_READINGS and self.seconds >= MIN_READING_SECONDS
        is_long = self.seconds >= MIN_SECONDS or is_read
        return is_long and not self.may_hold_start and not self._is_idle

    @property
    def reading(self) -> PhaseReading:
        """Return how it was measured; in place only if what was seen of it alone would make no signature."""
        is_in_place = self.readings >= MIN_READINGS and self.alone_seconds < MIN_SECONDS
        return PhaseReading.IN_PLACE if is_in_place else PhaseReading.ALONE

    @property
    def is_light(self) -> bool:
        """Return whether use was almost zero for longer than a start; this node then accepts it as signature."""
        is_long = self.seconds >= START_SECONDS or self.readings >= LIGHT_READINGS
        return is_long and not self.may_hold_start and self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self.counters.activity_ratio() < IDLE_RATIO

    def next(
        self, pod_uid: str, sample: GpuSample, readings: int = 0, memory_seconds: float = MEMORY_SECONDS
    ) -> "SoloUse":
        """Return the average with one more window.

        Args:
            readings: 1 for a window in which neighbours were stopped.
            memory_seconds: for how long windows count in full.
        """
        alone = 0.0 if readings else sample.window_seconds
        skipped = self.start_seconds if pod_uid == self.pod_uid else 0.0
        counters, seconds, clock = sample.counters, sample.window_seconds, sample.sm_clock_mhz
        if counters.is_far_more_active(self.counters):
            return SoloUse(
                counters,
                seconds,
                pod_uid,
                may_hold_start=True,
                readings=readings,
                sm_clock_mhz=clock,
                alone_seconds=alone,
            )
        if self.may_hold_start and counters.activity_ratio() > self.counters.activity_ratio():
            return SoloUse(counters, seconds, pod_uid, readings=readings, sm_clock_mhz=clock, alone_seconds=alone)
        if skipped is not None and skipped < START_SECONDS:
            if self.counters.is_far_more_active(counters):
                return replace(self, pod_uid=pod_uid, start_seconds=skipped + seconds)
            if skipped and counters.activity_ratio() < self.counters.activity_ratio():
                return replace(self, pod_uid=pod_uid, start_seconds=None)  # it may contain the end of the start
        total = min(memory_seconds, self.seconds) + seconds
        weight = seconds / total
        means = {
            name: new if (old := getattr(self.counters, name)) is None else old + weight * (new - old)
            for name in COUNTERS
            if (new := getattr(counters, name)) is not None
        }
        if self.seconds and self.sm_clock_mhz is not None and clock is not None:
            clock = self.sm_clock_mhz + weight * (clock - self.sm_clock_mhz)
        elif self.seconds:
            clock = None
        return SoloUse(
            Counters(**means),
            total,
            pod_uid,
            readings=self.readings + readings,
            sm_clock_mhz=clock,
            alone_seconds=min(memory_seconds, self.alone_seconds) + alone,
        )


@dataclass(frozen=True, slots=True)
class OtherPhase:
    """Other work of a program than its signature describes, observed under one cap.

    Attributes:
        lasted_seconds: seconds it was observed since the usual work was.
        all_seconds: total seconds it was observed.
        cap_curve: its progress under caps, from its GpuShare.
    """

    cap: int
    seen: SoloUse
    lasted_seconds: float = 0.0
    all_seconds: float = 0.0
    cap_curve: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def read_back(cls, kept: WorkloadPhase) -> "OtherPhase":
        """Rebuild a phase, as observed under its cap, from a GpuShare."""
        cap = kept.thread_percentage or 100
        curve = {point.thread_percentage: point.progress_ratio for point in kept.cap_curve}
        seen = kept.as_signature("").seen_counters()
        readings = MIN_READINGS if kept.reading is PhaseReading.IN_PLACE else 0
        window = kept.window_seconds or 0.0
        read = SoloUse(seen, window, "", readings=readings, sm_clock_mhz=kept.sm_clock_mhz)
        return cls(cap, read, cap_curve=curve)

    def published(self, total_seconds: float) -> WorkloadPhase:
        """Return it for the workload's GpuShare.

        Args:
            total_seconds: total seconds the workload was observed.
        """
        counters, progress = at_full_threads(self.seen.counters, self.cap / 100)
        return WorkloadPhase(
            on_the_wire(counters),
            round(self.all_seconds / total_seconds, 2) if self.all_seconds else None,
            PhaseReading.IN_PLACE if self.seen.readings else PhaseReading.ALONE,
            None if self.cap == 100 else self.cap,
            () if self.cap == 100 else (CapPoint(self.cap, round(progress, DIGITS)),),
            float(int(self.seen.seconds)),
            round(self.seen.sm_clock_mhz, 1) if self.seen.sm_clock_mhz else None,
        )

    def fits(self, cap: int, sample: GpuSample) -> bool:
        """Return whether a window under a cap shows this work."""
        return cap == self.cap and fits(self.seen.counters, self.seen.sm_clock_mhz, sample, BAD_FIT)

    @property
    def lasts(self) -> bool:
        """Return whether it was observed for long enough to count as a phase."""
        return self.seen.is_signature and (
            self.seen.seconds >= PHASE_SECONDS or self.seen.readings >= MIN_READINGS
        )

    @property
    def signature(self) -> SoloSignature:
        """Return its signature with all threads."""
        solo = solo_of(self.cap, self.seen)
        return replace(solo, cap_curve={**solo.cap_curve, **self.cap_curve})


def fits(signature: Counters, taken_mhz: float | None, sample: GpuSample, bar: float) -> bool:
    """Return whether a window shows the work of a signature: how far their proportions differ is below a bar."""
    missed = shape_misfit(signature, sample.counters, taken_mhz, sample.sm_clock_mhz)
    return missed is None or missed <= bar


def on_the_wire(counters: Counters) -> dict[str, float]:
    """Return counters as they are published."""
    return {name: round(min(1.0, value), DIGITS) for name, value in counters.as_dict().items()}


def solo_of(cap: int, seen: SoloUse) -> SoloSignature:
    """Return the signature with all threads that follows from what was seen under a cap."""
    counters, progress = at_full_threads(seen.counters, cap / 100)
    return SoloSignature(counters, {} if cap == 100 else {cap: progress}, sm_clock_mhz=seen.sm_clock_mhz)
