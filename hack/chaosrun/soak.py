"""The soak: pods come and go at a steady rate, and what each part uses is measured all the time."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from chaosrun import usage
from chaosrun.churn import LOOK_EVERY_SECONDS, Churn
from chaosrun.freezes import FreezeWatch
from chaosrun.load import Load
from chaosrun.look import Eye
from chaosrun.parts import Part

SAMPLE_EVERY_SECONDS: Final = 10.0
SHORTEST_MINUTES: Final = 2 * usage.FEWEST_SAMPLES * SAMPLE_EVERY_SECONDS / 60  # a busy machine takes half of them
USAGE_FILE: Final = "usage.jsonl"


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What a soak saw; `violations` are those of the auditor."""

    growths: tuple[usage.Growth, ...]
    created: int
    deleted: int
    violations: tuple[str, ...]
    longest_freeze_seconds: float
    longest_gap_seconds: float
    unwatched: int


def soak(
    eye: Eye,
    load: Load,
    freezes: FreezeWatch,
    directory: Path,
    *,
    minutes: float,
    pods_per_minute: float,
    population: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    sample: Callable[[Mapping[str, Part]], Mapping[str, usage.Usage]] = usage.sample,
) -> SoakResult:
    """Churn for so long; pods that wait for room count as the load's, not as gpushare's."""
    begun = clock()
    series: dict[str, list[usage.Usage]] = defaultdict(list)
    violations: dict[str, None] = {}
    next_sample = 0.0
    churn = Churn(eye, load, freezes, pods_per_minute=pods_per_minute, population=population, clock=clock)
    while (now := clock() - begun) < minutes * 60:
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
        sleep(max(0.0, LOOK_EVERY_SECONDS - (clock() - begun - now)))
    growths = tuple(usage.growth(name, found) for name, found in series.items())
    return SoakResult(
        growths,
        load.created,
        load.deleted,
        tuple(violations),
        churn.longest_freeze_seconds,
        churn.longest_gap_seconds,
        len(churn.unwatched),
    )
