"""Probation: a pod whose workload is unknown and could not be profiled in place gets a GPU to itself for a while.

In place, a workload is profiled while its neighbours are stopped for a moment (docs/design.md 4). That is not
possible beside pods of class latency, which are never stopped, where pods cannot be frozen at all, and on GPUs
before Hopper, whose counters take longer than a pod may be stopped (docs/adr/0225). There a pod prefers an empty
GPU, which is then closed for others until its workload is profiled or the window ends. A workload has at most one
such pod, a namespace one at a time (its users choose workload names), and the cluster `most`. Other pods go where
they fit, with their shares as caps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.api import JobClass, Reason, Rejection
from gpushare.core.placement.closed_gpus import ClosedGpu, ProbationTerm, Unprofiled
from gpushare.core.placement.fitting import fitting_gpus
from gpushare.core.placement.judge import Judge
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray

DEFAULT_SECONDS: Final = 60.0
DEFAULT_MOST: Final = 2
DEFAULT_LONGEST_SECONDS: Final = 300.0
MOST_SECONDS: Final = 3600.0
PROGRAM_START_SECONDS: Final = 30.0  # start of a container's life in which there may be nothing to profile
_TIER: Final = 1e7
"""Score difference between GPUs where a workload can be profiled in place, empty ones, and others; far above any
policy's scores."""
_DAY, _HOUR, _MINUTE = 86_400, 3600, 60


@dataclass(frozen=True, slots=True)
class ProbationSettings:
    """An installation's settings of probation.

    Attributes:
        seconds: length of the window; longer if a workload's GpuShare asks for it; 0 turns probation off.
        most: most pods on probation at a time.
        freezes: whether throughput pods may be stopped for a moment, so that others can be profiled in place.
        longest_seconds: longest window for a GpuShare that asks for more than `seconds`.
    """

    seconds: float = DEFAULT_SECONDS
    most: int = DEFAULT_MOST
    freezes: bool = True
    longest_seconds: float = DEFAULT_LONGEST_SECONDS


NO_PROBATION: Final = ProbationSettings(seconds=0.0)


@dataclass(frozen=True, slots=True)
class ClosedPlace:
    """A closed GPU and its row and slot in the state."""

    row: int
    slot: int
    closed: ClosedGpu

    def refusal(self) -> Rejection:
        """Return the refusal for other pods."""
        term = self.closed.term
        pod = term.pod or self.closed.pod_uid
        return Rejection(
            Reason.PROBATION,
            f"could go only to GPU {self.closed.gpu_uuid}, which is on probation by pod {pod} until "
            f"{clock_time(term.until)} at the latest, while its workload's profile is taken",
        )


class Probationary:
    """A policy for one newcomer that avoids GPUs closed for other pods, and may close one for the newcomer.

    Args:
        policy: the wrapped policy, for the same newcomer.
        seeks: whether the newcomer should get a GPU to itself where it cannot be profiled in place.
    """

    is_choosy = True

    def __init__(
        self,
        policy: PlacementPolicy,
        request: PlacementRequest,
        closed: Sequence[ClosedPlace],
        settings: ProbationSettings,
        now: float,
        *,
        seeks: bool,
    ) -> None:
        self.inner = policy
        self.name = f"{policy.name}, {'on' if seeks else 'beside'} probation"
        self._request, self._closed, self._settings, self._now, self._seeks = request, closed, settings, now, seeks

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Return the policy's score on the best kind of GPU of each node; -inf where no GPU is possible."""
        open_gpus = gpu_fits & self._open(state, rows)
        scores = np.full(len(rows), -np.inf)
        for tier, gpus in enumerate(self._tiers(state, rows, open_gpus)):
            left = np.flatnonzero(np.isneginf(scores) & gpus.any(axis=0))
            if len(left):
                scores[left] = self.inner.rank(state, shape, rows[left], gpus[:, left]) - tier * _TIER
        return scores

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Return the policy's choice among the node's best kind of GPU."""
        return self.inner.pick(state, shape, row, self._best_slots(state, shape, row, slots))

    def select(self, scores: FloatArray) -> int:
        """Select as the wrapped policy does."""
        return self.inner.select(scores)

    def token(self, state: ClusterState) -> object:
        """Return a value that changes with the policy's token and the closed GPUs."""
        inner = self.inner.token(state)
        if inner is None:
            return None
        return inner, tuple((each.row, each.slot) for each in self._closed), self._settings.freezes

    def takes(self, state: ClusterState, row: int, slot: int) -> bool:
        """Return whether a GPU is of the best kind that its node has."""
        fits = fitting_gpus(state, self._request.shape, np.array([row]))[:, 0]
        slots = np.flatnonzero(fits).tolist()
        return slot in self._best_slots(state, self._request.shape, row, slots)

    def refusals(self, state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
        """Return why each row is refused (a closed GPU, else the policy's reason), and each row's index."""
        fits = fitting_gpus(state, shape, rows)
        groups = np.full(len(rows), -1, np.int64)
        found: list[Rejection] = []
        for each in self._closed:
            for at in np.flatnonzero(rows == each.row).tolist():
                only = np.zeros((len(fits), 1), bool)
                only[each.slot, 0] = fits[each.slot, at]
                if groups[at] < 0 and only.any() and self.inner.rank(state, shape, rows[[at]], only)[0] > -np.inf:
                    groups[at] = len(found)
                    found.append(each.refusal())
        others = np.flatnonzero(groups < 0)
        if len(others):
            more, of_those = self.inner.refusals(state, shape, rows[others])
            groups[others] = len(found) + of_those
            found += more
        return found, groups

    def term(self, state: ClusterState, row: int, slot: int) -> ProbationTerm | None:
        """Return the newcomer's term on the chosen GPU; None if it is not on probation there."""
        unprofiled = self._request.unprofiled
        if not self._seeks or unprofiled is None or state.clients[slot, row]:
            return None
        return ProbationTerm(
            unprofiled.workloads,
            unprofiled.pod or self._request.pod_uid,
            self._now + window_seconds(self._request, self._settings),
            unprofiled.namespace,
        )

    def _open(self, state: ClusterState, rows: IntArray) -> BoolArray:
        """Return which GPUs of rows are not closed, (width, rows)."""
        is_open = np.ones((state.present.shape[0], len(rows)), bool)
        for each in self._closed:
            is_open[each.slot, rows == each.row] = False
        return is_open

    def _tiers(self, state: ClusterState, rows: IntArray, gpus: BoolArray) -> Iterator[BoolArray]:
        """Yield GPUs among `gpus`, best kind first: shared with pods that can be stopped, empty, all."""
        if self._seeks:
            is_empty = state.clients.take(rows, 1) == 0
            if self._settings.freezes:
                stops = (state.latency.take(rows, 1) == 0) & ~state.unreadable.take(rows)
                yield gpus & ~is_empty & stops
            yield gpus & is_empty
        yield gpus

    def _best_slots(self, state: ClusterState, shape: Shape, row: int, slots: Sequence[int]) -> list[int]:
        """Return those of `slots` that are open and of the best kind that the policy accepts; all of them fit."""
        rows = np.array([row])
        gpus = np.zeros((state.present.shape[0], 1), bool)
        gpus[list(slots), 0] = True
        for tier in self._tiers(state, rows, gpus & self._open(state, rows)):
            if tier.any() and self.inner.rank(state, shape, rows, tier)[0] > -np.inf:
                return [slot for slot in slots if tier[slot, 0]]
        return []


def closed_places(state: ClusterState, judge: Judge, now: float) -> tuple[ClosedPlace, ...]:
    """Return the closed GPUs: the window has not ended, the pod exists, and there is no profile yet."""
    found = []
    for closed in state.closed_gpus.at(now):
        at = state.gpu_at(closed.gpu_uuid)
        if at is not None and not judge.is_profiled(state, closed.pod_uid):
            found.append(ClosedPlace(*at, closed))
    return tuple(found)


def on_probation(
    policy: PlacementPolicy,
    judge: Judge,
    state: ClusterState,
    request: PlacementRequest,
    settings: ProbationSettings,
    *,
    now: float,
) -> Probationary | None:
    """Return the policy for a request; None if no GPU is closed and the pod should not get one to itself."""
    if request.gpu_count != 1 or request.share_milli >= GPU_MILLI or not settings.seconds:
        return None
    closed = closed_places(state, judge, now)
    is_unreadable_somewhere = not settings.freezes or state.latency_count > 0 or bool(state.unreadable.any())
    seeks = is_unreadable_somewhere and _may_have_gpu(request.unprofiled, state, closed, settings)
    if not closed and not seeks:
        return None
    return Probationary(policy, request, closed, settings, now, seeks=seeks)


def _may_have_gpu(
    unprofiled: Unprofiled | None, state: ClusterState, closed: Sequence[ClosedPlace], settings: ProbationSettings
) -> bool:
    """Return whether a workload may have a GPU to itself, by the limits on cluster, workload and namespace."""
    if unprofiled is None or len(closed) >= settings.most:
        return False
    if state.closed_gpus.has_one_of(unprofiled.workloads):
        return False
    namespaces = {each.closed.term.namespace for each in closed}
    return not unprofiled.namespace or unprofiled.namespace not in namespaces


def window_seconds(request: PlacementRequest, settings: ProbationSettings) -> int:
    """Return the length of a pod's window in whole seconds: longer for a long profile, up to the limit."""
    own = request.unprofiled.window_seconds if request.unprofiled is not None else None
    needed = 0.0 if own is None else own + PROGRAM_START_SECONDS
    return round(max(settings.seconds, min(settings.longest_seconds, needed)))


def why_unread(neighbours: Iterable[JobClass | None], *, can_read: bool) -> str:
    """Return why a pod cannot be profiled in place beside its neighbours; empty if it can, or has none.

    Args:
        neighbours: their classes; None if unknown.
        can_read: whether throughput pods can be stopped there for as long as a reading takes.
    """
    classes = list(neighbours)
    if JobClass.LATENCY in classes:
        return "beside pods of class latency, which are never stopped"
    return "where nobody can be stopped for as long as a reading takes" if classes and not can_read else ""


def clock_time(moment: float) -> str:
    """Return the time of day, in UTC, of a Unix time in seconds."""
    second = int(moment) % _DAY
    return f"{second // _HOUR:02}:{second % _HOUR // _MINUTE:02}:{second % _MINUTE:02} UTC"
