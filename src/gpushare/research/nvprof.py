"""Function-unit utilisation of a program from nvprof's CSV output, for GPUs before Ampere.

Two runs of nvprof give the files. `nvprof --csv --print-gpu-summary` (or the plain summary, or a trace) has
the time of every GPU activity; `nvprof --csv --metrics half_precision_fu_utilization,...` has a level from 0 to
10 for each kernel. The program's utilisation is the mean of the levels weighted with each kernel's time, over the
time of all GPU activities, copies and fills of memory included.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# nvprof's metric names (CUDA profiler user's guide, metrics reference) by our pipe.
PIPES: Final[Mapping[str, str]] = {
    "half_precision_fu_utilization": "fp16",
    "single_precision_fu_utilization": "fp32",
    "double_precision_fu_utilization": "fp64",
    "tensor_precision_fu_utilization": "tensor_fp16",
    "tensor_int_fu_utilization": "tensor_int8",
    "dram_utilization": "dram",
}
_OTHER_SUFFIX: Final = "_utilization"  # further levels of nvprof, kept by their own name: "ldst_fu", "l2"
MAX_LEVEL: Final = 10
_SECONDS: Final[Mapping[str, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LEVEL: Final = re.compile(r"^(?:[A-Za-z][A-Za-z -]*)?\(?(\d+(?:\.\d+)?)\)?$")
_ACTIVITIES: Final = "GPU activities"
_API_SECTION: Final = re.compile(r"^==\d*==+ API calls:|^=+ API calls:")
_RESULT_SECTION: Final = re.compile(r"^==\d*==+ Profiling result:|^=+ Profiling result:")
_CORRELATION: Final = re.compile(r"\s+\[\d+\]$")  # a trace numbers its kernels: "void k(int) [115]"


class NvprofError(Exception):
    """The file is not what nvprof writes; `line` is 1-based, 0 for the whole file."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.line = line


@dataclass(frozen=True, slots=True)
class NvprofUtilization:
    """A program's utilisation.

    Attributes:
        pipes: mean level by pipe as a ratio, 0 to 1, over the time of all GPU activities.
        coverage: share of the kernels' time whose kernels have metrics, 0 to 1, by pipe; a kernel without them
            counts as level 0, so a coverage below 1 means that the true utilisation may be higher.
        gpu_seconds: time of all GPU activities; kernel_seconds: of the kernels alone.
        without_metrics: kernels that no metric names, longest first.
    """

    pipes: Mapping[str, float]
    coverage: Mapping[str, float]
    gpu_seconds: float
    kernel_seconds: float
    without_metrics: tuple[str, ...]


def parse_level(text: str) -> float:
    """Return a level such as "Low (2)", "Max (10)", "Idle (0)" or "7" as a number from 0 to 10.

    Raises:
        ValueError: not a level.
    """
    match = _LEVEL.match(text.strip())
    if match is None or not 0 <= float(match[1]) <= MAX_LEVEL:
        raise ValueError(f"{text!r} is not a level from 0 to 10")
    return float(match[1])


def parse_summary(lines: Iterable[str]) -> dict[str, float]:
    """Return seconds by GPU activity, from a summary (whose API calls are ignored) or a trace.

    Raises:
        NvprofError: no table, no units row, or an invalid cell.
    """
    listed = list(_without_api_calls(lines))
    seconds: dict[str, float] = {}
    for column, columns in (("Time", {"Time", "Calls", "Name"}), ("Duration", {"Start", "Duration", "Name"})):
        for header, units, rows in _tables(listed, columns):
            unit = units.get(column, "")
            if unit not in _SECONDS:
                raise NvprofError(f"the units row names {unit!r} for {column}; allowed are {', '.join(_SECONDS)}")
            for number, row in rows:
                cells = dict(zip(header, row, strict=False))
                if cells.get("Type", _ACTIVITIES) != _ACTIVITIES:
                    continue
                name = _CORRELATION.sub("", cells["Name"])
                value = _number(cells[column], column, number) * _SECONDS[unit]
                seconds[name] = seconds.get(name, 0.0) + value
        if seconds:
            return seconds
    raise NvprofError("no table of GPU activities found; make it with nvprof --csv --print-gpu-summary")


def parse_metrics(lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return mean levels by kernel and pipe from `--metrics`; devices and streams are weighted by invocations.

    Raises:
        NvprofError: no table, or an invalid cell.
    """
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for header, _, rows in _tables(lines, {"Kernel", "Metric Name", "Avg"}):
        for number, row in rows:
            cells = dict(zip(header, row, strict=False))
            metric = cells.get("Metric Name", "")
            pipe = PIPES.get(metric, metric.removesuffix(_OTHER_SUFFIX))
            if not metric.endswith(_OTHER_SUFFIX):
                continue
            calls = _number(cells.get("Invocations") or "1", "Invocations", number)
            try:
                level = parse_level(cells["Avg"])
            except (KeyError, ValueError) as error:
                raise NvprofError(f"Avg: {error}", number) from None
            total, weight = sums.get((cells["Kernel"], pipe), (0.0, 0.0))
            sums[cells["Kernel"], pipe] = (total + level * calls, weight + calls)
    if not sums:
        wanted = ", ".join(PIPES)
        raise NvprofError(f"no utilisation metric found; make it with nvprof --csv --metrics {wanted}")
    levels: dict[str, dict[str, float]] = {}
    for (kernel, pipe), (total, weight) in sums.items():
        levels.setdefault(kernel, {})[pipe] = total / weight if weight else 0.0
    return levels


def utilization(summary: Mapping[str, float], metrics: Mapping[str, Mapping[str, float]]) -> NvprofUtilization:
    """Return the time-weighted mean level of each pipe over all GPU activities, with the kernels' coverage."""
    gpu_seconds = sum(summary.values())
    kernels = {name: seconds for name, seconds in summary.items() if not is_copy(name)}
    kernel_seconds = sum(kernels.values())
    measured = sorted({pipe for levels in metrics.values() for pipe in levels})
    pipes, coverage = {}, {}
    for pipe in measured:
        weighted = sum(metrics.get(name, {}).get(pipe, 0.0) * seconds for name, seconds in kernels.items())
        covered = sum(seconds for name, seconds in kernels.items() if pipe in metrics.get(name, {}))
        pipes[pipe] = weighted / MAX_LEVEL / gpu_seconds if gpu_seconds else 0.0
        coverage[pipe] = covered / kernel_seconds if kernel_seconds else 1.0
    missing = [name for name in kernels if name not in metrics]
    return NvprofUtilization(
        pipes, coverage, gpu_seconds, kernel_seconds, tuple(sorted(missing, key=lambda name: -kernels[name]))
    )


def is_copy(activity: str) -> bool:
    """Return whether an activity is a copy or fill of memory, without function units, as "[CUDA memcpy HtoD]"."""
    return activity.startswith("[CUDA mem")


def _without_api_calls(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, but blank the older format's table of API calls: its header is that of activities."""
    is_api = False
    for line in lines:
        if _API_SECTION.match(line):
            is_api = True
        elif _RESULT_SECTION.match(line):
            is_api = False
        yield "" if is_api else line


def _tables(
    lines: Iterable[str], columns: set[str]
) -> Iterator[tuple[list[str], dict[str, str], list[tuple[int, list[str]]]]]:
    """Yield tables whose header has these columns: header, units by column, and rows with line numbers."""
    header: list[str] | None = None
    units: dict[str, str] = {}
    rows: list[tuple[int, list[str]]] = []
    for number, row in _rows(lines):
        if columns <= set(row):
            if header is not None:
                yield header, units, rows
            header, units, rows = row, {}, []
        elif header is None:
            continue
        elif not rows and not units and _is_units(row):
            units = dict(zip(header, row, strict=False))
        elif len(row) == len(header):
            rows.append((number, row))
        else:
            raise NvprofError(f"{len(row)} cells where the header has {len(header)}", number)
    if header is not None:
        yield header, units, rows


def _rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield CSV rows with line numbers, ignoring nvprof's own "==PID==" lines and the program's output."""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("=="):
            continue
        [row] = csv.reader([text])
        if len(row) > 1:
            yield number, row


def _is_units(row: Sequence[str]) -> bool:
    return all(cell in ("", "%", *_SECONDS) for cell in row)


def _number(text: str, column: str, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise NvprofError(f"{column}: {text!r} is not a number", line) from None
    if not 0 <= value < float("inf"):
        raise NvprofError(f"{column}: {text!r} is not a number from 0 on", line)
    return value
