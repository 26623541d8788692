"""Processes that use a shared GPU outside MPS, where no share and no memory limit applies to them.

A process that is about to become an MPS client may look like one outside for a moment, so two looks in a row
count.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.gpu.devices import GpuProcess

LOOKS: Final = 2
AGAIN_SECONDS: Final = 0.5  # at most, to the look that decides: with one look a second, reported within 1.5 s
QUIET_SECONDS: Final = 30.0  # so that a pod that starts process after process does not cause endless events


@dataclass(frozen=True, slots=True)
class OutsideProcess:
    """A process outside MPS.

    Attributes:
        start_ticks: start time, which distinguishes it from a later process with the same pid.
        pod_uid: the pod it belongs to; None if it is in no pod.
        is_graphics: it uses graphics and no CUDA.
    """

    pid: int
    start_ticks: int
    pod_uid: str | None
    is_graphics: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class OutsideWatch:
    """State of the watch over one GPU between two looks.

    Attributes:
        looks: for each process of the last look, in how many looks in a row it was present.
        told_at: by pod uid (None: processes of no pod), when the last event was due.
        found: number of processes found since the watch began.
    """

    looks: Mapping[OutsideProcess, int] = field(default_factory=dict)
    told_at: Mapping[str | None, float] = field(default_factory=dict)
    found: int = 0

    @property
    def present(self) -> tuple[OutsideProcess, ...]:
        """Return the processes that are outside MPS now, seen in at least LOOKS looks in a row."""
        return tuple(process for process, looks in self.looks.items() if looks >= LOOKS)

    @property
    def is_unsure(self) -> bool:
        """Return whether the next look decides about a process."""
        return any(looks < LOOKS for looks in self.looks.values())


@dataclass(frozen=True, slots=True)
class Found:
    """Processes of one pod that were found at this look.

    Attributes:
        is_told: whether an event is due; False if the pod had one a moment ago.
        is_graphics: none of them uses CUDA.
    """

    pod_uid: str | None
    pids: tuple[int, ...]
    is_told: bool
    is_graphics: bool = False


def pids_outside(processes: Iterable[GpuProcess], server_pid: int | None) -> tuple[int, ...]:
    """Return the pids of processes that are neither MPS clients nor the MPS server."""
    return tuple(p.pid for p in processes if not p.is_mps_client and p.pid != server_pid)


def look(
    before: OutsideWatch, present: Iterable[OutsideProcess], exempt: Collection[str], now: float
) -> tuple[OutsideWatch, tuple[Found, ...]]:
    """Return the state after another look at one GPU, and the processes found by it.

    A process is found once, when it has been present for LOOKS looks in a row; one that went away and came back is
    found again.

    Args:
        before: the state after the previous look.
        present: every process outside MPS at this look.
        exempt: uids of the pods that may be outside MPS: the MPS host's own, and pods on several whole GPUs.
        now: monotonic seconds.
    """
    watched = [process for process in present if process.pod_uid is None or process.pod_uid not in exempt]
    looks = {process: before.looks.get(process, 0) + 1 for process in watched}
    by_pod: dict[str | None, list[OutsideProcess]] = {}
    for process, times in looks.items():
        if times == LOOKS:
            by_pod.setdefault(process.pod_uid, []).append(process)
    told_at = {uid: at for uid, at in before.told_at.items() if now - at < QUIET_SECONDS}
    found = tuple(
        Found(
            uid,
            tuple(sorted(process.pid for process in processes)),
            uid not in told_at,
            all(process.is_graphics for process in processes),
        )
        for uid, processes in by_pod.items()
    )
    told_at |= {each.pod_uid: now for each in found if each.is_told}
    return OutsideWatch(looks, told_at, before.found + sum(len(each.pids) for each in found)), found
