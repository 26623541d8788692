"""Simulated GPU for a collection: the shipped model's predictions for the H200's programs, under any name.

It exercises the whole path of a dataset from the plan to the fit, on any machine and in no time. The results
are predictions with noise, so they say nothing about a real GPU; the header names the driver "simulated".
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

import numpy as np

from gpushare.core.gpu import COUNTERS, mean_counters
from gpushare.core.interference import Profile
from gpushare.data import H200_COLOCATION, default_model
from gpushare.research.calibration.collector import Log, Timing, run_line
from gpushare.research.calibration.counters import RunCounters
from gpushare.research.calibration.plan import Cell
from gpushare.research.calibration.resume import SIMULATED
from gpushare.research.dataset import Dataset, Mechanism, parse
from gpushare.research.solo_profiles import profile_of

_NOISE: Final = 0.02
"""Standard deviation of a rate, as a ratio: the difference between two windows of one program on an H200."""


@cache
def known_programs() -> Dataset:
    """Return the H200's dataset."""
    return parse((files("gpushare.data") / H200_COLOCATION).read_bytes().splitlines())


class SimulatedCounters:
    """Header of a simulated GPU; its counters come with its runs."""

    def __init__(self, gpu_model: str) -> None:
        self._model = gpu_model

    def about(self) -> dict[str, str]:
        """Return a header that says what it is."""
        return {"gpu_model": self._model, "driver": SIMULATED}

    def start(self) -> None:
        """Do nothing, as there is nothing to read."""

    def stop(self) -> dict[str, float]:
        """Return no counters."""
        return {}

    def memory_by_pid(self) -> dict[int, int]:
        """Return no processes."""
        return {}


class SimulatedPool:
    """Workers that run in no time.

    Args:
        speed: of the GPU, as a factor on every rate.
        known_as: the H200's program that stands for a name; one that it lacks starts no worker.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        log: Log,
        *,
        mechanism: Mechanism,
        speed: float,
        probes: Collection[str],
        known_as: Callable[[str], str],
    ) -> None:
        self._mechanism, self._speed, self._probes, self._known_as = mechanism, speed, probes, known_as
        known = {tenant.workload for run in known_programs().runs if run.is_solo for tenant in run.tenants}
        self._alive = Counter(cell for cell in cells if known_as(cell[0]) in known)
        self._fired = 0
        for name in sorted({name for name, _ in cells} - {name for name, _ in self._alive}):
            log(f"{name} is none of the H200's programs")

    def alive(self) -> Counter[Cell]:
        """Return how many workers each cell has, those of unknown programs none."""
        return self._alive.copy()

    def read_memory(self, memory_by_pid: dict[int, int]) -> None:
        """Do nothing, as memory is what it was on the H200."""

    def fire(
        self,
        cells: Sequence[Cell],
        timing: Timing,
        counters: RunCounters,  # noqa: ARG002 - a WorkerPool's
        log: Log,  # noqa: ARG002 - a WorkerPool's
    ) -> dict[str, Any] | None:
        """Say what the window would have shown; two windows of one set differ by noise."""
        self._fired += 1
        profiles = [_profile(self._known_as(name)) for name, _ in cells]
        progress = self._progress(profiles, [cap for _, cap in cells])
        chance = np.random.default_rng([zlib.crc32(repr(cells).encode()), self._fired])
        progress = [each * float(1 + _NOISE * chance.normal()) for each in progress]
        rates = [
            self._speed * part * profile.iterations_per_s if profile.iterations_per_s else 0.0
            for part, profile in zip(progress, profiles, strict=True)
        ]
        is_set = len(cells) > 1 and not any(name in self._probes for name, _ in cells)
        return run_line(
            cells,
            rates,
            device=_device(profiles, progress),
            window_seconds=timing.shared_seconds if is_set else timing.window_seconds,
            memory_mib=(profile.memory_mib for profile in profiles),
            probes=self._probes,
        )

    def close(self) -> None:
        """Do nothing, as no process runs."""

    def _progress(self, profiles: Sequence[Profile], caps: Sequence[int]) -> list[float]:
        if self._mechanism is Mechanism.TIME_SLICING:
            busy = [profile.counters.graphics_util or 0.0 for profile in profiles]
            return [min(1.0, 1.0 / max(1.0, sum(busy))) for _ in busy]
        return [each.progress for each in default_model().predict(list(zip(profiles, caps, strict=True)))]


def simulated_pools(
    mechanism: Mechanism,
    *,
    speed: float = 1.0,
    probes: Collection[str] = (),
    known_as: Callable[[str], str] = str,
) -> Callable[[Sequence[Cell], Log], SimulatedPool]:
    """Return what makes the workers of a phase up."""

    def make(cells: Sequence[Cell], log: Log) -> SimulatedPool:
        return SimulatedPool(cells, log, mechanism=mechanism, speed=speed, probes=probes, known_as=known_as)

    return make


@cache
def _profile(name: str) -> Profile:
    data = known_programs()
    if name in data.solo:
        return profile_of(data, name)
    alone = [run for run in data.runs if run.is_solo and run.tenants[0].workload == name]  # a probe
    rate = sum(run.iterations_per_s[0] for run in alone) / len(alone)
    return Profile(mean_counters([run.counters for run in alone]), rate)


def _device(profiles: Sequence[Profile], progress: Sequence[float]) -> dict[str, float]:
    """Return the sum of what the programs draw alone, each times its progress, at most 1."""
    found: dict[str, float] = {}
    for counter in COUNTERS:
        values = [getattr(profile.counters, counter) for profile in profiles]
        if None not in values:
            drawn = sum(value * part for value, part in zip(values, progress, strict=True))
            found[counter] = round(min(1.0, drawn), 4)
    return found
