"""The law: how much tenants stretch each other's kernels, a fixed point over a few latent resources.

Three terms, all zero without neighbours (measured on an H200, docs/interference.md):

- *Turns.* Where tenants must share SMs, a kernel waits until the blocks of others leave. A program of long kernels
  makes the others wait long, and a program of short kernels waits often: the delay is the neighbour's holding time
  times the program's own waiting frequency, times the part of its SMs that no cap keeps free. This is why an
  uncapped matrix product takes nearly everything and a chain of small kernels beside it nearly nothing. A tenant
  does not compete while it waits for its host; the slower its kernels run, the smaller that part of its time is.
- *Overflow.* Memory bandwidth, caches, pipes and power are shared even where caps separate the SMs: demand above
  capacity slows those that rely on the resource.
- *Conservation.* What the tenants draw of a resource whose use the counters show, at their predicted progress, is
  never more than the GPU has.

A tenant that is slowed uses less of the shared resources, hence the fixed point. The functions take NumPy
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
# Newton steps towards the factor by which a full resource takes longer; the rest is taken from all alike.
_NEWTON: Final = 3
_COLUMNS: Final = 2 * TURNS + 3 * RESOURCES + 2


@dataclass(frozen=True, slots=True)
class Pressure:
    """How tenants under their caps press on others and suffer from them; every array is kinds x tenants.

    Attributes:
        holds, waits: how long it makes others wait for SMs, and how often it waits itself.
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
        """Append the tenants of another."""
        return Pressure(
            *(np.concatenate([getattr(self, name), getattr(more, name)], axis=1) for name in Pressure.__slots__)
        )


def shapes(inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by name."""
    return {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, _COLUMNS), "b2": (_COLUMNS,)}


def _positive(x: Any) -> Any:
    return (x + np.sqrt(x * x + _SMOOTH)) * 0.5


def pressure(parameters: Mapping[str, Any], inputs: Any, caps: Any, uses: Any) -> Pressure:
    """From tenants (inputs: tenants x features, standardised; caps: tenants, 0 to 1; uses: conserved resources x
    tenants) to their pressures."""
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
    """Sum over the first or second axis by rows: these are short, so it takes half the time of NumPy's."""
    if not isinstance(x, np.ndarray):
        return x.sum(axis=axis, keepdims=keepdims)
    rows = x.swapaxes(0, axis)
    total = rows[0] + rows[1] if len(rows) > 1 else rows[0]
    for row in rows[2:]:
        total += row
    return (total[:, None] if axis else total[None]) if keepdims else total


def stretch(each: Pressure, index: Any, present: Any) -> Any:
    """Return the part of its progress alone under its cap that each tenant keeps: places x sets, 0 to 1.

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
        holding = holds * (1.0 - away * kept)
        turns = _summed(waits * (_summed(holding, 1, keepdims=True) - holding), 0)
        pressed = presses * kept
        overflow = _positive(draws + (_summed(pressed, 1, keepdims=True) - pressed))
        slow = 1.0 + turns + _summed(relies * overflow, 0) - alone
        kept = np.sqrt(kept / slow) * present
    for uses in each.uses[:, index]:
        kept = conserved(kept, uses * present)
    return kept


def conserved(kept: Any, uses: Any) -> Any:
    """Lower the progress kept until the use of one resource fits the GPU; both places x sets.

    The part of the resource that a tenant uses alone is the part of its time that it spends on it. That part takes
    longer by the same factor for all tenants, just enough for the sum to fit (processor sharing). A tenant can
    always draw what it was measured to draw alone.
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
