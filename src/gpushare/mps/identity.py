"""Find the pod of a process: /proc/<pid>/cgroup -> pod uid (cgroup v1 and v2, containerd and CRI-O)."""

import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
_UID: Final = r"[0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32}"
# cgroupfs driver: .../kubepods/burstable/pod<uid>/<container>; systemd driver: ...-pod<uid with
# underscores>.slice. kubepods may be missing from the front when the reader sits in a cgroup namespace of its own
# ("/../../pod<uid>").
_POD: Final = re.compile(rf"(?:^|[/-])pod({_UID})(?:\.slice)?(?:[/:]|$)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected process; `start_ticks` distinguishes it from a later process with the same pid."""

    pid: int
    uid: int
    start_ticks: int | None


def pod_uid_of_cgroup(text: str) -> str | None:
    """Return the pod uid in the text of a /proc/<pid>/cgroup file; None when it names no pod.

    The outermost match of a line counts: what a container creates below its own cgroup cannot rename it.
    """
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        if match := _POD.search(path):
            uid = match[1].replace("_", "-")
            return uid if "-" in uid else uid.lower()
    return None


def pod_uid_of(pid: int, proc: Path = PROC) -> str | None:
    """Return the pod uid of a process; None when it is gone, not ours to read, or in no pod."""
    if pid <= 0:
        return None
    try:
        return pod_uid_of_cgroup((proc / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return None


def start_ticks_of(pid: int, proc: Path = PROC) -> int | None:
    """Return the start time of a process in clock ticks since boot; None when it is gone."""
    try:
        # The command name in parentheses may contain anything, so count from the last ")".
        return int((proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def peer_pid(connection: socket.socket) -> int:
    """Return the connected process's pid by SO_PEERCRED, in this process's pid namespace (0 if outside)."""
    return int(struct.unpack_from("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def peer_of(connection: socket.socket) -> Peer:
    """Return the connected process, with its start time."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid, start_ticks_of(pid))


def is_alive(pid: int, start_ticks: int | None = None) -> bool:
    """Return whether the process still runs: not a zombie, and the same one if its start time is given."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in {"Z", "X"} and (start_ticks is None or int(fields[19]) == start_ticks)
