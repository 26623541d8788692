"""Draw a tenant set's progress from the interference model: forecast plus noise, the same for the same set.

For the twin and the job simulator: they know only the model, and its error has to show.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import Final

import numpy as np
from cachetools import LRUCache

from gpushare.core.interference import Forecast, InterferenceModel, Profile, cap_progress
from gpushare.twin.contention import TwinLoad

_INTERVAL_SDS: Final = 2 * 1.645  # a 90% interval is this many standard deviations wide
LEAST_PROGRESS: Final = 0.01  # a tenant without any progress would stop simulated time
_MOST_KEPT: Final = 256


def draw(forecasts: Sequence[Forecast], alone: Sequence[float], key: str, *, seed: int = 0) -> tuple[float, ...]:
    """Draw the progress of each tenant of one set.

    Args:
        forecasts: the model's forecasts for the set, in a fixed order.
        alone: progress of each alone under its cap; no tenant runs faster beside others.
        key: names the set, in that order; the same key and seed draw the same noise.
    """
    return tuple(
        max(LEAST_PROGRESS, min(each.progress + noise, limit))
        for each, noise, limit in zip(forecasts, _residuals(forecasts, key, seed), alone, strict=True)
    )


def _residuals(forecasts: Sequence[Forecast], key: str, seed: int = 0) -> list[float]:
    """Draw measured less predicted; the interval gives the standard deviation."""
    rng = np.random.default_rng([seed, zlib.crc32(key.encode())])
    return [float(rng.normal()) * (each.upper - each.lower) / _INTERVAL_SDS for each in forecasts]


class DrawnProgress:
    """A `gpushare.twin.contention.ProgressModel`: what a GPU would do, as far as the model knows.

    A set is computed once and kept; the order of its tenants does not matter, and those that are alike run alike.
    One tenant runs as its cap curve says, and uncapped as alone. Where the noise would lift a tenant to its
    progress alone, its sign is reversed: a neighbour that costs something in the model costs something here.
    Nor does noise lift a set above the GPU's capacity.

    Args:
        model: where the model comes from; called at the first set, since reading it takes a while.
    """

    def __init__(self, model: Callable[[], InterferenceModel]) -> None:
        self._model = model
        self._kept: LRUCache[str, tuple[float, ...]] = LRUCache(_MOST_KEPT)

    def __call__(self, loads: Sequence[TwinLoad]) -> tuple[float, ...]:
        """Return the progress of each load, in the given order."""
        if not loads:
            return ()
        # Without the name: renaming a workload must not change its draw.
        loads = [replace(load, workload="") for load in loads]
        named = [repr(astuple(load)[:3]) for load in loads]
        order = sorted(range(len(loads)), key=named.__getitem__)
        key = "\n".join(named[at] for at in order)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._compute([loads[at] for at in order], key)
        result = [0.0] * len(loads)
        for at, progress in zip(order, found, strict=True):
            result[at] = progress
        return tuple(result)

    def _compute(self, loads: Sequence[TwinLoad], key: str) -> tuple[float, ...]:
        tenants = [(Profile(load.solo, load.iterations_per_s), load.thread_percentage) for load in loads]
        alone = [
            1.0 if cap == 100 else max(LEAST_PROGRESS, min(1.0, cap_progress(profile, cap / 100)))
            for profile, cap in tenants
        ]
        if len(loads) == 1:
            return tuple(alone)
        model = self._model()
        forecasts = model.predict(tenants)
        result: list[float] = []
        for load, forecast, noise, limit in zip(loads, forecasts, _residuals(forecasts, key), alone, strict=True):
            same = loads.index(load)
            drawn = forecast.progress + (noise if forecast.progress + noise < limit else -noise)
            result.append(result[same] if same < len(result) else max(LEAST_PROGRESS, min(drawn, limit)))
        return model.conserved(tenants, result)
