"""What pods have of each GPU by their decisions, and whether there is room for another: the auditor's own sums."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from bench.chaos.picture import ExpectedPods, Picture

SHARES_PER_GPU: Final = 100
CLIENTS_PER_GPU: Final = 48
RESERVE_MIB: Final = 512  # policy.gpuMemoryReserveMiB


@dataclass(frozen=True, slots=True)
class Given:
    """Shares and memory that bound pods hold, by GPU."""

    shares: Counter[str]
    memory_mib: Counter[str]


@dataclass(frozen=True, slots=True)
class Fullness:
    """Parts of all GPUs that are in use, 0 to 1.

    Attributes:
        shares_ratio: of their shares, by the pods' decisions; memory_ratio: of what tenants get of their memory.
        used_ratio: of that memory, by what clients have allocated.
        clients: of the GPU that has the most.
    """

    shares_ratio: float = 0.0
    memory_ratio: float = 0.0
    used_ratio: float = 0.0
    clients: int = 0


def given(picture: Picture) -> Given:
    """Return what the pods hold that are bound and have not ended, those that are being deleted included."""
    found = Given(Counter(), Counter())
    for pod in (picture.pods or {}).values():
        if pod.is_over or not pod.is_bound:
            continue
        for uuid in pod.gpus:
            found.shares[uuid] += pod.share if len(pod.gpus) == 1 else SHARES_PER_GPU
            found.memory_mib[uuid] += pod.memory_mib
    return found


def has_room(picture: Picture, one: ExpectedPods) -> bool:
    """Return whether a GPU has share and memory left for a pod; that no GPU is known is no lack of room."""
    taken = given(picture)
    return not picture.gpus or any(
        taken.shares[gpu.uuid] + one.share <= SHARES_PER_GPU
        and taken.memory_mib[gpu.uuid] + one.memory_mib <= gpu.memory_mib - RESERVE_MIB
        for gpu in picture.gpus
    )


def fullness(picture: Picture) -> Fullness:
    """Return how full the GPUs are together."""
    if not picture.gpus:
        return Fullness()
    taken = given(picture)
    memory_mib = sum(gpu.memory_mib - RESERVE_MIB for gpu in picture.gpus)
    clients = [[one for one in gpu.clients if one.is_alive] for gpu in picture.gpus]
    return Fullness(
        round(taken.shares.total() / (SHARES_PER_GPU * len(picture.gpus)), 3),
        round(taken.memory_mib.total() / memory_mib, 3),
        round(sum(one.memory_used_mib or 0 for each in clients for one in each) / memory_mib, 3),
        max(len(each) for each in clients),
    )
