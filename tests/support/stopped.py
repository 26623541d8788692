"""How long a pod is stopped: its freezer looked at from outside, twenty times a second."""

import threading
import time
from types import TracebackType
from typing import Self

from gpushare.mps.freezer import CgroupFreezer, FreezeState

LOOK_SECONDS = 0.05


class StoppedTime:
    """Times at which a pod was found frozen while the block ran.

    Attributes:
        is_seen: whether the pod's cgroup is on this machine.
        longest_gap: longest time between two looks, seconds.
    """

    def __init__(self, pod_uid: str) -> None:
        self._freezer = CgroupFreezer()
        self._cgroup = self._freezer.find(pod_uid)
        self.is_seen = self._cgroup is not None
        self.longest_gap = 0.0
        self._stops: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self.is_seen:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        before, was_frozen = time.monotonic(), False
        while not self._end.wait(LOOK_SECONDS):
            assert self._cgroup is not None
            is_frozen = self._freezer.state(self._cgroup) is FreezeState.FROZEN
            now = time.monotonic()
            self.longest_gap = max(self.longest_gap, now - before)
            if is_frozen and was_frozen:
                self._stops.append((before, now))
            before, was_frozen = now, is_frozen

    def most_within(self, seconds: float) -> float:
        """Return the most time in which it was frozen within any span of this length, seconds."""
        return max(
            (
                sum(end - begin for begin, end in self._stops if at <= begin < at + seconds)
                for at, _ in self._stops
            ),
            default=0.0,
        )
