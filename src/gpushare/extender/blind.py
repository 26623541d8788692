"""Restart kube-scheduler while its own watches are down: it does not see pods that this process sees.

After repeated outages of the API server client-go's reflectors wait up to a minute before they watch again, and
kube-scheduler has no option for it (docs/measurements/hostile.md). The extender's watches are back within
seconds. If kube-scheduler has neither tried a waiting pod nor asked about it, and meanwhile asked about no pod at
all and served no other such pod, it does not see the pod. kube-scheduler runs in the same pod as this process,
with a shared process namespace, so it can be ended from here.
"""

import logging
import math
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpushare.core.api import PodView, claims_volumes, may_wait_untried, names, not_scheduled
from gpushare.kube import PODS, Api, ApiError, NotFound

_log = logging.getLogger(__name__)
DEFAULT_SECONDS: Final = 25.0
"""Longer than a change of the leader, with kube-scheduler's lease of 15 s, and its start take."""
PAUSE_SECONDS: Final = 40.0  # at least, between two restarts
MOST_RESTARTS: Final = 3  # within `WINDOW_SECONDS`: kubelet's back-off grows with each, up to five minutes
WINDOW_SECONDS: Final = 600.0
BUSY_SECONDS: Final = 2.0  # since the last question: the waiting pods, perhaps thousands, are not looked through
CONFIG: Final = "--config=/etc/gpushare/scheduler.yaml"  # an argument that the chart gives kube-scheduler alone


@dataclass(slots=True)
class UntriedPods:
    """Pods that kube-scheduler could try, and since when nothing has come from it; seconds of one clock.

    Attributes:
        after_seconds: how long nothing may come.
    """

    after_seconds: float
    _since: dict[str, float] = field(default_factory=dict)
    _heard_at: float = -math.inf
    _tried: set[str] = field(default_factory=set)

    def look(self, untried: Iterable[PodView], asked_at: float, now: float) -> list[PodView]:
        """Return the pods that have waited unseen for too long.

        Args:
            untried: the unbound pods that nothing holds back and that kube-scheduler has not tried.
            asked_at: when kube-scheduler last asked about any pod.
        """
        pods = {pod.uid: pod for pod in untried}
        self._tried &= pods.keys()
        for uid in self._tried:
            del pods[uid]
        if asked_at > self._heard_at or self._since.keys() - pods.keys():  # it is at work, or another scheduler is
            self._heard_at = max(self._heard_at, asked_at)
            self._since = {}
        self._since = {uid: self._since.get(uid, now) for uid in pods}
        return [pods[uid] for uid, since in self._since.items() if now - since >= self.after_seconds]

    def leave_out(self, pod_uid: str) -> None:
        """Leave a pod out from now on: it waits for something else, or has had its one restart."""
        self._since.pop(pod_uid, None)
        self._tried.add(pod_uid)

    def reset(self) -> None:
        """Begin anew to count for how long each pod waits unseen."""
        self._since = {}


def processes_of_scheduler(proc: Path = Path("/proc")) -> Iterator[int]:
    """Yield the pids of kube-scheduler, as the chart starts it, in this process namespace."""
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if CONFIG.encode() in arguments[1:]:
                    yield int(entry.name)


class BlindScheduler:
    """Watch over kube-scheduler; `round` is called about once a second.

    Args:
        untried: returns the unbound pods that nothing holds back and that kube-scheduler has not tried.
        asked_at: returns when kube-scheduler last asked about any pod, by `clock`.
        restarts: returns how often the watch of pods has broken.
        leads: returns whether this kube-scheduler is the one that tries pods.
        after_seconds: see UntriedPods; 0: never act.
        end: asks kube-scheduler's processes to end, and returns how many there are.
    """

    def __init__(
        self,
        api: Api,
        *,
        untried: Callable[[], Iterable[PodView]],
        asked_at: Callable[[], float],
        restarts: Callable[[], int],
        leads: Callable[[], Awaitable[bool]],
        after_seconds: float,
        clock: Callable[[], float],
        end: Callable[[], int] | None = None,
    ) -> None:
        self._api, self._untried, self._asked_at, self._restarts = api, untried, asked_at, restarts
        self._leads, self._clock, self._end = leads, clock, end or _terminate
        self._pods = UntriedPods(after_seconds)
        self._quiet_until = clock() + after_seconds
        self._ended_at: deque[float] = deque(maxlen=MOST_RESTARTS)
        self._known_restarts = restarts()
        self._is_on = after_seconds > 0

    async def round(self) -> bool:
        """End kube-scheduler if it does not see a pod, and return whether it was; kubelet starts it again."""
        now = self._clock()
        if not self._is_on:
            return False
        if now - self._asked_at() < BUSY_SECONDS:
            self._pods.reset()
            return False
        if self._restarts() != self._known_restarts:  # its watches may just be coming back, as ours were
            self._known_restarts = self._restarts()
            self._pods.reset()
        unseen = self._pods.look(self._untried(), self._asked_at(), now)
        if now < self._quiet_until:
            return False
        for pod in unseen:
            try:
                if not await self._is_unseen(pod):
                    self._pods.leave_out(pod.uid)
                    continue
            except ApiError:  # the API server is away again, so nobody sees any pod
                self._pods.reset()
                return False
            for each in unseen:  # one restart for each pod is enough
                self._pods.leave_out(each.uid)
            self._pods.reset()
            self._ended_at.append(now)
            is_most = len(self._ended_at) == MOST_RESTARTS
            window_ends = self._ended_at[0] + WINDOW_SECONDS if is_most else now
            self._quiet_until = max(now + PAUSE_SECONDS, window_ends)
            is_ended = self._end() > 0
            does = "it is started anew" if is_ended else "its process is not found here"
            _log.warning("kube-scheduler has not seen pod %s and asks nothing: %s", pod.key, does)
            return is_ended
        return False

    async def _is_unseen(self, pod: PodView) -> bool:
        """Return whether the API server's pod is one that kube-scheduler should have tried and has not."""
        try:
            read = await self._api.get(PODS, pod.name, namespace=pod.namespace)
        except NotFound:
            return False
        now = PodView.from_object(read)
        is_placed = now.node is not None or bool(now.nominated_node)
        waits = is_placed or not_scheduled(read.get("status") or {}) is not None or may_wait_untried(read["spec"])
        is_ours = read["spec"].get("schedulerName") == names.SCHEDULER_NAME and now.uid == pod.uid
        if not is_ours or waits or now.leaving:
            return False
        # Before 1.35 only the leader's extender, which was asked, knows of pods whose volumes are being prepared.
        return not claims_volumes(read["spec"]) or await self._leads()


def _terminate() -> int:
    """Ask kube-scheduler to end, which gives its lease back."""
    found = 0
    for pid in processes_of_scheduler():
        with suppress(ProcessLookupError):
            try:
                os.kill(pid, signal.SIGTERM)
                found += 1
            except PermissionError as error:
                _log.warning("kube-scheduler's process %d: %s", pid, error)
    return found
