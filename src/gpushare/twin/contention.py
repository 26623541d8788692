"""The programs of the twin's tenants, and the Protocol of a model of their joint progress.

`gpushare.twin.drawn` fills `ProgressModel` from the fitted model; `contended_progress` is a simple law
for tests to compare with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gpushare.core.gpu import COUNTERS, Counters


@dataclass(frozen=True, slots=True)
class TwinLoad:
    """One tenant as the model sees it.

    Attributes:
        solo: its counters alone on the GPU at 100% threads, ratios.
        thread_percentage: the cap it runs under, 1 to 100.
        iterations_per_s: its rate alone; None when unknown.
        workload: its program's name; a model may know what was measured of it.
    """

    solo: Counters
    thread_percentage: int = 100
    iterations_per_s: float | None = None
    workload: str = ""


class ProgressModel(Protocol):
    """Progress of each tenant relative to running alone uncapped, ratios in 0 to 1, in the order given."""

    def __call__(self, loads: Sequence[TwinLoad]) -> tuple[float, ...]:
        """Predict for one set of tenants on one GPU."""
        ...


class Plant(ProgressModel, Protocol):
    """Behaviour of a simulated GPU: its tenants' progress, and the readings of its counters."""

    def counters(self, loads: Sequence[TwinLoad], progress: Sequence[float]) -> Counters:
        """Return the device's ratios while each load makes that progress."""
        ...


def counters_of(loads: Sequence[TwinLoad], progress: Sequence[float]) -> Counters:
    """Return each tenant's counters alone times its progress, summed, at most 1 (docs/design.md 4)."""
    total = dict.fromkeys(COUNTERS, 0.0)
    for load, ratio in zip(loads, progress, strict=True):
        for name, value in load.solo.as_dict().items():
            total[name] = min(1.0, total[name] + value * ratio)
    return Counters(**total)


# Pairs at full load on an H200 keep 1.44 of one GPU in sum uncapped (docs/facts.md 30): some 0.7 of the
# nominal capacity sum is lost to caches and scheduling, which this factor on every neighbour's SM time represents.
_INTERFERENCE_PER_NEIGHBOUR: Final = 0.08
# A cap below what a tenant uses slows it by less than the cut: measured caps of 50% keep 60 to 75% of most
# programs.
_CAP_EXPONENT: Final = 0.7


def cap_progress(solo: Counters, thread_percentage: int) -> float:
    """Return progress alone under a cap: 1 while the cap exceeds the SMs it keeps busy, a power law below."""
    busy = max(solo.sm_util or 0.0, 0.01)
    share = thread_percentage / 100
    return 1.0 if share >= busy else float((share / busy) ** _CAP_EXPONENT)


def contended_progress(loads: Sequence[TwinLoad]) -> tuple[float, ...]:
    """Return progress by a rule: caps, oversubscribed pipes that slow their users, a loss per neighbour.

    A tenant's demand on a pipe is its solo use times its progress under its cap. Where the demands on a pipe sum
    above 1, a tenant is slowed by the overflow in proportion to its own reliance on that pipe; the worst pipe
    counts. Caps that sum to at most 100 keep tenants on separate SMs, so SM time itself is then not contended.
    """
    capped = [cap_progress(load.solo, load.thread_percentage) for load in loads]
    separate = sum(load.thread_percentage for load in loads) <= 100
    vectors: list[dict[str, float]] = []
    for load in loads:
        vector: dict[str, float] = dict(load.solo.pipes())
        vector["l2"] = 0.5 * vector.get("dram", 0.0)
        if not separate:
            vector["sm"] = load.solo.sm_util or 0.0
        vectors.append(vector)
    demand: dict[str, float] = {}
    for drawn, progress in zip(vectors, capped, strict=True):
        for pipe, use in drawn.items():
            demand[pipe] = demand.get(pipe, 0.0) + use * progress
    result = []
    for index, (own, progress) in enumerate(zip(vectors, capped, strict=True)):
        slowed = progress
        for pipe, use in own.items():
            if demand[pipe] > 1:
                reliance = min(1.0, use / 0.5)
                slowed = min(slowed, progress * (1 - reliance + reliance / demand[pipe]))
        toll = sum(
            (loads[other].solo.sm_util or 0.0) * capped[other] for other in range(len(loads)) if other != index
        )
        result.append(max(0.01, slowed / (1 + _INTERFERENCE_PER_NEIGHBOUR * toll)))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """A program that the twin's tenants can run.

    Attributes:
        solo: counters alone at 100% threads; iterations_per_s: rate alone; memory_mib: its usual device memory.
    """

    name: str
    solo: Counters
    iterations_per_s: float
    memory_mib: int


def _workload(
    name: str, rate: float, memory_mib: int, *, sm: float, occupancy: float, graphics: float, **pipes: float
) -> SimulatedWorkload:
    return SimulatedWorkload(
        name, Counters(sm_util=sm, sm_occupancy=occupancy, graphics_util=graphics, **pipes), rate, memory_mib
    )


# Shapes follow the H200 measurements in docs/facts.md 21 and 22 (a ResNet's SM_UTIL 73% with FP32 28%, an fp64
# product's DFMA 94.6%, an fp16 one's HMMA 90%); the rest are typical of their kind, not measured.
WORKLOADS: Final[Mapping[str, SimulatedWorkload]] = {
    w.name: w
    for w in (
        _workload(
            "resnet50-train",
            13.1,
            5874,
            sm=0.73,
            occupancy=0.30,
            graphics=0.96,
            fp32_util=0.28,
            integer_util=0.10,
            dram_bw_util=0.20,
        ),
        _workload(
            "bert-train",
            9.4,
            8200,
            sm=0.82,
            occupancy=0.24,
            graphics=0.98,
            fp32_util=0.09,
            fp16_util=0.03,
            hmma_tensor_util=0.46,
            any_tensor_util=0.46,
            integer_util=0.08,
            dram_bw_util=0.35,
        ),
        _workload(
            "bert-infer",
            180.0,
            1900,
            sm=0.31,
            occupancy=0.12,
            graphics=0.55,
            fp16_util=0.02,
            hmma_tensor_util=0.17,
            any_tensor_util=0.17,
            integer_util=0.04,
            dram_bw_util=0.15,
        ),
        _workload(
            "dlrm-infer",
            420.0,
            6100,
            sm=0.22,
            occupancy=0.10,
            graphics=0.48,
            fp32_util=0.05,
            integer_util=0.07,
            dram_bw_util=0.38,
        ),
        _workload(
            "gemm-fp64",
            24.0,
            2100,
            sm=0.99,
            occupancy=0.13,
            graphics=1.0,
            fp64_util=0.0005,
            dfma_tensor_util=0.946,
            any_tensor_util=0.946,
            integer_util=0.03,
            dram_bw_util=0.06,
        ),
        _workload(
            "gemm-fp16",
            310.0,
            2100,
            sm=0.98,
            occupancy=0.13,
            graphics=1.0,
            hmma_tensor_util=0.90,
            any_tensor_util=0.90,
            integer_util=0.03,
            dram_bw_util=0.14,
        ),
        _workload(
            "stream",
            95.0,
            12600,
            sm=0.97,
            occupancy=0.78,
            graphics=1.0,
            fp32_util=0.04,
            integer_util=0.06,
            dram_bw_util=0.91,
        ),
        _workload(
            "montecarlo-fp32",
            55.0,
            900,
            sm=0.95,
            occupancy=0.60,
            graphics=1.0,
            fp32_util=0.71,
            integer_util=0.24,
            dram_bw_util=0.02,
        ),
        _workload(
            "latency-probe",
            1000.0,
            600,
            sm=0.02,
            occupancy=0.01,
            graphics=0.05,
            fp32_util=0.01,
            dram_bw_util=0.005,
        ),
    )
}
