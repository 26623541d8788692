"""Placement policies: each ranks nodes and picks GPUs; `gpushare.core.placement.search` searches.

`make` returns them by the names that the command line and the chart use.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from gpushare.core.placement.fragmentation import Mix
from gpushare.core.placement.policies.classic import BestFit, Clustering, DotProduct, Packing, RandomFit
from gpushare.core.placement.policies.fgd import Fgd
from gpushare.core.placement.policies.gpushare import GpuShareFit
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.shapes import Shape

__all__ = [
    "NAMES",
    "BestFit",
    "Clustering",
    "DotProduct",
    "Fgd",
    "GpuShareFit",
    "Packing",
    "RandomFit",
    "make",
]

History = Mapping[Shape, float]

# In quotes: numpy loads its random module, 3 MiB, when it is first named, and no live process uses it.
_MAKERS: "Final[dict[str, Callable[[History, np.random.Generator], PlacementPolicy]]]" = {
    "random": lambda _history, rng: RandomFit(rng),
    "dotprod": lambda _history, _rng: DotProduct(),
    "clustering": lambda _history, _rng: Clustering(),
    "packing": lambda _history, _rng: Packing(),
    "bestfit": lambda _history, _rng: BestFit(),
    "fgd": lambda history, _rng: Fgd(Mix.of(history)),
    "gpushare": lambda _history, _rng: GpuShareFit(),
}
NAMES: Final = tuple(_MAKERS)
"""Names of the policies, simplest first."""


def make(name: str, history: History, rng: "np.random.Generator") -> PlacementPolicy:
    """Return a policy by name; `history` (frequency of each request) is only used by fgd, gpushare learns its own.

    Raises:
        KeyError: there is no policy of this name.
    """
    return _MAKERS[name](history, rng)
