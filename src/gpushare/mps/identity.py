"""Find the pod of a process: /proc/<pid>/cgroup -> pod uid (cgroup v1 and v2, containerd and CRI-O)."""

import os
import re
import socket
import struct
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_UID: Final = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
# cgroupfs driver: .../kubepods/burstable/pod<uid>/<container>; systemd driver: ...-pod<uid with
# underscores>.slice. kubepods may be missing from the front when the reader sits in a cgroup namespace of its own
# ("/../../pod<uid>").
_POD: Final = re.compile(rf"(?:^|[/-])pod({_UID})(?:\.slice)?(?:[/:]|$)")
_STATE, _THREADS, _START_TICKS = 0, 17, 19  # fields of /proc/<pid>/stat after the command's name
_EXITED: Final = frozenset({"Z", "X"})


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected process; `start_ticks` distinguishes it from a later process with the same pid."""

    pid: int
    uid: int
    start_ticks: int | None


def pod_uid_of_cgroup(text: str) -> str | None:
    """Return the pod uid in the text of a /proc/<pid>/cgroup file; None if it names no pod.

    The outermost match of a line counts, so names that a container creates below its own cgroup do not matter.
    """
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        if match := _POD.search(path):
            uid = match[1].replace("_", "-")
            return uid if "-" in uid else uid.lower()
    return None


def pod_uid_of(pid: int, proc: Path = PROC) -> str | None:
    """Return the pod uid of a process; None if it is gone, not readable, or in no pod."""
    return pod_uid_of_cgroup(container_of(pid, proc)) if pid > 0 else None


def _stat(process: Path) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the process's state on."""
    # The command name in parentheses may contain anything, so count from the last ")".
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def start_ticks_of(pid: int, proc: Path = PROC) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is gone."""
    try:
        return int(_stat(proc / str(pid))[_START_TICKS])
    except (OSError, ValueError, IndexError):
        return None


def seconds_alive(start_ticks: int) -> float:
    """Return how long ago a process started, by a clock that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def peer_pid(connection: socket.socket) -> int:
    """Return the connected process's pid by SO_PEERCRED, in this process's pid namespace (0 if outside)."""
    return int(struct.unpack_from("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def peer_of(connection: socket.socket) -> Peer:
    """Return the connected process, with its start time."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid, start_ticks_of(pid))


def is_alive(pid: int, start_ticks: int | None = None) -> bool:
    """Return whether the process still runs: not a zombie, and the same one if its start time is given.

    A process whose first thread has exited looks like a zombie; it runs as long as another thread does.
    """
    try:
        fields = _stat(PROC / str(pid))
        is_running = fields[_STATE] not in _EXITED or int(fields[_THREADS]) > 1
        return is_running and (start_ticks is None or int(fields[_START_TICKS]) == start_ticks)
    except (OSError, ValueError, IndexError):
        return False


class RunState(Enum):
    """Whether a process executes instructions."""

    RUNS = auto()
    STOPPED = auto()  # by a signal or a tracer
    UNKNOWN = auto()  # frozen, within the kernel, without its first thread, or gone


def run_state_of(pid: int, proc: Path = PROC) -> RunState:
    """Return whether a process runs or a signal has stopped it, judged by its first thread."""
    try:
        state = _stat(proc / str(pid))[_STATE]
    except (OSError, IndexError):
        return RunState.UNKNOWN
    if state in {"T", "t"}:
        return RunState.STOPPED
    return RunState.RUNS if state in {"R", "S"} else RunState.UNKNOWN


def is_traced(pid: int, proc: Path = PROC) -> bool:
    """Return whether a tracer holds it, which lets it execute an instruction at a time at most."""
    return _status_line(pid, "TracerPid:", proc) not in ([], ["0"])


def is_namespace_init(pid: int, proc: Path = PROC) -> bool:
    """Return whether it is the first process of a pid namespace below ours; all others in it end with it."""
    return _status_line(pid, "NSpid:", proc)[1:][-1:] == ["1"]


def container_of(pid: int, proc: Path = PROC) -> str:
    """Return the cgroups of a process, which are equal for all processes of a container; empty if it is gone."""
    process = proc / str(pid)
    try:
        text = (process / "cgroup").read_text(errors="replace")
        # Cgroup v1 shows "/" for a thread that has exited, and a process may continue without its first thread.
        if pod_uid_of_cgroup(text) is None and _stat(process)[_STATE] in _EXITED:
            for thread in (process / "task").iterdir():
                of_thread = (thread / "cgroup").read_text(errors="replace")
                if pod_uid_of_cgroup(of_thread) is not None:
                    return of_thread
    except (OSError, IndexError):
        return ""
    return text


def ends_with(first: int, other: int, proc: Path = PROC) -> bool:
    """Return whether another process ends when the first process of a pid namespace ends, as far as can be told.

    True if both are in one container, and the other one is not in a separate pid namespace.
    """
    if container_of(other, proc) != container_of(first, proc):
        return False
    spaces = [_pid_namespace(pid, proc) for pid in (first, other)]
    depths = [len(_status_line(pid, "NSpid:", proc)) for pid in (first, other)]
    is_beside = None not in spaces and spaces[0] != spaces[1] and depths[0] == depths[1]
    return not is_beside


def _pid_namespace(pid: int, proc: Path) -> int | None:
    try:
        return (proc / str(pid) / "ns" / "pid").stat().st_ino
    except OSError:  # gone, or not ours to look at
        return None


def _status_line(pid: int, key: str, proc: Path) -> list[str]:
    try:
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return next((line.removeprefix(key).split() for line in lines if line.startswith(key)), [])
