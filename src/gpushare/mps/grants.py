"""The grant of a pod's next process: rules that apply one limit to all processes of a pod.

**Memory.** A ceiling is fixed when a process connects, for its whole life (docs/facts.md 5, 11), so it cannot be
divided later. If a process's whole grant counted, its unused part would be missing for its siblings; if only its
present use counted, it could later exceed the limit. Hence three steps, each enforceable (docs/adr/0020):

1. the next process waits until its siblings' use has settled, at most `SETTLE_LIMIT_SECONDS`;
2. its ceiling is the pod's limit less what its siblings use then;
3. if an older process grows later so that the pod exceeds its limit, the pod's newest process is ended. So is a
   process that uses more than its own ceiling, which means that it has several clients.

Unknown memory never counts as zero. If a process's use is unknown, its grant counts in full; if its grant is
unknown too, the whole limit counts. But no process is ended because of memory that was not measured.

**Threads.** A thread percentage applies to each process (docs/facts.md 29), so a pod's cap is divided as processes
arrive: each gets an even part of what is left, for the number of processes that the pod declared
(`gpushare.io/processes`). When nothing is left, the next one waits (docs/adr/0115).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpushare.core.api import LEAST_PROCESS_PERCENT

SETTLE_SECONDS: Final = 1.0  # a framework allocates its first memory within this time after making its context
SETTLE_LIMIT_SECONDS: Final = 5.0
# The smallest ceiling that the daemon accepts. No context fits in it, so CUDA itself reports to the process that
# it is out of memory.
EXHAUSTED_MIB: Final = 1
UNCAPPED_PERCENT: Final = 100
UNCOUNTED_MIB: Final = 1024  # a PyTorch job's context has 0.5 GiB


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A live process of a pod.

    Attributes:
        granted_mib: its ceiling; None if it connected before this gate and no record of it remains.
        used_mib: its present device memory; None if it cannot be read.
        granted_at: when it connected, in seconds of the gate's clock.
        changed_at: when its use last changed, by the same clock.
    """

    pid: int
    granted_mib: int | None
    used_mib: int | None
    granted_at: float
    changed_at: float

    def counted_mib(self, limit_mib: int) -> int:
        """Return how much of the pod's limit this process counts for: its use, else its grant, else all."""
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

    MPS would round a part below `LEAST_PROCESS_PERCENT` up, and the sum would exceed the cap. So no process gets
    less, except the only process of a pod whose whole cap is less. The threads of an uncapped pod are not divided.

    Args:
        cap_percent: the pod's cap.
        processes: number of processes that share it, as the pod declares.
        siblings: thread percentages of its other clients; None if unknown, which counts as the whole cap.
    """
    if cap_percent >= UNCAPPED_PERCENT:
        return UNCAPPED_PERCENT
    left = cap_percent - sum(max(LEAST_PROCESS_PERCENT, cap_percent if p is None else p) for p in siblings)
    least = min(cap_percent, LEAST_PROCESS_PERCENT)
    if left < least:
        return None
    return max(least, -(-left // max(1, processes - len(siblings))))


def known_mib(processes: Sequence[ProcessMemory]) -> int:
    """Return the measured use of the processes, which is the least that they occupy together."""
    return sum(process.used_mib for process in processes if process.used_mib is not None)


def is_beyond_its_grant(process: ProcessMemory) -> bool:
    """Return whether a process uses more than its ceiling, so it certainly has more than one client.

    MPS applies the ceiling to each client, and a program can ask for a second context as another process would.
    Memory that the driver counts and MPS does not is at most `UNCOUNTED_MIB`.
    """
    if process.used_mib is None or process.granted_mib is None:
        return False
    return process.used_mib > process.granted_mib + UNCOUNTED_MIB


def to_end(limit_mib: int, processes: Sequence[ProcessMemory]) -> tuple[int, ...]:
    """Return the pids to end: those beyond their own grant, then the newest until the rest is within the limit.

    A process with unknown use is not ended, as that might not help. Nor is a pod's only process that stays within
    its grant (if the limit was lowered since): a changed decision applies to the next process.
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
