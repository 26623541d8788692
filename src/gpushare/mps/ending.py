"""End an MPS client so that its neighbours live: stop its process, let its kernels finish, then kill it.

`terminate_client` on a client that keeps the GPU busy with large matrix products ended in a fatal GPU error in 12
of 13 tries on H200s and an H100: every neighbour was lost, or whoever came next. A kill after its kernels had
finished harmed nobody (docs/facts.md 35, docs/measurements/ending-h200.md, docs/adr/0162).
"""

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from gpushare.mps.identity import start_ticks_of

# kubelet kills within three seconds of the agent's `ends_at`; where it does not, the gate does after this time.
LEAVING_DRAIN_SECONDS: Final = 3.5
# A GPU-bound PyTorch job runs on for 0.2 to 0.4 s after its stop (docs/facts.md 25).
DRAIN_SECONDS: Final = 1.0


class EndingStep(StrEnum):
    """What was done to a client at this look."""

    STOPPED = "Stopped"
    DRAINS = "Drains"
    KILLED = "Killed"
    GONE = "Gone"
    REFUSED = "Refused"


class SendSignal(Protocol):
    """Sends a signal to a process."""

    def __call__(self, pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        """Return False when the process is gone or another one has its pid; PermissionError where not allowed."""
        ...


def send_signal(pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
    """Send a signal to the very process that had the pid at `start_ticks` (clock ticks since boot).

    Raises:
        PermissionError: the MPS host may not (it lacks CAP_KILL, or the node's policy forbids it).
    """
    try:
        process = os.pidfd_open(pid)
    except (ProcessLookupError, ValueError):
        return False
    try:
        if start_ticks is not None and start_ticks_of(pid) != start_ticks:
            return False
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


@dataclass(frozen=True, slots=True)
class _Begun:
    since: float
    drain_seconds: float
    start_ticks: int | None


class Endings:
    """The clients of one GPU that are being ended; asked anew at each look, about once a second."""

    def __init__(self, *, send: SendSignal = send_signal, clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self._begun: dict[int, _Begun] = {}

    def end(self, pid: int, start_ticks: int | None = None, *, drain_seconds: float = DRAIN_SECONDS) -> EndingStep:
        """Take the next step towards a client's end.

        It is stopped at every look: what else runs in its container could continue it.

        Args:
            start_ticks: start time of the process meant, clock ticks since boot; None where it is unknown.
            drain_seconds: how long its kernels get to finish after the first stop; the first call's holds.
        """
        begun = self._begun.get(pid)
        is_drained = begun is not None and self._clock() - begun.since >= begun.drain_seconds
        try:
            lives = self._send(pid, start_ticks, signal.SIGKILL if is_drained else signal.SIGSTOP)
        except PermissionError:
            return EndingStep.REFUSED
        if not lives:
            self._begun.pop(pid, None)
            return EndingStep.GONE
        if is_drained:
            return EndingStep.KILLED
        if begun is None:
            self._begun[pid] = _Begun(self._clock(), drain_seconds, start_ticks)
            return EndingStep.STOPPED
        return EndingStep.DRAINS

    def go_on(self, clients: Collection[int]) -> tuple[int, ...]:
        """Take the next step with everybody whose end has begun, whether or not its reason still holds.

        Whoever is no client any more is forgotten, so that a later process with the same pid begins anew.

        Returns:
            The pids that were killed.
        """
        self._begun = {pid: begun for pid, begun in self._begun.items() if pid in clients}
        steps = {pid: self.end(pid, begun.start_ticks) for pid, begun in list(self._begun.items())}
        return tuple(pid for pid, step in steps.items() if step is EndingStep.KILLED)
