"""How much memory a pod's next process may have: the rule that makes one limit hold for all of its processes.

A ceiling binds at connect and for life (docs/facts.md 5, 11), so it cannot be shared out later. What a process was
granted and does not use would starve its siblings if it counted in full; what it uses now, if nothing else
counted, could grow beyond. Hence three steps, each enforceable (docs/adr/0020):

1. the next process waits until its siblings' use has settled, at most `SETTLE_LIMIT_SECONDS`;
2. its ceiling is the pod's limit less what its siblings use then;
3. should an older process grow later so that the pod passes its limit, the pod's newest process is ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SETTLE_SECONDS: Final = 1.0  # a framework's first allocations follow its context within that time
SETTLE_LIMIT_SECONDS: Final = 5.0
# The least the daemon takes: no context fits in it, so CUDA itself tells the process that memory is out.
EXHAUSTED_MIB: Final = 1


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A live process of a pod.

    Attributes:
        granted_mib: its ceiling, None when it connected before this gate and nobody remembers.
        used_mib: device memory now, None when nobody can tell: then its grant counts in full.
        granted_at, changed_at: when it connected and when its use last changed, seconds of one clock.
    """

    pid: int
    granted_mib: int | None
    used_mib: int | None
    granted_at: float
    changed_at: float

    def counted_mib(self) -> int:
        """What of the pod's limit is this process's."""
        if self.used_mib is not None:
            return self.used_mib
        return self.granted_mib or 0

    def is_settled(self, now: float) -> bool:
        """Whether its use stands for what it will use."""
        if self.used_mib is None:
            return True
        return now - self.changed_at >= SETTLE_SECONDS or now - self.granted_at >= SETTLE_LIMIT_SECONDS


def grant_mib(limit_mib: int, siblings: Sequence[ProcessMemory], now: float) -> int | None:
    """Ceiling of a pod's next process; None while its siblings have not settled."""
    if not all(process.is_settled(now) for process in siblings):
        return None
    return max(EXHAUSTED_MIB, limit_mib - sum(process.counted_mib() for process in siblings))


def to_end(limit_mib: int, processes: Sequence[ProcessMemory]) -> tuple[int, ...]:
    """Pids to end, newest first, until what stays is within the limit; empty when it is.

    A lone process cannot pass its own ceiling; if it does (the limit was lowered since), it stays: a changed
    decision binds the next process.
    """
    staying = sorted(processes, key=lambda process: (process.granted_at, process.pid))
    ended = []
    while len(staying) > 1 and sum(process.used_mib or 0 for process in staying) > limit_mib:
        ended.append(staying.pop().pid)
    return tuple(ended)
