"""The GPU's pipes and how much a workload uses them (docs/design.md 4, docs/facts.md 21)."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

# Fields of a colocation dataset's `device` object, in the order used for vectors.
COUNTERS: Final = (
    "sm_util",
    "sm_occupancy",
    "fp64_util",
    "dfma_tensor_util",
    "fp32_util",
    "fp16_util",
    "hmma_tensor_util",
    "imma_tensor_util",
    "any_tensor_util",
    "integer_util",
    "dram_bw_util",
    "graphics_util",
)

# A shorter window says too little about a workload: GPM needs 100 ms between samples (facts.md 21), and how many
# iterations fall into 0.2 s is chance.
MIN_SIGNATURE_SECONDS: Final = 0.2

FAR_MORE_ACTIVE: Final = 2.0  # phases of a program differ by less; its start, which hardly uses the GPU, by more


@dataclass(frozen=True, slots=True)
class Counters:
    """Device counters of one window, or of one workload alone: ratios from 0 to 1, None where not measured."""

    sm_util: float | None = None
    sm_occupancy: float | None = None
    fp64_util: float | None = None
    dfma_tensor_util: float | None = None
    fp32_util: float | None = None
    fp16_util: float | None = None
    hmma_tensor_util: float | None = None
    imma_tensor_util: float | None = None
    any_tensor_util: float | None = None
    integer_util: float | None = None
    dram_bw_util: float | None = None
    graphics_util: float | None = None

    def pipes(self) -> dict[str, float]:
        """Return use by pipe (fp16, fp32, fp64, int8, integer, dram), tensor pipes included; measured ones only.

        On current GPUs a matrix product shows on the tensor pipes alone (facts.md 21: an fp64 product has 94.6% on
        DFMA and 0.05% on FP64), so each precision is its plain pipe plus its tensor pipe, at most 1.
        """
        sums = {
            "fp16": (self.fp16_util, self.hmma_tensor_util),
            "fp32": (self.fp32_util,),
            "fp64": (self.fp64_util, self.dfma_tensor_util),
            "int8": (self.imma_tensor_util,),
            "integer": (self.integer_util,),
            "dram": (self.dram_bw_util,),
        }
        return {
            pipe: min(1.0, sum(part for part in parts if part is not None))
            for pipe, parts in sums.items()
            if any(part is not None for part in parts)
        }

    def activity_ratio(self) -> float:
        """Return how busy the SMs are: SM use, else the highest measured counter, else 0."""
        return self.sm_util if self.sm_util is not None else max(self.as_dict().values(), default=0.0)

    def is_far_more_active(self, other: "Counters") -> bool:
        """Return whether these counters are more than twice as active, so the others cannot be the same work."""
        return self.activity_ratio() > FAR_MORE_ACTIVE * other.activity_ratio()

    def as_dict(self) -> dict[str, float]:
        """Return the measured counters by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


def mean_counters(counters: Iterable[Counters], weights: Iterable[float] | None = None) -> Counters:
    """Average each field over the windows that measured it; None where none did.

    Args:
        weights: weight of each window, such as its length; equal if left out.
    """
    listed = list(counters)
    weighted = list(zip(listed, [1.0] * len(listed) if weights is None else weights, strict=True))
    means: dict[str, float | None] = {}
    for name in COUNTERS:
        values = [(value, weight) for each, weight in weighted if (value := getattr(each, name)) is not None]
        total = sum(weight for _, weight in values)
        means[name] = sum(value * weight for value, weight in values) / total if total else None
    return Counters(**means)
