"""Common parts of most policies: how ties are broken and how GPUs of a chosen node are picked."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from gpushare.core.api import Rejection
from gpushare.core.placement.state import BoolArray, ClusterState, FloatArray, IntArray, Shape


class Deterministic:
    """Ties go to the first row and to the fullest GPU that fits, so that pods gather."""

    def select(self, scores: FloatArray) -> int:
        """Return the first of the best rows."""
        return int(scores.argmax())

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Return the fullest GPUs that fit, lower slots first among equals."""
        free = state.share_free_milli[:, row].tolist()
        if shape.gpu_count == 1:
            return (min(slots, key=free.__getitem__),)
        return sorted(slots, key=free.__getitem__)[: shape.gpu_count]

    is_choosy = False

    def refusals(self, state: ClusterState, shape: Shape, rows: IntArray) -> tuple[list[Rejection], IntArray]:
        """Return no refusals, as the policy takes any GPU that fits."""
        del state, shape
        return [], np.zeros(len(rows), np.int64)

    def token(self, state: ClusterState) -> object:
        """Return a constant, as scores depend only on the state."""
        del state
        return ()


class ScoresGpus(Deterministic, ABC):
    """A policy that scores each GPU for a part of one; a node has the score of its best GPU."""

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Return the best GPU's score on each node."""
        scores = self._scores(state, shape, rows)
        if scores.ndim == 1:
            return scores
        best: FloatArray = np.where(gpu_fits, scores, -np.inf).max(axis=0)
        return best

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Return the GPU with the best score, the first among equals; whole GPUs are all equal."""
        scores = self._scores(state, shape, np.array([row]))
        if scores.ndim == 1:
            return super().pick(state, shape, row, slots)
        return (max(slots, key=scores[:, 0].__getitem__),)

    @abstractmethod
    def _scores(self, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Return scores of each GPU (width, rows) for a part of one, else of each node (rows,)."""
