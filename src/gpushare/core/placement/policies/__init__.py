"""Placement policies: each ranks nodes and picks GPUs; `gpushare.core.placement.search` searches.

`make` returns them by the names that the command line and the chart use.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from gpushare.core.placement.fragmentation import Mix
from gpushare.core.placement.policies.classic import BestFit, Clustering, DotProduct, Packing, RandomFit
from gpushare.core.placement.policies.fgd import Fgd
from gpushare.core.placement.policies.gpushare import RELEARN_SECONDS, GpuShareFit
from gpushare.core.placement.search import PlacementPolicy
from gpushare.core.placement.shapes import Shape

__all__ = [
    "NAMES",
    "RELEARN_SECONDS",
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

# In quotes: numpy loads its random module, 3 MiB, when it is first named, and no process on a cluster uses it.
_MAKERS: "Final[dict[str, Callable[[History, np.random.Generator | None], PlacementPolicy]]]" = {
    "random": lambda _history, rng: RandomFit(rng or np.random.default_rng(0)),
    "dotprod": lambda _history, _rng: DotProduct(),
    "clustering": lambda _history, _rng: Clustering(),
    "packing": lambda _history, _rng: Packing(),
    "bestfit": lambda _history, _rng: BestFit(),
    "fgd": lambda history, _rng: Fgd(Mix.of(history)),
    "gpushare": lambda _history, _rng: GpuShareFit(),
}
NAMES: Final = tuple(_MAKERS)
"""Names of the policies, simplest first."""


def make(
    name: str, history: History, rng: "np.random.Generator | None" = None, *, learns_aside: bool = False
) -> PlacementPolicy:
    """Return a policy by name.

    Args:
        history: frequency of each request; only fgd uses it, gpushare learns its own.
        rng: for the policy that chooses at random.
        learns_aside: whether the caller lets a `LearningPolicy` learn, so that no decision waits for it.

    Raises:
        KeyError: there is no policy of this name.
    """
    return GpuShareFit(learns_aside=True) if learns_aside and name == "gpushare" else _MAKERS[name](history, rng)
