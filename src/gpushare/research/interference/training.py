"""Fit the law to measured sets: seeded, NumPy only, reproducible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpushare.core.interference import network
from gpushare.research.interference.tape import Variable

Array = npt.NDArray[np.float64]

HIDDEN: Final = 16
STEPS: Final = 600
_RATE: Final = 0.012
_DECAY: Final = 1e-3
_NOISE: Final = 0.15  # noise on standardised inputs: a new program is never exactly like one of these
_LOST: Final = 0.15  # share of programs whose probes are hidden at each step: not every profile has them
_ROUNDING: Final = 0.02  # of the absolute error, progress


@dataclass(frozen=True, slots=True)
class Cells:
    """Distinct tenants under their caps, aligned.

    Attributes:
        inputs: tenants x features, standardised; unprobed: the same as if no probes had been measured.
        programs: number of each tenant's program; caps, alone: tenants.
        uses: conserved resources x tenants, parts of what the GPU has.
    """

    inputs: Array
    unprobed: Array
    programs: npt.NDArray[np.int64]
    caps: Array
    alone: Array
    uses: Array


@dataclass(frozen=True, slots=True)
class Batch:
    """Sets of up to one size.

    Attributes:
        index: sets x places, rows of the tenant table; present: 1.0 where there is a tenant, else 0.0;
        progress: measured, the same shape.
    """

    index: npt.NDArray[np.int64]
    present: Array
    progress: Array


def batches_of(index: Sequence[Sequence[int]], progress: Sequence[Sequence[float]]) -> list[Batch]:
    """Group sets into two padded batches: up to four tenants, and more."""
    batches = []
    for least, most in ((1, 4), (5, 10**6)):
        chosen = [at for at, each in enumerate(index) if least <= len(each) <= most]
        if not chosen:
            continue
        places = max(len(index[at]) for at in chosen)
        shape = (len(chosen), places)
        batch = Batch(np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape))
        for row, at in enumerate(chosen):
            size = len(index[at])
            batch.index[row, :size], batch.present[row, :size], batch.progress[row, :size] = (
                index[at],
                1.0,
                progress[at],
            )
        batches.append(batch)
    return batches


def fit_parameters(cells: Cells, batches: Sequence[Batch], seed: int) -> dict[str, Array]:
    """Find the parameters that minimise the smoothed absolute error of progress, with every set weighted alike.

    The seed decides the start and the noise.
    """
    chance = np.random.default_rng(seed)
    shapes = network.shapes(cells.inputs.shape[1], HIDDEN)
    parameters = {
        "w1": chance.normal(size=shapes["w1"]) / np.sqrt(cells.inputs.shape[1]),
        "b1": np.zeros(shapes["b1"]),
        "w2": chance.normal(size=shapes["w2"]) * 0.5 / np.sqrt(HIDDEN),
        "b2": chance.normal(size=shapes["b2"]) * 0.2 - 0.7,
    }
    parameters["b2"][2 * network.TURNS] = 1.0
    first = {name: np.zeros_like(each) for name, each in parameters.items()}
    second = {name: np.zeros_like(each) for name, each in parameters.items()}
    weights = [(batch.present / batch.present.sum(axis=1, keepdims=True)).T for batch in batches]
    count = sum(len(batch.index) for batch in batches)
    for step in range(1, STEPS + 1):
        variables = {name: Variable(each) for name, each in parameters.items()}
        lost = chance.random(cells.programs.max() + 1) < _LOST
        inputs = np.where(lost[cells.programs][:, None], cells.unprobed, cells.inputs)
        noisy = inputs + _NOISE * chance.normal(size=cells.inputs.shape)
        each_tenant = network.pressure(variables, noisy, cells.caps, cells.uses)
        loss: Any = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            kept = network.stretch(each_tenant, batch.index.T, batch.present.T)
            error = (kept * cells.alone[batch.index.T] - batch.progress.T) * batch.present.T
            loss = loss + (np.sqrt(error * error + _ROUNDING**2) * weight).sum(axis=1).sum(axis=0)
        loss.backward()
        rate = _RATE * 0.5 * (1 + np.cos(np.pi * step / STEPS)) + 1e-4
        for name, each in parameters.items():
            gradient = _gradient(variables[name]) / count + (_DECAY * each if name[0] == "w" else 0.0)
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            move = (first[name] / (1 - 0.9**step)) / (np.sqrt(second[name] / (1 - 0.99**step)) + 1e-8)
            parameters[name] = each - rate * move
    return parameters


def _gradient(variable: Variable) -> Array:
    assert variable.gradient is not None
    return variable.gradient
