"""Fragmentation gradient descent: Weng et al., "Beware of Fragmentation", USENIX ATC'23, algorithm 2."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpushare.core.placement.fragmentation import FragmentTables, Mix, open_share
from gpushare.core.placement.policies.base import Deterministic
from gpushare.core.placement.state import GPU_MILLI, BoolArray, ClusterState, FloatArray, IntArray, Shape

_POINTS: Final = 100.0  # kube-scheduler's scale; the published scores are whole points


class Fgd(Deterministic):
    """The node and GPU where the expected fragmentation grows least under a known mix of arrivals."""

    name = "fgd"

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._tables: FragmentTables | None = None

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Return the best GPU's score on each node."""
        scores = self._scores(state, shape, rows)
        if scores.ndim == 1:
            return scores
        best: FloatArray = np.where(gpu_fits, scores, -1.0).max(axis=0)
        return best

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Return the GPU with the best score, the first among equals; whole GPUs are all equal."""
        scores = self._scores(state, shape, np.array([row]))
        if scores.ndim == 1:
            return super().pick(state, shape, row, slots)
        return (max(slots, key=scores[:, 0].__getitem__),)

    def _scores(self, state: ClusterState, shape: Shape, rows: IntArray) -> FloatArray:
        """Return points of each node for whole GPUs and none, or of each GPU (width, rows) for a part of one."""
        tables = self._tables
        if tables is None or tables.models != len(state.model_names):
            tables = self._tables = FragmentTables(self._mix, state.model_names)
        cpu, free, models = state.cpu_free_milli.take(rows), open_share(state, rows), state.model_ids.take(rows, 1)
        asked = shape.share_milli * shape.gpu_count
        shrink = asked + tables.usable_after(cpu, free, models, shape) - tables.usable(cpu, free, models)
        points: FloatArray = np.floor(_POINTS / (1.0 + np.exp(-shrink / GPU_MILLI)))
        return points
