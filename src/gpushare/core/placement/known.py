"""What is known of a workload when one of its pods is placed."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from gpushare.core.api import GpuShare
from gpushare.core.interference import NO_EFFECTS, Profile, as_profile


@dataclass(frozen=True, slots=True)
class KeptApart:
    """A workload's pod was retracted from beside these neighbours, and none is put there again for a while.

    Attributes:
        neighbours: names of workloads, as `KnownWorkload.name`.
        until: seconds of the caller's clock (Unix time on a live cluster).
    """

    neighbours: frozenset[str]
    until: float


@dataclass(frozen=True, slots=True)
class KnownWorkload:
    """What is known of one workload.

    Attributes:
        key: identifies the profile's version; equal keys mean equal profiles; "" without a profile.
        gpu_model: where the profile was taken; "" for any.
        max_slowdown: tolerated, 1 or more; None where the workload does not say, and its pod's class decides.
        profile: None while the workload is not profiled.
        name: of the workload among its neighbours, as namespace/name of its GpuShare.
        apart: whom it is kept apart from.
        wants_own: whether it was retracted so often that it gets a GPU of its own.
    """

    key: str
    gpu_model: str
    max_slowdown: float | None
    profile: Profile | None = field(compare=False, repr=False)
    name: str = ""
    apart: tuple[KeptApart, ...] = ()
    wants_own: bool = False

    @property
    def matters(self) -> bool:
        """Whether a decision could come out otherwise for it than for a workload of which nothing is known."""
        return self.profile is not None or bool(self.apart) or self.wants_own

    def apart_from(self, now: float) -> frozenset[str]:
        """The neighbours that it is kept apart from at a time."""
        return frozenset(name for each in self.apart if each.until > now for name in each.neighbours)


def known_of(share: GpuShare, seconds: Callable[[str | None], float]) -> KnownWorkload:
    """What a GpuShare says of its workload.

    Args:
        seconds: reads a moment of the API; long ago where it is none.
    """
    signature, name = share.status.profile, f"{share.namespace}/{share.name}"
    profile = as_profile(signature, share.status.learned) if signature is not None else None
    key, gpu_model = "", ""
    if signature is not None and profile is not None:
        key = f"{name}@{signature.taken_at}:{signature.window_seconds}"
        if profile.effects != NO_EFFECTS:
            key += f":{profile.effects}"
        if len(signature.cap_curve) > 1:  # it grows without the signature being taken anew
            key += f":{zlib.crc32(repr(signature.cap_curve).encode()):08x}"
        if profile.phases:
            key += f":{zlib.crc32(repr(signature.phases).encode()):08x}"
        gpu_model = signature.gpu_model
    # One that is only intended has no end yet: the pod's successor may come before the record does.
    ends = [
        (frozenset(each.neighbours), math.inf if each.until is None else seconds(each.until))
        for each in share.status.retractions
    ]
    return KnownWorkload(
        key,
        gpu_model,
        share.spec.max_slowdown,
        profile,
        name,
        tuple(KeptApart(neighbours, until) for neighbours, until in ends),
        share.status.needs_own_gpu,
    )
