"""A pod's trouble on its GPU, as its node's agent reports it (docs/adr/0146), and who ended its neighbours."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpushare.core.api.schema import described

MOST_NEIGHBOURS_ENDED: Final = 8


class TroubleKind(StrEnum):
    """Kind of trouble of a pod that holds a share and makes no good use of it."""

    STALLED = "Stalled"
    OUTSIDE_MPS = "OutsideMps"
    GPU_FAULT = "GpuFault"


@dataclass(frozen=True, slots=True)
class TenantTrouble:
    """One pod's trouble."""

    kind: TroubleKind = described(
        "Stalled: its processes do nothing. OutsideMps: some use the GPU outside MPS, where no limit applies. "
        "GpuFault: a GPU fault ended them, and none was started again.",
        default=TroubleKind.STALLED,
        required=True,
    )
    message: str = described("A sentence for people.", default="", maxLength=1024)


@dataclass(frozen=True, slots=True)
class GroupReplacements:
    """Pods of the group that were in trouble and replaced; after each, the next one waits for longer."""

    count: int = described("How many.", default=1, required=True, minimum=1)
    at: str = described("When the last one was evicted.", default="", required=True, format="date-time")


@dataclass(frozen=True, slots=True)
class NeighboursEnded:
    """A process of the group was killed within a kernel, and the fault ended every other tenant of the GPU."""

    at: str = described("When the GPU's node noticed it.", default="", required=True, format="date-time")
    pod_uid: str = described("The pod's uid.", default="", required=True, maxLength=64)
    gpu: str = described("The GPU, by UUID.", default="", required=True, maxLength=96)
