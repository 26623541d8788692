"""Which processes use a shared GPU outside MPS, where no share and no memory limit binds them.

A process that is about to become an MPS client may look like one outside for an instant: two looks in a row count.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.gpu.devices import GpuProcess

LOOKS: Final = 2  # at the agent's one second a look, a process is told within two seconds
QUIET_SECONDS: Final = 30.0  # a pod that starts process after process does not fill the API server with events


@dataclass(frozen=True, slots=True)
class OutsideProcess:
    """A process outside MPS; `start_ticks` tells it from a later one with its pid, `pod_uid` is None in no pod."""

    pid: int
    start_ticks: int
    pod_uid: str | None
    is_graphics: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class OutsideWatch:
    """What is remembered of one GPU between two looks.

    Attributes:
        looks: by process that was there at the last look, how many looks in a row it has been.
        told_at: by pod uid (None: processes of no pod), when an event was due last.
        found: processes found since the watch began.
    """

    looks: Mapping[OutsideProcess, int] = field(default_factory=dict)
    told_at: Mapping[str | None, float] = field(default_factory=dict)
    found: int = 0

    @property
    def present(self) -> tuple[OutsideProcess, ...]:
        """The processes that are outside MPS now, as LOOKS looks in a row have shown."""
        return tuple(process for process, looks in self.looks.items() if looks >= LOOKS)


@dataclass(frozen=True, slots=True)
class Found:
    """Processes of one pod that were found just now; `is_told` False when the pod had its event moments ago.

    `is_graphics`: none of them computes by CUDA.
    """

    pod_uid: str | None
    pids: tuple[int, ...]
    is_told: bool
    is_graphics: bool = False


def pids_outside(processes: Iterable[GpuProcess], server_pid: int | None) -> tuple[int, ...]:
    """Pids of the processes that are neither MPS clients nor the server, which its gate knows by its pid."""
    return tuple(p.pid for p in processes if not p.is_mps_client and p.pid != server_pid)


def look(
    before: OutsideWatch, present: Iterable[OutsideProcess], exempt: Collection[str], now: float
) -> tuple[OutsideWatch, tuple[Found, ...]]:
    """Compare a look at one GPU with the looks before.

    Args:
        present: every process outside MPS of this look.
        exempt: uids of the pods that may be outside MPS: the MPS host's own, and pods of several whole GPUs.
        now: monotonic seconds.

    Returns:
        the watch to go on with, and each process once, when it has been there for LOOKS looks in a row. One that
        went away and came back is found again.
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
