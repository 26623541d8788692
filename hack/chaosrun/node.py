"""What /proc, the cgroups, kubelet's checkpoint and the gates' files say; nothing here asks a part of gpushare."""

import contextlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROC: Final = Path("/proc")
RUN: Final = Path("/run/gpushare")
CHECKPOINT: Final = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
SHARE_RESOURCE: Final = "gpushare.io/share"
OUTSIDE_COMM: Final = "gpu-no-mps"  # the twin's name for a process that uses a GPU without MPS
FREEZER_V1: Final = Path("/sys/fs/cgroup/freezer")
FREEZER_V2: Final = Path("/sys/fs/cgroup")
LOOK_SECONDS: Final = 0.1
GAP_SECONDS: Final = 0.4  # between two looks further apart a pod may well have run
_POD: Final = re.compile(r"[/-]pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class Process:
    """A live process of a pod."""

    pid: int
    pod_uid: str
    command: str
    comm: str


def pod_uid_in(cgroup: str) -> str | None:
    """Return the uid of the pod that the text of a /proc/<pid>/cgroup names."""
    found = _POD.search(cgroup)
    return found[1].replace("_", "-") if found else None


def processes() -> tuple[Process, ...]:
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
                found.append(Process(int(entry.name), uid, command, (place / "comm").read_text().strip()))
    return tuple(found)


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
    path = run / gpu / "gate.json"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found


def gpus_on_node(run: Path = RUN) -> tuple[str, ...]:
    """Return the UUIDs of the node's GPUs."""
    return tuple(sorted(path.parent.name for path in run.glob("*/tenant")))


class FreezeWatch:
    """Looks at each pod's freezer ten times a second, and knows the longest time that it stood still.

    A time counts as far as looks at short intervals all found the pod frozen: a throttled one is frozen for at
    most half a second and then runs.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._is_v1 = root is None and FREEZER_V1.is_dir()
        self._root = root or (FREEZER_V1 if self._is_v1 else FREEZER_V2)
        self._cgroups: dict[str, Path] = {}
        self._since: dict[str, tuple[float, float]] = {}
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="freeze-watch", daemon=True)
        self.looks_frozen = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def watch(self, uids: Iterable[str]) -> None:
        """Look at these pods from now on."""
        wanted = set(uids)
        with self._lock:
            for uid in set(self._cgroups) - wanted:
                del self._cgroups[uid]
            missing = wanted - set(self._cgroups)
        found = {uid: path for uid in missing if (path := self._find(uid)) is not None}
        with self._lock:
            self._cgroups |= found

    def longest(self) -> dict[str, float]:
        """Return the longest time of each pod since the last call, seconds."""
        with self._lock:
            found, self._longest = self._longest, {}
        return found

    def look(self, now: float) -> None:
        """Look at every pod once."""
        with self._lock:
            pods = dict(self._cgroups)
        for uid, path in pods.items():
            if not self._is_frozen(path):
                self._since.pop(uid, None)
                continue
            self.looks_frozen += 1
            first, last = self._since.get(uid, (now, now))
            if now - last > GAP_SECONDS:
                first = now
            self._since[uid] = (first, now)
            with self._lock:
                self._longest[uid] = max(self._longest.get(uid, 0.0), now - first)
        for uid in set(self._since) - set(pods):
            del self._since[uid]

    def _watch(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self.look(time.monotonic())

    def _find(self, uid: str) -> Path | None:
        for pattern in (
            f"kubepods/pod{uid}",
            f"kubepods/*/pod{uid}",
            f"kubepods.slice/**/*pod{uid.replace('-', '_')}.slice",
        ):
            for path in self._root.glob(pattern):
                return path
        return None

    def _is_frozen(self, path: Path) -> bool:
        try:
            if self._is_v1:
                return (path / "freezer.state").read_text().strip() == "FROZEN"
            return "frozen 1" in (path / "cgroup.events").read_text()
        except OSError:
            return False
