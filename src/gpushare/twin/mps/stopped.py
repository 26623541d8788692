"""Find the twin's clients that are stopped: those whose pod's cgroup the MPS host's throttle has frozen."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpushare.mps.freezer import CGROUP_ROOT, CgroupFreezer, Freezer, FreezerError, FreezeState
from gpushare.mps.identity import pod_uid_of

NODE_CGROUPS: Final = Path("/host/sys/fs/cgroup")  # in the MPS host's container, by the chart
SEARCH_SECONDS: Final = 5.0  # between two searches for a missing cgroup: one walks a tree of directories


class StoppedTenants:
    """Freezer state of the tenants: it finds each process's pod once, and reads its freezer at every call.

    Args:
        pod_of: the uid of a process's pod; None where it is in none.
    """

    def __init__(
        self,
        freezer: Freezer | None = None,
        pod_of: Callable[[int], str | None] = pod_uid_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._freezer = freezer or CgroupFreezer(NODE_CGROUPS if NODE_CGROUPS.is_dir() else CGROUP_ROOT)
        self._pod_of = pod_of
        self._clock = clock
        self._cgroups: dict[int, Path] = {}
        self._search_at: dict[int, float] = {}

    def is_stopped(self, pid: int) -> bool:
        """Return whether a process is frozen now; one in no pod never is."""
        cgroup = self._cgroups.get(pid) or self._find(pid)
        if cgroup is None:
            return False
        try:
            return self._freezer.state(cgroup) is FreezeState.FROZEN
        except OSError:  # the pod is gone
            self.forget(pid)
            return False

    def forget(self, pid: int) -> None:
        """Forget a process that has ended."""
        self._cgroups.pop(pid, None)
        self._search_at.pop(pid, None)

    def _find(self, pid: int) -> Path | None:
        if self._clock() < self._search_at.get(pid, -math.inf):
            return None
        self._search_at[pid] = self._clock() + SEARCH_SECONDS
        uid = self._pod_of(pid)
        if uid is not None:
            with contextlib.suppress(FreezerError, OSError):
                if (found := self._freezer.find(uid)) is not None:
                    self._cgroups[pid] = found
        return self._cgroups.get(pid)
