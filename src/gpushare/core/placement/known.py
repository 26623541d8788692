"""What is known of a workload when one of its pods is placed."""

from dataclasses import dataclass, field

from gpushare.core.api import GpuShare
from gpushare.core.interference import Profile, as_profile


@dataclass(frozen=True, slots=True)
class KnownWorkload:
    """What is known of one workload.

    Attributes:
        key: identifies the profile's version; equal keys mean equal profiles.
        gpu_model: where it was taken; "" for any.
        max_slowdown: tolerated slowdown, 1 or more.
    """

    key: str
    gpu_model: str
    max_slowdown: float
    profile: Profile = field(compare=False, repr=False)


def known_of(share: GpuShare, max_slowdown: float) -> KnownWorkload | None:
    """What a GpuShare says of its workload; None without a profile that the model can use.

    Args:
        max_slowdown: tolerated where the GpuShare does not say.
    """
    signature = share.status.profile
    profile = as_profile(signature) if signature is not None else None
    if signature is None or profile is None:
        return None
    tolerated = share.spec.max_slowdown if share.spec.max_slowdown is not None else max_slowdown
    key = f"{share.namespace}/{share.name}@{signature.taken_at}:{signature.window_seconds}"
    return KnownWorkload(key, signature.gpu_model, tolerated, profile)
