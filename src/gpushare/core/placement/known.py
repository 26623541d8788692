"""What is known of a workload when one of its pods is placed."""

from dataclasses import dataclass, field

from gpushare.core.interference import Profile


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one workload.

    Attributes:
        key: names the profile as it is now; equal keys have equal profiles.
        gpu_model: where it was taken; "" for any.
        max_slowdown: tolerated, 1 or more.
    """

    key: str
    gpu_model: str
    max_slowdown: float
    profile: Profile = field(compare=False, repr=False)
