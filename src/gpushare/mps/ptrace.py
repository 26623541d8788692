"""Hold the threads of a CUDA process that launch kernels, by ptrace(2), while CUDA's own threads keep answering.

Linux ties a traced thread to the thread that traces it. So all calls for one process must come from one thread,
and when that thread or its process ends, the held threads go on (docs/adr/0162).
"""

import ctypes
import os
import time
from collections.abc import Callable
from itertools import islice
from typing import Final

from gpushare.mps.identity import PROC

_SINGLESTEP, _DETACH, _SEIZE, _INTERRUPT = 9, 17, 0x4206, 0x4207  # requests, <linux/ptrace.h>
_ALL_THREADS: Final = 0x40000000  # __WALL of waitpid(2): also threads other than the first
# The driver names its threads "cuda-EvtHandlr", "cuda00001400006": they answer the MPS server (docs/facts.md 36).
_OF_CUDA: Final = "cuda"
HOLD_SECONDS: Final = 0.5  # stopping a thread takes 0.1 ms, but waits for some system calls
_PAUSE_SECONDS: Final = 0.0005
_STEP_SECONDS: Final = 0.005  # an instruction takes about 25 us; a thread that takes longer may wait in the kernel
_LOOPS: Final = 8  # most listings of the threads, which may start others until they are held
_QUICK: Final = 64  # up to this many threads, about 10 ms, are held even if the node is short of CPU
MOST_THREADS: Final = 2048  # most threads of a process, about 0.1 ms each; a PyTorch job has some hundreds


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class HeldThreads:
    """The threads of one process that are held, until `release` or the end of the calling thread.

    Args:
        is_left: returns whether a thread must go on, by its name.
    """

    def __init__(self, pid: int, is_left: Callable[[str], bool] = lambda name: name.startswith(_OF_CUDA)) -> None:
        self.pid, self._is_left = pid, is_left
        self._stopped: dict[int, None] = {}  # stopped, in their order
        self._seized: set[int] = set()  # traced, stopped or not

    def hold(self, timeout_seconds: float = HOLD_SECONDS) -> None:
        """Stop all threads that need not go on.

        If cgroup v1 froze the pod after the process was stopped, Linux answers only at the thaw or the kill.

        Raises:
            PermissionError: the caller lacks SYS_PTRACE, or another tracer has the process.
            ProcessLookupError: it has ended.
            TimeoutError: a thread does not stop, because it waits in the kernel or its pod is frozen; or there are
                more threads than `MOST_THREADS` or than can be stopped in time (other clients wait meanwhile).
        """
        deadline = time.monotonic() + timeout_seconds
        for _ in range(_LOOPS):
            new = [thread for thread in self._threads(deadline) if thread not in self._seized]
            if not new:
                return
            for number, thread in enumerate(new):
                if number >= _QUICK and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{len(new) - number} threads of process {self.pid} are not stopped in time"
                    )
                try:
                    _ptrace(_SEIZE, thread)
                    self._seized.add(thread)  # from now on it must be collected, even if it has just exited
                    _ptrace(_INTERRUPT, thread)
                except ProcessLookupError:
                    if thread == self.pid:
                        raise
            for thread in new:
                if thread in self._seized and self._waited(thread, deadline):
                    self._stopped[thread] = None
        raise TimeoutError(f"process {self.pid} starts threads faster than they are held")

    def _threads(self, deadline: float) -> list[int]:
        """Return the threads to hold; threads that have exited but are not collected yet are left out."""
        threads = []
        tasks = PROC / str(self.pid) / "task"
        try:
            with os.scandir(tasks) as entries:
                listed = sorted(int(entry.name) for entry in islice(entries, MOST_THREADS + 1))
        except FileNotFoundError:
            raise ProcessLookupError(f"process {self.pid} has ended") from None
        if len(listed) > MOST_THREADS:
            raise TimeoutError(f"process {self.pid} has more than {MOST_THREADS} threads")
        for number, thread in enumerate(listed):
            if number >= _QUICK and time.monotonic() > deadline:
                raise TimeoutError(f"the {len(listed)} threads of process {self.pid} are not listed in time")
            try:
                name = (tasks / str(thread) / "comm").read_text(errors="replace").strip()
            except OSError:
                continue
            if self._state(thread) not in {"", "Z", "X"} and not self._is_left(name):
                threads.append(thread)
        return threads

    def _waited(self, thread: int, deadline: float) -> bool:
        """Wait until a thread stops; return False if it has ended instead."""
        while True:
            is_late = time.monotonic() > deadline  # before the look: we may get no CPU for a while after it
            try:
                found, status = os.waitpid(thread, _ALL_THREADS | os.WNOHANG)
            except ChildProcessError:
                found, status = thread, 0
            if found:
                if os.WIFSTOPPED(status):
                    return True
                self._forget(thread)
                return False
            if is_late:
                raise TimeoutError(f"thread {thread} of process {self.pid} does not stop")
            time.sleep(_PAUSE_SECONDS)

    def step(self, is_over: Callable[[], bool], timeout_seconds: float) -> None:
        """Let threads that are not in a system call execute instruction by instruction, until `is_over`.

        A thread may have been stopped while it held a lock of the driver that the answer needs (docs/facts.md 36).
        At about 25 us per instruction it releases the lock within milliseconds, whereas a kernel launch, thousands
        of instructions, takes longer than the answer.
        """
        deadline = time.monotonic() + timeout_seconds
        running = [thread for thread in self._stopped if not self._is_in_kernel(thread)]
        while running and not is_over() and time.monotonic() < deadline:
            for thread in list(running):
                burst = min(deadline, time.monotonic() + _STEP_SECONDS)
                while time.monotonic() < burst and not is_over():
                    if not self._stepped(thread, deadline):
                        running.remove(thread)
                        break

    def _stepped(self, thread: int, deadline: float) -> bool:
        """Execute one instruction; return False if the thread then waits in the kernel or ends."""
        try:
            _ptrace(_SINGLESTEP, thread)
            look_at = time.monotonic() + _STEP_SECONDS
            while True:
                found, status = os.waitpid(thread, _ALL_THREADS | os.WNOHANG)
                if found and os.WIFSTOPPED(status):
                    return True
                if found:
                    self._forget(thread)
                    return False
                if (now := time.monotonic()) > look_at:
                    if now > deadline or self._state(thread) in {"S", "D", ""}:
                        break
                    time.sleep(_PAUSE_SECONDS)  # it waits for a CPU
            _ptrace(_INTERRUPT, thread)
            self._waited(thread, time.monotonic() + HOLD_SECONDS)
        except ChildProcessError:
            self._forget(thread)
        except ProcessLookupError:  # it was killed and must be collected
            self._stopped.pop(thread, None)
        return False

    def _state(self, thread: int) -> str:
        """Return the letter of a thread's state; empty if it is gone."""
        try:
            text = (PROC / str(self.pid) / "task" / str(thread) / "stat").read_text(errors="replace")
        except OSError:
            return ""
        return text.rpartition(")")[2].split()[0]

    def _is_in_kernel(self, thread: int) -> bool:
        """Return whether a thread was stopped in a system call; True too if that cannot be told."""
        try:
            text = (PROC / str(self.pid) / "task" / str(thread) / "syscall").read_text()
        except OSError:
            return False
        return not text.startswith("-1")

    def collect(self) -> bool:
        """Return whether every traced thread has ended, and collect those; until then no other process can."""
        for thread in list(self._seized):
            try:
                found, status = os.waitpid(thread, _ALL_THREADS | os.WNOHANG)
            except ChildProcessError:
                self._forget(thread)
                continue
            if found and not os.WIFSTOPPED(status):
                self._forget(thread)
        return not self._seized

    def release(self) -> bool:
        """Let every held thread go on as before, without waiting.

        Returns:
            Whether no thread is traced any more. A thread that has not stopped yet, because its pod is frozen,
            would stop later, and one that ends must be collected; so call again until this is True.
        """
        for thread in list(self._seized):
            try:
                if thread not in self._stopped:
                    found, status = os.waitpid(thread, _ALL_THREADS | os.WNOHANG)
                    if not found:
                        continue  # it was interrupted, and stops as soon as it can
                    if not os.WIFSTOPPED(status):
                        self._forget(thread)
                        continue
                _ptrace(_DETACH, thread)
                self._forget(thread)
            except ChildProcessError:
                self._forget(thread)
            except ProcessLookupError:  # it was killed and must be collected
                self._stopped.pop(thread, None)
        return not self._seized

    def _forget(self, thread: int) -> None:
        self._seized.discard(thread)
        self._stopped.pop(thread, None)
