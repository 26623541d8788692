"""kube-scheduler's choice of node for pods without a GPU, which the extender is never asked about.

Its scoring by resources (pkg/scheduler/framework/plugins/noderesources of Kubernetes 1.35), for pods that differ
only in CPU and memory: LeastAllocated, and with `balanced` also BalancedAllocation, as in the default profile,
each 0 to 100 with weight 1; ties are broken at random. Every node is scored; on thousands of nodes kube-scheduler
samples a part, which adds noise but no bias.
"""

import numpy as np

from gpushare.core.api import Rejection
from gpushare.core.placement import UNLIMITED, ClusterState, FloatArray, Placement, Shape, summarize


class KubeSchedulerRule:
    """The rule over one cluster's nodes, which stay the same.

    Args:
        rng: draws among equally good nodes.
        balanced: whether BalancedAllocation counts too.
    """

    def __init__(self, state: ClusterState, rng: np.random.Generator, *, balanced: bool) -> None:
        self._state, self._rng, self._balanced = state, rng, balanced
        self._capacity = np.ones((2, len(state.alive)))
        for name in state.node_names:
            row, spec = state.row(name), state.spec(name)
            assert spec is not None, "known nodes have a spec"
            self._capacity[:, row] = (spec.cpu_milli or UNLIMITED, spec.memory_mib or UNLIMITED)

    def place(self, shape: Shape) -> Placement | Rejection:
        """Return the node of a pod without GPUs, or why there is none."""
        state = self._state
        free = np.stack([state.cpu_free_milli, state.node_memory_free_mib]).astype(np.float64)
        left = free - np.array([[shape.cpu_milli], [shape.node_memory_mib]])
        fits = state.alive & (left >= 0).all(axis=0)
        if not fits.any():
            return summarize(state, shape)
        scores = np.where(fits, self._scores(left), -1.0)
        best = np.flatnonzero(scores == scores.max())
        return Placement(state.node_name(int(self._rng.choice(best))), ())

    def _scores(self, left: FloatArray) -> FloatArray:
        free_ratio = np.clip(left / self._capacity, 0.0, 1.0)
        least_allocated: FloatArray = np.floor(np.floor(100.0 * free_ratio).mean(axis=0))
        if not self._balanced:
            return least_allocated
        balanced = np.floor(100.0 * (1.0 - np.abs(free_ratio[0] - free_ratio[1]) / 2.0))
        scores: FloatArray = least_allocated + balanced
        return scores
