"""Find what ours loses because it knows only what agents have read, giving it one kind of knowledge at a time:
`python -m bench knowledge --seeds 10 11 --jobs 250`.

Every variant runs the same jobs on the table. Each line: throughput, below the promise, latency p99, retractions
and needless ones, mean completion; then the error of what the agents infer of tenants that share: mean absolute
error, bias, and the same for promises against the table's.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bench.retractions import GPU_MEMORY_MIB
from gpushare.core.api import CapPoint, JobClass, WorkloadSignature
from gpushare.core.control import SloSign, WatchedTenant, WatchSettings
from gpushare.data import default_model
from gpushare.research.shipped_table import complete_table
from gpushare.sim.jobs import Job, JobCluster, JobTenant, simulate
from gpushare.sim.table_agents import CounterNoise
from gpushare.sim.table_catalog import TableWorld
from gpushare.sim.table_hindsight import Asker
from gpushare.sim.table_live import ReadOnTable
from gpushare.sim.table_ours import CURVE_CAPS, TableSight, share_name
from gpushare.sim.table_report import TableFigures, table_figures
from gpushare.sim.table_reports import TableReports
from gpushare.sim.table_trace import draw_table_jobs
from gpushare.sim.table_truth import TableTruth

SURE = 0.02  # error that is told with true progress
TARGET_SECONDS = 10.0  # window of requests of a latency target


@dataclass(slots=True)
class Studied(ReadOnTable):
    """Ours as it is, or with the truth in place of a part of what it knows.

    Attributes:
        true_progress: whether the loop sees the true progress.
        true_promise: whether the loop keeps the promises by the table's cap curves.
        raised: factor on what class throughput is promised, by the loop and where a pod is placed.
        targets: whether jobs of class latency name a target, which they meet while they make what the table
            promises them.
        reports: whether jobs of class throughput report their rate, with what the table promises them as target.
        told: whether every program's signature and cap curve are known before anything runs.
        inferred: of tenants that share, (inferred, true, promise told, promise by the table).
        late: job-seconds below the promise by the table, by why.
        seconds: job-seconds on GPUs.
    """

    true_progress: bool = False
    true_promise: bool = False
    raised: float = 1.0
    targets: bool = False
    reports: bool = False
    told: bool = False
    inferred: list[tuple[float, float, float, float]] = field(default_factory=list)
    late: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    _blind: set[int] = field(default_factory=set)
    _last: dict[int, tuple[float | None, float]] = field(default_factory=dict)
    _reports: TableReports = field(init=False)

    def __post_init__(self) -> None:
        ReadOnTable.__post_init__(self)
        self._reports = TableReports(np.random.default_rng([self.seed, 14]))

    def _begin(self, cluster: JobCluster) -> None:
        ReadOnTable._begin(self, cluster)  # noqa: SLF001 - its base
        truth = cluster.truth
        if self.told and isinstance(truth, TableTruth):
            for name in truth.workloads:
                curve = tuple(CapPoint(cap, round(truth.alone(name, cap), 4)) for cap in CURVE_CAPS)
                counters = truth.profiles[name].counters.as_dict()
                kept = WorkloadSignature(self.gpu_model, counters, cap_curve=curve, window_seconds=120.0)
                self._shares.kept[share_name(name)] = kept
            self._shares.version += 1

    def _watched(self, cluster: JobCluster, gpu: int, sight: TableSight) -> tuple[WatchedTenant, ...]:
        found = ReadOnTable._watched(self, cluster, gpu, sight)  # noqa: SLF001 - its base
        shown = []
        for each, true in zip(found, cluster.progress(gpu), strict=True):
            promise = cluster.jobs[int(each.uid)].least_progress
            if len(found) > 1 and each.progress is not None and each.active:
                self.inferred.append((each.progress, true, each.promise, promise))
            now = each
            if self.true_progress and true > 0:
                now = replace(now, progress=true, error=SURE, active=True)
            if self.true_promise:
                now = replace(now, promise=promise)
            if self.targets and each.job_class is JobClass.LATENCY and true > 0:
                now = replace(now, slo=_target(true, promise, cluster.now_seconds))
            shown.append(now)
        if self.reports:
            shown = list(self._with_reports(cluster, gpu, sight, shown))
        self._last |= {int(each.uid): (each.progress, each.promise) for each in shown}
        return tuple(shown)

    def _with_reports(
        self, cluster: JobCluster, gpu: int, sight: TableSight, tenants: Sequence[WatchedTenant]
    ) -> tuple[WatchedTenant, ...]:
        agent = self._agents[gpu]
        uid_of = {cluster.jobs[tenant.job].name: str(tenant.job) for tenant in cluster.gpus[gpu]}
        return self._reports.seen(
            tenants,
            cluster.now_seconds,
            self.settings,
            since=max(sight.watched.changed_at, sight.since_seconds, agent.read_at),
            predicted_errors={
                uid_of[name]: error for name, error in agent.predicted_errors.items() if name in uid_of
            },
            throttled=sight.watched.duties,
        )

    def _awaits_reports(self, sight: TableSight) -> bool:
        since = max(sight.watched.changed_at, sight.since_seconds)
        return self.reports and self._reports.awaits(sight.jobs, since, sight.watched.seen_at)

    def _admitted(self, cluster: JobCluster, job: int) -> Job:
        asked = cluster.jobs[job]
        if (job, cluster.retractions.get(job, 0)) not in self._as_admitted:
            is_blind = asked.is_auto and not self._is_profiled(asked.workload)
            (self._blind.add if is_blind else self._blind.discard)(job)
        admitted = ReadOnTable._admitted(self, cluster, job)  # noqa: SLF001 - its base
        if self.raised == 1.0 or admitted.job_class is not JobClass.THROUGHPUT:
            return admitted
        return replace(admitted, max_slowdown=max(1.0, admitted.max_slowdown / self.raised))

    def add(self, cluster: JobCluster, rates: Mapping[int, float], until: float) -> None:
        """Count a stretch of constant rates from now on."""
        elapsed = until - cluster.now_seconds
        for gpu, tenants in enumerate(cluster.gpus):
            for tenant in tenants:
                self.seconds += elapsed
                job, true = cluster.jobs[tenant.job], rates.get(tenant.job, 0.0)
                self._count(cluster, tenant.job, true, until)
                if true < job.least_progress * (1 - 1e-6):
                    self.late[self._why_late(cluster, gpu, tenant, true)] += elapsed

    def _count(self, cluster: JobCluster, number: int, true: float, until: float) -> None:
        job, truth = cluster.jobs[number], cluster.truth
        if not self.reports or job.job_class is not JobClass.THROUGHPUT or not isinstance(truth, TableTruth):
            return
        alone = truth.rate_alone(job.workload)
        self._reports.begin(number, job.least_progress * alone, alone, cluster.now_seconds)
        self._reports.advance(number, true, until)

    def _why_late(self, cluster: JobCluster, gpu: int, tenant: JobTenant, true: float) -> str:
        job = cluster.jobs[tenant.job]
        inferred, promise = self._last.get(tenant.job, (None, 0.0))
        if tenant.ready_seconds > cluster.now_seconds:
            return "it restarts"
        if tenant.is_stopped:
            return "it is stopped for a reading"
        if cluster.truth.alone(job.workload, tenant.thread_percentage) < job.least_progress:
            if not job.is_auto:
                return "its cap is too small even alone"
            how = "before a profile" if tenant.job in self._blind else "from the profile"
            return f"its cap is too small even alone: auto {how}"
        if inferred is None:
            return "nothing is inferred of it"
        if true >= promise:
            known = self._agents[gpu].signatures.of(self._pod(job), self.gpu_model)
            how = "by its profile" if known is not None else "of an unknown program"
            return f"the agent promises less than the table, {how}"
        if inferred >= promise:
            return "inferred to keep its promise"
        return "seen, and being mended or not mendable"


def _target(true: float, promise: float, now: float) -> SloSign:
    """Return the state of a target of one second: a request takes as much longer as its program is slower."""
    took = promise / true
    return SloSign(took > 1 + 1e-6, now - TARGET_SECONDS, took, 1.0, f"has a p99 of {took:.2f} s, target 1 s")


MakeStudied = Callable[[TableWorld, int], Studied]


def _ours(**fields: object) -> MakeStudied:
    def make(world: TableWorld, seed: int) -> Studied:
        return Studied(world.model, world.truth.gpu_model, {}, seed, release=world.release, **fields)  # type: ignore[arg-type]

    return make


VARIANTS: Mapping[str, MakeStudied] = {
    "ours": _ours(),
    "true progress": _ours(true_progress=True),
    "true promises": _ours(true_promise=True),
    "true progress and promises": _ours(true_progress=True, true_promise=True),
    "class latency names targets": _ours(targets=True),
    "every job names a target": _ours(targets=True, reports=True),
    "told signatures and curves": _ours(told=True),
    "told, true progress and promises": _ours(told=True, true_progress=True, true_promise=True),
    "a tenth more promised": _ours(raised=1.1),
    "acts at a third of its error": _ours(settings=WatchSettings(confidence=0.3)),
    "no noise in counters": _ours(noise=CounterNoise(0.0, 0.0, 0.0)),
    "unlearnt": _ours(learns=False),
    "unwatched": _ours(watches=False),
}


def figures_of(world: TableWorld, policy: Studied, jobs: Sequence[Job], gpus: int) -> TableFigures:
    """Run one variant."""

    def keeps(tenants: Sequence[tuple[int, int]]) -> bool:
        return world.search.keeps([Asker.of(jobs[job]) for job, _ in tenants], [cap for _, cap in tenants])

    return table_figures(simulate(jobs, gpus, policy, world.truth, on_span=policy.add), jobs, keeps)


def report(seeds: Sequence[int], load: float, count: int, gpus: int, variants: Sequence[str]) -> Iterator[str]:
    """Run every variant on the same jobs of each seed."""
    truth = TableTruth(complete_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    world = TableWorld(truth, default_model().for_gpu(truth.gpu_model))
    for seed in seeds:
        jobs = draw_table_jobs(truth, count, gpus=gpus, load=load, seed=seed)
        for name in variants:
            policy = VARIANTS[name](world, seed)
            told = figures_of(world, policy, jobs, gpus)
            inferred, true, promise, right = np.array(policy.inferred or [(0.0,) * 4]).T
            yield (
                f"{seed} {name:34s} {told.throughput:.3f} {told.late_ratio:6.2%} {told.latency_p99 or 0:.2f} "
                f"{told.retractions:3d} {told.needless:3d} {told.mean_completion_seconds:6.0f}   progress "
                f"{np.abs(inferred - true).mean():.3f} {(inferred - true).mean():+.3f}   promise "
                f"{np.abs(promise - right).mean():.3f} {(promise - right).mean():+.3f}"
            )
            took = [each.took_seconds for each in policy.profiled]
            if took:
                stopped = f"{policy.stopped_seconds / policy.seconds:.2%} stopped for readings"
                median = f"{np.median(took):.1f} s in the median, {max(took):.1f} s at most"
                yield f"{'':36s} {len(took)} programs profiled in place, after {median}; {stopped}"
            for why, seconds in policy.late.most_common():
                yield f"{'':36s} {seconds / policy.seconds:6.2%} {why}"


def main(argv: Sequence[str]) -> None:
    options = argparse.ArgumentParser(prog="python -m bench knowledge", description=__doc__.split("\n", 1)[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[10])
    options.add_argument("--load", type=float, default=2.0)
    options.add_argument("--jobs", type=int, default=250)
    options.add_argument("--gpus", type=int, default=16)
    options.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    asked = options.parse_args(argv)
    for line in report(asked.seeds, asked.load, asked.jobs, asked.gpus, asked.variants):
        print(line, flush=True)
