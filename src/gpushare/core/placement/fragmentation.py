"""How much free GPU the pods that typically arrive cannot use: the fragmentation measure of FGD.

Source: Weng et al., "Beware of Fragmentation" (USENIX ATC'23), section 3, with the reading of its published
simulator (github.com/hkust-adsl/kubernetes-scheduler-simulator, pkg/utils/frag.go): on one node and for one
kind of pod, all free GPU is a fragment if the pod does not fit, else the GPUs whose free part is smaller than
its share; a pod without GPUs makes all free GPU a fragment. Kinds are weighted by how often they arrive.

Evaluated by table: for pods of one GPU the usable part of a GPU depends on its own free share, the node's
free CPU and its model alone, so it is looked up by (model, CPU level, free share); pods of several GPUs add a
term in (model, CPU level, number of whole free GPUs).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from gpushare.core.placement.state import GPU_MILLI, ClusterState, FloatArray, IntArray, Shape

POPULARITY: Final = 0.95
"""Kinds are typical, most frequent first, until they make up this part of arrivals (the paper's experiments)."""


class Kind(NamedTuple):
    """What the measure sees of a request."""

    cpu_milli: int
    share_milli: int
    gpu_count: int
    models: tuple[str, ...]


def kind_of(shape: Shape) -> Kind:
    """The kind of a request; memory and tenancy do not matter here."""
    share = shape.share_milli if shape.gpu_count else 0
    return Kind(shape.cpu_milli, share, shape.gpu_count, tuple(sorted(shape.models)))


@dataclass(frozen=True, slots=True)
class Mix:
    """Which kinds of pods arrive and how often; `weights` sum to 1."""

    kinds: tuple[Kind, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, history: Mapping[Shape, float], popularity: float = POPULARITY) -> "Mix":
        """The typical kinds among requests seen, by how often."""
        counts: dict[Kind, float] = {}
        for shape, count in history.items():
            counts[kind_of(shape)] = counts.get(kind_of(shape), 0.0) + count
        return cls.from_counts(counts, popularity)

    @classmethod
    def from_counts(cls, counts: Mapping[Kind, float], popularity: float = POPULARITY) -> "Mix":
        """The most frequent kinds that make up `popularity` of all; equal counts go by size, larger first."""
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
    """A mix made ready to evaluate many nodes at once."""

    def __init__(self, mix: Mix, model_names: list[str]) -> None:
        """`model_names` by model id, as in ClusterState."""
        self.mix = mix
        self.models = len(model_names)
        self.cpu_levels: IntArray = np.array(sorted({kind.cpu_milli for kind in mix.kinds}), np.int64)
        levels, models = len(self.cpu_levels) + 1, len(model_names) + 1  # the last model is "absent" (-1)
        self.single_weights: dict[int, FloatArray] = {}
        """How often pods of one GPU come that fit, by share: (models, CPU levels)."""
        single = np.zeros((models, levels, GPU_MILLI + 1))
        several = np.zeros((models, levels, 1))
        widest = max([kind.gpu_count for kind in mix.kinds], default=0)
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
        """Thousandths of a GPU that are usable, by (model, CPU level, free share)."""
        self._several: FloatArray = several

    def level(self, cpu_free_milli: IntArray) -> IntArray:
        """Index of the CPU level of each node: how many kinds' CPU it can still serve."""
        return np.searchsorted(self.cpu_levels, cpu_free_milli, side="right")

    def several(self, models: IntArray, levels: IntArray, whole: IntArray) -> FloatArray:
        """Thousandths usable by pods of several GPUs, given the number of whole free GPUs."""
        capped = np.minimum(whole, self._several.shape[2] - 1)
        found: FloatArray = self._several[models, levels, capped] * (whole * GPU_MILLI)
        return found

    def usable(self, cpu_free_milli: IntArray, free: IntArray, models: IntArray) -> FloatArray:
        """Expected use of each node's free GPU in thousandths; `free`, `models` of shape (width, rows)."""
        levels = self.level(cpu_free_milli)
        found: FloatArray = self.single[models, levels, free].sum(axis=0)
        found += self.several(models[0], levels, (free == GPU_MILLI).sum(axis=0))
        return found

    def usable_after(self, cpu_free_milli: IntArray, free: IntArray, models: IntArray, shape: Shape) -> FloatArray:
        """The same once a pod of this shape is there: (width, rows) by GPU for a part of one, else (rows,).

        Meaningless where it does not fit.
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
    """Share of each GPU that one more tenant with its share of the memory could take, at least 0."""
    share: IntArray = np.where(state.healthy.take(rows, 1), state.share_free_milli.take(rows, 1), 0)
    if state.isolated_count:
        share[state.isolated.take(rows, 1)] = 0
    if state.tracks_memory:
        usable = state.memory_usable_mib.take(rows, 1)
        by_memory = state.memory_free_mib.take(rows, 1) * GPU_MILLI // np.maximum(usable, 1)
        share = np.where(usable > 0, np.minimum(share, by_memory), share)
    return np.maximum(share, 0)


def fragmented_milli(state: ClusterState, mix: Mix) -> float:
    """Thousandths of a GPU, over the whole cluster, that are free but of no use to the mix."""
    rows = np.flatnonzero(state.alive)
    free = open_share(state, rows)
    tables = FragmentTables(mix, state.model_names)
    usable = tables.usable(state.cpu_free_milli.take(rows), free, state.model_ids.take(rows, 1))
    return float(free.sum() - usable.sum())
