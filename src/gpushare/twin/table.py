"""The table's ten programs as tenants of the twin: their joint progress was measured on an H200.

No model takes part, so the loop's inference and predictions can be wrong (docs/measurements/table.md).
"""

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from gpushare.core.gpu import Counters
from gpushare.data import H200_TABLE, H200_TABLE_TWICE
from gpushare.data.measured import MeasuredSets, MeasuredWindow, windows_of
from gpushare.twin.contention import WORKLOADS, ProgressModel, SimulatedWorkload, TwinLoad, counters_of

GPU_MODEL: Final = "NVIDIA H200"
_LEAST: Final = 1e-3  # a tenant that made no progress in its whole window still gets some


@cache
def table() -> MeasuredSets:
    """Read both files of the shipped table, once."""
    windows: list[MeasuredWindow] = []
    for name, session in ((H200_TABLE, ""), (H200_TABLE_TWICE, H200_TABLE_TWICE)):
        lines = (files("gpushare.data") / name).read_text().splitlines()
        assert json.loads(lines[0])["gpu_model"] == GPU_MODEL
        windows += windows_of(lines, session)
    return MeasuredSets(windows)


def workload_named(name: str) -> SimulatedWorkload:
    """Return a program that the twin's tenants can run: one of `WORKLOADS`, or one of the table's.

    Raises:
        KeyError: there is none; the message names all.
    """
    if (found := WORKLOADS.get(name)) is not None:
        return found
    if name not in table().workloads:
        raise KeyError(f"{name} is none of {', '.join([*sorted(WORKLOADS), *table().workloads])}")
    return SimulatedWorkload(
        name, table().counters_alone(name), table().rate_alone(name), table().memory_mib(name)
    )


class TableProgress:
    """A `ProgressModel`: measured progress where the table holds the set, another model's elsewhere.

    The table holds every set of at most four tenants that its programs can form, on an H200. One that is frozen is
    in no set: the others run as in the set without it, which makes a throttle the exact mixture of both.

    Args:
        otherwise: for sets that the table lacks.
        gpu_model: of the simulated GPU.
    """

    def __init__(self, otherwise: ProgressModel, gpu_model: str) -> None:
        self._otherwise = otherwise
        self._is_h200 = gpu_model == GPU_MODEL

    def __call__(self, loads: Sequence[TwinLoad]) -> tuple[float, ...]:
        """Return the progress of each load, in the given order."""
        if not self._holds(loads):
            return self._otherwise(loads)
        found = table().under([load.workload for load in loads], [[load.thread_percentage for load in loads]])
        return tuple(max(_LEAST, progress) for progress in found[0].tolist())

    def counters(self, loads: Sequence[TwinLoad], progress: Sequence[float]) -> Counters:
        """Return what the device's counters read, given each load's progress."""
        if not self._holds(loads):
            return counters_of(loads, progress)
        return table().counters([load.workload for load in loads], [load.thread_percentage for load in loads])

    def _holds(self, loads: Sequence[TwinLoad]) -> bool:
        names = [load.workload for load in loads]
        # The table is read for its own programs only: most nodes' tenants are others.
        return (
            self._is_h200
            and bool(names)
            and not any(name in WORKLOADS for name in names)
            and table().offers(names)
        )
