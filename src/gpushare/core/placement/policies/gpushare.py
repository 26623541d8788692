"""Our policy: FGD's gradient on a measure of fragments that looks ahead, and that sees CPU and memory run out.

FGD calls a free part of a GPU useful if some typical pod fits it; that says nothing of what is left once it came,
and nothing of a node whose CPU will be gone before its GPUs are. Here a node is worth what its free GPUs are
expected to end up holding:

- a GPU's gap is worth its expected fill if it sees `HORIZON` arrivals of the mix and takes those that raise it
  (a dynamic programme over gap sizes, for each level of the node's free CPU and each model);
- the node's sum is scaled by the part of its free GPU that its free CPU, and its free memory, can still feed when
  pods come as in the mix, leanest first; CPU-stranded GPUs are fragments before they are stranded;
- a pod goes where worth shrinks least beyond what it uses itself. Differences below `GRAIN_MILLI` are ties, and
  ties go to the fullest node, so that nodes fill one after the other and the rest stays whole.

docs/placement.md has the measurements behind each of these, one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final
from weakref import ref

import numpy as np

from gpushare.core.placement.fragmentation import FragmentTables, Mix, open_share
from gpushare.core.placement.policies.base import Deterministic
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Shape
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray

HORIZON: Final = 64
"""Arrivals that a gap is expected to see: kinds rarer than one in so many are not waited for. Between 32 and 128
the mean over kinds of traces moves by 0.15 points (docs/placement.md)."""
GRAIN_MILLI: Final = 30
"""Smaller differences of worth are noise of the estimate; 10 to 80 differ by 0.1 points (docs/placement.md)."""
_TIE_NODE: Final = 0.12
_TIE_GPU: Final = 0.04
"""Of a grain, for a node and a GPU that are wholly free: equals go to the fuller node and its fuller GPU. Small
beside `gpushare.core.placement.caution.TIE_WEIGHT`, which may decide between equals before."""
RELEARN_GROWTH: Final = 1.25
"""The mix is learnt anew when the pods in place became this many times more, or fewer."""
_PRIOR: Final[Mapping[Shape, float]] = {
    PlacementRequest("", share).shape: 1.0 for share in range(100, GPU_MILLI + 1, 100)
}
"""What to expect of a cluster where nothing runs yet: every tenth of a GPU alike. Worth ten pods."""


class GpuShareFit(Deterministic):
    """Where the expected final fill of the node's free GPUs shrinks least."""

    name = "gpushare"
    grain_milli = GRAIN_MILLI

    def __init__(self, history: Mapping[Shape, float] | None = None, *, learns_aside: bool = False) -> None:
        """How it comes to know the mix.

        Args:
            history: requests seen, by how often; without it the pods in place are taken for the mix.
            learns_aside: whether somebody asks for `lesson` now and then, so that no decision waits for learning.
        """
        self._history = history
        self._learns_aside = learns_aside
        self._worth: _Worth | None = None
        self._learnt_from: ref[ClusterState] | None = None
        self._learnt_at = 0
        self._generation = 0

    def lesson(self, state: ClusterState) -> "MixLesson | None":
        """What is to be learnt, if the pods in place have changed enough since the last time."""
        return self._lesson(state) if self._is_outdated(state) else None

    def adopt(self, state: ClusterState, lesson: "MixLesson", learnt: "_Worth") -> None:
        """Use what `lesson.learn` gave, from the next decision on."""
        self._worth = learnt
        self._learnt_from = ref(state)
        self._learnt_at = lesson.seen
        self._generation += 1

    def token(self, state: ClusterState) -> object:
        """Changes when the mix has been learnt anew."""
        self._current(state)
        return self._generation

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """The best GPU's score on each node."""
        scores = self._scores(state, shape, rows)
        if scores.ndim == 1:
            return scores
        best: FloatArray = np.where(gpu_fits, scores, -np.inf).max(axis=0)
        return best

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """The GPU with the best score, the first among equals; whole GPUs are all alike."""
        scores = self._scores(state, shape, np.array([row]))
        if scores.ndim == 1:
            return super().pick(state, shape, row, slots)
        return (max(slots, key=scores[:, 0].__getitem__),)

    def worth_kept(self, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Worth kept, in grains, by GPU for a part of one; (width, rows)."""
        return self._scores(state, shape, rows)

    def _scores(self, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Worth kept, in grains: (width, rows) by GPU for a part of one, else (rows,)."""
        worth = self._current(state)
        cpu, memory = state.cpu_free_milli.take(rows), state.node_memory_free_mib.take(rows)
        free, models = open_share(state, rows), state.model_ids.take(rows, 1)
        total = free.sum(axis=0)
        asked = shape.share_milli * shape.gpu_count
        before = worth.tables.usable(cpu, free, models) * worth.fed(cpu, memory, total)
        after = worth.tables.usable_after(cpu, free, models, shape)
        after *= worth.fed(cpu - shape.cpu_milli, memory - shape.node_memory_mib, total - asked)
        points: FloatArray = np.rint((asked + after - before) / GRAIN_MILLI)
        points -= _TIE_NODE * total / (GPU_MILLI * len(free))
        if points.ndim == 2:
            points -= _TIE_GPU * free / GPU_MILLI
        return points

    def _current(self, state: ClusterState) -> "_Worth":
        """Tables for the mix as known now."""
        worth = self._worth
        if worth is not None and self._is_about(state) and (self._learns_aside or not self._is_outdated(state)):
            return worth
        lesson = self._lesson(state)
        learnt = lesson.learn()
        self.adopt(state, lesson, learnt)
        return learnt

    def _lesson(self, state: ClusterState) -> "MixLesson":
        history = {**_PRIOR, **state.reserved_shapes} if self._history is None else self._history
        return MixLesson(history, tuple(state.model_names), _seen(state))

    def _is_about(self, state: ClusterState) -> bool:
        """Whether what is known was learnt from this state, with the GPU models that it has now."""
        return (
            self._worth is not None
            and self._learnt_from is not None
            and self._learnt_from() is state
            and self._worth.tables.models == len(state.model_names)
        )

    def _is_outdated(self, state: ClusterState) -> bool:
        if not self._is_about(state):
            return True
        growth = _seen(state) / self._learnt_at
        return self._history is None and not 1 / RELEARN_GROWTH < growth < RELEARN_GROWTH


def _seen(state: ClusterState) -> int:
    """Requests that the mix would be drawn from now."""
    return len(state.reservations) + len(_PRIOR)


class _Worth:
    """A history of requests made ready to value nodes."""

    def __init__(self, history: Mapping[Shape, float], model_names: list[str]) -> None:
        self.tables = LookaheadTables(Mix.of(history), model_names)
        self._cpu = _supply({shape: shape.cpu_milli for shape in history}, history)
        self._memory = _supply({shape: shape.node_memory_mib for shape in history}, history)

    def fed(self, cpu: IntArray, memory_mib: IntArray, free_milli: IntArray) -> FloatArray:
        """Part of each node's free GPU that its free CPU and memory can feed, 0 to 1."""
        gpu = np.maximum(free_milli, 1)
        return np.minimum(np.interp(cpu / gpu, *self._cpu), np.interp(memory_mib / gpu, *self._memory))


@dataclass(frozen=True, slots=True)
class MixLesson:
    """A mix to be learnt: everything that it takes is in here, so that it can be done beside the state's owner.

    Attributes:
        history: requests by how often; model_names: by model id; seen: how many requests it was drawn from.
    """

    history: Mapping[Shape, float]
    model_names: tuple[str, ...]
    seen: int

    def learn(self) -> _Worth:
        """Takes some 50 to 300 ms, most of it in NumPy."""
        return _Worth(self.history, list(self.model_names))


class LookaheadTables(FragmentTables):
    """FGD's tables with each gap valued by its expected fill after HORIZON arrivals instead of one."""

    def __init__(self, mix: Mix, model_names: list[str], horizon: int = HORIZON) -> None:
        super().__init__(mix, model_names)
        shares = sorted(self.single_weights)
        if not shares:
            return
        step = gcd(GPU_MILLI, *shares)
        weights = np.array([self.single_weights[share] for share in shares]).reshape(len(shares), -1)
        distinct, inverse = np.unique(weights, axis=1, return_inverse=True)
        worth = np.zeros((distinct.shape[1], GPU_MILLI // step + 1))
        for _ in range(horizon):
            gain = np.zeros_like(worth)
            for share, weight in zip(shares, distinct, strict=True):
                at = share // step
                better = share + worth[:, : worth.shape[1] - at] - worth[:, at:]
                gain[:, at:] += weight[:, None] * np.maximum(better, 0.0)
            worth += gain
        by_gap = worth[:, np.arange(GPU_MILLI + 1) // step]
        self.single = by_gap[inverse.reshape(-1)].reshape(self.single.shape)


def _supply(needs: Mapping[Shape, int], history: Mapping[Shape, float]) -> tuple[FloatArray, FloatArray]:
    """Resource a thousandth of GPU (rising) against the part of GPU demand fed with it, leanest pods first."""
    demand = {shape: count * shape.share_milli * shape.gpu_count for shape, count in history.items()}
    lean = sorted(
        (needs[shape] / (shape.share_milli * shape.gpu_count), asked)
        for shape, asked in demand.items()
        if asked > 0
    )
    part = np.array([asked for _, asked in lean]) / max(sum(asked for _, asked in lean), 1)
    used = np.array([ratio for ratio, _ in lean]) * part
    return np.concatenate([[0.0], np.cumsum(used)]), np.concatenate([[0.0], np.cumsum(part)])
