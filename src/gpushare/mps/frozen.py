"""Who is frozen by us, on disk before it is so: whoever comes after a crash can thaw exactly these.

One file per frozen pod under `<host directory>/frozen`, named by its uid, holding its cgroup's path. It is written
before the cgroup and removed after the thaw, so a pod that somebody else froze is never taken for ours.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpushare.mps.freezer import Freezer, FreezerError, FreezeState
from gpushare.mps.status import ThrottleRefusal

logger = logging.getLogger(__name__)

NUDGE_EVERY_SECONDS: Final = 0.02
STUCK_SECONDS: Final = 0.4  # then it is let go; it was never still, so the pod's probes are none the wiser


def record_of(base: Path | str) -> Path:
    """The record's directory under the host directory."""
    return Path(base) / "frozen"


def recorded(base: Path | str) -> tuple[Path, ...]:
    """The record's files; none when nobody is frozen by us."""
    record = record_of(base)
    return tuple(sorted(record.iterdir())) if record.is_dir() else ()


def thaw_recorded(base: Path | str, freezer: Freezer) -> tuple[str, ...]:
    """Thaw every pod that the record names; uids of those that were frozen. What cannot be thawed stays in it."""
    thawed = []
    for mark in recorded(base):
        try:
            path = mark.read_text()
            if path:  # an empty one: killed before anything was frozen
                was = freezer.state(Path(path))
                freezer.thaw(Path(path))
                if was is not FreezeState.THAWED:
                    thawed.append(mark.name)
            mark.unlink(missing_ok=True)
        except FileNotFoundError:
            mark.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            logger.error("cannot thaw pod %s, trying again: %s", mark.name, error)
    return tuple(thawed)


@dataclass(frozen=True, slots=True)
class FreezeRefused:
    """Why a pod was not frozen."""

    reason: ThrottleRefusal
    detail: str


@dataclass(slots=True)
class _Held:
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
        self._held: dict[str, _Held] = {}

    @property
    def uids(self) -> frozenset[str]:
        """Whom we froze and have not thawed."""
        return frozenset(self._held)

    @property
    def still(self) -> frozenset[str]:
        """Those of them that stand still; until all do, `settle` wants to be called."""
        return frozenset(uid for uid, held in self._held.items() if held.is_still)

    def freeze(self, uid: str, now: float) -> FreezeRefused | None:
        """Freeze a pod, or say why not; nothing is left behind then."""
        if uid in self._held:
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
            self._held[uid] = _Held(cgroup, now, now)
            self._freezer.freeze(cgroup)
            self._held[uid].is_still = self._freezer.state(cgroup) is FreezeState.FROZEN
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

    def settle(self, now: float) -> dict[str, FreezeRefused]:
        """Look after those that are still freezing; who sticks for too long is let go, with the reason."""
        stuck = {}
        for uid, held in list(self._held.items()):
            if held.is_still:
                continue
            try:
                held.is_still = self._freezer.state(held.cgroup) is FreezeState.FROZEN
                if held.is_still:
                    continue
                if now - held.since >= STUCK_SECONDS:
                    if self.thaw(uid):
                        stuck[uid] = FreezeRefused(ThrottleRefusal.STUCK, "it sticks in FREEZING")
                elif now - held.nudged_at >= NUDGE_EVERY_SECONDS:
                    held.nudged_at = now
                    self._freezer.nudge(held.cgroup)
            except FileNotFoundError:
                self._forget(uid)
            except OSError as error:
                if self.thaw(uid):
                    stuck[uid] = FreezeRefused(ThrottleRefusal.NOT_WRITABLE, str(error))
        return stuck

    def thaw(self, uid: str) -> bool:
        """Let a pod run; False when its cgroup did not take it: it is still held, so try again."""
        held = self._held.get(uid)
        if held is None:
            return True
        try:
            self._freezer.thaw(held.cgroup)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._runs(held.cgroup):
                if not held.is_refused:
                    logger.error("cannot thaw pod %s, trying on: %s", uid, error)
                held.is_refused = True
                return False
        self._forget(uid)
        return True

    def thaw_all(self) -> bool:
        """Let everyone run; False when somebody's cgroup did not take it."""
        for uid in list(self._held):
            self.thaw(uid)
        return not self._held

    def _runs(self, cgroup: Path) -> bool:
        try:
            return self._freezer.state(cgroup) is FreezeState.THAWED
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    def _forget(self, uid: str) -> None:
        self._held.pop(uid, None)
        (self._record / uid).unlink(missing_ok=True)
