"""Our policy: FGD's gradient on a measure of fragments that looks ahead and considers that CPU and memory run out.

FGD calls a free part of a GPU useful if some typical pod fits it. That ignores what is left after that pod, and
nodes whose CPU will be used up before their GPUs. Here a node is worth what its free GPUs are expected to hold in
the end:

- a GPU's gap is worth its expected fill if it sees `HORIZON` arrivals of the mix and takes those that raise it
  (a dynamic programme over gap sizes, for each level of the node's free CPU and each model);
- the node's sum is scaled by the part of its free GPU that its free CPU and memory still suffice for when pods
  arrive as in the mix, those that need least first; so GPUs that will lack CPU count as fragments in advance;
- a pod goes where worth shrinks least beyond what it uses itself. Differences below `GRAIN_MILLI` are ties, and
  ties go to the fullest node, so that nodes fill one after the other and the rest stays whole.

docs/placement.md has the measurements behind each of these, one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Final
from weakref import ref

import numpy as np

from gpushare.core.placement.fragmentation import FragmentTables, Mix, open_share
from gpushare.core.placement.policies.base import ScoresGpus
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Shape
from gpushare.core.placement.state import ClusterState, FloatArray, IntArray

HORIZON: Final = 64
"""Arrivals that a gap is expected to see; the policy does not wait for kinds rarer than one in this many. Between
32 and 128 the mean over kinds of traces moves by 0.15 points (docs/placement.md)."""
GRAIN_MILLI: Final = 30
"""Smaller differences of worth are noise of the estimate; 10 to 80 differ by 0.1 points (docs/placement.md)."""
_TIE_NODE: Final = 0.12
_TIE_GPU: Final = 0.04
"""Penalty, in grains, of a wholly free node and GPU, so that among equals the fuller node and its fuller GPU win.
Small compared with `gpushare.core.placement.caution.TIE_WEIGHT`, which decides between equals first."""
RELEARN_GROWTH: Final = 1.25
"""The mix is learnt anew at once when the number of pods has grown or shrunk by this factor."""
RELEARN_SECONDS: Final = 30.0
"""The mix is learnt anew when it has changed at all and was learnt this long ago, where it is learnt aside."""
_PRIOR: Final[Mapping[Shape, float]] = {
    PlacementRequest("", share).shape: 1.0 for share in range(100, GPU_MILLI + 1, 100)
}
"""Mix that is assumed while nothing runs: every tenth of a GPU equally often. It has the weight of ten pods."""


class GpuShareFit(ScoresGpus):
    """The node and GPU where the expected final fill of the node's free GPUs shrinks least."""

    name = "gpushare"
    grain_milli = GRAIN_MILLI

    def __init__(self, history: Mapping[Shape, float] | None = None, *, learns_aside: bool = False) -> None:
        """Set where the mix comes from.

        Args:
            history: frequency of each request; without it the mix is learnt from the present pods.
            learns_aside: whether the caller asks for `lesson` now and then, so that no decision waits for
                learning.
        """
        self._history = history
        self._learns_aside = learns_aside
        self._worth: _Worth | None = None
        self._learnt_from: ref[ClusterState] | None = None
        self._learnt: MixLesson | None = None
        self._generation = 0

    def lesson(self, state: ClusterState, now: float) -> "MixLesson | None":
        """Return what to learn, if the pods in place have changed enough since the last time.

        Args:
            now: seconds of a clock of the caller's.
        """
        if self._is_outdated(state):
            return self._lesson(state, now)
        learnt = self._learnt
        if learnt is None or now - learnt.drawn_at < RELEARN_SECONDS:
            return None
        found = self._lesson(state, now)
        return found if found.history != learnt.history else None

    def adopt(self, state: ClusterState, lesson: "MixLesson", learnt: "_Worth") -> None:
        """Use the result of `lesson.learn` from the next decision on."""
        self._worth = learnt
        self._learnt_from = ref(state)
        self._learnt = lesson
        self._generation += 1

    def token(self, state: ClusterState) -> object:
        """Return a value that changes when the mix has been learnt anew."""
        self._current(state)
        return self._generation

    def worth_kept(self, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Return the worth that is kept, in grains, by GPU for a part of one; (width, rows)."""
        return self._scores(state, shape, rows)

    def _scores(self, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Return the worth that is kept, in grains: (width, rows) by GPU for a part of one, else (rows,)."""
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
        """Return tables for the present mix."""
        worth = self._worth
        if worth is not None and self._is_about(state) and (self._learns_aside or not self._is_outdated(state)):
            return worth
        lesson = self._lesson(state)
        learnt = lesson.learn()
        self.adopt(state, lesson, learnt)
        return learnt

    def _lesson(self, state: ClusterState, now: float = 0.0) -> "MixLesson":
        history = {**_PRIOR, **state.reserved_shapes} if self._history is None else self._history
        return MixLesson(history, tuple(state.model_names), _seen(state), now)

    def _is_about(self, state: ClusterState) -> bool:
        """Return whether the tables were learnt from this state, with its present GPU models."""
        return (
            self._worth is not None
            and self._learnt_from is not None
            and self._learnt_from() is state
            and self._worth.tables.models == len(state.model_names)
        )

    def _is_outdated(self, state: ClusterState) -> bool:
        if self._learnt is None or not self._is_about(state):
            return True
        growth = _seen(state) / self._learnt.seen
        return self._history is None and not 1 / RELEARN_GROWTH < growth < RELEARN_GROWTH


def _seen(state: ClusterState) -> int:
    """Return the number of requests that the mix would be learnt from now."""
    return len(state.reservations) + len(_PRIOR)


class _Worth:
    """A history of requests, prepared to value nodes."""

    def __init__(self, history: Mapping[Shape, float], model_names: list[str]) -> None:
        self.tables = LookaheadTables(Mix.of(history), model_names)
        self._cpu = _supply({shape: shape.cpu_milli for shape in history}, history)
        self._memory = _supply({shape: shape.node_memory_mib for shape in history}, history)

    def fed(self, cpu: IntArray, memory_mib: IntArray, free_milli: IntArray) -> FloatArray:
        """Return the part of each node's free GPU that its free CPU and memory suffice for, 0 to 1."""
        gpu = np.maximum(free_milli, 1)
        return np.minimum(np.interp(cpu / gpu, *self._cpu), np.interp(memory_mib / gpu, *self._memory))


@dataclass(frozen=True, slots=True)
class MixLesson:
    """A mix to learn, complete, so that it can be learnt in another thread than the state's.

    Attributes:
        history: frequency of each request.
        model_names: by model id.
        seen: number of requests that the history was drawn from.
        drawn_at: when it was drawn, in seconds of the caller's clock; 0 if no clock counts.
    """

    history: Mapping[Shape, float]
    model_names: tuple[str, ...]
    seen: int
    drawn_at: float = 0.0

    def learn(self) -> _Worth:
        """Learn; takes 50 to 300 ms, most of it in NumPy."""
        return _Worth(self.history, list(self.model_names))


class LookaheadTables(FragmentTables):
    """FGD's tables with each gap valued by its expected fill after HORIZON arrivals instead of one."""

    def __init__(self, mix: Mix, model_names: list[str]) -> None:
        super().__init__(mix, model_names)
        shares = sorted(self.single_weights)
        if not shares:
            return
        step = gcd(GPU_MILLI, *shares)
        weights = np.array([self.single_weights[share] for share in shares]).reshape(len(shares), -1)
        distinct, inverse = np.unique(weights, axis=1, return_inverse=True)
        worth = np.zeros((distinct.shape[1], GPU_MILLI // step + 1))
        for _ in range(HORIZON):
            gain = np.zeros_like(worth)
            for share, weight in zip(shares, distinct, strict=True):
                at = share // step
                better = share + worth[:, : worth.shape[1] - at] - worth[:, at:]
                gain[:, at:] += weight[:, None] * np.maximum(better, 0.0)
            worth += gain
        by_gap = worth[:, np.arange(GPU_MILLI + 1) // step]
        self.single = by_gap[inverse.reshape(-1)].reshape(self.single.shape)


def _supply(needs: Mapping[Shape, int], history: Mapping[Shape, float]) -> tuple[FloatArray, FloatArray]:
    """Return resource per thousandth of GPU, ascending, and the part of demand it suffices for, leanest first."""
    demand = {shape: count * shape.share_milli * shape.gpu_count for shape, count in history.items()}
    lean = sorted(
        (needs[shape] / (shape.share_milli * shape.gpu_count), asked)
        for shape, asked in demand.items()
        if asked > 0
    )
    part = np.array([asked for _, asked in lean]) / max(sum(asked for _, asked in lean), 1)
    used = np.array([ratio for ratio, _ in lean]) * part
    return np.concatenate([[0.0], np.cumsum(used)]), np.concatenate([[0.0], np.cumsum(part)])
