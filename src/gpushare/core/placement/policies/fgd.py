"""Fragmentation gradient descent: Weng et al., "Beware of Fragmentation", USENIX ATC'23, algorithm 2."""

from typing import Final

import numpy as np

from gpushare.core.placement.fragmentation import FragmentTables, Mix, open_share
from gpushare.core.placement.policies.base import ScoresGpus
from gpushare.core.placement.state import GPU_MILLI, ClusterState, FloatArray, IntArray, Shape

_POINTS: Final = 100.0  # kube-scheduler's scale; the published scores are whole points


class Fgd(ScoresGpus):
    """The node and GPU where the expected fragmentation grows least under a known mix of arrivals."""

    name = "fgd"

    def __init__(self, mix: Mix) -> None:
        self._mix = mix
        self._tables: FragmentTables | None = None

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
