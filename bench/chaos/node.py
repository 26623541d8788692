"""Read /proc, the cgroups, kubelet's checkpoint and the gates' files, without asking any part of gpushare."""

import contextlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROC: Final = Path("/proc")
RUN: Final = Path("/run/gpushare")
CHECKPOINT: Final = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
SHARE_RESOURCE: Final = "gpushare.io/share"
OUTSIDE_COMM: Final = "gpu-no-mps"  # the twin's name for a process that uses a GPU without MPS
_POD: Final = re.compile(r"[/-]pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A live process of a pod."""

    pid: int
    pod_uid: str
    command: str
    comm: str


def pod_uid_in(cgroup: str) -> str | None:
    """Return the uid of the pod that the text of a /proc/<pid>/cgroup names."""
    found = _POD.search(cgroup)
    return found[1].replace("_", "-") if found else None


def processes() -> tuple[RunningProcess, ...]:
    """Return every live process that is in a pod."""
    found = []
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        place = Path(entry.path)
        with contextlib.suppress(OSError):
            uid = pod_uid_in((place / "cgroup").read_text())
            if uid is None:
                continue
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if command:  # empty: a zombie
                found.append(RunningProcess(int(entry.name), uid, command, (place / "comm").read_text().strip()))
    return tuple(found)


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent; None if there is no such process any more."""
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def is_alive(pid: int, start_ticks: int | None) -> bool:
    """Return whether that very process still runs."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in {"Z", "X"} and start_ticks in {None, int(fields[19])}


def devices_by_pod(checkpoint: Path = CHECKPOINT) -> dict[str, tuple[str, ...]]:
    """Return the share devices that kubelet gave each pod, by uid."""
    found: dict[str, tuple[str, ...]] = {}
    try:
        entries = json.loads(checkpoint.read_bytes())["Data"]["PodDeviceEntries"] or []
    except (OSError, ValueError, KeyError):
        return found
    for entry in entries:
        if entry["ResourceName"] == SHARE_RESOURCE:
            ids = tuple(sorted(one for many in entry["DeviceIDs"].values() for one in many))
            found[entry["PodUID"]] = found.get(entry["PodUID"], ()) + ids
    return found


def gate_file(gpu: str, run: Path = RUN) -> dict[str, Any] | None:
    """Return a gate's status; None without one, or while something hangs in its place."""
    return _object(run / gpu / "gate.json")


def twin_file(gpu: str, run: Path = RUN) -> dict[str, Any] | None:
    """Return what the twin's daemon says of its clients; None without it, or while it hangs."""
    return _object(run / gpu / "twin.json")


def _object(path: Path) -> dict[str, Any] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe: do not block
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            found = json.loads(file.read())
        except (OSError, ValueError):
            return None
    return found if isinstance(found, dict) else None


def gpus_on_node(run: Path = RUN) -> tuple[str, ...]:
    """Return the UUIDs of the node's GPUs."""
    return tuple(sorted(path.parent.name for path in run.glob("*/tenant")))
