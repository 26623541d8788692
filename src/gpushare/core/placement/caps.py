"""The thread percentage of a tenant beside its neighbours (docs/design.md 5, docs/facts.md 8)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gpushare.core.api.names import SHARES_PER_GPU
from gpushare.core.api.request import JobClass

UNCAPPED_PERCENT: Final = 100
MINIMUM_PERCENT: Final = 1


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A tenant of the same GPU as caps see it."""

    share_percent: int
    job_class: JobClass


def thread_percentage(share_percent: int, job_class: JobClass, neighbours: Iterable[Neighbour] = ()) -> int:
    """The MPS thread percentage of a tenant, 1 to 100.

    A latency tenant runs uncapped. A throughput tenant is capped at its share, and beside latency tenants at what
    their shares leave free: capped so, the latency tenant's p50 is as alone (0.016 ms), uncapped it is 0.640 ms
    (docs/facts.md 8). Whole GPUs are uncapped.
    """
    if job_class is JobClass.LATENCY or share_percent >= SHARES_PER_GPU:
        return UNCAPPED_PERCENT
    kept_free = sum(other.share_percent for other in neighbours if other.job_class is JobClass.LATENCY)
    return max(MINIMUM_PERCENT, min(share_percent, SHARES_PER_GPU - kept_free))
