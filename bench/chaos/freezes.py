"""Watch each tenant's freezer, ten times a second, from outside: which pods are frozen, and for how long."""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from devcluster.settings import cgroup_root

HIERARCHIES: Final = Path("/sys/fs/cgroup")
LOOK_SECONDS: Final = 0.1
GAP_SECONDS: Final = 0.4  # between two looks further apart a pod may have run: its CPU time shows it


@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Observations since the previous report.

    Attributes:
        longest: longest time that each pod was frozen, seconds, by uid.
        gap_seconds: the longest time without a look; a freeze that began and ended within it was not seen.
        unwatched: pods whose cgroup is not found, by uid: for how many seconds.
    """

    longest: Mapping[str, float] = field(default_factory=dict)
    gap_seconds: float = 0.0
    unwatched: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Frozen:
    """Pod that was frozen at the last look, with the CPU time that it had used by then."""

    since: float
    seen: float
    cpu: int | None


class FreezeWatch:
    """Watcher of each pod's freezer, which records the longest time that it was frozen.

    A time goes on while every look finds the pod frozen. Between two looks at a short interval that is enough: a
    throttled pod is frozen for at most half a second. Over a gap, as on a busy machine, the pod's CPU time must
    not have moved as well.

    Args:
        root: where the hierarchies are mounted.
        parent: the cgroup below which kubelet makes its own.
    """

    def __init__(self, root: Path = HIERARCHIES, parent: str | None = None) -> None:
        self._is_v1 = (root / "freezer").is_dir()
        parent = (cgroup_root() if parent is None else parent).strip("/")
        self._freezer = (root / "freezer" if self._is_v1 else root) / parent
        self._cpu = (root / "cpuacct" if self._is_v1 else root) / parent
        self._cgroups: dict[str, Path] = {}  # below the parent
        self._missing_since: dict[str, float] = {}
        self._frozen: dict[str, _Frozen] = {}
        self._longest: dict[str, float] = {}
        self._looked_at: float | None = None
        self._gap = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="freeze-watch", daemon=True)

    def start(self) -> None:
        self._looked_at = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def watch(self, uids: Iterable[str], now: float) -> None:
        """Look at these pods from now on; all of them have processes, so they have cgroups."""
        wanted = set(uids)
        with self._lock:
            for uid in set(self._cgroups) - wanted:
                del self._cgroups[uid]
            missing = wanted - set(self._cgroups)
        found = {uid: path for uid in missing if (path := self._find(uid)) is not None}
        with self._lock:
            self._cgroups |= found
            self._missing_since = {uid: self._missing_since.get(uid, now) for uid in missing - set(found)}

    def report(self, now: float) -> FreezeReport:
        """Return what was seen since the last call."""
        with self._lock:
            longest, self._longest = self._longest, {}
            gap, self._gap = self._gap, 0.0
            if self._looked_at is not None:
                gap = max(gap, now - self._looked_at)
            unwatched = {uid: now - since for uid, since in self._missing_since.items()}
        return FreezeReport(longest, gap, unwatched)

    def look(self, now: float) -> None:
        """Look at every pod once."""
        with self._lock:
            pods = dict(self._cgroups)
            if self._looked_at is not None:
                self._gap = max(self._gap, now - self._looked_at)
            self._looked_at = now
        for uid, path in pods.items():
            if not self._is_frozen(path):
                self._frozen.pop(uid, None)
                continue
            cpu = self._cpu_time(path)
            before = self._frozen.get(uid)
            stood_still = before is not None and (
                now - before.seen <= GAP_SECONDS or (cpu is not None and cpu == before.cpu)
            )
            since = before.since if before is not None and stood_still else now
            self._frozen[uid] = _Frozen(since, now, cpu)
            with self._lock:
                self._longest[uid] = max(self._longest.get(uid, 0.0), now - since)
        for uid in set(self._frozen) - set(pods):
            del self._frozen[uid]

    def _watch(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self.look(time.monotonic())

    def _find(self, uid: str) -> Path | None:
        for pattern in (
            f"kubepods/pod{uid}",
            f"kubepods/*/pod{uid}",
            f"kubepods.slice/**/*pod{uid.replace('-', '_')}.slice",
        ):
            for path in self._freezer.glob(pattern):
                return path.relative_to(self._freezer)
        return None

    def _is_frozen(self, path: Path) -> bool:
        try:
            if self._is_v1:
                return (self._freezer / path / "freezer.state").read_text().strip() == "FROZEN"
            return "frozen 1" in (self._freezer / path / "cgroup.events").read_text()
        except OSError:
            return False

    def _cpu_time(self, path: Path) -> int | None:
        """Return the CPU time that a pod has used, ns or us; None where nobody knows."""
        try:
            if self._is_v1:
                return int((self._cpu / path / "cpuacct.usage").read_text())
            for line in (self._cpu / path / "cpu.stat").read_text().splitlines():
                if line.startswith("usage_usec "):
                    return int(line.split()[1])
        except (OSError, ValueError):
            return None
        return None
