"""Traces of jobs: read from CSV, or drawn at random with a seed."""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from gpushare.core.api import JobClass, Rejection, parse_class, parse_fraction
from gpushare.sim.jobs import Job

REQUIRED_COLUMNS: Final = ("job", "workload", "submit_seconds", "solo_seconds")
OPTIONAL_COLUMNS: Final = ("max_slowdown", "fraction", "class", "start_seconds")
DEFAULT_MAX_SLOWDOWN: Final = 2.0  # slowdown of two jobs that take turns
# 30 years: beyond that, times cannot be distinguished to the millisecond as which they are written.
MOST_SECONDS: Final = 1e9
_MOST_SLOWDOWN: Final = 1000.0  # as a GpuShare allows


class JobTraceError(Exception):
    """A trace cannot be used: one sentence with line and column, 1-based."""

    def __init__(self, message: str, *, line: int, column: str = "") -> None:
        where = f"line {line}, column {column}" if column else f"line {line}"
        super().__init__(f"{where}: {message}")


def parse_jobs(lines: Iterable[str]) -> list[Job]:
    """Read a trace, sorted by submission.

    Raises:
        JobTraceError: a missing or unknown column, a bad number, a repeated name, or no jobs at all.
    """
    rows = _rows(lines)
    header = [name.strip() for name in next(rows, (1, []))[1]]
    for column in REQUIRED_COLUMNS:
        if column not in header:
            raise JobTraceError(f'column "{column}" is missing', line=1)
    for column in header:
        if column not in REQUIRED_COLUMNS + OPTIONAL_COLUMNS:
            allowed = ", ".join(REQUIRED_COLUMNS + OPTIONAL_COLUMNS)
            raise JobTraceError(f'unknown column "{column}"; allowed are {allowed}', line=1)
    jobs: list[Job] = []
    names: set[str] = set()
    for line, cells in rows:
        if not cells:
            continue
        if len(cells) != len(header):
            raise JobTraceError(f"{len(cells)} cells where {len(header)} belong", line=line)
        row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        if row["job"] in names:
            raise JobTraceError(f'"{row["job"]}" is there twice', line=line, column="job")
        names.add(row["job"])
        jobs.append(
            Job(
                name=row["job"],
                workload=row["workload"],
                submit_seconds=_number(row, "submit_seconds", line, least=0.0, most=MOST_SECONDS),
                solo_seconds=_number(row, "solo_seconds", line, least=1e-3, most=MOST_SECONDS),
                max_slowdown=_number(row, "max_slowdown", line, least=1.0, most=_MOST_SLOWDOWN)
                if row.get("max_slowdown")
                else DEFAULT_MAX_SLOWDOWN,
                fraction=_fraction(row, line),
                job_class=_job_class(row, line),
                start_seconds=_number(row, "start_seconds", line, least=0.0, most=MOST_SECONDS)
                if row.get("start_seconds")
                else 0.0,
            )
        )
    if not jobs:
        raise JobTraceError("the trace has no jobs", line=1)
    return sorted(jobs, key=lambda job: job.submit_seconds)


def draw_jobs(
    workloads: Sequence[str], count: int, *, mean_interarrival_seconds: float, mean_solo_seconds: float, seed: int
) -> list[Job]:
    """Draw Poisson arrivals of uniformly drawn workloads with log-normal lengths (sigma 1)."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(mean_interarrival_seconds, count)) if mean_interarrival_seconds else None
    lengths = rng.lognormal(math.log(mean_solo_seconds) - 0.5, 1.0, count)
    kinds = rng.integers(0, len(workloads), count)
    return [
        Job(
            f"job-{index:05d}",
            workloads[int(kinds[index])],
            round(float(arrivals[index]), 3) if arrivals is not None else 0.0,
            round(max(1.0, float(lengths[index])), 3),
            DEFAULT_MAX_SLOWDOWN,
        )
        for index in range(count)
    ]


def format_jobs(jobs: Iterable[Job]) -> str:
    """Write jobs as the CSV that `parse_jobs` reads."""
    rows = [",".join(REQUIRED_COLUMNS + OPTIONAL_COLUMNS)]
    rows += [
        f'"{j.name}","{j.workload}",{j.submit_seconds},{j.solo_seconds},{j.max_slowdown},{j.fraction},{j.job_class.value}'
        f",{j.start_seconds}"
        for j in jobs
    ]
    return "\n".join(rows) + "\n"


def _rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield each row's last line and its cells."""
    reader = csv.reader(lines)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise JobTraceError(f"is not CSV ({error})", line=reader.line_num) from None


def _fraction(row: dict[str, str], line: int) -> str:
    value = row.get("fraction") or "auto"
    parsed = parse_fraction(value)
    if isinstance(parsed, Rejection) or (parsed[0] is not None and parsed[1] != 1):
        raise JobTraceError(f'"{value}" is not a fraction of one GPU, or auto', line=line, column="fraction")
    return value


def _job_class(row: dict[str, str], line: int) -> JobClass:
    parsed = parse_class(row.get("class") or JobClass.THROUGHPUT.value)
    if isinstance(parsed, Rejection):
        raise JobTraceError(f'"{row["class"]}" is not throughput or latency', line=line, column="class")
    return parsed


def _number(row: dict[str, str], column: str, line: int, *, least: float, most: float) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise JobTraceError(f'"{row[column]}" is not a number', line=line, column=column) from None
    if not least <= value <= most:
        raise JobTraceError(f'"{row[column]}" is not between {least:g} and {most:g}', line=line, column=column)
    return value
