"""End a stopped client at the MPS server before it is killed, so that a kernel in progress costs no neighbour.

A stopped client does not answer `terminate_client`, and a running one launches kernels while it is being ended. So
the threads that launch are held by ptrace, the process is continued, and CUDA's own thread answers (docs/facts.md
36, docs/adr/0162).
"""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpushare.mps.ending import SendSignal, Termination, send_signal
from gpushare.mps.errors import MpsError
from gpushare.mps.identity import is_alive, start_ticks_of
from gpushare.mps.ptrace import HeldThreads

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 1.0  # usually 10 to 30 ms; the daemon serves nobody else in that time
STEP_AFTER_SECONDS: Final = 0.06
OTHERS_SECONDS: Final = 2.0  # how long a terminated client waits for the others of its pod
HELD_SECONDS: Final = 10.0  # after its termination; the gate kills it within two looks
LIMIT_SECONDS: Final = 4.0  # of a request and those before it; a frozen pod may keep its tracer waiting
REMEMBERED_SECONDS: Final = 60.0  # the gate may ask about an ended client for some more looks
_LOOK_SECONDS: Final = 0.05


@dataclass(slots=True)
class _Request:
    pid: int
    start_ticks: int
    step: Termination = Termination.IN_PROGRESS
    since: float = 0.0
    asked_at: float = 0.0


class Terminator:
    """Terminates the clients of one GPU one after the other, in its own thread, as only one thread may trace them.

    If its process ends, the kernel lets held threads go on, and the next gate stops them again.

    Args:
        ask: makes the MPS server end a client, and returns when it has. Called from another thread.
    """

    def __init__(
        self,
        ask: Callable[[int, float], None],
        *,
        send: SendSignal = send_signal,
        hold: Callable[[int], HeldThreads] = HeldThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._send, self._hold, self._clock = ask, send, hold, clock
        self._requests: dict[tuple[int, int], _Request] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._holding: list[tuple[float, HeldThreads]] = []
        self._leaving: list[HeldThreads] = []  # to release as soon as possible
        self._may_not = False

    def __call__(self, pid: int, start_ticks: int) -> Termination:
        """Begin to terminate a stopped client, or return its progress.

        A terminated client stays held. It is reported as done when no other is in progress, or after two seconds:
        killing a container's first process ends the others in it, so the others must be terminated before.
        """
        with self._lock:
            self._forget()
            request = self._requests.get((pid, start_ticks))
            if request is None:
                request = self._requests[pid, start_ticks] = _Request(pid, start_ticks, asked_at=self._clock())
                self._queue.put(request)
            self._ensure_thread()
            if request.step is Termination.IN_PROGRESS and self._clock() > request.asked_at + LIMIT_SECONDS:
                request.step, request.since = Termination.FAILED, self._clock()
            if request.step is Termination.DONE and self._clock() < request.since + OTHERS_SECONDS:
                others = self._requests.values()
                if any(other.step is Termination.IN_PROGRESS for other in others):
                    return Termination.IN_PROGRESS
            return request.step

    def _ensure_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        thread = threading.Thread(target=self._run, name="terminator", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.error("cannot terminate clients now, trying again at the next look: %s", error)
        else:
            self._thread = thread

    def _forget(self) -> None:
        for key, request in list(self._requests.items()):
            is_old = self._clock() > request.since + REMEMBERED_SECONDS
            if request.step is not Termination.IN_PROGRESS and is_old and not is_alive(*key):
                del self._requests[key]

    def _run(self) -> None:
        while True:
            try:
                request = self._queue.get(timeout=_LOOK_SECONDS if self._holding or self._leaving else None)
            except queue.Empty:
                self._collect()
                continue
            step = Termination.FAILED
            try:
                step = self._terminate(request)
            except Exception:
                logger.exception("cannot terminate client %d; it is killed all the same", request.pid)
            with self._lock:
                if request.step is Termination.IN_PROGRESS:
                    request.step, request.since = step, self._clock()

    def _collect(self) -> None:
        """Collect held processes that were killed, and release those that were not."""
        self._leaving = [threads for threads in self._leaving if not threads.release()]
        for each in list(self._holding):
            since, threads = each
            if threads.collect():
                self._holding.remove(each)
            elif self._clock() > since + HELD_SECONDS:
                self._holding.remove(each)
                self._leaving.append(threads)

    def _terminate(self, request: _Request) -> Termination:
        pid, ticks = request.pid, request.start_ticks
        if not is_alive(pid, ticks):
            return Termination.FAILED
        threads, continued = self._hold(pid), False
        try:
            threads.hold()
            if start_ticks_of(pid) != ticks:
                raise ProcessLookupError(f"process {pid} has ended")
            if request.step is not Termination.IN_PROGRESS:
                raise TimeoutError(f"process {pid} did not stop within {LIMIT_SECONDS:g} s")
            continued = self._send(pid, ticks, signal.SIGCONT)
            seconds = self._ask_while_held(threads)
        except (OSError, TimeoutError, MpsError) as error:
            if continued:
                with contextlib.suppress(OSError):
                    self._send(pid, ticks, signal.SIGSTOP)
            if not threads.release():
                self._leaving.append(threads)
            self._tell(pid, error)
            return Termination.FAILED
        self._holding.append((self._clock(), threads))
        logger.info("the MPS server ended client %d within %.0f ms", pid, 1000 * seconds)
        return Termination.DONE

    def _tell(self, pid: int, error: Exception) -> None:
        may_not = isinstance(error, PermissionError)
        level = logging.DEBUG if may_not and self._may_not else logging.WARNING
        self._may_not |= may_not
        why = f"the MPS host may not trace it ({error})" if may_not else str(error)
        logger.log(level, "client %d is killed without the MPS server's doing: %s", pid, why)

    def _ask_while_held(self, threads: HeldThreads) -> float:
        """Ask the server while the threads are held; return how many seconds it took.

        Raises:
            MpsError: it refused, or did not answer in time.
        """
        over = threading.Event()
        errors: list[Exception] = []

        def ask() -> None:
            try:
                self._ask(threads.pid, ANSWER_SECONDS)
            except Exception as error:  # noqa: BLE001 - handed to the thread that waits
                errors.append(error)
            finally:
                over.set()

        began = self._clock()
        try:
            threading.Thread(target=ask, name="terminate_client", daemon=True).start()
        except RuntimeError as error:
            raise MpsError(f"no thread is free for terminate_client: {error}", retryable=True) from None
        if not over.wait(STEP_AFTER_SECONDS):
            threads.step(over.is_set, ANSWER_SECONDS - STEP_AFTER_SECONDS)
            over.wait(max(0.0, began + ANSWER_SECONDS - self._clock()))
        if not over.is_set():
            raise MpsError(f"no answer to terminate_client within {ANSWER_SECONDS:g} s", retryable=True)
        if errors:
            raise (
                errors[0]
                if isinstance(errors[0], MpsError | OSError)
                else MpsError(str(errors[0]), retryable=False)
            )
        return self._clock() - began
