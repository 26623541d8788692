"""The law: how much tenants stretch each other's kernels, a fixed point over a few latent resources.

Three terms, all zero without neighbours (measured on an H200, docs/interference.md):

- *Turns.* Where tenants must share SMs, a kernel waits until the blocks of others leave. Who holds SMs long makes
  the others wait, and a program of short kernels waits often: the neighbour's holding time times the own waiting
  frequency, times the part of the own SMs that no cap keeps free. This is why an uncapped matrix product takes
  all and a chain of small kernels beside it nothing. A tenant is out of the way only while it waits for its
  host, and the slower its kernels get on, the less of its time that is: a starved one has a kernel in the queue.
- *Overflow.* Memory bandwidth, caches, pipes and power are shared even where caps separate the SMs: demand above
  capacity slows those that rely on the resource.
- *Conservation.* What the tenants draw of a resource whose use the counters show, at the progress that is left to
  them, is never more than the GPU has.

A tenant that is slowed presses less on the shared resources, hence the fixed point. The functions take NumPy
arrays or the fitter's variables alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

TURNS: Final = 2  # latent kinds of holding and waiting
RESOURCES: Final = 3  # latent shared resources
ROUNDS: Final = 4  # of the fixed point; the fifth changes no progress by more than 0.01
_SMOOTH: Final = 0.05
_NEWTON: Final = 3  # steps to the stretch of a full resource's time; what they leave is taken from all alike
_COLUMNS: Final = 2 * TURNS + 3 * RESOURCES + 2


@dataclass(frozen=True, slots=True)
class Pressure:
    """What one tenant under one cap does to others and suffers from them; every array is kinds x tenants.

    Attributes:
        holds, waits: turns given to others to wait for, and taken.
        needs: part of the GPU's SMs the tenant covers while it runs, at most its cap; 1 x tenants.
        away: part of its time alone in which no kernel of the tenant holds or awaits SMs, 0 to 1; 1 x tenants.
        presses, draws, relies: on each shared resource as a neighbour, by itself, and how its overflow hurts.
        uses: of each conserved resource, alone under the cap, as a part of what the GPU has.
    """

    holds: Any
    waits: Any
    needs: Any
    away: Any
    presses: Any
    draws: Any
    relies: Any
    uses: Any

    def with_more(self, more: "Pressure") -> "Pressure":
        """These tenants and then those."""
        return Pressure(
            *(np.concatenate([getattr(self, name), getattr(more, name)], axis=1) for name in Pressure.__slots__)
        )


def shapes(inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes."""
    return {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, _COLUMNS), "b2": (_COLUMNS,)}


def _positive(x: Any) -> Any:
    return (x + np.sqrt(x * x + _SMOOTH)) * 0.5


def pressure(parameters: Mapping[str, Any], inputs: Any, caps: Any, uses: Any) -> Pressure:
    """From tenants (inputs: tenants x features, standardised; caps: tenants, 0 to 1; uses: conserved resources x
    tenants) to what they do."""
    hidden = np.tanh(inputs @ parameters["w1"] + parameters["b1"])
    out = (hidden @ parameters["w2"] + parameters["b2"]).T
    edges = np.cumsum([TURNS, TURNS, 1, RESOURCES, RESOURCES, RESOURCES, 1]).tolist()
    start = [0, *edges[:-1]]
    holds, waits, needs, presses, draws, relies, away = (out[a:b] for a, b in zip(start, edges, strict=True))
    return Pressure(
        np.exp(np.minimum(holds, 6.0)),
        np.exp(np.minimum(waits, 6.0)),
        caps / (1.0 + np.exp(-needs)) + 0.01,
        1.0 / (1.0 + np.exp(-away)),
        _positive(presses),
        _positive(draws),
        _positive(relies),
        uses,
    )


def _summed(x: Any, axis: int, *, keepdims: bool = False) -> Any:
    """Sum over the first or second axis, which are short: by rows, in half the time of NumPy's reduction."""
    if not isinstance(x, np.ndarray):
        return x.sum(axis=axis, keepdims=keepdims)
    rows = x.swapaxes(0, axis)
    total = rows[0] + rows[1] if len(rows) > 1 else rows[0]
    for row in rows[2:]:
        total += row
    return (total[:, None] if axis else total[None]) if keepdims else total


def stretch(each: Pressure, index: Any, present: Any) -> Any:
    """Progress kept of each tenant's progress alone under its cap: places x sets, 0 to 1.

    index: places x sets, tenants of `each`; present: the same shape, 1.0 where a tenant stands, else 0.0.
    Places come first so that sums over tenants and kinds run over long rows.
    """
    holds, waits = each.holds[:, index], each.waits[:, index]
    needs, away = each.needs[:, index][0] * present, each.away[:, index][0]
    holds = holds * present
    presses, draws, relies = each.presses[:, index], each.draws[:, index], each.relies[:, index]
    others = _summed(needs, 0, keepdims=True) - needs
    free = np.maximum(1.0 - others, 0.0)
    waits = waits * (1.0 - np.minimum(free / (needs + 0.001), 1.0))
    draws = draws - 1.0
    alone = _summed(relies * _positive(draws), 0)
    kept = present * 1.0
    for _ in range(ROUNDS):
        held = holds * (1.0 - away * kept)
        turns = _summed(waits * (_summed(held, 1, keepdims=True) - held), 0)
        pressed = presses * kept
        overflow = _positive(draws + (_summed(pressed, 1, keepdims=True) - pressed))
        slow = 1.0 + turns + _summed(relies * overflow, 0) - alone
        kept = np.sqrt(kept / slow) * present
    for uses in each.uses[:, index]:
        kept = conserved(kept, uses * present)
    return kept


def conserved(kept: Any, uses: Any) -> Any:
    """Progress kept once one resource's use fits into what the GPU has; both places x sets.

    A tenant spends that part of its time on the resource that it uses of it alone, and that part takes longer by
    the same factor for all, just enough for the sum to fit (processor sharing). What one tenant was measured to
    draw alone, it can draw.
    """
    most = np.maximum(uses.max(axis=0, keepdims=True), 1.0)
    uses = uses / most
    longer: Any = 0.0
    for _ in range(_NEWTON):
        slower = 1.0 + longer * uses
        drawn = uses * kept / slower
        excess = np.maximum(_summed(drawn, 0, keepdims=True) - 1.0, 0.0)
        longer = longer + excess / (_summed(drawn * uses / slower, 0, keepdims=True) + 1e-9)
    kept = kept / (1.0 + longer * uses)
    return kept / np.maximum(_summed(uses * kept, 0, keepdims=True), 1.0)
