"""The soak: pods come and go at a steady rate, and what each part uses is measured all the time."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from chaosrun import auditor, usage
from chaosrun.auditor import Allowance
from chaosrun.load import Load
from chaosrun.look import Eye
from chaosrun.node import FreezeWatch

LOOK_EVERY_SECONDS: Final = 2.0
SAMPLE_EVERY_SECONDS: Final = 10.0
USAGE_FILE: Final = "usage.jsonl"


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What a soak saw; `violations` are those of the auditor."""

    growths: tuple[usage.Growth, ...]
    created: int
    deleted: int
    violations: tuple[str, ...]
    longest_freeze_seconds: float


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
) -> SoakResult:
    """Churn for so long; pods that wait for room count as the load's, not as gpushare's."""
    begun = clock()
    series: dict[str, list[usage.Usage]] = defaultdict(list)
    violations: dict[str, None] = {}
    churned, next_sample, longest = 0, 0.0, 0.0
    load.fill(population)
    while (now := clock() - begun) < minutes * 60:
        picture = eye.picture()
        for one in auditor.broken(picture, load.expected, Allowance()):
            violations.setdefault(f"{one.rule}: {one.detail}")
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
        freezes.watch(picture.processes)
        frozen = freezes.longest()
        longest = max([longest, *frozen.values()])
        for one in auditor.left_frozen(frozen):
            violations.setdefault(f"{one.rule}: {one.detail}")
        if now >= next_sample:
            next_sample = now + SAMPLE_EVERY_SECONDS
            found = usage.sample(eye.parts)
            with (directory / USAGE_FILE).open("a") as file:
                file.write(json.dumps({"at": round(now, 1), **{k: asdict(v) for k, v in found.items()}}) + "\n")
            for name, one_usage in found.items():
                series[name].append(one_usage)
        time.sleep(max(0.0, LOOK_EVERY_SECONDS - (clock() - begun - now)))
    growths = tuple(usage.growth(name, found) for name, found in series.items())
    return SoakResult(growths, load.created, load.deleted, tuple(violations), longest)
