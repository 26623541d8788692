"""Explain why each job was retracted on the table: `python -m bench retractions --seed 1 --load 2`.

Of every retraction of ours: what the loop said, and what the table says that a throttle could have done at that
moment. The slack is the least of any tenant's progress less its promise, under the best duties of at most two
throttled tenants, in steps of a tenth.
"""

import argparse
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpushare.core.api import JobClass
from gpushare.core.control import GpuWatch
from gpushare.data import default_model
from gpushare.research.shipped_table import complete_table
from gpushare.sim.jobs import JobCluster, JobRetraction, mixture, simulate
from gpushare.sim.table_catalog import TableWorld
from gpushare.sim.table_hindsight import Asker
from gpushare.sim.table_ours import LiveOnTable, known_profiles
from gpushare.sim.table_report import is_needless, table_figures
from gpushare.sim.table_trace import draw_table_jobs
from gpushare.sim.table_truth import TableTruth
from gpushare.sim.truth import TenantKind

DUTIES = [step / 10 for step in range(1, 11)]
MOST_THROTTLED = 2
GPU_MEMORY_MIB = 143_771


class Cause(StrEnum):
    LASTING = "a throttle kept the promises for 300 s, and sharing cost more than it brought, by the loop's belief"
    KEPT = "the window showed the promise kept, a belief from former windows did not"
    UNKEEPABLE = "no throttle keeps every promise"
    PROMISE = "the agent tells another promise than the table"
    INFERENCE = "the error of inference hides a throttle that keeps the promises"
    BELIEF = "what the loop believed of the tenants' effects hides it"


@dataclass(frozen=True)
class Slack:
    """Slack by the table; with the agent's promises; and with the error of inference in addition."""

    true: float
    told: float
    inferred: float

    def cause(self, *, is_lasting: bool, is_seen_kept: bool) -> Cause:
        if is_lasting:
            return Cause.LASTING
        if is_seen_kept:
            return Cause.KEPT
        if self.true < 0:
            return Cause.UNKEEPABLE
        if self.told < 0:
            return Cause.PROMISE
        return Cause.INFERENCE if self.inferred < 0 else Cause.BELIEF


@dataclass(frozen=True)
class Case:
    """One retraction.

    Attributes:
        joint_progress, free_progress: true sums before it, and of the others running free after it.
        program, promise, inferred, true: of the tenant whose promise it was for; None for a lasting throttle.
    """

    retraction: JobRetraction
    why: str
    cause: Cause
    slack: Slack
    joint_progress: float
    free_progress: float
    figures: tuple[str, float, float, float] | None


@dataclass
class LastWindow:
    """Last window of one GPU's agent."""

    watch: GpuWatch
    jobs: tuple[int, ...]
    true: tuple[float, ...]
    told: tuple[float, ...]
    inferred: tuple[float, ...]
    slack: Slack | None = None


@dataclass(slots=True)
class AccountedPolicy(LiveOnTable):
    """Our policy, with an account of every retraction."""

    last: dict[int, LastWindow] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    def _look(self, cluster, gpu, sight):
        true = cluster.progress(gpu)
        LiveOnTable._look(self, cluster, gpu, sight)  # noqa: SLF001
        jobs = tuple(tenant.job for tenant in cluster.gpus[gpu])
        off = [sight.standing[job] + sight.passing[job] for job in jobs]
        told = tuple(self._promise(cluster, job) for job in jobs)
        seen = LastWindow(sight.watched, jobs, true, told, tuple(map(sum, zip(true, off, strict=True))))
        if sight.watched.retract is not None:
            seen.slack = Slack(
                slack(cluster, gpu, [cluster.jobs[job].least_progress for job in jobs]),
                slack(cluster, gpu, told),
                slack(cluster, gpu, [promise - each for promise, each in zip(told, off, strict=True)]),
            )
        self.last[gpu] = seen

    def _watch(self, cluster):
        before = len(cluster.retracted)
        LiveOnTable._watch(self, cluster)  # noqa: SLF001
        for retraction in cluster.retracted[before:]:
            seen = next(each for each in self.last.values() if retraction.job in each.jobs)
            self.cases.append(case_of(cluster, retraction, seen))
            self.last = {gpu: each for gpu, each in self.last.items() if each is not seen}


def slack(cluster: JobCluster, gpu: int, promises: Sequence[float]) -> float:
    """Return the least slack of any promise under the best duties."""
    found = -1.0
    can = [cluster.jobs[tenant.job].job_class is JobClass.THROUGHPUT for tenant in cluster.gpus[gpu]]
    for duties in itertools.product(*(DUTIES if each else [1.0] for each in can)):
        if sum(duty < 1.0 for duty in duties) <= MOST_THROTTLED:
            made = mixture(cluster.rates_of, cluster.kinds(gpu), duties)
            found = max(found, min(each - promise for each, promise in zip(made, promises, strict=True)))
    return found


def case_of(cluster: JobCluster, retraction: JobRetraction, seen: LastWindow) -> Case:
    why = seen.watch.retract_why
    is_lasting = " of the time for " in why
    at = None if is_lasting else seen.jobs.index(int(why.split()[0]))
    is_seen_kept = at is not None and seen.inferred[at] >= seen.told[at]
    others = [(job, cap) for job, cap in retraction.tenants if job != retraction.job]
    kinds = tuple(TenantKind(cluster.jobs[job].workload, cap) for job, cap in others)
    figures = None
    if at is not None:
        figures = cluster.jobs[seen.jobs[at]].workload, seen.told[at], seen.inferred[at], seen.true[at]
    assert seen.slack is not None, "somebody was asked to leave"
    return Case(
        retraction,
        why,
        seen.slack.cause(is_lasting=is_lasting, is_seen_kept=is_seen_kept),
        seen.slack,
        sum(seen.true),
        sum(cluster.rates_of(kinds)),
        figures,
    )


def main(argv: Sequence[str]) -> None:
    options = argparse.ArgumentParser(prog="python -m bench retractions", description=__doc__.split("\n", 1)[0])
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--load", type=float, default=2.0)
    options.add_argument("--jobs", type=int, default=500)
    options.add_argument("--gpus", type=int, default=16)
    options.add_argument("--verbose", action="store_true", help="each retraction, not only the counts")
    asked = options.parse_args(argv)
    for line in report(asked.seed, asked.load, asked.jobs, asked.gpus, verbose=asked.verbose):
        print(line)


def report(seed: int, load: float, count: int, gpus: int, *, verbose: bool) -> list[str]:
    """Simulate one seed, and count the retractions by cause."""
    truth = TableTruth(complete_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    world = TableWorld(truth, default_model().for_gpu(truth.gpu_model))
    jobs = draw_table_jobs(truth, count, gpus=gpus, load=load, seed=seed)
    policy = AccountedPolicy(
        world.model, truth.gpu_model, known_profiles(truth, seed), seed, release=world.release
    )
    outcome = simulate(jobs, gpus, policy, truth)

    def keeps(tenants: Sequence[tuple[int, int]]) -> bool:
        return world.search.keeps([Asker.of(jobs[job]) for job, _ in tenants], [cap for _, cap in tenants])

    ends = {index: job.end_seconds for index, job in enumerate(outcome.jobs)}
    found: Counter[tuple[str, bool, bool]] = Counter()
    lines = []
    for case in policy.cases:
        needless = is_needless(case.retraction, ends, keeps)
        luck = needless and not keeps(case.retraction.tenants)
        found[case.cause, needless, luck] += 1
        if verbose:
            what = "by luck" if luck else "needless" if needless else "needed"
            slacks = f"{case.slack.true:.3f}, as told {case.slack.told:.3f}, as inferred {case.slack.inferred:.3f}"
            sums = f"all made {case.joint_progress:.2f}, the others free {case.free_progress:.2f}"
            at = f"{case.retraction.seconds:.0f} s, {what}, {case.cause.name}"
            lines.append(f"{at}: {case.why}; slack {slacks}; {sums}; {case.figures}")
    figures = table_figures(outcome, jobs, keeps)
    lines.append(
        f"seed {seed}, load {load:g}: throughput {figures.throughput:.3f}, "
        f"below the promise {figures.late_ratio:.2%}, {figures.retractions} of {count} retracted, "
        f"{figures.needless} needless, {sum(n for (_, _, luck), n in found.items() if luck)} of them by luck"
    )
    for (cause, needless, luck), number in sorted(found.items()):
        what = "needless, by luck" if luck else "needless" if needless else "needed"
        lines.append(f"{number:3d} {what}: {cause}")
    return lines
