"""The decision for a pod, kept in its decision annotations, the only durable record (docs/design.md 2.2)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import names

_THREADS: Final = re.compile(r"[1-9][0-9]?|100")
_SECONDS: Final = re.compile(r"[1-9][0-9]{0,3}")
_LIMIT: Final = re.compile(r"([0-9]{1,3})=([1-9][0-9]{0,8})M")


@dataclass(frozen=True, slots=True)
class Decision:
    """Placement of a pod, with its ceilings.

    Attributes:
        gpu_uuids: the decided GPUs, in the order the container sees them.
        thread_percentage: 1 to 100, the MPS active-thread ceiling on each GPU.
        memory_limit_mib: device memory ceiling on each GPU, all of the pod's processes together.
        decided_at: RFC 3339 time, UTC.
        probation_seconds: how long the pod has its GPU to itself while its workload is profiled; None if it is not
            on probation.
    """

    gpu_uuids: tuple[str, ...]
    thread_percentage: int
    memory_limit_mib: int
    decided_at: str
    probation_seconds: int | None = None

    def to_annotations(self) -> dict[str, str]:
        """Return the four decision annotations, and a fifth on probation."""
        limits = ",".join(f"{index}={self.memory_limit_mib}M" for index in range(len(self.gpu_uuids)))
        probation = (
            {} if self.probation_seconds is None else {names.PROBATION_SECONDS: str(self.probation_seconds)}
        )
        return {
            names.GPU: ",".join(self.gpu_uuids),
            names.THREAD_PERCENTAGE: str(self.thread_percentage),
            names.MEMORY_LIMIT: limits,
            names.DECIDED_AT: self.decided_at,
            **probation,
        }

    @classmethod
    def from_annotations(cls, annotations: Mapping[str, str]) -> "Decision | None":
        """Read the annotations back; None when the pod has no decision.

        Raises:
            ValueError: an annotation is present but malformed; the message names it.
        """
        gpus = annotations.get(names.GPU)
        if not gpus:
            return None
        uuids = tuple(gpus.split(","))
        if not all(uuids) or len(set(uuids)) != len(uuids):
            raise ValueError(f"annotation {names.GPU}: {gpus[:200]!r} is not a list of different GPUs")
        threads = annotations.get(names.THREAD_PERCENTAGE, "")
        if not _THREADS.fullmatch(threads):
            raise ValueError(f"annotation {names.THREAD_PERCENTAGE}: {threads[:200]!r} is not 1 to 100")
        limits = annotations.get(names.MEMORY_LIMIT, "")
        limit = _LIMIT.fullmatch(limits.partition(",")[0])
        seconds = annotations.get(names.PROBATION_SECONDS)
        if seconds is not None and not _SECONDS.fullmatch(seconds):
            raise ValueError(f"annotation {names.PROBATION_SECONDS}: {seconds[:200]!r} is not 1 to 9999")
        decision = cls(
            uuids,
            int(threads),
            int(limit[2]) if limit else 0,
            annotations.get(names.DECIDED_AT, ""),
            None if seconds is None else int(seconds),
        )
        if limits != decision.to_annotations()[names.MEMORY_LIMIT] or limit is None:
            raise ValueError(
                f"annotation {names.MEMORY_LIMIT}: {limits[:200]!r} is not of the form 0=8192M, one for each GPU"
            )
        return decision
