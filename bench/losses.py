"""Find where our policy loses throughput against hindsight, removing one kind of ignorance at a time:
`python -m bench losses --seeds 10 11 12 13 --jobs 250`.

Every variant runs the same jobs on the table. Each line: throughput, of hindsight, what it gains on ours in the
mean of the seeds, with the standard error of that gain; then what else a policy is judged by.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from importlib import import_module
from unittest.mock import patch

import numpy as np

from bench.lost_progress import LostProgress, why_not
from bench.retractions import GPU_MEMORY_MIB
from gpushare.core.api import SHARES_PER_GPU
from gpushare.core.interference import InterferenceModel, Prediction, Profile, TenantTable
from gpushare.core.placement import Newcomer, Settings
from gpushare.data import default_model
from gpushare.research.shipped_table import complete_table
from gpushare.sim.jobs import Job, simulate
from gpushare.sim.table_catalog import TableWorld
from gpushare.sim.table_hindsight import Asker, Hindsight
from gpushare.sim.table_ours import InferenceError, LiveOnTable, known_profiles
from gpushare.sim.table_report import TableFigures, table_figures
from gpushare.sim.table_trace import draw_table_jobs
from gpushare.sim.table_truth import TableTruth

EXACT = InferenceError(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class KnownTable(TenantTable):
    """Tenants with known programs: each one's index in the table, -1 for a program that is not in it."""

    programs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def with_more(self, more):
        both = TenantTable.with_more(self, more)
        programs = np.concatenate([self.programs, more.programs])
        return KnownTable(*(getattr(both, each.name) for each in fields(TenantTable)), programs)


class TrueModel(InterferenceModel):
    """A model whose expectation is the table's own rate, wherever the table offers a set.

    Attributes:
        is_sure: whether its bounds are the rate too; else they lie as far from it as the model's do.
    """

    truth: TableTruth
    is_sure: bool

    @classmethod
    def of(cls, model: InterferenceModel, truth: TableTruth, *, is_sure: bool) -> "TrueModel":
        made = cls(**{each.name: getattr(model, each.name) for each in fields(model)})
        object.__setattr__(made, "truth", truth)
        object.__setattr__(made, "is_sure", is_sure)
        object.__setattr__(made, "rates", {})
        return made

    def for_gpu(self, _gpu_model):
        return self

    @cached_property
    def _places(self):
        return {self.truth.rate_alone(name): at for at, name in enumerate(self.truth.workloads)}

    def table(self, profiles, thread_percentages):
        known = InterferenceModel.table(self, profiles, thread_percentages)
        programs = np.array([self._places.get(each.iterations_per_s, -1) for each in profiles], np.int64)
        return KnownTable(*(getattr(known, each.name) for each in fields(TenantTable)), programs)

    def predict_sets(self, table, index):
        prediction = InterferenceModel.predict_sets(self, table, index)
        progress = prediction.progress.copy()
        lower, upper, likely = prediction.lower.copy(), prediction.upper.copy(), prediction.likely.copy()
        for line, row in enumerate(index.tolist()):
            at = [place for place, each in enumerate(row) if each >= 0]
            found = self._rates([(int(table.programs[row[place]]), float(table.caps[row[place]])) for place in at])
            if found is not None:
                moved = found - progress[line, at]
                progress[line, at] = found
                lower[line, at] = found if self.is_sure else np.clip(lower[line, at] + moved, 0.0, None)
                upper[line, at] = found if self.is_sure else upper[line, at] + moved
                likely[line, at] = found if self.is_sure else likely[line, at] + moved
        lower = np.minimum(lower, progress)
        return Prediction(progress, lower, np.maximum(upper, progress), np.clip(likely, lower, progress))

    def _rates(self, tenants):
        key = tuple(tenants)
        if key not in self.rates:
            names = [self.truth.workloads[program] for program, _ in tenants if program >= 0]
            is_offered = names and len(names) == len(tenants) and self.truth.offers(names)
            self.rates[key] = (
                self.truth.progress_under(names, [[100 * cap for _, cap in tenants]])[0] if is_offered else None
            )
        return self.rates[key]


class FearlessModel(InterferenceModel):
    """Model without intervals for choosing places; learning from windows uses its own."""

    @classmethod
    def of(cls, model):
        return cls(**{each.name: getattr(model, each.name) for each in fields(model)})

    def for_gpu(self, _gpu_model):
        return self

    def predict(self, tenants):
        return InterferenceModel(**{each.name: getattr(self, each.name) for each in fields(self)}).predict(tenants)

    def predict_sets(self, table, index):
        prediction = InterferenceModel.predict_sets(self, table, index)
        return Prediction(*[prediction.progress] * 4)


@dataclass(slots=True)
class TrueCaps(LiveOnTable):
    """Ours, with the cap that is best by the table for the set that is there, where one keeps every promise."""

    search: object = None

    def _cap(self, cluster, job, gpu, decided):
        tenants = cluster.gpus[gpu]
        askers = [Asker.of(cluster.jobs[each]) for each in (job, *(t.job for t in tenants))]
        best = self.search.best(askers, [None, *(tenant.thread_percentage for tenant in tenants)])
        return best.caps[0] if best is not None else decided


def true_profiles(truth: TableTruth) -> dict[str, Profile]:
    """Return the true profile of each program, with its rate and memory."""
    return {
        name: replace(
            truth.true_profiles[name], iterations_per_s=truth.rate_alone(name), memory_mib=truth.memory_mib(name)
        )
        for name in truth.workloads
    }


class TiesOnly:
    """Placement policy that considers the free share that it leaves for ties only."""

    def __init__(self, policy):
        self._policy = policy

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def worth_kept(self, state, shape, rows):
        points = self._policy.worth_kept(state, shape, rows)
        return points - np.rint(points)


@dataclass(slots=True)
class GainOnly(LiveOnTable):
    """Our policy, placing each pod where it gains most, whatever free share is worth."""

    def _new_context(self, cluster):
        context = LiveOnTable._new_context(self, cluster)  # noqa: SLF001
        return replace(context, policy=TiesOnly(context.policy))


@dataclass(slots=True)
class WithQueue(LiveOnTable):
    """Our policy, expecting arrivals like the jobs that wait as much as ones like the tenants (docs/adr/0206)."""

    def _place(self, cluster, context):
        waiting = [Newcomer.of(self._request(cluster, job)) for job in cluster.queue]
        with patch.object(OUTLOOK, "mix_of", partial(mix_with, waiting)):
            LiveOnTable._place(self, cluster, context)  # noqa: SLF001


OUTLOOK = import_module("gpushare.core.placement.outlook")
SEEN_MIX = OUTLOOK.mix_of


def mix_with(waiting, judge, state, newcomer, gpu_model):
    """Return the mix of the tenants and, with the same weight, of those that wait for a part of a GPU."""
    found = Counter({kind.member: kind.weight for kind in SEEN_MIX(judge, state, newcomer, gpu_model)})
    sharing = [
        one for one in waiting if one.share_percent < SHARES_PER_GPU and not (one.known and one.known.wants_own)
    ]
    for one in sharing:
        found[one.member(gpu_model, one.share_percent).under_least_cap()] += 1 / len(sharing)
    return tuple(OUTLOOK.MixKind(member, weight / found.total()) for member, weight in found.items())


@dataclass(frozen=True)
class VariantSetting:
    """Common part of the variants."""

    table: TableWorld

    @property
    def truth(self) -> TableTruth:
        return self.table.truth

    def ours(self, seed, kind=LiveOnTable, *, model=None, profiles=None, **other):
        known = profiles or known_profiles(self.truth, seed)
        return kind(model or self.table.model, self.truth.gpu_model, known, seed, **other)

    def told(self, *, is_sure=True):
        return TrueModel.of(self.table.model, self.truth, is_sure=is_sure)


OURS, HINDSIGHT = "ours", "hindsight"
NEVER_KEEPS = Settings(reserve_after_seconds=0.0)
VARIANTS: Mapping[str, Callable[[VariantSetting, int], object]] = {
    OURS: lambda w, seed: w.ours(seed),
    "true predictions, no intervals": lambda w, seed: w.ours(
        seed, model=w.told(), profiles=true_profiles(w.truth), learns=False
    ),
    "true predictions, the model's intervals": lambda w, seed: w.ours(
        seed, model=w.told(is_sure=False), profiles=true_profiles(w.truth), learns=False
    ),
    "the model's predictions, no intervals": lambda w, seed: w.ours(seed, model=FearlessModel.of(w.table.model)),
    "true progress": lambda w, seed: w.ours(seed, error=EXACT),
    "true predictions and progress": lambda w, seed: w.ours(
        seed, model=w.told(), profiles=true_profiles(w.truth), learns=False, error=EXACT
    ),
    "true profiles alone": lambda w, seed: w.ours(seed, profiles=true_profiles(w.truth)),
    "caps by the truth": lambda w, seed: w.ours(seed, TrueCaps, search=w.table.search),
    "no fragmentation": lambda w, seed: w.ours(seed, GainOnly),
    "what waits is in the mix": lambda w, seed: w.ours(seed, WithQueue),
    "no GPU kept for who waits long": lambda w, seed: w.ours(seed, release=NEVER_KEEPS),
    "true predictions and progress, no GPU kept": lambda w, seed: w.ours(
        seed, model=w.told(), profiles=true_profiles(w.truth), learns=False, error=EXACT, release=NEVER_KEEPS
    ),
    "not watched": lambda w, seed: w.ours(seed, watches=False),
    HINDSIGHT: lambda w, _seed: Hindsight(w.table.search),
}


@dataclass(frozen=True, slots=True)
class VariantRow:
    """A variant over seeds.

    Attributes:
        figures: by seed; gains: throughput less that of ours, by seed.
    """

    name: str
    figures: Sequence[TableFigures]
    gains: Sequence[float]

    def line(self, hindsight: Sequence[TableFigures]) -> str:
        """Return its line of the table; of hindsight is the mean of the seeds' own ratios."""
        mean = {
            "throughput": np.mean([each.throughput for each in self.figures]),
            "late": np.mean([each.late_ratio for each in self.figures]),
            "retracted": np.mean([each.retractions for each in self.figures]),
            "seconds": np.mean([each.mean_completion_seconds for each in self.figures]),
        }
        of = np.mean([a.throughput / b.throughput for a, b in zip(self.figures, hindsight, strict=True)])
        spread = np.std(self.gains, ddof=1) / len(self.gains) ** 0.5 if len(self.gains) > 1 else float("nan")
        p99 = np.mean([each.latency_p99 for each in self.figures if each.latency_p99 is not None] or [np.nan])
        return (
            f"{self.name:44s} {mean['throughput']:.3f} {of:.3f} {np.mean(self.gains):+.3f} ± {spread:.3f} "
            f"{mean['late']:7.2%} {p99:.2f} {mean['retracted']:5.1f} {mean['seconds']:6.0f}"
        )


def figures_of(world: VariantSetting, name: str, jobs: Sequence[Job], gpus: int, seed: int) -> TableFigures:
    """Run one variant."""

    def keeps(tenants):
        return world.table.search.keeps([Asker.of(jobs[job]) for job, _ in tenants], [cap for _, cap in tenants])

    return table_figures(simulate(jobs, gpus, VARIANTS[name](world, seed), world.truth), jobs, keeps)


def report(seeds: Sequence[int], load: float, count: int, gpus: int, variants: Sequence[str]) -> Iterator[str]:
    """Run every variant, ours and hindsight first, on the same jobs of each seed."""
    truth = TableTruth(complete_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    world = VariantSetting(TableWorld(truth, default_model().for_gpu(truth.gpu_model)))
    jobs = {seed: draw_table_jobs(truth, count, gpus=gpus, load=load, seed=seed) for seed in seeds}
    found: dict[str, list[TableFigures]] = {}
    yield f"{'':44s} throughput, of hindsight, gain on ours, below promise, latency p99, retracted, mean s"
    for name in dict.fromkeys((HINDSIGHT, OURS, *variants)):
        found[name] = [figures_of(world, name, jobs[seed], gpus, seed) for seed in seeds]
        if OURS in found:
            shown = [HINDSIGHT, OURS] if name == OURS else [name]
            for each in shown:
                gains = [a.throughput - b.throughput for a, b in zip(found[each], found[OURS], strict=True)]
                yield VariantRow(each, found[each], gains).line(found[HINDSIGHT])


def split(seeds: Sequence[int], load: float, count: int, gpus: int, variants: Sequence[str]) -> Iterator[str]:
    """Say what the GPUs could make more at every moment, by variant, in the mean of the seeds."""
    truth = TableTruth(complete_table(), gpu_memory_mib=GPU_MEMORY_MIB)
    world = VariantSetting(TableWorld(truth, default_model().for_gpu(truth.gpu_model)))
    yield f"{'':44s} made, by better duties, by other caps, by jobs that wait; promises that no throttle keeps"
    for name in dict.fromkeys((HINDSIGHT, OURS, *variants)):
        found = []
        for seed in seeds:
            jobs = draw_table_jobs(truth, count, gpus=gpus, load=load, seed=seed)
            policy = VARIANTS[name](world, seed)
            why = partial(why_not, policy) if isinstance(policy, LiveOnTable) else None
            found.append(LostProgress(world.table.search, why))
            simulate(jobs, gpus, policy, truth, on_span=found[-1].add)
        made, duties, caps, room, unkeepable = (
            float(np.mean([getattr(each, what) / each.seconds for each in found]))
            for what in ("made", "duties", "caps", "room", "unkeepable")
        )
        yield f"{name:44s} {made:.3f} {duties:+.3f} {caps:+.3f} {room:+.3f} {unkeepable:.2%}"
        for reason in sorted({reason for each in found for reason in each.reasons if reason}):
            part = float(np.mean([each.reasons[reason] / each.seconds for each in found]))
            yield f"{'':44s} {part:+.3f} {reason}"


def main(argv: Sequence[str]) -> None:
    options = argparse.ArgumentParser(prog="python -m bench losses", description=__doc__.split("\n", 1)[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13])
    options.add_argument("--load", type=float, default=2.0)
    options.add_argument("--jobs", type=int, default=250)
    options.add_argument("--gpus", type=int, default=16)
    options.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options.add_argument(
        "--split", action="store_true", help="of each moment: duties, caps, room that is not used"
    )
    asked = options.parse_args(argv)
    tell = split if asked.split else report
    for line in tell(asked.seeds, asked.load, asked.jobs, asked.gpus, asked.variants):
        print(line, flush=True)
