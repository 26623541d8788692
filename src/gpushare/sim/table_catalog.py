"""Every policy that is scored by the table, and one run of all of them on the same jobs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from gpushare.core.interference import InterferenceModel, Prediction, TenantTable
from gpushare.core.placement import Settings
from gpushare.sim.jobs import Job, JobPolicy, simulate
from gpushare.sim.table_hindsight import Asker, Hindsight, TableSearch
from gpushare.sim.table_live import ReadOnTable
from gpushare.sim.table_ours import LiveOnTable, known_profiles
from gpushare.sim.table_policies import HardCaps, exclusive, mps_equal, mps_pairs, time_slicing
from gpushare.sim.table_report import TableFigures, table_figures
from gpushare.sim.table_trace import as_table_jobs, draw_table_jobs
from gpushare.sim.table_truth import TableTruth


@dataclass(slots=True)
class TableWorld:
    """Common parts of runs on one table; search results are kept for the next run.

    Attributes:
        release: the release's settings, used by our policy.
    """

    truth: TableTruth
    model: InterferenceModel
    release: Settings = field(default_factory=Settings)
    search: TableSearch = field(init=False)

    def __post_init__(self) -> None:
        self.search = TableSearch(self.truth)

    def ours(self, seed: int, name: str, *, watches: bool = True, learns: bool = True) -> ReadOnTable:
        """Return the live decision and loop, knowing what agents have read."""
        return self._reading(self.model, seed, name, watches=watches, learns=learns)

    def without_model(self, seed: int, name: str) -> ReadOnTable:
        """Return the live decision without profiles and model; the loop works as usual, by the counters alone."""
        return self._reading(self.model, seed, name, uses_model=False)

    def optimistic(self, seed: int, name: str) -> ReadOnTable:
        """Return the live decision and loop, knowing what was read, with predictions that are too optimistic."""
        return self._reading(OptimisticModel.of(self.model), seed, name)

    def _reading(
        self,
        model: InterferenceModel,
        seed: int,
        name: str,
        *,
        watches: bool = True,
        learns: bool = True,
        uses_model: bool = True,
    ) -> ReadOnTable:
        return ReadOnTable(
            model,
            self.truth.gpu_model,
            {},
            seed,
            name,
            watches=watches,
            learns=learns,
            release=self.release,
            uses_model=uses_model,
        )

    def told(self, seed: int, name: str, *, watches: bool = True, learns: bool = True) -> LiveOnTable:
        """Return the live decision and loop, told all signatures and cap curves before anything runs."""
        known = known_profiles(self.truth, seed)
        return LiveOnTable(
            self.model,
            self.truth.gpu_model,
            known,
            seed,
            name,
            watches=watches,
            learns=learns,
            release=self.release,
        )

    def told_without_model(self, seed: int, name: str) -> LiveOnTable:
        """Return the live decision without the model; the loop knows signatures and cap curves."""
        known = known_profiles(self.truth, seed)
        return LiveOnTable(self.model, self.truth.gpu_model, {}, seed, name, seen=known, release=self.release)

    def told_optimistic(self, seed: int, name: str) -> LiveOnTable:
        """Return the live decision and loop, told the cap curves, with predictions that are too optimistic."""
        known = known_profiles(self.truth, seed)
        hopeful = OptimisticModel.of(self.model)
        return LiveOnTable(hopeful, self.truth.gpu_model, known, seed, name, release=self.release)


OPTIMISM: Final = 1.2


class OptimisticModel(InterferenceModel):
    """A model that predicts a fifth more progress than it should, at most what a tenant makes alone."""

    @classmethod
    def of(cls, model: InterferenceModel) -> Self:
        """Return an optimistic copy of a model."""
        return cls(**{each.name: getattr(model, each.name) for each in fields(model)})

    def predict_sets(self, table: TenantTable, index: npt.NDArray[np.int64]) -> Prediction:
        """Predict sets of tenants, all bounds raised."""
        sober = super().predict_sets(table, index)
        alone = np.where(index >= 0, table.alone[np.where(index >= 0, index, 0)], 0.0)
        return Prediction(
            *(
                np.minimum(OPTIMISM * each, np.maximum(alone, each))
                for each in (sober.progress, sober.lower, sober.upper, sober.likely)
            )
        )


TABLE_POLICIES: Final[Mapping[str, Callable[[TableWorld, int], JobPolicy]]] = {
    "exclusive": lambda _world, _seed: exclusive(),
    "time-slicing": lambda _world, _seed: time_slicing(),
    "mps-pairs": lambda _world, _seed: mps_pairs(),
    "mps-equal": lambda _world, _seed: mps_equal(),
    "hard-caps": lambda _world, _seed: HardCaps(),
    "gpushare": lambda world, seed: world.ours(seed, "gpushare"),
    "gpushare-unwatched": lambda world, seed: world.ours(seed, "gpushare-unwatched", watches=False),
    "gpushare-unlearnt": lambda world, seed: world.ours(seed, "gpushare-unlearnt", learns=False),
    "gpushare-no-model": lambda world, seed: world.without_model(seed, "gpushare-no-model"),
    "gpushare-optimistic": lambda world, seed: world.optimistic(seed, "gpushare-optimistic"),
    "gpushare-told-curves": lambda world, seed: world.told(seed, "gpushare-told-curves"),
    "gpushare-unwatched-told-curves": lambda world, seed: world.told(
        seed, "gpushare-unwatched-told-curves", watches=False
    ),
    "gpushare-unlearnt-told-curves": lambda world, seed: world.told(
        seed, "gpushare-unlearnt-told-curves", learns=False
    ),
    "gpushare-no-model-told-curves": lambda world, seed: world.told_without_model(
        seed, "gpushare-no-model-told-curves"
    ),
    "gpushare-optimistic-told-curves": lambda world, seed: world.told_optimistic(
        seed, "gpushare-optimistic-told-curves"
    ),
    "hindsight": lambda world, _seed: Hindsight(world.search),
}
"""(world, seed) -> policy.

`gpushare` and its variants know what agents have read. With `-told-curves` they know every program's signature and
cap curve, with noise, before anything runs, and see the true progress with a drawn error: an upper figure.
"""


def run_on_table(
    world: TableWorld, policies: Sequence[str], *, jobs: int | Sequence[Job], gpus: int, load: float, seed: int
) -> dict[str, TableFigures]:
    """Run the same jobs under each policy.

    Args:
        jobs: the number of jobs to draw for the load, or the jobs.

    Raises:
        SimulationError: a policy leaves jobs waiting for ever.
    """
    drawn: Sequence[Job]
    if isinstance(jobs, int):
        drawn = draw_table_jobs(world.truth, jobs, gpus=gpus, load=load, seed=seed)
    else:
        drawn = as_table_jobs(jobs, world.truth)

    def keeps(tenants: Sequence[tuple[int, int]]) -> bool:
        askers = [Asker.of(drawn[job]) for job, _ in tenants]
        return world.search.keeps(askers, [cap for _, cap in tenants])

    return {
        name: table_figures(simulate(drawn, gpus, TABLE_POLICIES[name](world, seed), world.truth), drawn, keeps)
        for name in policies
    }
