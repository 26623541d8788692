"""Every policy that is judged by the table, and one run of all of them on the same jobs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpushare.core.interference import InterferenceModel
from gpushare.sim.jobs import JobPolicy, simulate
from gpushare.sim.table_hindsight import Asker, Hindsight, TableSearch
from gpushare.sim.table_policies import HardCaps, exclusive, mps_equal, mps_pairs, time_slicing
from gpushare.sim.table_report import TableFigures, table_figures
from gpushare.sim.table_trace import draw_table_jobs
from gpushare.sim.table_truth import TableTruth


@dataclass(slots=True)
class TableWorld:
    """What runs on one table have in common; what a search found is kept for the next run."""

    truth: TableTruth
    model: InterferenceModel
    search: TableSearch = field(init=False)

    def __post_init__(self) -> None:
        self.search = TableSearch(self.truth)


TABLE_POLICIES: Final[Mapping[str, Callable[[TableWorld, int], JobPolicy]]] = {
    "exclusive": lambda _world, _seed: exclusive(),
    "time-slicing": lambda _world, _seed: time_slicing(),
    "mps-pairs": lambda _world, _seed: mps_pairs(),
    "mps-equal": lambda _world, _seed: mps_equal(),
    "hard-caps": lambda _world, _seed: HardCaps(),
    "hindsight": lambda world, _seed: Hindsight(world.search),
}
"""(world, seed) -> policy."""


def run_on_table(
    world: TableWorld, policies: Sequence[str], *, jobs: int, gpus: int, load: float, seed: int
) -> dict[str, TableFigures]:
    """Run the same jobs under each policy.

    Raises:
        SimulationError: a policy leaves jobs waiting for ever.
    """
    drawn = draw_table_jobs(world.truth, jobs, gpus=gpus, load=load, seed=seed)

    def keeps(tenants: Sequence[tuple[int, int]]) -> bool:
        askers = [Asker.of(drawn[job]) for job, _ in tenants]
        return world.search.keeps(askers, [cap for _, cap in tenants])

    return {
        name: table_figures(simulate(drawn, gpus, TABLE_POLICIES[name](world, seed), world.truth), drawn, keeps)
        for name in policies
    }
