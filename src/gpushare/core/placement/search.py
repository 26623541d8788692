"""The search over nodes: which fit, and how a policy ranks them.

A node fits if enough of its GPUs have the requested share, memory and clients, are healthy, of an accepted model
and within the fault domain, and if its CPU and memory suffice. A policy ranks the nodes that fit and picks the
GPUs on the chosen one; it never searches. Scores are cached per policy and shape of request, and only rows that
changed are ranked again, so that a decision costs about the same on 100 nodes and on 10,000.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, Self, runtime_checkable
from weakref import ref

import numpy as np

from gpushare.core.api import Reason, Rejection
from gpushare.core.placement.fitting import fitting_gpus, grouped_refusals
from gpushare.core.placement.node_cache import kept_by_row
from gpushare.core.placement.shapes import Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray

__all__ = [
    "UNKNOWN_NODE",
    "Candidates",
    "LearningPolicy",
    "Lesson",
    "NarrowedPolicy",
    "NodeList",
    "PlacementPolicy",
    "WorthPolicy",
    "fit",
    "scores",
]


class PlacementPolicy(Protocol):
    """A policy ranks nodes and picks GPUs; it sees only GPUs on which the tenant fits."""

    @property
    def name(self) -> str:
        """Return its name on the command line and in the chart."""
        ...

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Score `rows`, all of which fit, higher is better; `gpu_fits` (width, rows) marks the GPUs that fit."""
        ...

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Pick `gpu_count` of `slots`, which all fit, on the chosen node."""
        ...

    def select(self, scores: FloatArray) -> int:
        """Return the index of the best of `scores`, where -inf does not fit; any index where none fits."""
        ...

    def token(self, state: ClusterState) -> object:
        """Return a token: cached scores are valid while it stays equal; None forbids caching (a random policy)."""
        ...

    @property
    def is_choosy(self) -> bool:
        """Return whether it may refuse a node that fits, with a score of -inf; `refusals` says why."""
        ...

    def refusals(self, state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
        """Return why it takes no GPU of `rows`, on which the tenant fits: the refusals, and each row's index."""
        ...


@runtime_checkable
class WorthPolicy(Protocol):
    """A policy that scores in thousandths of a GPU what its choice leaves free, so that it can be weighed."""

    @property
    def grain_milli(self) -> int:
        """Return the size of one point of its scores; smaller differences are ties."""
        ...

    def worth_kept(self, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Score each GPU of `rows` for a part of one, (width, rows): whole points, and less than half for ties."""
        ...


class Lesson(Protocol):
    """Input of a policy's learning step, complete, so that it can be learnt in another thread."""

    def learn(self) -> Any:
        """Learn; this is the slow part."""
        ...


@runtime_checkable
class LearningPolicy(Protocol):
    """A policy that learns from the state, in another thread if the caller asks for lessons."""

    def lesson(self, state: ClusterState, now: float) -> Lesson | None:
        """Return what to learn now; None while its knowledge is recent enough.

        Args:
            now: seconds of a clock of the caller's.
        """
        ...

    def adopt(self, state: ClusterState, lesson: Any, learnt: Any) -> None:
        """Use what was learnt from now on."""
        ...


class NarrowedPolicy:
    """A policy that ranks as another one does, except for a few rows; the other's cached scores apply to it.

    A base class and no protocol: every question asks for it, and protocols are slow to check.

    Attributes:
        wider: the other policy.
        rows: the rows that it ranks differently.
    """

    wider: PlacementPolicy
    rows: IntArray


class NodeList:
    """Names of nodes to choose among; their rows are cached while no node comes or goes."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._found: tuple[ref[ClusterState], int, IntArray, Sequence[str]] | None = None

    @classmethod
    def of_rows(cls, state: ClusterState, rows: IntArray) -> Self:
        """Return the nodes of these rows."""
        made = cls(state.node_names_of(rows))
        made._found = (ref(state), state.nodes_version, rows, ())
        return made

    def rows(self, state: ClusterState) -> tuple[IntArray, Sequence[str]]:
        """Return the rows of the known nodes, in the order given, and the names of the unknown ones."""
        found = self._found
        if found is None or found[0]() is not state or found[1] != state.nodes_version:
            rows = state.rows(self.names)
            unknown: list[str] = []
            if None in rows:
                unknown = [name for name, row in zip(self.names, rows, strict=True) if row is None]
                rows = [row for row in rows if row is not None]
            self._found = found = (ref(state), state.nodes_version, np.array(rows, np.int64), unknown)
        return found[2], found[3]


class Candidates:
    """Nodes on which a request fits, best first on demand, and why it does not fit on the others."""

    def __init__(
        self,
        state: ClusterState,
        policy: PlacementPolicy,
        shape: Shape,
        rows: IntArray,
        scores: FloatArray,
        *,
        unknown: Sequence[str] = (),
        excluded: Mapping[str, Rejection] | None = None,
    ) -> None:
        fitting = scores > -np.inf
        all_fit = np.count_nonzero(fitting) == len(fitting)
        self._state, self._policy, self._shape = state, policy, shape
        self._asked, self._fitting = rows, fitting
        self.unknown = unknown
        """Requested names that are not GPU nodes."""
        self.excluded = excluded or {}
        """Nodes that kube-scheduler refuses before it asks about the others."""
        self.rows: IntArray = rows if all_fit else rows[fitting]
        self.scores: FloatArray = scores if all_fit else scores[fitting]
        """One score for each of `nodes`, higher is better."""

    @property
    def nodes(self) -> list[str]:
        """Return the names of the nodes that fit, in the requested order."""
        return self._state.node_names_of(self.rows)

    def are_among(self, rows: IntArray) -> BoolArray:
        """Return which of the nodes that fit are among these rows."""
        marked = np.zeros(len(self._state.alive), bool)
        marked[rows] = True
        among: BoolArray = marked.take(self.rows)
        return among

    def best(self, count: int, avoid: IntArray | None = None, *, equal_only: bool = False) -> IntArray:
        """Return the `count` best rows that fit, ties in the requested order; none of `avoid` while others fit.

        Args:
            equal_only: return only rows with the best score.
        """
        rows, scores = self.rows, self.scores
        if avoid is not None and len(avoid):
            free = ~self.are_among(avoid)
            if free.any():
                rows, scores = rows[free], scores[free]
        if equal_only and len(rows):
            equally_good: IntArray = rows[scores == scores.max()][:count]
            return equally_good
        if len(rows) <= count:
            return rows
        last = np.partition(scores, -count)[-count]
        better, equal = np.flatnonzero(scores > last), np.flatnonzero(scores == last)
        return rows[np.concatenate((better, equal[: count - len(better)]))]

    def rejections(self) -> dict[str, Rejection]:
        """Return why each other node does not fit."""
        rows, different, groups = self.grouped_rejections()
        names = self._state.node_names_of(rows)
        found = {name: different[group] for name, group in zip(names, groups.tolist(), strict=True)}
        found.update((name, UNKNOWN_NODE) for name in self.unknown)
        found.update(self.excluded)
        return found

    def grouped_rejections(self) -> tuple[IntArray, list[Rejection], IntArray]:
        """Return the rows that do not fit, the distinct refusals, and each row's index into these.

        Unknown and excluded nodes are not among them.
        """
        state, shape, rows = self._state, self._shape, self._asked[~self._fitting]
        different, groups = grouped_refusals(state, shape, rows)
        if self._policy.is_choosy and len(rows):
            has_room = fit(state, shape, rows)[0]
            more, of_those = self._policy.refusals(state, shape, rows[has_room])
            groups = groups.copy()
            groups[has_room] = len(different) + of_those
            different = [*different, *more]
            used, groups = np.unique(groups, return_inverse=True)
            different = [different[group] for group in used.tolist()]
        return rows, different, groups


UNKNOWN_NODE: Final = Rejection(Reason.NO_GPUS, "the node has no GPUs that gpushare manages")


def fit(state: ClusterState, shape: Shape, rows: IntArray) -> tuple[BoolArray, BoolArray]:
    """Return which rows fit, and which of their GPUs do (width, rows)."""
    gpu_fits = fitting_gpus(state, shape, rows)
    fitting: BoolArray
    if shape.gpu_count == 1:
        fitting = np.logical_or.reduce(gpu_fits, axis=0)
    elif shape.gpu_count:
        fitting = gpu_fits.sum(axis=0) >= shape.gpu_count
    else:
        fitting = state.alive.take(rows)
    if shape.cpu_milli:
        fitting &= state.cpu_free_milli.take(rows) >= shape.cpu_milli
    if shape.node_memory_mib:
        fitting &= state.node_memory_free_mib.take(rows) >= shape.node_memory_mib
    return fitting, gpu_fits


def scores(state: ClusterState, policy: PlacementPolicy, shape: Shape) -> FloatArray:
    """Return the score of every row, -inf where it does not fit."""
    if isinstance(policy, NarrowedPolicy):
        found = scores(state, policy.wider, shape).copy()
        found[policy.rows] = _ranked(state, policy, shape, policy.rows)
        return found
    token = policy.token(state)
    if token is None:
        return _ranked(state, policy, shape, np.arange(len(state.alive)))
    return kept_by_row(state, policy.name, shape, token, lambda rows: _ranked(state, policy, shape, rows))


def _ranked(state: ClusterState, policy: PlacementPolicy, shape: Shape, rows: IntArray) -> FloatArray:
    if not len(rows):  # a cluster without a GPU node: there is nothing to rank
        return np.full(0, -np.inf)
    fitting, gpu_fits = fit(state, shape, rows)
    if fitting.all():
        return policy.rank(state, shape, rows, gpu_fits)
    ranked = np.full(len(rows), -np.inf)
    at = np.flatnonzero(fitting)
    if len(at):
        ranked[at] = policy.rank(state, shape, rows[at], gpu_fits.take(at, 1))
    return ranked
