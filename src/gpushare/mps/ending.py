"""End an MPS client so that its neighbours survive: stop it, let its kernels finish, terminate it, then kill it.

`terminate_client` on a client that keeps the GPU busy with large matrix products ended in a fatal GPU error in 16
of 17 tries on H200s and an H100: every neighbour was lost, or the next client was. A kill after its kernels had
finished harmed no neighbour. Nor did a kill within a kernel, if its launching threads were held and it was
terminated first (docs/facts.md 35 and 36, docs/measurements/ending-h200.md, docs/adr/0162;
gpushare.mps.terminating).
"""

import contextlib
import errno
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Final, Protocol

from gpushare.mps.identity import RunState, is_alive, run_state_of
from gpushare.mps.layout import write_atomically

logger = logging.getLogger(__name__)

# kubelet kills within three seconds of the agent's `ends_at`; otherwise the gate kills after this time.
LEAVING_DRAIN_SECONDS: Final = 3.5
# A GPU-bound PyTorch job runs on for 0.2 to 0.4 s after its stop (docs/facts.md 25).
DRAIN_SECONDS: Final = 1.0
# If something in its container continues a stopped process, its time restarts, at most this often.
CONTINUED_LIMIT: Final = 2
_LONGEST_DRAIN_SECONDS: Final = 60.0  # in a record; we never write a longer one
_REMEMBERED: Final = 1024  # processes that no signal reaches; only a bound


class EndingStep(StrEnum):
    """The step that was taken for a client at this look."""

    STOPPED = "Stopped"
    DRAINS = "Drains"
    KILLED = "Killed"
    DIES = "Dies"  # was killed before; it ends once it is thawed or leaves the driver
    GONE = "Gone"
    REFUSED = "Refused"


class Termination(Enum):
    """Progress of the MPS server in ending a stopped client."""

    IN_PROGRESS = auto()
    DONE = auto()
    FAILED = auto()


class Terminate(Protocol):
    """Make the MPS server end a stopped client, without waiting; later calls return the progress."""

    def __call__(self, pid: int, start_ticks: int) -> Termination:
        """Begin the termination, or return its progress."""
        ...


class SendSignal(Protocol):
    """Function that sends a signal to a process."""

    def __call__(self, pid: int, start_ticks: int | None, number: signal.Signals) -> bool:
        """Return False if the process has ended or another one has its pid; raise OSError if it cannot be sent."""
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
        if error.errno == errno.EINVAL:  # not the pid of a process
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


def clients_being_ended(record: Path) -> dict[int, int]:
    """Return the start ticks of the clients in a record of `Endings`, by pid; none if it cannot be read."""
    try:
        return {pid: ticks for pid, ticks, _ in _read_record(record)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read_record(record: Path) -> Iterator[tuple[int, int, float]]:
    """Yield the recorded clients' pids, start ticks and seconds to drain.

    Raises:
        OSError, ValueError, KeyError, TypeError: it cannot be read.
    """
    for each in json.loads(record.read_bytes())["processes"]:
        drain = float(each["drain_seconds"])
        if not 0 <= drain <= _LONGEST_DRAIN_SECONDS:
            raise ValueError(f"{drain} s is no time to drain")
        yield int(each["pid"]), int(each["start_ticks"]), drain


@dataclass(frozen=True, slots=True)
class _Begun:
    """An ending in progress.

    Attributes:
        was_stopped: it has been seen stopped since `since`.
        continued: how often something else continued it.
        is_asked: the server was asked to end it.
    """

    start_ticks: int | None
    since: float
    drain_seconds: float
    was_stopped: bool = False
    continued: int = 0
    is_asked: bool = False
    is_killed: bool = False


class Endings:
    """The clients of one GPU that are being ended. A stopped client is killed, whatever happens meanwhile.

    Args:
        record: file with the stopped clients, written before each stop, so that the next gate continues with them.
        terminate: makes the MPS server end a client that was stopped for `DRAIN_SECONDS`, before it is killed. If
            that fails, the client is killed when its time to drain is over.
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

        The stop signal is repeated at every look, as another process in its container could continue it.

        Args:
            start_ticks: start time of the process, in clock ticks since boot; None if unknown.
            drain_seconds: how long its kernels get to finish after the first stop; the value of the first call
                holds.
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
        """Return the server's progress; None if it was not asked, or need not be asked any more."""
        if self._terminate is None or begun.start_ticks is None or not begun.is_asked or begun.is_killed:
            return None
        return self._terminate(pid, begun.start_ticks)

    def go_on(self) -> tuple[int, ...]:
        """Take the next step for every client whose ending has begun, whether or not its reason still holds.

        So no process stays stopped, even if the server has ended and it is no longer a client.

        Returns:
            The pids that were killed now.
        """
        steps = {pid: self.end(pid) for pid in list(self._begun)}
        return tuple(pid for pid, step in steps.items() if step is EndingStep.KILLED)

    def leave(self, pid: int) -> None:
        """Send a client no more signals: somebody else is ending it."""
        self._forget(pid)

    def let_go(self) -> None:
        """Continue the processes that are stopped and not killed, for a caller that ends before them."""
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
        """Return the record after checking that the process is still stopped.

        A process that something else continued has launched kernels again, so its time restarts.
        """
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
                "cannot write %s; the next gate will not know of stopped processes: %s", self._record, error
            )

    def _restore(self) -> None:
        """Continue with the processes that an earlier gate stopped; their time restarts, as nobody watched it."""
        if self._record is None:
            return
        try:
            for pid, start_ticks, drain in _read_record(self._record):
                self._begun[pid] = _Begun(start_ticks, self._clock(), drain)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error("cannot read %s; processes that it lists stay stopped: %s", self._record, error)
        if self._begun:
            logger.info("going on to end clients that an earlier gate stopped: %s", sorted(self._begun))
