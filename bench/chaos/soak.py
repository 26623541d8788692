"""Run a soak: replace pods at a steady rate, and measure each component's use of resources all the time."""

import json
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

from bench.chaos import usage
from bench.chaos.churn import LOOK_EVERY_SECONDS, Churn
from bench.chaos.freezes import FreezeWatch
from bench.chaos.load import Load
from bench.chaos.look import Eye
from bench.chaos.parts import Component

SAMPLE_EVERY_SECONDS: Final = 10.0
SHORTEST_MINUTES: Final = 2 * usage.FEWEST_SAMPLES * SAMPLE_EVERY_SECONDS / 60  # a busy machine takes half of them
USAGE_FILE, SOAK_FILE = "usage.jsonl", "soak.json"


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Result of a soak so far; written to disk after each sample.

    Attributes:
        growths: of each part; none while there are too few samples to compare.
        violations: those of the auditor.
        minutes: how long it has run.
        is_whole: whether it ran for as long as it was asked to; older ones wrote nothing else.
    """

    growths: tuple[usage.Growth, ...] = ()
    created: int = 0
    deleted: int = 0
    violations: tuple[str, ...] = ()
    longest_freeze_seconds: float = 0.0
    longest_gap_seconds: float = 0.0
    unwatched: int = 0
    minutes: float = 0.0
    is_whole: bool = True


class Interruption:
    """Note the first SIGTERM or SIGINT instead of ending the program; the next one ends it as before.

    Attributes:
        signal_number: the signal that came; 0 while none has.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {one: signal.signal(one, self._note) for one in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def __bool__(self) -> bool:
        return self.signal_number != 0

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)


def soak(
    eye: Eye,
    load: Load,
    freezes: FreezeWatch,
    directory: Path,
    *,
    minutes: float,
    pods_per_minute: float,
    population: int,
    is_interrupted: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    sample: Callable[[Mapping[str, Component]], Mapping[str, usage.Usage]] = usage.sample,
) -> SoakResult:
    """Replace pods for some time; waiting for room is counted for the load, not for gpushare.

    Args:
        directory: gets the samples, and with each of them what was seen until then.
        is_interrupted: asked after each look; it ends the soak early.
    """
    begun = clock()
    series: dict[str, list[usage.Usage]] = defaultdict(list)
    violations: dict[str, None] = {}
    next_sample = 0.0
    churn = Churn(eye, load, freezes, pods_per_minute=pods_per_minute, population=population, clock=clock)

    def result() -> SoakResult:
        passed = clock() - begun
        return SoakResult(
            _growths(series),
            load.created,
            load.deleted,
            tuple(violations),
            churn.longest_freeze_seconds,
            churn.longest_gap_seconds,
            len(churn.unwatched),
            minutes=round(passed / 60, 2),
            is_whole=passed >= minutes * 60,
        )

    while (now := clock() - begun) < minutes * 60 and not is_interrupted():
        wrong, _ = churn.look()
        for one in wrong:
            violations.setdefault(f"{one.rule}: {one.detail}")
        if now >= next_sample:
            next_sample = now + SAMPLE_EVERY_SECONDS
            found = sample(eye.parts)
            with (directory / USAGE_FILE).open("a") as file:
                file.write(json.dumps({"at": round(now, 1), **{k: asdict(v) for k, v in found.items()}}) + "\n")
            for name, one_usage in found.items():
                series[name].append(one_usage)
            _write(directory, result())
        sleep(max(0.0, LOOK_EVERY_SECONDS - (clock() - begun - now)))
    _write(directory, last := result())
    return last


def read_result(directory: Path) -> SoakResult | None:
    """Return what a soak has written, whole or cut off; None where only the samples of an older one are left."""
    try:
        values = json.loads((directory / SOAK_FILE).read_text())
    except FileNotFoundError:
        return None
    values["growths"] = tuple(usage.Growth(**one) for one in values["growths"])
    values["violations"] = tuple(values["violations"])
    return SoakResult(**values)


def read_samples(directory: Path) -> tuple[float, tuple[usage.Growth, ...]]:
    """Return when the last sample was taken, in minutes, and what grew until then; a line cut off is left out."""
    series: dict[str, list[usage.Usage]] = defaultdict(list)
    last = 0.0
    for line in (directory / USAGE_FILE).read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        last = values.pop("at")
        for name, one in values.items():
            series[name].append(usage.Usage(**{**one, "pids": tuple(one["pids"])}))
    return last / 60, _growths(series)


def _growths(series: Mapping[str, Sequence[usage.Usage]]) -> tuple[usage.Growth, ...]:
    return tuple(usage.growth(name, found) for name, found in series.items() if len(found) >= usage.FEWEST_SAMPLES)


def _write(directory: Path, result: SoakResult) -> None:
    """Write it all or not at all: a kill at any moment leaves the last whole one."""
    new = directory / f".{SOAK_FILE}"
    new.write_text(json.dumps(asdict(result), indent=1) + "\n")
    new.replace(directory / SOAK_FILE)
