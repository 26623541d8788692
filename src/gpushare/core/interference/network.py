"""The law by which tenants slow each other's kernels down: a fixed point over a few latent resources.

Three terms, all zero without neighbours (measured on an H200, docs/interference.md):

- *Turns.* Where tenants must share SMs, a kernel waits until the blocks of others leave. A program of long kernels
  makes the others wait long, and a program of short kernels waits often: the delay is the neighbour's holding time
  times the program's own waiting frequency, times the part of its SMs that no cap keeps free. This is why an
  uncapped matrix product gets nearly all of the GPU and a chain of small kernels beside it nearly nothing. A
  tenant does not compete while it waits for its host; the slower its kernels run, the smaller that part of its
  time is.
- *Overflow.* Memory bandwidth, caches, pipes and power are shared even where caps separate the SMs: demand above
  capacity slows the tenants that rely on the resource.
- *Conservation.* At their predicted progress, the tenants together never use more of a resource than the GPU has,
  for resources whose use the counters show.

A tenant that is slowed down uses less of the shared resources, hence the fixed point. The functions accept both
NumPy arrays and the fitter's variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

TURNS: Final = 2  # latent kinds of holding and waiting
RESOURCES: Final = 3  # latent shared resources
ROUNDS: Final = 4  # of the fixed-point iteration; a fifth changes no progress by more than 0.01
_SMOOTH: Final = 0.05
# Newton steps towards the factor by which a full resource slows its users; the rest is taken from all equally.
_NEWTON: Final = 3
_COLUMNS: Final = 2 * TURNS + 3 * RESOURCES + 2


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure of tenants under their caps on others, and their sensitivity; arrays are kinds x tenants.

    Attributes:
        holds: how long it makes others wait for SMs.
        waits: how often it waits for SMs itself.
        needs: part of the GPU's SMs that it covers while it runs, at most its cap; 1 x tenants.
        away: part of its time alone in which none of its kernels holds or awaits SMs, 0 to 1; 1 x tenants.
        presses: its demand for each shared resource, as the neighbours feel it.
        draws: its demand for each shared resource, as it feels it itself.
        relies: how much an overflow of each shared resource slows it.
        uses: its use of each conserved resource, alone under the cap, relative to what the GPU has.
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
        """Return these tenants with those of another appended."""
        return Pressure(
            *(np.concatenate([getattr(self, name), getattr(more, name)], axis=1) for name in Pressure.__slots__)
        )


def shapes(inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    return {"w1": (inputs, hidden), "b1": (hidden,), "w2": (hidden, _COLUMNS), "b2": (_COLUMNS,)}


def _positive(x: Any) -> Any:
    return (x + np.sqrt(x * x + _SMOOTH)) * 0.5


def pressure(parameters: Mapping[str, Any], inputs: Any, caps: Any, uses: Any) -> Pressure:
    """Return the pressures of tenants.

    Args:
        parameters: of the network, see `shapes`.
        inputs: tenants x features, standardised.
        caps: of the tenants, 0 to 1.
        uses: conserved resources x tenants.
    """
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
    """Sum over the first or second axis row by row; the axes are short, so this takes half of NumPy's time."""
    if not isinstance(x, np.ndarray):
        return x.sum(axis=axis, keepdims=keepdims)
    rows = x.swapaxes(0, axis)
    total = rows[0] + rows[1] if len(rows) > 1 else rows[0]
    for row in rows[2:]:
        total += row
    return (total[:, None] if axis else total[None]) if keepdims else total


def stretch(each: Pressure, index: Any, present: Any) -> Any:
    """Return the part that each tenant keeps of its progress alone under its cap: places x sets, 0 to 1.

    Places come first so that sums over tenants and kinds run over long rows.

    Args:
        each: pressures of the tenants.
        index: places x sets, tenants of `each`.
        present: places x sets, 1.0 for a tenant and 0.0 for an empty place.
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
    """Lower the kept progress until the use of one resource fits the GPU; both arguments are places x sets.

    The part of the resource that a tenant uses alone is the part of its time that it spends on it. That part takes
    longer by the same factor for all tenants, just enough for the sum to fit (processor sharing). A tenant can
    always use as much as it was measured to use alone.
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
