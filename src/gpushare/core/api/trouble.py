"""What is wrong with a pod on its GPU, as its node's agent reports it (docs/adr/0146)."""

from dataclasses import dataclass
from enum import StrEnum

from gpushare.core.api.schema import described


class TroubleKind(StrEnum):
    """What is wrong with a pod that holds a share and makes no good use of it."""

    STALLED = "Stalled"
    OUTSIDE_MPS = "OutsideMps"
    GPU_FAULT = "GpuFault"


@dataclass(frozen=True, slots=True)
class TenantTrouble:
    """One pod's trouble."""

    kind: TroubleKind = described(
        "Stalled: its processes do nothing. OutsideMps: some use the GPU where no limit binds them. GpuFault: "
        "they ended in a fault of the GPU, and none came back.",
        default=TroubleKind.STALLED,
        required=True,
    )
    message: str = described("A sentence for people.", default="", maxLength=1024)
