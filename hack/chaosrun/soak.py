"""The soak: pods come and go at a steady rate, and what each part uses is measured all the time."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from chaosrun import auditor, usage
from chaosrun.auditor import Allowance
from chaosrun.freezes import FreezeWatch
from chaosrun.lasting import Differences, Starts
from chaosrun.load import Load
from chaosrun.look import Eye
from chaosrun.parts import Part

LOOK_EVERY_SECONDS: Final = 2.0
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
    differences, starts = Differences(), Starts()
    churned, next_sample, longest, gap = 0, 0.0, 0.0, 0.0
    unwatched: set[str] = set()
    freezes.report(clock())
    load.fill(population)
    while (now := clock() - begun) < minutes * 60:
        picture = eye.picture()
        wrong = auditor.broken(picture, load.expected, Allowance()) + differences.look(picture, clock())
        wrong += starts.look(picture, load.expected, clock(), refusal=None if load.is_idle else load.last_refusal)
        if picture.pods is not None:
            for pod in load.expected:
                seen = picture.pods.get(pod.uid)
                if seen is None or seen.is_over:
                    load.forget(pod.uid)
        due = int(now / 60 * pods_per_minute)
        if due > churned:
            load.churn(due - churned, population)
            churned = due
        load.fill(population)
        load.step(picture)
        freezes.watch(load.running(picture), clock())
        seen_frozen = freezes.report(clock())
        longest, gap = max([longest, *seen_frozen.longest.values()]), max(gap, seen_frozen.gap_seconds)
        unwatched |= seen_frozen.unwatched.keys()
        wrong += auditor.left_frozen(seen_frozen)
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
    return SoakResult(growths, load.created, load.deleted, tuple(violations), longest, gap, len(unwatched))
