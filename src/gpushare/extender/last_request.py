"""The request that was made last: making one again costs more than comparing what it was made of."""

from dataclasses import dataclass

from gpushare.core.api import GpuShare, PodView, Rejection
from gpushare.core.placement import KnownWorkload, PlacementRequest


@dataclass(frozen=True, slots=True)
class LastRequest:
    """The request that was made last, and what of: prioritize asks about the pod that filter asked about."""

    pod: PodView
    share: GpuShare | None
    known: KnownWorkload | None
    since: float
    request: PlacementRequest | Rejection

    def is_of(self, pod: PodView, share: GpuShare | None, known: KnownWorkload | None, since: float) -> bool:
        """Return whether a request for these would be the same."""
        return self.share is share and self.known is known and self.since == since and self.pod == pod
