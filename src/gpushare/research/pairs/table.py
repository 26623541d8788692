"""Measured pairs of training jobs: solo rates and side-by-side rates, parsed and checked.

The format is that of gavel's throughput tables (Narayanan et al., OSDI'20; stanford-futuredata/gavel, MIT): CSV
with columns `gpu, workload, steps_per_s` and `gpu, workload_a, workload_b, steps_per_s_a, steps_per_s_b`; a rate
of 0 says that the pair did not fit on the GPU. Pure: lines in, values out.
"""

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SOLO_COLUMNS: Final = ("gpu", "workload", "steps_per_s")
PAIR_COLUMNS: Final = ("gpu", "workload_a", "workload_b", "steps_per_s_a", "steps_per_s_b")
_BATCH: Final = re.compile(r"^(?P<family>.+?) \(batch size (?P<batch>\d+)\)$")

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class TableError(Exception):
    """A table cannot be used; one sentence; `table` is "solo" or "pairs", line 1-based (0: the whole)."""

    def __init__(self, table: str, message: str, *, line: int = 0, column: str = "") -> None:
        where = f"line {line}: " if line else ""
        where += f"column {column}: " if column else ""
        super().__init__(f"{where}{message}")
        self.table = table


@dataclass(frozen=True, slots=True)
class PairTable:
    """All measured pairs on one GPU model.

    Attributes:
        gpu: its name in the tables.
        workloads: names, sorted; families and log2_batch are read off them, aligned.
        log2_solo: log2 of the steps/s alone, aligned with workloads.
        first, second: [pairs] indices into workloads.
        progress: [pairs, 2] rate beside the other over rate alone; 0 where the pair did not fit.
    """

    gpu: str
    workloads: tuple[str, ...]
    families: tuple[str, ...]
    log2_batch: Floats
    log2_solo: Floats
    first: Indices
    second: Indices
    progress: Floats

    @property
    def normalized_sum(self) -> Floats:
        """Return [pairs] summed progress; taking turns would reach 1, and 0 means that the pair did not fit."""
        total: Floats = self.progress.sum(axis=1)
        return total

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Return [pairs] whether both ran."""
        return np.asarray((self.progress > 0).all(axis=1), dtype=np.bool_)

    @property
    def same_family(self) -> Floats:
        """Return [workloads, workloads] 1 where both are of one family, else 0."""
        return np.array([[a == b for b in self.families] for a in self.families], dtype=float)


def parse_pair_table(solo_lines: Iterable[str], pair_lines: Iterable[str], gpu: str) -> PairTable:
    """Read both CSV tables for one GPU.

    Raises:
        TableError: a missing column, a bad number, a workload without solo rate, a repeated pair, an absent GPU.
    """
    solo: dict[str, float] = {}
    gpus: set[str] = set()
    for line, row in _rows("solo", solo_lines, SOLO_COLUMNS):
        gpus.add(row["gpu"])
        if row["gpu"] != gpu:
            continue
        rate = _number("solo", row, line, "steps_per_s")
        if rate == 0:
            raise TableError("solo", f'"{row["workload"]}" has rate 0 alone', line=line, column="steps_per_s")
        if row["workload"] in solo:
            raise TableError(
                "solo", f'"{row["workload"]}" is measured twice on {gpu}', line=line, column="workload"
            )
        solo[row["workload"]] = rate
    if not solo:
        raise TableError("solo", f'no rows for GPU "{gpu}"; the table has {", ".join(sorted(gpus)) or "no rows"}')

    measured: dict[tuple[str, str], tuple[float, float]] = {}
    pair_gpus: set[str] = set()
    for line, row in _rows("pairs", pair_lines, PAIR_COLUMNS):
        pair_gpus.add(row["gpu"])
        if row["gpu"] != gpu:
            continue
        for column in ("workload_a", "workload_b"):
            if row[column] not in solo:
                raise TableError("pairs", f'"{row[column]}" has no solo rate on {gpu}', line=line, column=column)
        a, b = row["workload_a"], row["workload_b"]
        if (a, b) in measured or (b, a) in measured:
            raise TableError("pairs", f'"{a}" with "{b}" is measured twice on {gpu}', line=line)
        rates = (_number("pairs", row, line, "steps_per_s_a"), _number("pairs", row, line, "steps_per_s_b"))
        measured[a, b] = (rates[0] / solo[a], rates[1] / solo[b]) if min(rates) > 0 else (0.0, 0.0)
    if not measured:
        known = ", ".join(sorted(pair_gpus)) or "no rows"
        raise TableError("pairs", f'no rows for GPU "{gpu}"; the table has {known}')

    workloads = tuple(sorted({name for pair in measured for name in pair}))
    index = {name: position for position, name in enumerate(workloads)}
    split = [family_and_batch(name) for name in workloads]
    return PairTable(
        gpu=gpu,
        workloads=workloads,
        families=tuple(family for family, _ in split),
        log2_batch=np.array([math.log2(batch) for _, batch in split]),
        log2_solo=np.array([math.log2(solo[name]) for name in workloads]),
        first=np.array([index[a] for a, _ in measured], dtype=np.intp),
        second=np.array([index[b] for _, b in measured], dtype=np.intp),
        progress=np.array(list(measured.values())),
    )


def family_and_batch(workload: str) -> tuple[str, int]:
    """Split "ResNet-18 (batch size 64)" into family and batch size; others: the name, 1."""
    match = _BATCH.match(workload)
    return (match["family"], max(1, int(match["batch"]))) if match else (workload, 1)


def _rows(table: str, lines: Iterable[str], columns: Sequence[str]) -> Iterable[tuple[int, dict[str, str]]]:
    reader = csv.reader(lines)
    header = next(reader, None)
    if header is None:
        raise TableError(table, "the file is empty")
    header = [name.strip() for name in header]
    for column in columns:
        if column not in header:
            raise TableError(table, f'column "{column}" is missing', line=1)
    for column in header:
        if column not in columns:
            raise TableError(table, f'unknown column "{column}"; allowed are {", ".join(columns)}', line=1)
    try:
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise TableError(table, f"{len(cells)} cells where {len(header)} belong", line=reader.line_num)
            yield reader.line_num, dict(zip(header, (cell.strip() for cell in cells), strict=True))
    except csv.Error as error:
        raise TableError(table, f"is not CSV ({error})", line=reader.line_num) from None


def _number(table: str, row: dict[str, str], line: int, column: str) -> float:
    text = row[column]
    try:
        value = float(text)
    except ValueError:
        raise TableError(table, f'"{text}" is not a number', line=line, column=column) from None
    if not math.isfinite(value) or value < 0:
        raise TableError(table, f'"{text}" is not a rate of 0 or more', line=line, column=column)
    return value
