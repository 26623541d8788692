"""The windows of pods on probation, as the ledger counts them: if the wall clock is set, they move with it."""

from collections.abc import Callable

from gpushare.core.api import GpuShare, PodView
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    WindowStarts,
    closed_places,
    term_of,
    unprofiled_of,
)
from gpushare.runtime.moments import ClockSteps, unix_seconds


class Probations:
    """The windows of the bound pods on probation, and the GPUs that are closed for them.

    Args:
        share_of: returns a pod's GpuShare.
    """

    def __init__(self, state: ClusterState, share_of: Callable[[PodView], GpuShare | None]) -> None:
        self._state, self._share_of = state, share_of
        self._steps, self._set_seconds = ClockSteps(), 0.0
        self._starts = WindowStarts(unix_seconds, lambda: self._set_seconds)
        self._pods: dict[str, PodView] = {}
        self._closed: frozenset[str] = frozenset()

    def look(self, before: PodView | None, pod: PodView, wall: float) -> None:
        """Note when a pod was decided and started, by Unix time."""
        self._starts.look(before, pod, wall)

    def count(self, pod: PodView) -> None:
        """Close the GPU of a bound pod that holds its reservation, if it is on probation."""
        if pod.decision is None or pod.decision.probation_seconds is None:
            return
        self._pods[pod.uid] = pod
        unprofiled = unprofiled_of(pod, self._share_of(pod))
        self._state.set_probation(pod.uid, term_of(pod, unprofiled, self._starts.of(pod)))

    def forget(self, pod_uid: str) -> None:
        """Forget a pod that is gone."""
        self._starts.forget(pod_uid)
        self._pods.pop(pod_uid, None)

    def follow_clock(self, wall: float, monotonic: float) -> None:
        """Move all windows if the wall clock was set; call this before `look` and before decisions."""
        if (set_seconds := self._steps.seconds(wall, monotonic)) != self._set_seconds:
            self._set_seconds = set_seconds
            for pod in self._pods.values():
                if self._state.reservation(pod.uid) is not None:
                    self.count(pod)

    def have_ended(self, context: DecisionContext) -> bool:
        """Return whether a GPU is open now that was closed at the last call, by its window's end or a profile."""
        before = self._closed
        closed = closed_places(context.state, context.judge, context.now)
        self._closed = frozenset(each.closed.gpu_uuid for each in closed)
        return bool(before - self._closed)
