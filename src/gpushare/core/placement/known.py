"""What is known of a workload when one of its pods is placed."""

from dataclasses import dataclass, field

from gpushare.core.admission import Defaults
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


def known_of(share: GpuShare, defaults: Defaults) -> KnownWorkload | None:
    """What a GpuShare says of its workload; None without a profile that the model can use."""
    signature = share.status.profile
    profile = as_profile(signature) if signature is not None else None
    if signature is None or profile is None:
        return None
    job_class = share.status.job_class or share.spec.job_class or defaults.job_class
    tolerated = share.spec.max_slowdown
    if tolerated is None:
        tolerated = defaults.max_slowdown_of(job_class)
    key = f"{share.namespace}/{share.name}@{signature.taken_at}:{signature.window_seconds}"
    return KnownWorkload(key, signature.gpu_model, tolerated, profile)
