"""Each workload's GPU use alone: from its GpuShare's profile, else as this node saw it alone or in place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gpushare.core.api import CapPoint, WorkloadSignature
from gpushare.core.gpu import COUNTERS, Counters, GpuSample
from gpushare.core.progress import at_full_threads
from gpushare_deviceplugin.pods import ManagedPod
from gpushare_deviceplugin.shares import SharedProfile, SoloSignature, shares_of

MIN_SECONDS: Final = 5.0  # of running alone, before the average counts as a signature
MIN_READINGS: Final = 2  # with its neighbours stopped, each the settled end of about a second
MIN_READING_SECONDS: Final = 1.0
MEMORY_SECONDS: Final = 120.0  # older windows fade, so that a workload's later phases replace its first ones
DIGITS: Final = 4  # of a counter on the wire
IDLE_RATIO: Final = 0.01  # of the SMs: a client that only waits uses less, and tells nothing about its workload
LIGHT_READINGS: Final = 6  # that show so little use, until a program counts as one that uses no more
START_SECONDS: Final = 30.0  # longest start of a program; PyTorch's client idles for 7 to 9 s
MAX_WORKLOADS: Final = 1000  # of one node; the one not seen for longest is forgotten


@dataclass(frozen=True, slots=True)
class _Seen:
    """A workload's average use while alone.

    Attributes:
        pod_uid: the pod that was seen last.
        start_seconds: of this pod, left out because they look like its start; None once it works.
        may_hold_start: whether it is one window, whose first part may be the start.
        readings: windows in which its neighbours were stopped.
        sm_clock_mhz: mean SM clock; None: not told in all of it.
    """

    counters: Counters
    seconds: float
    pod_uid: str
    start_seconds: float | None = None
    may_hold_start: bool = False
    readings: int = 0
    sm_clock_mhz: float | None = None

    @property
    def is_signature(self) -> bool:
        """Return whether it shows a program at work, for long enough."""
        is_read = self.readings >= MIN_READINGS and self.seconds >= MIN_READING_SECONDS
        is_long = self.seconds >= MIN_SECONDS or is_read
        return is_long and not self.may_hold_start and not self._is_idle

    @property
    def is_light(self) -> bool:
        """Return whether it has shown next to no use for longer than a start takes: good enough for this node."""
        is_long = self.seconds >= START_SECONDS or self.readings >= LIGHT_READINGS
        return is_long and not self.may_hold_start and self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self.counters.activity_ratio() < IDLE_RATIO

    def next(self, pod_uid: str, sample: GpuSample, readings: int = 0) -> "_Seen":
        """Return the average with one more window.

        Args:
            readings: 1 for a window in which neighbours were stopped.
        """
        skipped = self.start_seconds if pod_uid == self.pod_uid else 0.0
        counters, seconds, clock = sample.counters, sample.window_seconds, sample.sm_clock_mhz
        if counters.is_far_more_active(self.counters):
            return _Seen(counters, seconds, pod_uid, may_hold_start=True, readings=readings, sm_clock_mhz=clock)
        if self.may_hold_start and counters.activity_ratio() > self.counters.activity_ratio():
            return _Seen(counters, seconds, pod_uid, readings=readings, sm_clock_mhz=clock)
        if skipped is not None and skipped < START_SECONDS:
            if self.counters.is_far_more_active(counters):
                return replace(self, pod_uid=pod_uid, start_seconds=skipped + seconds)
            if skipped and counters.activity_ratio() < self.counters.activity_ratio():
                return replace(self, pod_uid=pod_uid, start_seconds=None)  # it may contain the end of the start
        total = min(MEMORY_SECONDS, self.seconds) + seconds
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
        return _Seen(Counters(**means), total, pod_uid, readings=self.readings + readings, sm_clock_mhz=clock)


class Signatures:
    """All signatures that this node knows.

    Args:
        profiles: GpuShares' profiles by namespace/name, a live view.
    """

    def __init__(self, profiles: Mapping[str, SharedProfile]) -> None:
        self._profiles = profiles
        self._seen: dict[tuple[str, str], dict[int, _Seen]] = {}  # by workload and model, then by cap

    def of(self, pod: ManagedPod, gpu_model: str) -> SoloSignature | None:
        """Return a pod's signature on a GPU model; None until it was seen alone, or read in place, on one.

        A program that hardly uses the GPU has one too, which is not published: without it nothing could be told of
        its neighbours.
        """
        for profile in self._profiles_of(pod):
            if profile.signature is not None and profile.gpu_model in ("", gpu_model):
                return profile.signature
        found = self._best(pod, gpu_model)
        if found is None:
            light = [seen for seen in self._caps_of(pod, gpu_model).values() if seen.is_light]
            return SoloSignature(light[0].counters, {}, sm_clock_mhz=light[0].sm_clock_mhz) if light else None
        cap, seen = found
        counters, progress = at_full_threads(seen.counters, cap / 100)
        return SoloSignature(counters, {} if cap == 100 else {cap: progress}, sm_clock_mhz=seen.sm_clock_mhz)

    def is_light(self, pod: ManagedPod, gpu_model: str) -> bool:
        """Return whether all that is known of a pod's workload is that it hardly used the GPU so far."""
        if any(each.signature is not None for each in self._profiles_of(pod)) or self._best(pod, gpu_model):
            return False
        return any(seen.is_light for seen in self._caps_of(pod, gpu_model).values())

    def news(self, pod: ManagedPod, gpu_model: str) -> WorkloadSignature | None:
        """Return the measured signature of a pod's workload, for its GpuShare; None if that has as good."""
        best = self._best(pod, gpu_model)
        if best is None:
            return None
        cap, seen = best
        counters, progress = at_full_threads(seen.counters, cap / 100)
        found = WorkloadSignature(
            gpu_model,
            {name: round(min(1.0, value), DIGITS) for name, value in counters.as_dict().items()},
            cap_curve=() if cap == 100 else (CapPoint(cap, round(progress, DIGITS)),),
            window_seconds=float(int(seen.seconds)),
            thread_percentage=None if cap == 100 else cap,
            sm_clock_mhz=round(seen.sm_clock_mhz, 1) if seen.sm_clock_mhz else None,
        )
        kept = next((each.kept for each in self._profiles_of(pod) if each.kept is not None), None)
        return found if kept is None or kept.gives_way(found) else None

    def _profiles_of(self, pod: ManagedPod) -> Iterator[SharedProfile]:
        """Return the profiles of a pod's GpuShares: only those in its own namespace."""
        return shares_of(pod, self._profiles)

    def _best(self, pod: ManagedPod, gpu_model: str) -> tuple[int, _Seen] | None:
        """Return what was seen under the most threads, with them."""
        by_cap = self._caps_of(pod, gpu_model)
        return max(((cap, seen) for cap, seen in by_cap.items() if seen.is_signature), default=None, key=_cap)

    def _caps_of(self, pod: ManagedPod, gpu_model: str) -> Mapping[int, _Seen]:
        return self._seen.get((pod.workload, gpu_model), {})

    def learn(
        self, pod: ManagedPod, gpu_model: str, sample: GpuSample, cap: int = 100, *, is_reading: bool = False
    ) -> None:
        """Learn from a window in which this pod ran alone under a cap, or its neighbours were stopped.

        A program's start hardly uses the GPU. What precedes a window more than twice as active is forgotten, and
        so is that window when the next one is more active still: it may hold the start's end. The windows in which
        a later pod of a known workload starts are left out.
        """
        key = (pod.workload, gpu_model)
        by_cap = self._seen.pop(key, {})
        before = by_cap.get(cap) or _Seen(Counters(), 0.0, pod.uid)
        self._seen[key] = by_cap | {cap: before.next(pod.uid, sample, int(is_reading))}
        if len(self._seen) > MAX_WORKLOADS:
            del self._seen[next(iter(self._seen))]


def _cap(found: tuple[int, _Seen]) -> int:
    return found[0]
