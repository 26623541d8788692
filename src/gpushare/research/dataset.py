"""Colocation dataset v1 (docs/design.md 4): measured runs of one or more tenants on one GPU, parsed and checked.

Pure: lines in, values out. The caller opens the file.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

from gpushare.core.gpu.pipes import COUNTERS, Counters, mean_counters

SCHEMA: Final = "gpushare.io/colocation/v1"
_MOST_PROGRESS: Final = 1.5  # the H200's datasets reach 1.13 to 1.20: what is measured alone varies too
_HEADER_FIELDS: Final = {"schema", "gpu_model", "driver", "mechanism"}
_RUN_FIELDS: Final = {"tenants", "iterations_per_s", "device", "window_s", "memory_mib", "session"}
_TENANT_FIELDS: Final = {"workload", "thread_percentage", "probe"}


class DatasetError(Exception):
    """The dataset cannot be read; the message is one sentence, `line` and `column` say where (1-based)."""

    def __init__(self, message: str, *, line: int, column: int = 1) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


class Mechanism(StrEnum):
    """Mechanism by which the tenants of a run shared the GPU."""

    MPS = "mps"
    TIME_SLICING = "time-slicing"


class Skipped(StrEnum):
    """Reason for which a run, or a part of one, was left out; it completes "N runs skipped: <value>"."""

    BAD_FIELD = "a field is missing or of the wrong type"
    LENGTHS = "tenants, iterations_per_s and memory_mib differ in length"
    RATE = "a rate is zero, negative or not finite"
    PERCENTAGE = "a thread percentage is not 1 to 100"
    COUNTER = "a device counter is negative, above 1.5 or not finite"
    NO_SOLO = "a tenant has no solo run at 100% to compare with"
    UNKNOWN_FIELD = "an unknown field was ignored"
    FASTER = "a tenant is more than 1.5 times as fast as alone, so its rates are perhaps not of one unit"


@dataclass(frozen=True, slots=True)
class RunTenant:
    """One tenant of a run: which program, under what MPS thread percentage (1 to 100).

    `probe`: not a workload but one of the standard programs that workloads are measured beside.
    """

    workload: str
    thread_percentage: int
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One measured window.

    Attributes:
        tenants, iterations_per_s, memory_mib: aligned, one entry a tenant; memory_mib is None where not measured.
        counters: the device's, over the window; None where the source lacks one.
        window_seconds: how long the window was.
        line: 1-based line of the dataset.
        session: when and on which host it was measured; progress is relative to solo runs of the same session,
            since the rate of a host-bound program differs between hosts.
    """

    tenants: tuple[RunTenant, ...]
    iterations_per_s: tuple[float, ...]
    memory_mib: tuple[int | None, ...]
    counters: Counters
    window_seconds: float
    line: int
    session: str = ""

    @property
    def is_solo(self) -> bool:
        """Return whether one tenant ran alone."""
        return len(self.tenants) == 1

    @property
    def has_probe(self) -> bool:
        """Return whether a probe took part, so that the run belongs to a profile, not to a set of workloads."""
        return any(tenant.probe for tenant in self.tenants)


@dataclass(frozen=True)
class Dataset:
    """A whole dataset.

    Attributes:
        runs: the usable runs, in file order.
        skipped: number of runs skipped or fields ignored, by reason.
    """

    gpu_model: str
    driver: str
    mechanism: Mechanism
    runs: tuple[Run, ...]
    skipped: Mapping[Skipped, int]

    @cached_property
    def solo(self) -> dict[str, dict[int, tuple[Run, ...]]]:
        """Return the solo runs of workloads: workload -> thread percentage -> its runs."""
        grouped: dict[str, dict[int, list[Run]]] = {}
        for run in self.runs:
            if run.is_solo and not run.has_probe:
                tenant = run.tenants[0]
                grouped.setdefault(tenant.workload, {}).setdefault(tenant.thread_percentage, []).append(run)
        return {workload: {cap: tuple(runs) for cap, runs in caps.items()} for workload, caps in grouped.items()}

    @cached_property
    def _rates(self) -> dict[tuple[str, str, int], float]:
        """Return mean iterations/s alone by session, program and thread percentage, probes included."""
        grouped: dict[tuple[str, str, int], list[float]] = {}
        for run in self.runs:
            if run.is_solo:
                tenant = run.tenants[0]
                key = (run.session, tenant.workload, tenant.thread_percentage)
                grouped.setdefault(key, []).append(run.iterations_per_s[0])
        return {key: sum(rates) / len(rates) for key, rates in grouped.items()}

    def solo_rate(self, workload: str, thread_percentage: int = 100) -> float | None:
        """Return the mean iterations/s alone at that cap; None when never measured."""
        runs = self.solo.get(workload, {}).get(thread_percentage, ())
        return sum(run.iterations_per_s[0] for run in runs) / len(runs) if runs else None

    def cap_curve(self, workload: str) -> dict[int, float]:
        """Return measured progress alone by thread percentage, relative to 100% in the same session."""
        curve: dict[int, float] = {}
        for cap, runs in sorted(self.solo.get(workload, {}).items()):
            measured = [
                rate / whole
                for session in dict.fromkeys(run.session for run in runs)
                if (rate := self._rates.get((session, workload, cap)))
                and (whole := self._rates.get((session, workload, 100)))
            ]
            if measured:
                curve[cap] = sum(measured) / len(measured)
        return curve

    def solo_counters(self, workload: str, thread_percentage: int = 100) -> Counters | None:
        """Average the counters over the solo runs at that cap; None when never measured."""
        runs = self.solo.get(workload, {}).get(thread_percentage, ())
        return mean_counters([run.counters for run in runs]) if runs else None

    def progress(self, run: Run) -> tuple[float, ...] | None:
        """Return each tenant's rate relative to alone at 100% in the same session; None without solo rate."""
        alone = [self._rates.get((run.session, tenant.workload, 100)) for tenant in run.tenants]
        if any(rate is None for rate in alone):
            return None
        return tuple(rate / whole for rate, whole in zip(run.iterations_per_s, alone, strict=True) if whole)

    def shared_runs(self) -> Iterator[tuple[Run, tuple[float, ...]]]:
        """Yield every run of two or more workloads with its progress, if it has solo rates."""
        for run in self.runs:
            if not run.is_solo and not run.has_probe and (progress := self.progress(run)) is not None:
                yield run, progress

    @cached_property
    def probed(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Return workload -> probe -> (progress of the workload beside it, progress of the probe), both uncapped.

        Means over the pairs of one workload and one probe.
        """
        grouped: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for run in self.runs:
            if len(run.tenants) != 2 or any(tenant.thread_percentage < 100 for tenant in run.tenants):
                continue
            progress = self.progress(run)
            for own, other in ((0, 1), (1, 0)):
                if progress and run.tenants[other].probe and not run.tenants[own].probe:
                    by_probe = grouped.setdefault(run.tenants[own].workload, {})
                    by_probe.setdefault(run.tenants[other].workload, []).append((progress[own], progress[other]))
        return {
            workload: {
                probe: (sum(own for own, _ in both) / len(both), sum(its for _, its in both) / len(both))
                for probe, both in by_probe.items()
            }
            for workload, by_probe in grouped.items()
        }

    def notes(self) -> tuple[str, ...]:
        """Return one sentence for each reason why runs were skipped, with their number."""
        missing = sum(1 for run in self.runs if self.progress(run) is None)
        faster = sum(1 for run in self.runs if max(self.progress(run) or (0.0,)) > _MOST_PROGRESS)
        found = {Skipped.NO_SOLO: missing, Skipped.FASTER: faster}
        counts = {**self.skipped, **{why: n for why, n in found.items() if n}}
        verb = {Skipped.UNKNOWN_FIELD: "noted", Skipped.FASTER: "noted"}
        return tuple(
            f"{n} run{'s' if n != 1 else ''} {verb.get(why, 'skipped')}: {why}" for why, n in counts.items()
        )


def parse(lines: Iterable[str | bytes]) -> Dataset:
    """Parse a dataset's lines; empty lines are ignored.

    Raises:
        DatasetError: no header, another schema, or a line that is not JSON. An invalid run is skipped
            and counted in `Dataset.skipped`.
    """
    header: dict[str, Any] | None = None
    runs: list[Run] = []
    skipped: Counter[Skipped] = Counter()
    for number, raw in enumerate(lines, start=1):
        value = _json(raw, number)
        if value is None:
            continue
        if header is None:
            header = _header(value, number)
            continue
        run = _run(value, number)
        if isinstance(run, Skipped):
            skipped[run] += 1
            continue
        if _has_unknown_fields(value):
            skipped[Skipped.UNKNOWN_FIELD] += 1
        runs.append(run)
    if header is None:
        raise DatasetError("the dataset is empty; its first line must be the header", line=1)
    return Dataset(
        gpu_model=header["gpu_model"],
        driver=str(header.get("driver", "")),
        mechanism=Mechanism(header["mechanism"]),
        runs=tuple(runs),
        skipped=dict(skipped),
    )


def _json(raw: str | bytes, number: int) -> object | None:
    try:
        text = (raw.decode() if isinstance(raw, bytes) else raw).removeprefix("\ufeff" * (number == 1))
        return json.loads(text) if text.strip() else None
    except UnicodeDecodeError as error:
        raise DatasetError("is not UTF-8 text", line=number, column=error.start + 1) from None
    except json.JSONDecodeError as error:
        raise DatasetError(f"is not JSON ({error.msg})", line=number, column=error.colno) from None
    except (RecursionError, ValueError) as error:  # thousands of brackets, or of digits
        raise DatasetError(f"is not a dataset's JSON ({error})", line=number) from None


def _header(value: object, number: int) -> dict[str, Any]:
    if not isinstance(value, dict) or "schema" not in value:
        raise DatasetError('the first line must be a header with "schema"', line=number)
    if value["schema"] != SCHEMA:
        raise DatasetError(f'schema {value["schema"]!r} is not supported, only "{SCHEMA}" is', line=number)
    if not isinstance(value.get("gpu_model"), str) or not value["gpu_model"]:
        raise DatasetError('the header names no "gpu_model"', line=number)
    allowed = [mechanism.value for mechanism in Mechanism]
    if value.get("mechanism") not in allowed:
        raise DatasetError(f"mechanism {value.get('mechanism')!r} is not one of {', '.join(allowed)}", line=number)
    return value


def _run(value: object, number: int) -> Run | Skipped:
    try:
        if not isinstance(value, dict):
            return Skipped.BAD_FIELD
        tenants = tuple(
            RunTenant(_text(t["workload"]), _integer(t["thread_percentage"]), t.get("probe", False) is True)
            for t in value["tenants"]
        )
        rates = tuple(_number(rate) for rate in value["iterations_per_s"])
        memory = tuple(
            None if mib is None else int(_number(mib)) for mib in value.get("memory_mib") or [None] * len(tenants)
        )
        device = value["device"]
        measured = {name: _number(device[name]) for name in COUNTERS if device.get(name) is not None}
        window_seconds = _number(value.get("window_s", 0.0))
        session = str(value.get("session", ""))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return Skipped.BAD_FIELD
    if not 0 <= window_seconds < math.inf or any(mib is not None and mib < 0 for mib in memory):
        return Skipped.BAD_FIELD
    if not tenants or not len(tenants) == len(rates) == len(memory):
        return Skipped.LENGTHS
    if any(not math.isfinite(rate) or rate <= 0 for rate in rates):
        return Skipped.RATE
    if any(not 1 <= tenant.thread_percentage <= 100 for tenant in tenants):
        return Skipped.PERCENTAGE
    if any(not math.isfinite(ratio) or not 0 <= ratio <= 1.5 for ratio in measured.values()):
        return Skipped.COUNTER  # a window's edges can push a ratio a little above 1, never to 1.5
    return Run(tenants, rates, memory, Counters(**measured), window_seconds, number, session)


def _has_unknown_fields(value: object) -> bool:
    return isinstance(value, dict) and bool(
        value.keys() - _RUN_FIELDS
        or value["device"].keys() - set(COUNTERS)
        or any(tenant.keys() - _TENANT_FIELDS for tenant in value["tenants"])
    )


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _integer(value: object) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)
