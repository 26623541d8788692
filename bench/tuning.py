"""Measure cost and benefit of an operator's settings on the measured table: `python -m bench tuning FILE`.

The same jobs run under the chart's values with one of them changed at a time. FILE gets a JSON line a run; runs
that it holds already are not made again. `bench.tuning_page` draws them, and writes the tables of the pages.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.retractions import GPU_MEMORY_MIB
from gpushare.core.admission import Defaults
from gpushare.core.api import AUTO, JobClass
from gpushare.core.control import RetractionSettings, WatchSettings
from gpushare.core.placement import Settings
from gpushare.data import default_model
from gpushare.research.shipped_table import complete_table
from gpushare.sim.jobs import Job, JobPolicy, simulate
from gpushare.sim.table_catalog import TableWorld
from gpushare.sim.table_hindsight import Asker
from gpushare.sim.table_ours import LiveOnTable, known_profiles
from gpushare.sim.table_policies import exclusive
from gpushare.sim.table_report import table_figures
from gpushare.sim.table_trace import SERVING, as_table_jobs, draw_table_jobs
from gpushare.sim.table_truth import TableTruth

DEFAULT = "default"
LOADS = (1.2, 2.0)
SEEDS = (21, 22)


@dataclass(frozen=True)
class Release:
    """Settings by an operator and the users; the chart's values by default.

    Attributes:
        asks: what a job asks for, of what it asked for.
        serving_is_latency: whether all jobs of programs that serve are of class latency, or none; None: some.
        shares: False: a whole GPU for each job, one after the other.
        luck: other errors of what agents read and infer.
    """

    defaults: Defaults = field(default_factory=Defaults)
    reserve_after_seconds: float = Settings().reserve_after_seconds
    watch: WatchSettings = field(default_factory=WatchSettings)
    retraction: RetractionSettings = field(default_factory=RetractionSettings)
    loop: bool = True
    asks: Callable[[str], str] = str
    serving_is_latency: bool | None = None
    shares: bool = True
    luck: int = 0

    def jobs(self, drawn: Sequence[Job], truth: TableTruth) -> list[Job]:
        """Return the drawn jobs as users of this release submit them."""
        asked = []
        for job in drawn:
            job_class = job.job_class
            if self.serving_is_latency is not None and job.workload in SERVING:
                job_class = JobClass.LATENCY if self.serving_is_latency else JobClass.THROUGHPUT
            asked.append(
                replace(
                    job,
                    job_class=job_class,
                    max_slowdown=self.defaults.max_slowdown_of(job_class),
                    fraction=self.asks(AUTO if job.is_auto else job.fraction),
                )
            )
        return as_table_jobs(asked, truth)

    def policy(self, world: TableWorld, seed: int) -> JobPolicy:
        """Return the policy that decides: the live rules with these settings."""
        if not self.shares:
            return exclusive()
        ours = LiveOnTable(
            world.model,
            world.truth.gpu_model,
            known_profiles(world.truth, seed + self.luck),
            seed + self.luck,
            watches=self.loop,
            settings=self.watch,
            release=Settings(defaults=self.defaults, reserve_after_seconds=self.reserve_after_seconds),
        )
        ours._evictor.settings = self.retraction  # noqa: SLF001
        return ours


def times(factor: float) -> Callable[[str], str]:
    """Request a multiple of the fraction, at most a whole GPU."""
    return lambda fraction: fraction if fraction == AUTO else f"{min(1.0, factor * float(fraction)):g}"


def slowdown(ratio: float) -> Release:
    return Release(Defaults(max_slowdown_ratio=ratio))


def latency(ratio: float) -> Release:
    return Release(Defaults(latency_max_slowdown_ratio=ratio))


def retracts_after(seconds: float) -> Release:
    return Release(watch=WatchSettings(retract_after_seconds=seconds))


SETTINGS: Mapping[str, Mapping[str, Release]] = {
    DEFAULT: {"": Release()},
    "no sharing": {"": Release(shares=False)},
    "policy.maxSlowdown": {f"{each:g}": slowdown(each) for each in (1.1, 1.25, 2.0, 3.0)},
    "policy.latencyMaxSlowdown": {f"{each:g}": latency(each) for each in (1.05, 1.25, 1.5)},
    "class latency for": {
        "no job": Release(serving_is_latency=False),
        "every job of a program that serves": Release(serving_is_latency=True),
    },
    "fractions": {
        "half of them": Release(asks=times(0.5)),
        "twice as large": Release(asks=times(2.0)),
        "`auto` for all": Release(asks=lambda _: AUTO),
    },
    "loop.retractAfterSeconds": {f"{each:g}": retracts_after(each) for each in (60.0, 1800.0)},
    "policy.retraction": {"none": Release(retraction=RetractionSettings(evicts=False))},
    "throttle.enabled": {"false": Release(watch=WatchSettings(can_throttle=False))},
    "loop.enabled": {"false": Release(loop=False)},
    "policy.reserveAfterSeconds": {
        f"{each:g}": Release(reserve_after_seconds=each) for each in (0.0, 600.0, 5400.0)
    },
    "other luck": {"": Release(luck=100)},
}
"""Setting -> value -> the release with it."""


@dataclass(slots=True)
class Stops:
    """Stopped tenants, and for how long."""

    seconds: float = 0.0
    jobs: set[int] = field(default_factory=set)

    def add(self, cluster, _rates, until):
        for tenants in cluster.gpus:
            for tenant in tenants:
                if tenant.duty_ratio < 1.0:
                    self.seconds += (1.0 - tenant.duty_ratio) * (until - cluster.now_seconds)
                    self.jobs.add(tenant.job)


def measure(world: TableWorld, release: Release, drawn: Sequence[Job], gpus: int, seed: int) -> dict[str, object]:
    """Run the jobs once; slowdowns are seconds on GPUs over seconds alone on a whole one."""
    jobs, stops = release.jobs(drawn, world.truth), Stops()
    outcome = simulate(jobs, gpus, release.policy(world, seed), world.truth, on_span=stops.add)

    def keeps(tenants):
        return world.search.keeps([Asker.of(jobs[job]) for job, _ in tenants], [cap for _, cap in tenants])

    figures = table_figures(outcome, jobs, keeps)
    slowdowns = [job.slowdown for job in outcome.jobs]
    return {
        "throughput": figures.throughput,
        "makespan_seconds": figures.makespan_seconds,
        "completion_seconds": figures.mean_completion_seconds,
        "wait_seconds": figures.waits["all"].mean,
        "longest_wait_seconds": figures.waits["all"].longest,
        "below_promise": figures.late_ratio,
        "slowdown_median": float(np.median(slowdowns)),
        "slowdown_p95": float(np.percentile(slowdowns, 95)),
        "latency_p99": figures.latency_p99,
        "stopped": stops.seconds / sum(job.run_seconds for job in outcome.jobs),
        "throttled": len(stops.jobs),
        "retracted": figures.retractions,
        "needless": figures.needless,
    }


def sweep(found: Path, count: int, gpus: int, settings: Sequence[str]) -> Iterator[str]:
    """Make the runs that the file lacks, and write each at its end."""
    lines = found.read_text().splitlines() if found.exists() else []
    done = {tuple(json.loads(line)[key] for key in ("setting", "value", "load", "seed")) for line in lines}
    truth = TableTruth(complete_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    world = TableWorld(truth, default_model().for_gpu(truth.gpu_model))
    for setting in settings:
        for value, release in SETTINGS[setting].items():
            for load in LOADS:
                for seed in SEEDS:
                    if (setting, value, load, seed) in done:
                        continue
                    drawn = draw_table_jobs(truth, count, gpus=gpus, load=load, seed=seed)
                    figures = measure(world, release, drawn, gpus, seed)
                    run = {"setting": setting, "value": value, "load": load, "seed": seed, **rounded(figures)}
                    with found.open("a") as file:
                        file.write(json.dumps(run) + "\n")
                    yield json.dumps(run)


def rounded(figures: Mapping[str, object]) -> dict[str, object]:
    return {
        name: (None if math.isnan(value) else float(f"{value:.5g}")) if isinstance(value, float) else value
        for name, value in figures.items()
    }


def main(argv: Sequence[str]) -> None:
    options = argparse.ArgumentParser(prog="python -m bench tuning", description=__doc__.split("\n", 1)[0])
    options.add_argument("output", metavar="FILE", type=Path)
    options.add_argument("--jobs", type=int, default=160)
    options.add_argument("--gpus", type=int, default=8)
    options.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    asked = options.parse_args(argv)
    for line in sweep(asked.output, asked.jobs, asked.gpus, asked.settings):
        print(line, flush=True)
