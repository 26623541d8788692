"""Probation: a pod whose workload is unknown and could not be read in place gets a GPU of its own for a while.

In place a workload is read while its neighbours are stopped for a moment (docs/design.md 4). Pods of class latency
are never stopped, and where freezing is off nobody is. There a pod prefers an empty GPU, which is then closed for
others until its workload's profile is there or the window ends. One workload has one such pod, a namespace one at
a time, since a workload's name is its tenant's to choose, and the cluster `most`. The others go where they fit,
under their shares as caps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.api import JobClass, Reason, Rejection
from gpushare.core.placement.caution import Cautious
from gpushare.core.placement.closed_gpus import ClosedGpu, ProbationTerm
from gpushare.core.placement.fitting import fitting_gpus
from gpushare.core.placement.judge import Judge
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray

DEFAULT_SECONDS: Final = 60.0
DEFAULT_MOST: Final = 2
DEFAULT_LONGEST_SECONDS: Final = 300.0
MOST_SECONDS: Final = 3600.0
PROGRAM_START_SECONDS: Final = 30.0  # of a container's life that may hold nothing to profile
_TIER: Final = 1e7
"""Between GPUs where a workload can be read, empty ones and the others; policies' scores stay far below."""
_DAY, _HOUR, _MINUTE = 86_400, 3600, 60


@dataclass(frozen=True, slots=True)
class ProbationSettings:
    """What an installation says of it.

    Attributes:
        seconds: length of the window, longer where a workload's GpuShare asks for it; 0: nobody is on probation.
        most: pods that are on probation at a time.
        freezes: whether throughput pods may be stopped for a moment, so that others can be read in place.
        longest_seconds: what a GpuShare gets at most where it asks for more than `seconds`.
    """

    seconds: float = DEFAULT_SECONDS
    most: int = DEFAULT_MOST
    freezes: bool = True
    longest_seconds: float = DEFAULT_LONGEST_SECONDS


NO_PROBATION: Final = ProbationSettings(seconds=0.0)


@dataclass(frozen=True, slots=True)
class ClosedPlace:
    """A closed GPU and where it is."""

    row: int
    slot: int
    closed: ClosedGpu

    def refusal(self) -> Rejection:
        """Why another pod does not get it."""
        term = self.closed.term
        pod = term.pod or self.closed.pod_uid
        return Rejection(
            Reason.PROBATION,
            f"could go only to GPU {self.closed.gpu_uuid}, which is on probation by pod {pod} until "
            f"{clock_time(term.until)} at the latest, while its workload's profile is taken",
        )


class Probationary:
    """A policy for one newcomer, kept off GPUs that are another's for a while; it may ask for one itself.

    Args:
        policy: for the same newcomer.
        seeks: whether it is of a workload that wants a GPU of its own where it cannot be read in place.
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
        """The policy's score on the best kind of GPU that each node has for it; -inf where there is none."""
        open_gpus = gpu_fits & self._open(state, rows)
        scores = np.full(len(rows), -np.inf)
        for tier, gpus in enumerate(self._tiers(state, rows, open_gpus)):
            left = np.flatnonzero(np.isneginf(scores) & gpus.any(axis=0))
            if len(left):
                scores[left] = self.inner.rank(state, shape, rows[left], gpus[:, left]) - tier * _TIER
        return scores

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """The policy's choice among the best kind of GPU that the node has for it."""
        return self.inner.pick(state, shape, row, self._best_slots(state, shape, row, slots))

    def select(self, scores: FloatArray) -> int:
        """As the policy."""
        return self.inner.select(scores)

    def token(self, state: ClusterState) -> object:
        """Changes with the policy's and with the GPUs that are closed."""
        inner = self.inner.token(state)
        if inner is None:
            return None
        return inner, tuple((each.row, each.slot) for each in self._closed), self._settings.freezes

    def takes(self, state: ClusterState, row: int, slot: int) -> bool:
        """Whether a GPU is of the best kind that its node has for it."""
        fits = fitting_gpus(state, self._request.shape, np.array([row]))[:, 0]
        slots = np.flatnonzero(fits).tolist()
        if slot not in self._best_slots(state, self._request.shape, row, slots):
            return False
        return not isinstance(self.inner, Cautious) or self.inner.takes(state, row, slot)

    def refusals(self, state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
        """Return the closed GPU that the policy would take, else the policy's reason; and each row's index."""
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
        """The newcomer's term on the GPU that was chosen; None where it is not on probation there."""
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
        """GPUs of rows that are not closed, (width, rows)."""
        is_open = np.ones((state.present.shape[0], len(rows)), bool)
        for each in self._closed:
            is_open[each.slot, rows == each.row] = False
        return is_open

    def _tiers(self, state: ClusterState, rows: IntArray, gpus: BoolArray) -> Iterator[BoolArray]:
        """GPUs among `gpus`, best kind first: shared with pods that can be stopped, empty, all."""
        if self._seeks:
            is_empty = state.clients.take(rows, 1) == 0
            if self._settings.freezes:
                stops = (state.latency.take(rows, 1) == 0) & ~state.unfreezable.take(rows)
                yield gpus & ~is_empty & stops
            yield gpus & is_empty
        yield gpus

    def _best_slots(self, state: ClusterState, shape: Shape, row: int, slots: Sequence[int]) -> list[int]:
        """Those of `slots` that are open and of the best kind, as far as the policy takes one; all fit."""
        rows = np.array([row])
        gpus = np.zeros((state.present.shape[0], 1), bool)
        gpus[list(slots), 0] = True
        for tier in self._tiers(state, rows, gpus & self._open(state, rows)):
            if tier.any() and self.inner.rank(state, shape, rows, tier)[0] > -np.inf:
                return [slot for slot in slots if tier[slot, 0]]
        return []


def closed_places(state: ClusterState, judge: Judge, now: float) -> tuple[ClosedPlace, ...]:
    """The GPUs that are closed: the window is not over, the pod is there, and there is no profile yet."""
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
) -> PlacementPolicy:
    """The policy to place one request by: as it is unless a GPU is closed or the pod is to get one of its own."""
    if request.gpu_count != 1 or request.share_milli >= GPU_MILLI or not settings.seconds:
        return policy
    closed = closed_places(state, judge, now)
    seeks = (
        request.unprofiled is not None
        and len(closed) < settings.most
        and (not settings.freezes or state.latency_count > 0 or bool(state.unfreezable.any()))
        and not state.closed_gpus.has_one_of(request.unprofiled.workloads)
        and not any(each.closed.term.namespace == request.unprofiled.namespace != "" for each in closed)
    )
    if not closed and not seeks:
        return policy
    return Probationary(policy, request, closed, settings, now, seeks=seeks)


def window_seconds(request: PlacementRequest, settings: ProbationSettings) -> int:
    """Return the length of a pod's window, whole seconds: longer for a long profile, up to the ceiling."""
    own = request.unprofiled.window_seconds if request.unprofiled is not None else None
    needed = 0.0 if own is None else own + PROGRAM_START_SECONDS
    return round(max(settings.seconds, min(settings.longest_seconds, needed)))


def why_unread(neighbours: Iterable[JobClass | None], *, can_freeze: bool) -> str:
    """Return why a pod cannot be read in place beside its neighbours; empty where it can, or has none.

    Args:
        neighbours: their classes; None where one is not known.
        can_freeze: whether throughput pods can be stopped for a moment there.
    """
    classes = list(neighbours)
    if JobClass.LATENCY in classes:
        return "beside pods of class latency, which are never stopped"
    return "where nobody can be stopped for a moment" if classes and not can_freeze else ""


def clock_time(moment: float) -> str:
    """Return the time of day of a moment, Unix seconds, in UTC."""
    second = int(moment) % _DAY
    return f"{second // _HOUR:02}:{second % _HOUR // _MINUTE:02}:{second % _MINUTE:02} UTC"
