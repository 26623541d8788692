"""What a pod's next process may have: the rules that apply one limit to all of its processes.

**Memory.** A ceiling binds at connect and for life (docs/facts.md 5, 11), so it cannot be divided later. If a
process's whole grant counted, its unused part would starve its siblings; if only its present use counted, it could
later grow beyond. Hence three steps, each enforceable (docs/adr/0020):

1. the next process waits until its siblings' use has settled, at most `SETTLE_LIMIT_SECONDS`;
2. its ceiling is the pod's limit less what its siblings use then;
3. should an older process grow later so that the pod exceeds its limit, the pod's newest process is ended, as is
   one that has more than its own ceiling: it has several clients.

Unknown memory never counts as zero. Where a process's use is unknown, its grant counts in full; where its grant is
unknown too, the whole limit counts. But no process is ended over memory that was not measured.

**Threads.** A thread percentage holds for each process (docs/facts.md 29), so a pod's cap is divided as processes
come: each gets an even part of what is left, for as many as the pod said it has (`gpushare.io/processes`). When
nothing is left, the next one waits (docs/adr/0115).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import LEAST_PROCESS_PERCENT

SETTLE_SECONDS: Final = 1.0  # a framework allocates its first memory within that time of its context
SETTLE_LIMIT_SECONDS: Final = 5.0
# The least that the daemon accepts: no context fits in it, so CUDA itself reports to the process that memory is
# out.
EXHAUSTED_MIB: Final = 1
UNCAPPED_PERCENT: Final = 100
UNCOUNTED_MIB: Final = 1024  # a PyTorch job's context has 0.5 GiB


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A live process of a pod.

    Attributes:
        granted_mib: its ceiling, None when it connected before this gate and no record of it remains.
        used_mib: device memory now, None when it cannot be read.
        granted_at, changed_at: when it connected and when its use last changed, seconds of one clock.
    """

    pid: int
    granted_mib: int | None
    used_mib: int | None
    granted_at: float
    changed_at: float

    def counted_mib(self, limit_mib: int) -> int:
        """Return how much of the pod's limit counts as this process's: its use, else its grant, else all of it."""
        if self.used_mib is not None:
            return self.used_mib
        return limit_mib if self.granted_mib is None else self.granted_mib

    def is_settled(self, now: float) -> bool:
        """Return whether its present use can be taken as its final use."""
        if self.used_mib is None:
            return True
        return now - self.changed_at >= SETTLE_SECONDS or now - self.granted_at >= SETTLE_LIMIT_SECONDS


def grant_mib(limit_mib: int, siblings: Sequence[ProcessMemory], now: float) -> int | None:
    """Return the ceiling of a pod's next process; None while its siblings have not settled."""
    if not all(process.is_settled(now) for process in siblings):
        return None
    return max(EXHAUSTED_MIB, limit_mib - sum(process.counted_mib(limit_mib) for process in siblings))


def grant_percentage(cap_percent: int, processes: int, siblings: Sequence[int | None]) -> int | None:
    """Return the thread percentage of a pod's next process; None while its siblings leave it nothing.

    A part below `LEAST_PROCESS_PERCENT` would be rounded up by MPS, and the sum would pass the cap; so nobody gets
    less, but for the only process of a pod whose whole cap is less. A pod that is not capped is not divided.

    Args:
        cap_percent: the pod's cap; processes: how many the pod says share it.
        siblings: what its other clients run under; None where that is unknown, which counts as the whole cap.
    """
    if cap_percent >= UNCAPPED_PERCENT:
        return UNCAPPED_PERCENT
    left = cap_percent - sum(max(LEAST_PROCESS_PERCENT, cap_percent if p is None else p) for p in siblings)
    least = min(cap_percent, LEAST_PROCESS_PERCENT)
    if left < least:
        return None
    return max(least, -(-left // max(1, processes - len(siblings))))


def known_mib(processes: Sequence[ProcessMemory]) -> int:
    """Return the measured use of the processes, the least that they occupy in all."""
    return sum(process.used_mib for process in processes if process.used_mib is not None)


def is_beyond_its_grant(process: ProcessMemory) -> bool:
    """Return whether a process surely has more than one client: MPS holds each of them to its own ceiling.

    A program can ask for a second context, by the same way as another process would, and has its ceiling twice.
    What the driver counts for a process and MPS does not is within `UNCOUNTED_MIB`.
    """
    if process.used_mib is None or process.granted_mib is None:
        return False
    return process.used_mib > process.granted_mib + UNCOUNTED_MIB


def to_end(limit_mib: int, processes: Sequence[ProcessMemory]) -> tuple[int, ...]:
    """Return pids to end: those beyond their own grant, then the newest until the rest is within the limit.

    A process of unknown use is not ended: that might not help. Nor is a pod's only process within what it was
    granted (the limit was lowered since): a changed decision binds the next process.
    """
    measured = [process for process in processes if process.used_mib is not None]
    ended = [process.pid for process in measured if is_beyond_its_grant(process)]
    staying = sorted(
        (process for process in measured if process.pid not in ended),
        key=lambda process: (process.granted_at, process.pid),
    )
    while len(staying) > 1 and known_mib(staying) > limit_mib:
        ended.append(staying.pop().pid)
    return tuple(ended)
