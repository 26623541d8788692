"""Record on disk of the pods that we have frozen, so that after a crash a successor thaws them.

One file per frozen pod under `<host directory>/frozen`, named by its uid, contains its cgroup's path. It is
written before the cgroup is frozen and removed after the thaw, so a pod that somebody else froze is never taken
for ours.
"""

import contextlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpushare.mps.freezer import Freezer, FreezerError, FreezeState
from gpushare.mps.status import ThrottleRefusal

logger = logging.getLogger(__name__)

NUDGE_EVERY_SECONDS: Final = 0.02
STUCK_SECONDS: Final = 0.4  # then we give up; the pod was never fully frozen, so its probes were not affected


def record_of(base: Path | str) -> Path:
    """Return the record's directory in the host directory."""
    return Path(base) / "frozen"


def recorded(base: Path | str) -> tuple[Path, ...]:
    """Return the record's files; empty if we have frozen no pod."""
    record = record_of(base)
    return tuple(sorted(record.iterdir())) if record.is_dir() else ()


def is_recorded(base: Path | str, pod_uid: str) -> bool:
    """Return whether we have frozen this pod."""
    return (record_of(base) / pod_uid).exists()


def thaw_marked(mark: Path, freezer: Freezer) -> bool:
    """Thaw one pod of the record; return whether it was frozen.

    Raises:
        FileNotFoundError: its cgroup or its file is gone.
        OSError, ValueError: it cannot be thawed.
    """
    cgroup = mark.read_text()
    if not cgroup:  # the writer was killed before it froze the pod
        return False
    was = freezer.state(Path(cgroup))
    freezer.thaw(Path(cgroup))
    return was is not FreezeState.THAWED


def thaw_recorded(base: Path | str, freezer: Freezer, *, keep: bool = False) -> tuple[str, ...]:
    """Thaw every pod in the record and return their uids; a pod that cannot be thawed stays in it.

    Args:
        keep: leave all pods in the record, because its writer still lives and may freeze one of them again.
    """
    thawed = []
    for mark in recorded(base):
        try:
            if thaw_marked(mark, freezer):
                thawed.append(mark.name)
            if not keep:
                mark.unlink(missing_ok=True)
        except FileNotFoundError:
            if not keep:
                mark.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            logger.error("cannot thaw pod %s, trying again: %s", mark.name, error)
    return tuple(thawed)


@dataclass(frozen=True, slots=True)
class FreezeRefused:
    """Reason for which a pod was not frozen."""

    reason: ThrottleRefusal
    detail: str


@dataclass(slots=True)
class _FrozenPod:
    cgroup: Path
    since: float
    nudged_at: float
    is_still: bool = False
    is_refused: bool = False


class FrozenPods:
    """The pods that this process has frozen."""

    def __init__(self, base: Path | str, freezer: Freezer) -> None:
        self._record = record_of(base)
        self._freezer = freezer
        self._pods: dict[str, _FrozenPod] = {}

    @property
    def uids(self) -> frozenset[str]:
        """Return the uids of pods that we froze and have not thawed."""
        return frozenset(self._pods)

    @property
    def since(self) -> float:
        """Return when we froze the one that has been frozen longest; infinite for none."""
        return min((pod.since for pod in self._pods.values()), default=math.inf)

    @property
    def still(self) -> frozenset[str]:
        """Return the pods that are fully frozen; until all are, call `settle` again."""
        return frozenset(uid for uid, pod in self._pods.items() if pod.is_still)

    def freeze(self, uid: str, now: float) -> FreezeRefused | None:
        """Freeze a pod, or return why not; a refusal leaves neither a frozen cgroup nor a record."""
        if uid in self._pods:
            return None
        mark = self._record / uid
        try:
            cgroup = self._freezer.find(uid)
            if cgroup is None:
                return FreezeRefused(ThrottleRefusal.NO_CGROUP, "no cgroup of this pod on the node")
            if self._freezer.state(cgroup) is not FreezeState.THAWED:
                return FreezeRefused(ThrottleRefusal.FROZEN_BY_OTHERS, "somebody else froze it: left as it is")
            self._record.mkdir(exist_ok=True, mode=0o700)
            mark.write_text(str(cgroup))
            self._pods[uid] = _FrozenPod(cgroup, now, now)
            self._freezer.freeze(cgroup)
            self._pods[uid].is_still = self._freezer.state(cgroup) is FreezeState.FROZEN
        except FreezerError as error:
            return FreezeRefused(ThrottleRefusal.NO_CGROUP, str(error))
        except FileNotFoundError as error:
            self._forget(uid)
            return FreezeRefused(ThrottleRefusal.NO_CGROUP, f"its cgroup is gone: {error}")
        except OSError as error:
            if self.thaw(uid):
                mark.unlink(missing_ok=True)
            return FreezeRefused(ThrottleRefusal.NOT_WRITABLE, str(error))
        return None

    def thaw_left(self) -> None:
        """Thaw the pods on record that a former process froze and that could not be thawed when this one began."""
        for mark in recorded(self._record.parent):
            if mark.name in self._pods:
                continue
            try:
                thaw_marked(mark, self._freezer)
            except FileNotFoundError:
                pass
            except (OSError, ValueError):  # it was logged at the start
                continue
            mark.unlink(missing_ok=True)
            logger.warning("thawed pod %s, which could not be thawed before", mark.name)

    def settle(self, now: float) -> dict[str, FreezeRefused]:
        """Check pods that are still freezing; thaw those that are stuck for too long, and return why."""
        stuck = {}
        for uid, pod in list(self._pods.items()):
            if pod.is_still:
                continue
            try:
                pod.is_still = self._freezer.state(pod.cgroup) is FreezeState.FROZEN
                if pod.is_still:
                    continue
                if now - pod.since >= STUCK_SECONDS:
                    if self.thaw(uid):
                        stuck[uid] = FreezeRefused(ThrottleRefusal.STUCK, "it sticks in FREEZING")
                elif now - pod.nudged_at >= NUDGE_EVERY_SECONDS:
                    pod.nudged_at = now
                    self._freezer.nudge(pod.cgroup)
            except FileNotFoundError:
                self._forget(uid)
            except OSError as error:
                if self.thaw(uid):
                    stuck[uid] = FreezeRefused(ThrottleRefusal.NOT_WRITABLE, str(error))
        return stuck

    def let_go(self) -> frozenset[str]:
        """Forget the pods that somebody else thawed, and return their uids."""
        gone = set()
        for uid in tuple(self._pods):
            with contextlib.suppress(OSError):  # the next thaw reports it
                if self._freezer.state(self._pods[uid].cgroup) is FreezeState.THAWED:
                    gone.add(uid)
                    self._forget(uid)
        return frozenset(gone)

    def thaw(self, uid: str) -> bool:
        """Thaw a pod; return False if its cgroup refused: it is still frozen, so try again."""
        pod = self._pods.get(uid)
        if pod is None:
            return True
        try:
            self._freezer.thaw(pod.cgroup)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._runs(pod.cgroup):
                if not pod.is_refused:
                    logger.error("cannot thaw pod %s, retrying: %s", uid, error)
                pod.is_refused = True
                return False
        self._forget(uid)
        return True

    def thaw_all(self) -> bool:
        """Thaw every pod; return False if a cgroup refused."""
        for uid in list(self._pods):
            self.thaw(uid)
        return not self._pods

    def _runs(self, cgroup: Path) -> bool:
        try:
            return self._freezer.state(cgroup) is FreezeState.THAWED
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    def _forget(self, uid: str) -> None:
        self._pods.pop(uid, None)
        (self._record / uid).unlink(missing_ok=True)
