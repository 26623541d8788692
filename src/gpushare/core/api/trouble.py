"""Trouble of a pod on its GPU, as its node's agent reports it (docs/adr/0146)."""

from dataclasses import dataclass
from enum import StrEnum

from gpushare.core.api.schema import described


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
