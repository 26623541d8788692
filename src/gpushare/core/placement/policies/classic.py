"""Simple policies of published systems, as in the simulator of "Beware of Fragmentation" (USENIX ATC'23).

Source: github.com/hkust-adsl/kubernetes-scheduler-simulator, pkg/simulator/plugin; scores are whole points of 100
and ties go to the first node, which matters: most decisions are ties at that resolution.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpushare.core.placement.policies.base import Deterministic
from gpushare.core.placement.shapes import tenancy_kind
from gpushare.core.placement.state import (
    GPU_MILLI,
    UNLIMITED,
    BoolArray,
    ClusterState,
    FloatArray,
    IntArray,
    Shape,
)

CPU_SCALE_MILLI: Final = 128_000
"""A large node's CPU (MaxSpecCpu), the unit of a CPU term."""
GPU_SCALE_MILLI: Final = 8_000
"""A large node's GPUs (MaxSpecGpu), the unit of a GPU term."""


class BestFit(Deterministic):
    """Best fit: the node whose free CPU and GPU after placement, scaled and summed, are smallest."""

    name = "bestfit"

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Score as best_fit_score.go does."""
        del gpu_fits
        cpu_left = known_cpu(state, rows, shape.cpu_milli)
        gpu_left = state.share_free_milli.take(rows, 1).sum(axis=0) - shape.share_milli * shape.gpu_count
        left = 0.5 * cpu_left / CPU_SCALE_MILLI + 0.5 * gpu_left / GPU_SCALE_MILLI
        return _points(1.0 - left)


class DotProduct(Deterministic):
    """Tetris (SIGCOMM'14): avoid nodes whose free resources have the proportions of the demand."""

    name = "dotprod"

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Score as dot_product_score.go does with GPU dimensions merged, normalised by the largest node."""
        del gpu_fits
        cpu = known_cpu(state, rows, 0) / CPU_SCALE_MILLI * (shape.cpu_milli / CPU_SCALE_MILLI)
        gpu_asked = shape.share_milli * shape.gpu_count / GPU_SCALE_MILLI
        gpu = state.share_free_milli.take(rows, 1).sum(axis=0) / GPU_SCALE_MILLI * gpu_asked
        return _points(1.0 - (cpu + gpu) / 2.0)


class Clustering(Deterministic):
    """Gandiva (OSDI'18): pods with equal requests share nodes, the fuller the better."""

    name = "clustering"

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Score as gpu_clustering_score.go: own kind alone, own among others, empty, others only; each by use."""
        del gpu_fits
        if not shape.gpu_count:
            return np.zeros(len(rows))
        present = state.kinds.take(rows, 1) > 0
        own = present[tenancy_kind(shape.share_milli, shape.gpu_count)]
        kinds = present.sum(axis=0)
        tier = np.where(own, np.where(kinds == 1, 75, 50), np.where(kinds == 0, 25, 0))
        used = GPU_SCALE_MILLI - state.share_free_milli.take(rows, 1).sum(axis=0)
        points: FloatArray = tier + np.floor(25.0 * used / GPU_SCALE_MILLI)
        return points


class Packing(Deterministic):
    """Shared GPUs first, then free GPUs of used nodes, then free nodes (after Antman, OSDI'20)."""

    name = "packing"

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Score as gpu_packing_score.go does."""
        if not shape.gpu_count:
            return np.zeros(len(rows))
        free = state.share_free_milli.take(rows, 1)
        whole = (free == GPU_MILLI) & state.present.take(rows, 1)
        order = np.sort(np.where(gpu_fits, free, np.iinfo(np.int64).max), axis=0)[: shape.gpu_count]
        opened = (order == GPU_MILLI).sum(axis=0)
        shared = np.maximum(100 - np.floor((order // (GPU_MILLI // 100)).sum(axis=0) / 10), 50)
        free_gpus = whole.sum(axis=0)
        on_used_node = np.maximum(50 - opened, 33)
        points: FloatArray = np.where(
            free_gpus == state.gpu_counts[rows],
            np.maximum(33 - free_gpus, free_gpus),
            np.where(opened > 0, on_used_node, shared),
        ).astype(np.float64)
        return points


class RandomFit(Deterministic):
    """Any node that fits and any GPU of it that fits: the baseline that every policy has to beat."""

    name = "random"

    def __init__(self, rng: "np.random.Generator") -> None:
        self._rng = rng

    def rank(self, state: ClusterState, shape: Shape, rows: IntArray, gpu_fits: BoolArray) -> FloatArray:
        """Score all nodes equally."""
        del state, shape, gpu_fits
        return np.zeros(len(rows))

    def select(self, scores: FloatArray) -> int:
        """Return a random row among those that fit."""
        fitting = np.flatnonzero(scores > -np.inf)
        return int(fitting[self._rng.integers(len(fitting))]) if len(fitting) else 0

    def pick(self, state: ClusterState, shape: Shape, row: int, slots: list[int]) -> Sequence[int]:
        """Return random GPUs."""
        del state, row
        drawn: list[int] = self._rng.choice(slots, shape.gpu_count, replace=False).tolist()
        return drawn


def known_cpu(state: ClusterState, rows: IntArray, taken_milli: int) -> IntArray:
    """Return the free CPU less what is taken; 0 where CPU is not counted here."""
    free = state.cpu_free_milli[rows]
    left: IntArray = np.where(free < UNLIMITED // 2, free - taken_milli, 0)
    return left


def _points(ratio: FloatArray) -> FloatArray:
    points: FloatArray = np.floor(ratio * 100.0)
    return points
