"""Freezing a pod's cgroup: the port, its real implementation for cgroup v1 and v2, and a simulated one for tests.

The pod's own cgroup is used, above its containers: the pod cannot thaw itself, and a container that was paused by
somebody else stays paused (docs/facts.md 27).
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_MAX_DEPTH: Final = 8  # a kubelet in a container of a slice: docker/<id>/kubelet/kubepods/burstable/pod<uid> is 6
_MAX_DIRECTORIES: Final = 20_000
_NUDGE_SECONDS: Final = 0.002
_ANY_POD: Final = re.compile(r"(?:^|-)pod(?:[0-9a-f]{8}[-_][0-9a-f]{4}[-_]|[0-9a-f]{32})")


class FreezeState(StrEnum):
    """State of a cgroup's processes; FREEZING is in between, and in v1 a cgroup may get stuck there."""

    THAWED = "Thawed"
    FREEZING = "Freezing"
    FROZEN = "Frozen"


class FreezerError(Exception):
    """A pod's cgroup cannot be used for freezing; the message says why."""


class Freezer(Protocol):
    """A port that freezes and thaws whole pods. No call waits for the kernel for more than some milliseconds."""

    def problem(self) -> str:
        """Return why no pod can be frozen on this node; empty if pods can."""
        ...

    def find(self, pod_uid: str) -> Path | None:
        """Return the pod's cgroup; None if it has none (yet, or any more).

        Raises:
            FreezerError: freezing its cgroup would not reach its processes.
        """
        ...

    def state(self, cgroup: Path) -> FreezeState:
        """Return the cgroup's present state, whoever caused it.

        Raises:
            FileNotFoundError: it is gone; OSError: it cannot be read.
        """
        ...

    def freeze(self, cgroup: Path) -> None:
        """Ask the kernel to freeze the cgroup; it is finished when `state` is FROZEN.

        Raises:
            FileNotFoundError: it is gone; OSError: it cannot be written.
        """
        ...

    def thaw(self, cgroup: Path) -> None:
        """Thaw the cgroup; this takes effect at once.

        Raises:
            FileNotFoundError: it is gone; OSError: it cannot be written.
        """
        ...

    def nudge(self, cgroup: Path) -> None:
        """Retry a freeze that is stuck in FREEZING: in v1 thaw for a moment and freeze again, as runc does."""
        ...


def _names_of(pod_uid: str) -> tuple[str, ...]:
    """Return the possible names of a pod's cgroup: the cgroupfs driver's, and systemd's at the end of a slice."""
    return f"pod{pod_uid}", f"-pod{pod_uid.replace('-', '_')}.slice"


class CgroupFreezer:
    """The kernel's freezer: v1 if its hierarchy is mounted (kubelet puts the pods' cgroups in it), else v2."""

    def __init__(self, root: Path = CGROUP_ROOT) -> None:
        self._is_v1 = not (root / "cgroup.controllers").exists() and (root / "freezer").is_dir()
        self._hierarchy = root / "freezer" if self._is_v1 else root
        if not self._is_v1 and not (root / "cgroup.controllers").exists() and (root / "unified").is_dir():
            self._hierarchy = root / "unified"  # hybrid mode, without the v1 freezer
        self._file = "freezer.state" if self._is_v1 else "cgroup.freeze"
        self._found: dict[str, Path] = {}

    @property
    def hierarchy(self) -> Path:
        """Return the directory below which pods' cgroups are searched."""
        return self._hierarchy

    def problem(self) -> str:
        """Return a problem if the hierarchy is missing or mounted read-only; else empty."""
        sign = self._hierarchy / ("tasks" if self._is_v1 else "cgroup.controllers")
        if not sign.exists():
            return f"no cgroup file system with a freezer at {self._hierarchy}"
        if os.statvfs(self._hierarchy).f_flag & os.ST_RDONLY:
            return f"{self._hierarchy} is mounted read-only"
        # Check a file, not the directory: v1's root directory is not writable, and the host may not override that.
        processes = self._hierarchy / "cgroup.procs"
        return "" if os.access(processes, os.W_OK) else f"{self._hierarchy} may not be written"

    def find(self, pod_uid: str) -> Path | None:
        """Search the directories above the pods'; those that a pod creates in its own cgroup are never read."""
        known = self._found.get(pod_uid)
        if known is not None and known.is_dir():
            return known
        # pods come and go while this process runs, so entries of pods that are gone would accumulate
        self._found = {uid: path for uid, path in self._found.items() if path.is_dir()}
        plain, slice_ = _names_of(pod_uid)
        apart = None
        for entry in _above_pods(self._hierarchy):
            if entry.name == plain or entry.name.endswith(slice_) or entry.name == slice_[1:]:
                self._found[pod_uid] = Path(entry.path)
            elif f"{slice_}:" in entry.name:
                apart = entry.name
        if apart is not None:
            raise FreezerError(
                f"its containers lie outside its cgroup, in {apart[:120]}: kubelet uses the systemd driver "
                "and the container runtime the cgroupfs driver"
            )
        return self._found.get(pod_uid)

    def state(self, cgroup: Path) -> FreezeState:
        """Read `freezer.state` (v1), or `cgroup.events` and `cgroup.freeze` (v2), with freezes of ancestors."""
        if self._is_v1:
            return FreezeState((cgroup / self._file).read_text().strip().capitalize())
        if "frozen 1" in (cgroup / "cgroup.events").read_text().splitlines():
            return FreezeState.FROZEN
        asked = (cgroup / self._file).read_text().strip() == "1"
        return FreezeState.FREEZING if asked else FreezeState.THAWED

    def freeze(self, cgroup: Path) -> None:
        """Write the freeze to the cgroup's file."""
        self._write(cgroup, "FROZEN" if self._is_v1 else "1")

    def thaw(self, cgroup: Path) -> None:
        """Write the thaw to the cgroup's file."""
        self._write(cgroup, "THAWED" if self._is_v1 else "0")

    def nudge(self, cgroup: Path) -> None:
        """Retry in v1; in v2 the kernel continues by itself."""
        if self._is_v1:
            self.thaw(cgroup)
            time.sleep(_NUDGE_SECONDS)
            self.freeze(cgroup)

    def _write(self, cgroup: Path, word: str) -> None:
        # without O_CREAT and O_TRUNC, so that no file is created if the cgroup is gone
        descriptor = os.open(cgroup / self._file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, word.encode())
        finally:
            os.close(descriptor)


def _above_pods(hierarchy: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield every directory above the pods' own, breadth first."""
    level, seen = [str(hierarchy)], 0
    for _ in range(_MAX_DEPTH):
        below: list[str] = []
        for parent in level:
            try:
                entries = [entry for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            for entry in entries:
                yield entry
                if not _ANY_POD.search(entry.name):
                    below.append(entry.path)
            seen += len(entries)
        level = below
        if seen > _MAX_DIRECTORIES:
            return


@dataclass(slots=True)
class SimulatedFreezer:
    """Cgroups in memory. `sticks`: how many nudges a freeze needs; `error`: the error that writing raises."""

    root: Path = Path("/simulated")
    cgroups: dict[str, FreezeState] = field(default_factory=dict)
    sticks: dict[str, int] = field(default_factory=dict)
    error: OSError | None = None
    writes: int = 0
    _left: dict[str, int] = field(default_factory=dict)

    def add(self, pod_uid: str) -> None:
        """Add a pod's cgroup."""
        self.cgroups[pod_uid] = FreezeState.THAWED

    def remove(self, pod_uid: str) -> None:
        """Remove a pod's cgroup, frozen or not."""
        del self.cgroups[pod_uid]

    def problem(self) -> str:
        """Return the error that writing would raise."""
        return str(self.error or "")

    def find(self, pod_uid: str) -> Path | None:
        """Return the path that the pod's cgroup would have."""
        return self.root / pod_uid if pod_uid in self.cgroups else None

    def state(self, cgroup: Path) -> FreezeState:
        """Return the state that was set last."""
        return self.cgroups[self._known(cgroup)]

    def freeze(self, cgroup: Path) -> None:
        """Freeze at once, unless it is set to stick."""
        uid = self._written(cgroup)
        self._left[uid] = self.sticks.get(uid, 0)
        self.cgroups[uid] = FreezeState.FREEZING if self._left[uid] else FreezeState.FROZEN

    def thaw(self, cgroup: Path) -> None:
        """Thaw at once."""
        self.cgroups[self._written(cgroup)] = FreezeState.THAWED

    def nudge(self, cgroup: Path) -> None:
        """Count one nudge down."""
        uid = self._written(cgroup)
        self._left[uid] = max(0, self._left.get(uid, 0) - 1)
        self.cgroups[uid] = FreezeState.FREEZING if self._left[uid] else FreezeState.FROZEN

    def _known(self, cgroup: Path) -> str:
        if cgroup.name not in self.cgroups:
            raise FileNotFoundError(cgroup)
        return cgroup.name

    def _written(self, cgroup: Path) -> str:
        uid = self._known(cgroup)
        if self.error is not None:
            raise self.error
        self.writes += 1
        return uid
