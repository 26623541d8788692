"""When the windows of pods on probation begin, by the clock of who asks: with the container, wherever it runs."""

import math
from collections.abc import Callable
from typing import Final

from gpushare.core.api import PodView

START_SECONDS: Final = 240.0
"""A window starts when the pod's container runs, at most this long after the decision: pulling an image takes
minutes."""
REPORT_SECONDS: Final = 5.0
"""A start that is seen no later than this is taken from the node, so that all who tell of it tell the same time.
kubelet reports a start within a second or two."""
_ROUNDED_SECONDS: Final = 1.0  # a node's times are whole seconds, rounded down


class WindowStarts:
    """By how much the nodes' clocks are behind the caller's, noted for each pod on probation as it starts.

    Neither the start time by the node's clock alone nor the time from kubelet's acceptance of the pod to its start
    would do: a node's clock may be wrong, and kubelet may accept a pod minutes after the decision (docs/adr/0233).

    If the caller's clock is set meanwhile, windows move with it. A decision with a time in the future was made by
    a clock that was ahead, or ours was set back before this process started; it counts as made when it is first
    seen.

    Args:
        seconds: parses a time of the API, to -inf if it is invalid.
        was_set: returns by how many seconds the caller's clock was set so far.
    """

    def __init__(self, seconds: Callable[[str | None], float], was_set: Callable[[], float] = lambda: 0.0) -> None:
        self._seconds, self._was_set = seconds, was_set
        # By pod uid, what to add to times for those of the caller's clock if it had not been set.
        self._to_started: dict[str, float] = {}  # to times of its node
        self._to_decided: dict[str, float] = {}  # to the time of its decision

    def look(self, before: PodView | None, pod: PodView, now: float) -> None:
        """Note when a pod started, the first time that it is seen running.

        Args:
            before: the pod as it was seen last, if it was.
            now: by the caller's clock, seconds.
        """
        decision, started_at = pod.decision, self._seconds(pod.started_at)
        if pod.node is None:  # what is noted, if anything, is from a node that it is no longer bound to
            self.forget(pod.uid)
        if pod.node is None or decision is None or decision.probation_seconds is None:
            return
        set_by, decided_at = self._was_set(), self._seconds(decision.decided_at)
        if pod.uid not in self._to_decided:
            is_of_the_future = decided_at > now + REPORT_SECONDS
            self._to_decided[pod.uid] = (now - decided_at if is_of_the_future else 0.0) - set_by
        if pod.uid in self._to_started or started_at == -math.inf:
            return
        was_seen_waiting = before is not None and not before.started_at
        decided_at += self._to_decided[pod.uid] + set_by
        behind = (
            _seen_behind(started_at, now)
            if was_seen_waiting
            else _guessed_behind(decided_at, self._seconds(pod.accepted_at), started_at, now)
        )
        self._to_started[pod.uid] = behind - set_by

    def forget(self, pod_uid: str) -> None:
        """Forget a pod that is gone."""
        self._to_started.pop(pod_uid, None)
        self._to_decided.pop(pod_uid, None)

    def of(self, pod: PodView) -> float:
        """Return when the window of a bound pod begins, in the caller's seconds; of one that waits, at the latest.

        It begins when its first container starts, no earlier than the decision and at most `START_SECONDS` later.
        """
        set_by = self._was_set()
        decided_at = self._seconds(pod.decision.decided_at if pod.decision is not None else None)
        decided_at += self._to_decided.get(pod.uid, -set_by)
        started_at = self._seconds(pod.started_at) + self._to_started.get(pod.uid, -set_by)
        latest = decided_at + START_SECONDS
        return set_by + (latest if started_at == -math.inf else min(max(started_at, decided_at), latest))


def _seen_behind(started_at: float, now: float) -> float:
    """Return by how much a node's clock is behind if a pod was seen to start just now."""
    behind = now - started_at
    return 0.0 if 0.0 <= behind <= REPORT_SECONDS else behind


def _guessed_behind(decided_at: float, accepted_at: float, started_at: float, now: float) -> float:
    """Return by how much a node's clock is behind if a pod ran already when it was first seen.

    The node's times are believed if they lie between the decision and now; otherwise kubelet is assumed to have
    accepted the pod right after the decision.

    Args:
        accepted_at: when kubelet accepted it, by the node's clock; -inf if it does not say.
    """
    if accepted_at == -math.inf or (decided_at - _ROUNDED_SECONDS <= accepted_at and started_at <= now):
        return 0.0
    return decided_at - accepted_at
