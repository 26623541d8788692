"""End an MPS client so that its neighbours live: stop it, let its kernels finish, terminate it, then kill it.

`terminate_client` on a client that keeps the GPU busy with large matrix products ended in a fatal GPU error in 16
of 17 tries on H200s and an H100: every neighbour was lost, or whoever came next. A kill after its kernels had
finished harmed nobody; one within a kernel, after its launching threads were held and it was terminated, neither
(docs/facts.md 35 and 36, docs/measurements/ending-h200.md, docs/adr/0162; gpushare.mps.terminating).
"""

import contextlib
import errno
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Final, Protocol

from gpushare.mps.identity import RunState, is_alive, run_state_of
from gpushare.mps.layout import write_atomically

logger = logging.getLogger(__name__)

# kubelet kills within three seconds of the agent's `ends_at`; where it does not, the gate does after this time.
LEAVING_DRAIN_SECONDS: Final = 3.5
# A GPU-bound PyTorch job runs on for 0.2 to 0.4 s after its stop (docs/facts.md 25).
DRAIN_SECONDS: Final = 1.0
# Whom something in its container continues gets its time anew this often; then it is killed all the same.
CONTINUED_LIMIT: Final = 2
_LONGEST_DRAIN_SECONDS: Final = 60.0  # of a record; we would not write a longer one
_REMEMBERED: Final = 1024  # processes that no signal reaches; a bound only


class EndingStep(StrEnum):
    """What was done to a client at this look."""

    STOPPED = "Stopped"
    DRAINS = "Drains"
    KILLED = "Killed"
    DIES = "Dies"  # was killed before; it ends when it is thawed or leaves the driver
    GONE = "Gone"
    REFUSED = "Refused"


class Termination(Enum):
    """How far the MPS server is with the end of a stopped client."""

    IN_PROGRESS = auto()
    DONE = auto()
    FAILED = auto()


class Terminate(Protocol):
    """Has the MPS server end a stopped client, without waiting for it; called again it tells how far that is."""

    def __call__(self, pid: int, start_ticks: int) -> Termination:
        """Begin, or look."""
        ...


class SendSignal(Protocol):
    """Sends a signal to a process."""

    def __call__(self, pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        """Return False when the process has ended or another one has its pid; OSError where it cannot be sent."""
        ...


def send_signal(pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
    """Send a signal to the very process that had the pid at `start_ticks` (clock ticks since boot).

    Raises:
        PermissionError: the MPS host may not (it lacks CAP_KILL, or the node's policy forbids it).
        OSError: the kernel has no pidfds, or no descriptor is left.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno == errno.EINVAL:  # no process's pid
            return False
        raise
    try:
        if not is_alive(pid, start_ticks):
            return False
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(process)
    return True


@dataclass(frozen=True, slots=True)
class _Begun:
    """An ending in progress; `was_stopped`: it was seen stopped since; `is_asked`: the server is to end it."""

    start_ticks: int | None
    since: float
    drain_seconds: float
    was_stopped: bool = False
    continued: int = 0
    is_asked: bool = False
    is_killed: bool = False


class Endings:
    """The clients of one GPU that are being ended. Whoever was stopped is killed, whatever happens meanwhile.

    Args:
        record: a file of those who are stopped, written before they are: the next gate goes on with them.
        terminate: has the MPS server end who was stopped for `DRAIN_SECONDS`, before it is killed; where that
            fails it is killed when its drain's time is over.
    """

    def __init__(
        self,
        *,
        send: SendSignal = send_signal,
        state: Callable[[int], RunState] = run_state_of,
        clock: Callable[[], float] = time.monotonic,
        record: Path | None = None,
        terminate: Terminate | None = None,
    ) -> None:
        self._send, self._state, self._clock, self._record = send, state, clock, record
        self._terminate = terminate
        self._begun: dict[int, _Begun] = {}
        self._refused: dict[int, int | None] = {}
        self._restore()

    def end(self, pid: int, start_ticks: int | None = None, *, drain_seconds: float = DRAIN_SECONDS) -> EndingStep:
        """Take the next step towards a client's end.

        It is stopped at every look: what else runs in its container could continue it.

        Args:
            start_ticks: start time of the process meant, clock ticks since boot; None where it is unknown.
            drain_seconds: how long its kernels get to finish after the first stop; the first call's holds.
        """
        begun = self._begun.get(pid)
        if begun is None or start_ticks not in {None, begun.start_ticks}:
            return self._begin(pid, _Begun(start_ticks, self._clock(), drain_seconds))
        termination = self._look(pid, begun)
        if termination is Termination.IN_PROGRESS:
            return EndingStep.DRAINS
        if termination is not Termination.DONE:
            begun = self._begun[pid] = self._seen(pid, begun)
            if termination is None and self._is_to_be_asked(begun):
                self._begun[pid] = replace(begun, is_asked=True)
                return self.end(pid, begun.start_ticks)
        is_drained = (
            begun.is_killed
            or termination is Termination.DONE
            or self._clock() - begun.since >= begun.drain_seconds
        )
        try:
            lives = self._send(pid, begun.start_ticks, signal.SIGKILL if is_drained else signal.SIGSTOP)
        except OSError:
            return EndingStep.REFUSED
        if not lives:
            self._forget(pid)
            return EndingStep.GONE
        if not is_drained:
            return EndingStep.DRAINS
        self._begun[pid] = replace(begun, is_killed=True)
        return EndingStep.DIES if begun.is_killed else EndingStep.KILLED

    def _is_to_be_asked(self, begun: _Begun) -> bool:
        may_ask = self._terminate is not None and begun.start_ticks is not None and not begun.is_killed
        return may_ask and self._clock() - begun.since >= min(DRAIN_SECONDS, begun.drain_seconds)

    def _look(self, pid: int, begun: _Begun) -> Termination | None:
        """Return how far the server is; None where it was not asked, or need not be any more."""
        if self._terminate is None or begun.start_ticks is None or not begun.is_asked or begun.is_killed:
            return None
        return self._terminate(pid, begun.start_ticks)

    def go_on(self) -> tuple[int, ...]:
        """Take the next step with everybody whose end has begun, whether or not its reason still holds.

        Nobody stays stopped: neither when it is no client any more, because the server has ended.

        Returns:
            The pids that were killed now.
        """
        steps = {pid: self.end(pid) for pid in list(self._begun)}
        return tuple(pid for pid, step in steps.items() if step is EndingStep.KILLED)

    def let_go(self) -> None:
        """Continue those who are stopped and not killed, for a caller that ends before them."""
        for pid, begun in list(self._begun.items()):
            if not begun.is_killed:
                with contextlib.suppress(OSError):
                    self._send(pid, begun.start_ticks, signal.SIGCONT)
            self._forget(pid)

    def _begin(self, pid: int, begun: _Begun) -> EndingStep:
        if pid in self._refused and self._refused[pid] == begun.start_ticks:
            return EndingStep.REFUSED
        self._begun[pid] = begun
        self._save()
        try:
            if self._send(pid, begun.start_ticks, signal.SIGSTOP):
                return EndingStep.STOPPED
        except OSError as error:
            self._forget(pid)
            if error.errno != errno.EMFILE:
                if len(self._refused) >= _REMEMBERED:
                    self._refused.clear()
                self._refused[pid] = begun.start_ticks
            return EndingStep.REFUSED
        self._forget(pid)
        return EndingStep.GONE

    def _seen(self, pid: int, begun: _Begun) -> _Begun:
        """Look whether it is still stopped. Whom somebody continued has kernels again, so its time begins anew."""
        match self._state(pid):
            case RunState.STOPPED:
                return replace(begun, was_stopped=True)
            case RunState.RUNS if begun.was_stopped and not begun.is_killed and begun.continued < CONTINUED_LIMIT:
                return replace(begun, since=self._clock(), was_stopped=False, continued=begun.continued + 1)
        return begun

    def _forget(self, pid: int) -> None:
        if self._begun.pop(pid, None) is not None:
            self._save()

    def _save(self) -> None:
        if self._record is None:
            return
        processes = [
            {"pid": pid, "start_ticks": begun.start_ticks, "drain_seconds": begun.drain_seconds}
            for pid, begun in self._begun.items()
            if begun.start_ticks is not None
        ]
        try:
            write_atomically(self._record, {"processes": processes})
        except OSError as error:
            logger.warning(
                "cannot write %s; a gate that starts now knows of nobody stopped: %s", self._record, error
            )

    def _restore(self) -> None:
        """Go on with those whom an earlier gate stopped; their time begins anew, as nobody watched it."""
        if self._record is None:
            return
        try:
            for each in json.loads(self._record.read_bytes())["processes"]:
                drain = float(each["drain_seconds"])
                if not 0 <= drain <= _LONGEST_DRAIN_SECONDS:
                    raise ValueError(f"{drain} s is no time to drain")
                self._begun[int(each["pid"])] = _Begun(int(each["start_ticks"]), self._clock(), drain)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error("cannot read %s, whoever else was stopped stays so: %s", self._record, error)
        if self._begun:
            logger.info("going on to end clients that an earlier gate stopped: %s", sorted(self._begun))
