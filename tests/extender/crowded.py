"""Scenes for `sim jobs` in which most pods are refused: for a promise, for memory, or for who has waited long.

Drawn without a purpose (scenes.py), hardly any job is refused for anything but its share. Here a scene follows
from its number alone, so the tests that count refusals see the same scenes with every release of Hypothesis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.extender.scenes import MODEL, Effect, Machine, Scene, Wanted

from gpushare.core.admission import Defaults
from gpushare.core.api import JobClass
from gpushare.core.placement import ProbationSettings, Settings
from gpushare.twin.contention import WORKLOADS

POLICIES = ("bestfit", "bestfit", "bestfit", "gpushare")


def release_of(draw: Random, *, charges_memory: bool | None = None) -> Settings:
    """Settings by which nobody is on probation."""
    defaults = Defaults(
        job_class=draw.choice(list(JobClass)),
        max_slowdown_ratio=draw.choice([1.05, 1.5, 3.0]),
        latency_max_slowdown_ratio=draw.choice([1.02, 1.1, 2.0]),
        charge_memory=draw.random() < 0.5 if charges_memory is None else charges_memory,
        charge_threads=draw.random() < 0.5,
    )
    return Settings(
        draw.choice(POLICIES),
        defaults,
        draw.choice([0, 512, 21_000]),
        ProbationSettings(0.0),
        slowdown_headroom_ratio=draw.choice([0.0, 0.0, 0.5]),
    )


def profiled(draw: Random, percents: Sequence[int]) -> Wanted:
    """A pod with a profile, and in one of four cases with what was learnt of it."""
    learnt = Effect(draw.choice([-0.4, -0.1, 0.2]), draw.choice([-0.3, 0.0, 0.1]), draw.randint(1, 40))
    return Wanted(
        draw.choice(percents),
        draw.choice([500, 1_000, 4_000]),
        draw.choice([None, *JobClass]),
        draw.choice(sorted(WORKLOADS)),
        draw.choice([None, 1.05, 1.2, 1.5, 2.0]),
        MODEL,
        is_auto=draw.random() < 0.3,
        effect=learnt if draw.random() < 0.25 else None,
    )


def scene_of(draw: Random, machines: Sequence[int], wanted: Sequence[Wanted], release: Settings) -> Scene:
    """Nodes of one GPU, as `sim jobs` has them; nobody leaves before four decisions were made.

    The seed is even: every change of the number of pods counts, so the simulators know the mix of pods too.
    """
    leaving = [None] * 4 + [draw.choice([None, draw.randrange(10)]) for _ in wanted[4:]]
    count = draw.choice(machines)
    return Scene(
        [Machine()] * count,
        wanted,
        release,
        2 * draw.randrange(50),
        leaving=leaving,
        best_nodes=draw.choice([0, 8]),
    )


def slowed(number: int) -> Scene:
    """Profiled pods of 20 to 50%, more than the GPUs take without breaking a promise."""
    draw = Random(number)
    wanted = [profiled(draw, [20, 25, 30, 40, 50]) for _ in range(draw.randint(6, 8))]
    return scene_of(draw, [1, 2, 3], wanted, release_of(draw))


def short_of_memory(number: int) -> Scene:
    """Pods that take the memory of the GPUs long before their shares, as the release does not charge it."""
    draw = Random(number)
    knows = draw.random() < 0.3
    wanted = [
        Wanted(
            draw.choice([3, 10, 15, 20]),
            draw.choice([18_000, 25_000, 30_000]),
            JobClass.THROUGHPUT,
            draw.choice(sorted(WORKLOADS)),
            4.0,
            MODEL if knows and draw.random() < 0.5 else None,
        )
        for _ in range(draw.randint(6, 8))
    ]
    return scene_of(draw, [1, 2], wanted, release_of(draw, charges_memory=False))


def queueing(number: int) -> Scene:
    """Some pods come, then larger ones that have waited long, then young ones while some leave."""
    draw = Random(number)
    first = [profiled(draw, [30, 40, 50, 60]) for _ in range(draw.randint(1, 3))]
    old = [
        replace(
            profiled(draw, [50, 60, 80, 100]),
            waited_minutes=draw.choice([40, 50, 100, 300, 900]),
            is_auto=False,
            profiled_on=draw.choice([MODEL, None]),
        )
        for _ in range(draw.randint(1, 2))
    ]
    young = [
        replace(profiled(draw, [10, 20, 30, 40, 60]), profiled_on=draw.choice([MODEL, None]), max_slowdown=4.0)
        for _ in range(draw.randint(3, 5))
    ]
    release = replace(release_of(draw), reserve_after_seconds=draw.choice([1800.0, 1800.0, 600.0, 60.0, 0.0]))
    return scene_of(draw, [1, 1, 2, 2, 3, 5], [*first, *old, *young], release)
