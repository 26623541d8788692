"""Processes that use a shared GPU outside MPS, where no share and no memory limit applies to them.

A process that is about to become an MPS client may look like one outside for a moment, so two looks in a row
count. A pod that starts one short process after the other has none for two looks: then the pod's looks count.
Where it pauses between them, the processes count that were outside at one look and gone at the next.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.core.gpu.devices import GpuProcess

LOOKS: Final = 2
POD_LOOKS: Final = 3  # of the last `POD_WINDOW` looks, with whichever processes of the pod
POD_WINDOW: Final = 4
# Processes of a pod that were outside at one look; each but the last was gone at the next, not a client by then.
SHORT_PROCESSES: Final = 3
SHORT_WINDOW: Final = 30  # looks; of 30 clients none was listed as outside on its way (cluster-h200.md)
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
        pods: by pod uid, at which of the last `POD_WINDOW` looks it had a process outside, the last one first.
        gone: by pod uid, at which of the last `SHORT_WINDOW` looks a process of it was gone that had been outside
            at the look before, the last one first.
    """

    looks: Mapping[OutsideProcess, int] = field(default_factory=dict)
    told_at: Mapping[str | None, float] = field(default_factory=dict)
    found: int = 0
    pods: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    gone: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)

    @property
    def present(self) -> tuple[OutsideProcess, ...]:
        """Return the processes that are outside MPS now, by their own looks or by those of their pod."""
        return tuple(process for process in self.looks if self._is_found(process))

    @property
    def is_unsure(self) -> bool:
        """Return whether the next look decides about a process."""
        return any(not self._is_found(process) for process in self.looks)

    @property
    def is_wary(self) -> bool:
        """Return whether a pod had short processes outside lately, so that looks should come irregularly."""
        return bool(self.gone)

    def _is_found(self, process: OutsideProcess) -> bool:
        if self.looks[process] >= LOOKS:
            return True
        uid = process.pod_uid
        if uid is None:
            return False
        return sum(self.pods.get(uid, ())) >= POD_LOOKS or sum(self.gone.get(uid, ())) >= SHORT_PROCESSES - 1


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
    before: OutsideWatch,
    present: Iterable[OutsideProcess],
    exempt: Collection[str],
    now: float,
    *,
    clients: Collection[int] = (),
) -> tuple[OutsideWatch, tuple[Found, ...]]:
    """Return the state after another look at one GPU, and the processes found by it.

    A process is found once: when it has been present for LOOKS looks in a row, or its pod had some process
    outside in POD_LOOKS of the last POD_WINDOW, or it is the pod's third (SHORT_PROCESSES) within SHORT_WINDOW
    and the ones before it were gone at the look after. One that went away and came back is found again.

    A process that is a client at the look after was on its way there, so it does not count as gone. Of several
    that are gone at one look one counts, so that a pod that starts many at once and fails is not found.

    Args:
        before: the state after the previous look.
        present: every process outside MPS at this look.
        exempt: uids of the pods that may be outside MPS: the MPS host's own, and pods on several whole GPUs.
        now: monotonic seconds.
        clients: pids of the MPS clients at this look.
    """
    watched = [process for process in present if process.pod_uid is None or process.pod_uid not in exempt]
    looks = {process: before.looks.get(process, 0) + 1 for process in watched}
    left = {each.pod_uid for each in before.looks if each not in looks and each.pid not in clients}
    after = OutsideWatch(
        looks,
        pods=_last_looks(before.pods, {process.pod_uid for process in watched}, POD_WINDOW),
        gone=_last_looks(before.gone, left, SHORT_WINDOW),
    )
    known = set(before.present)
    by_pod: dict[str | None, list[OutsideProcess]] = {}
    for process in after.present:
        if process not in known:
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
    count = before.found + sum(len(each.pids) for each in found)
    return replace(after, told_at=told_at, found=count), found


def _last_looks(
    before: Mapping[str, tuple[bool, ...]], now: Collection[str | None], window: int
) -> dict[str, tuple[bool, ...]]:
    """Return at which of its last looks each pod was in `now`; a pod that was in none of them is left out."""
    uids = before.keys() | {uid for uid in now if uid is not None}
    looks = {uid: (uid in now, *before.get(uid, ()))[:window] for uid in uids}
    return {uid: of_pod for uid, of_pod in looks.items() if any(of_pod)}
