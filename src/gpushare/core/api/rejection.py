"""A refusal as a value: why something was not done, rendered once for people."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Reason for which a request or placement was refused; the label `reason` of metrics.

    Only `gpushare plan` and `explain` refuse a node by its cordon, taints, labels or kubelet's count of shares:
    kube-scheduler does so before it asks the extender.
    """

    INVALID_ANNOTATION = "InvalidAnnotation"
    NO_GPUS = "NoGpus"
    AGENT_SILENT = "AgentSilent"
    GPU_UNHEALTHY = "GpuUnhealthy"
    GPU_MODEL = "GpuModel"
    SHARE = "NotEnoughShare"
    GPU_MEMORY = "NotEnoughGpuMemory"
    CLIENTS = "TooManyClients"
    CPU = "NotEnoughCpu"
    NODE_MEMORY = "NotEnoughNodeMemory"
    SLOWDOWN = "SlowdownBeyondTolerance"
    FAULT_DOMAIN = "FaultDomain"
    KEPT = "KeptForAnother"
    PROBATION = "Probation"
    NODE_CORDONED = "NodeCordoned"
    NODE_TAINT = "NodeTaint"
    NODE_LABELS = "NodeLabels"
    SHARES_NOT_OFFERED = "SharesNotOffered"
    CONFLICT = "Conflict"
    TOO_MANY_GPUSHARES = "TooManyGpuShares"


@dataclass(frozen=True, slots=True)
class Rejection:
    """One refusal.

    Attributes:
        reason: the machine-readable kind.
        detail: one sentence for a person, with the figures that led to it.
    """

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return self.detail


def shown(value: object, most: int = 64) -> str:
    """Quote an untrusted value for a sentence: on one line, at most `most` characters of it."""
    if value is None:
        return "nothing"
    text = str(value)
    cut = text if len(text) <= most else f"{text[: most - 3]}..."
    return '"' + "".join(character if character.isprintable() else "?" for character in cut) + '"'
