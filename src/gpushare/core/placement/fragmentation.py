"""The fragmentation measure of FGD: how much free GPU the pods that typically arrive cannot use.

Source: Weng et al., "Beware of Fragmentation" (USENIX ATC'23), section 3, as read by its published simulator
(github.com/hkust-adsl/kubernetes-scheduler-simulator, pkg/utils/frag.go). For one node and one kind of pod, all
free GPU is a fragment if the pod does not fit; otherwise the GPUs whose free part is smaller than its share are.
For a pod without GPUs all free GPU is a fragment. Kinds are weighted by how often they arrive.

Evaluated by table: for pods of one GPU the usable part of a GPU depends only on its own free share, the node's
free CPU and its model, so it is looked up by (model, CPU level, free share). Pods of several GPUs add a term in
(model, CPU level, number of whole free GPUs).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from gpushare.core.api import MAX_GPUS_PER_POD
from gpushare.core.placement.state import GPU_MILLI, ClusterState, FloatArray, IntArray, Shape

POPULARITY: Final = 0.95
"""Typical kinds are the most frequent ones that make up this part of arrivals (as in the paper's experiments)."""


class Kind(NamedTuple):
    """The properties of a request that the measure uses."""

    cpu_milli: int
    share_milli: int
    gpu_count: int
    models: tuple[str, ...]


def kind_of(shape: Shape) -> Kind:
    """Return the kind of a request; memory and fault domain do not matter here."""
    share = shape.share_milli if shape.gpu_count else 0
    return Kind(shape.cpu_milli, share, shape.gpu_count, tuple(sorted(shape.models)))


@dataclass(frozen=True, slots=True)
class Mix:
    """The kinds of pods that arrive and their weights, which sum to 1."""

    kinds: tuple[Kind, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, history: Mapping[Shape, float], popularity: float = POPULARITY) -> "Mix":
        """Return the mix of the typical kinds among requests, given how often each came."""
        counts: dict[Kind, float] = {}
        for shape, count in history.items():
            counts[kind_of(shape)] = counts.get(kind_of(shape), 0.0) + count
        return cls.from_counts(counts, popularity)

    @classmethod
    def from_counts(cls, counts: Mapping[Kind, float], popularity: float = POPULARITY) -> "Mix":
        """Return the mix of the most frequent kinds that make up `popularity` of all, larger ones first."""
        ordered = sorted(counts.items(), key=lambda item: (item[1], item[0]), reverse=True)
        total = sum(counts.values())
        chosen: list[tuple[Kind, float]] = []
        covered = 0.0
        for kind, count in ordered:
            if covered >= popularity * total:
                break
            chosen.append((kind, count))
            covered += count
        return cls(tuple(kind for kind, _ in chosen), tuple(count / covered for _, count in chosen))


class FragmentTables:
    """Lookup tables of a mix, to evaluate many nodes at once."""

    def __init__(self, mix: Mix, model_names: list[str]) -> None:
        """Build the tables; `model_names` is indexed by model id, as in ClusterState."""
        self.mix = mix
        self.models = len(model_names)
        self.cpu_levels: IntArray = np.array(sorted({kind.cpu_milli for kind in mix.kinds}), np.int64)
        levels, models = len(self.cpu_levels) + 1, len(model_names) + 1  # the last model is "absent" (-1)
        self.single_weights: dict[int, FloatArray] = {}
        """By share, the weight of one-GPU pods that fit: (models, CPU levels)."""
        single = np.zeros((models, levels, GPU_MILLI + 1))
        several = np.zeros((models, levels, 1))
        # What a bound pod's annotations list is not bounded; more GPUs than a pod may ask for fit nowhere.
        widest = min(max([kind.gpu_count for kind in mix.kinds], default=0), MAX_GPUS_PER_POD)
        if widest > 1:
            several = np.zeros((models, levels, widest + 1))
        for kind, weight in zip(mix.kinds, mix.weights, strict=True):
            if not kind.gpu_count:
                continue
            level = int(np.searchsorted(self.cpu_levels, kind.cpu_milli)) + 1
            for model, name in enumerate(model_names):
                if kind.models and name not in kind.models:
                    continue
                if kind.gpu_count == 1:
                    single[model, level:, kind.share_milli :] += weight
                    by_share = self.single_weights.setdefault(kind.share_milli, np.zeros((models, levels)))
                    by_share[model, level:] += weight
                else:
                    several[model, level:, kind.gpu_count :] += weight
        self.single: FloatArray = single * np.arange(GPU_MILLI + 1)
        """Usable thousandths of a GPU, by (model, CPU level, free share)."""
        self._several: FloatArray = several

    def level(self, cpu_free_milli: IntArray) -> IntArray:
        """Return each node's CPU level: for how many kinds' CPU it still has room."""
        return np.searchsorted(self.cpu_levels, cpu_free_milli, side="right")

    def several(self, models: IntArray, levels: IntArray, whole: IntArray) -> FloatArray:
        """Return the thousandths usable by pods of several GPUs, given the number of whole free GPUs."""
        capped = np.minimum(whole, self._several.shape[2] - 1)
        found: FloatArray = self._several[models, levels, capped] * (whole * GPU_MILLI)
        return found

    def usable(self, cpu_free_milli: IntArray, free: IntArray, models: IntArray) -> FloatArray:
        """Return the expected use of each node's free GPU in thousandths; `free`, `models` are (width, rows)."""
        levels = self.level(cpu_free_milli)
        found: FloatArray = self.single[models, levels, free].sum(axis=0)
        found += self.several(models[0], levels, (free == GPU_MILLI).sum(axis=0))
        return found

    def usable_after(self, cpu_free_milli: IntArray, free: IntArray, models: IntArray, shape: Shape) -> FloatArray:
        """Return `usable` after a pod of this shape is added: (width, rows) for a part of one GPU, else (rows,).

        Values where the pod does not fit are meaningless.
        """
        levels = self.level(cpu_free_milli - shape.cpu_milli)
        by_gpu = self.single[models, levels, free]
        whole = (free == GPU_MILLI).sum(axis=0)
        found: FloatArray = by_gpu.sum(axis=0)
        if not shape.gpu_count or shape.share_milli == GPU_MILLI:
            taken = shape.gpu_count
            found -= taken * self.single[models[0], levels, GPU_MILLI]
            found += self.several(models[0], levels, np.maximum(whole - taken, 0))
            return found
        smaller = self.single[models, levels, np.maximum(free - shape.share_milli, 0)]
        opened = self.several(models[0], levels, np.maximum(whole - 1, 0))
        return (
            found - by_gpu + smaller + np.where(free == GPU_MILLI, opened, self.several(models[0], levels, whole))
        )


def open_share(state: ClusterState, rows: IntArray) -> IntArray:
    """Return the share of each GPU that one more tenant with its share of the memory could take, at least 0."""
    share: IntArray = np.where(state.healthy.take(rows, 1), state.share_free_milli.take(rows, 1), 0)
    if state.isolated_count:
        share[state.isolated.take(rows, 1)] = 0
    if state.tracks_memory:
        usable = state.memory_usable_mib.take(rows, 1)
        by_memory = state.memory_free_mib.take(rows, 1) * GPU_MILLI // np.maximum(usable, 1)
        share = np.where(usable > 0, np.minimum(share, by_memory), share)
    return np.maximum(share, 0)


def fragmented_milli(state: ClusterState, mix: Mix) -> float:
    """Return the free thousandths of a GPU, over the whole cluster, that are of no use to the mix."""
    rows = np.flatnonzero(state.alive)
    free = open_share(state, rows)
    tables = FragmentTables(mix, state.model_names)
    usable = tables.usable(state.cpu_free_milli.take(rows), free, state.model_ids.take(rows, 1))
    return float(free.sum() - usable.sum())
