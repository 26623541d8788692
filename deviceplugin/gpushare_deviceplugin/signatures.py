"""What each workload draws from a GPU alone: from its GpuShare's profile, else as seen here while it ran alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpushare.core.api import GpuShareStatus, WorkloadSignature, from_json
from gpushare.core.gpu import COUNTERS, Counters, GpuSample
from gpushare_deviceplugin.pods import ManagedPod

MIN_SECONDS: Final = 5.0  # of running alone, before what was seen counts as a signature
MEMORY_SECONDS: Final = 120.0  # older windows fade, so that a workload's later phases replace its first ones
DIGITS: Final = 4  # of a counter on the wire
MAX_WORKLOADS: Final = 1000  # of one node; the one not seen longest is forgotten


@dataclass(frozen=True, slots=True)
class SoloSignature:
    """A workload alone at 100% threads.

    Attributes:
        cap_curve: progress alone by thread percentage, where measured.
        iterations_per_s: rate alone, where the workload reports one.
    """

    counters: Counters
    cap_curve: Mapping[int, float] = field(default_factory=dict)
    iterations_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class SharedProfile:
    """A GpuShare's profile and the pods that it is for; `kept` as it is written there."""

    pod_uids: frozenset[str]
    gpu_model: str
    signature: SoloSignature
    kept: WorkloadSignature | None = None


def reduce_gpushare(obj: Mapping[str, Any]) -> SharedProfile | None:
    """A raw GpuShare to its profile; None while it has none."""
    status = from_json(GpuShareStatus, obj.get("status"))
    if status.profile is None or not status.profile.counters:
        return None
    return SharedProfile(
        pod_uids=frozenset(placement.pod_uid for placement in status.placements),
        gpu_model=status.profile.gpu_model,
        signature=SoloSignature(
            status.profile.as_counters(),
            {point.thread_percentage: point.progress_ratio for point in status.profile.cap_curve},
            status.profile.iterations_per_second,
        ),
        kept=status.profile,
    )


class Signatures:
    """All signatures that this node knows.

    Args:
        profiles: GpuShares' profiles by namespace/name, a live view.
    """

    def __init__(self, profiles: Mapping[str, SharedProfile]) -> None:
        self._profiles = profiles
        self._seen: dict[tuple[str, str], tuple[Counters, float]] = {}

    def of(self, pod: ManagedPod, gpu_model: str) -> SoloSignature | None:
        """A pod's signature on a GPU model; None while nobody has seen it alone there."""
        for profile in self._profiles_of(pod):
            if profile.gpu_model in ("", gpu_model):
                return profile.signature
        seen = self._seen.get((pod.workload, gpu_model))
        return SoloSignature(seen[0]) if seen is not None and seen[1] >= MIN_SECONDS else None

    def news(self, pod: ManagedPod, gpu_model: str) -> WorkloadSignature | None:
        """What this node saw of a pod's workload alone, for its GpuShare to keep; None when that has as good."""
        counters, seconds = self._seen.get((pod.workload, gpu_model), (Counters(), 0.0))
        if seconds < MIN_SECONDS:
            return None
        kept = next((each.kept for each in self._profiles_of(pod)), None)
        if kept is not None and not kept.gives_way(seconds):
            return None
        rounded = {name: round(min(1.0, value), DIGITS) for name, value in counters.as_dict().items()}
        return WorkloadSignature(gpu_model, rounded, window_seconds=float(int(seconds)))

    def _profiles_of(self, pod: ManagedPod) -> Iterator[SharedProfile]:
        """The profiles of GpuShares that speak for a pod: in its own namespace, whatever others say of its uid."""
        for key, profile in self._profiles.items():
            if pod.uid in profile.pod_uids and key.startswith(f"{pod.namespace}/"):
                yield profile

    def learn(self, pod: ManagedPod, gpu_model: str, sample: GpuSample) -> None:
        """A window in which this pod was alone on a GPU, with 100% of its threads."""
        key = (pod.workload, gpu_model)
        before, seconds = self._seen.pop(key, (Counters(), 0.0))
        total = min(MEMORY_SECONDS, seconds) + sample.window_seconds
        weight = sample.window_seconds / total
        means = {
            name: new if (old := getattr(before, name)) is None else old + weight * (new - old)
            for name in COUNTERS
            if (new := getattr(sample.counters, name)) is not None
        }
        self._seen[key] = (Counters(**means), total)
        if len(self._seen) > MAX_WORKLOADS:
            del self._seen[next(iter(self._seen))]
