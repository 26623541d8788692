"""Every job-level policy by name, made for a given truth.

`gpushare` is the live decision; the policies of other systems keep the search that their papers describe.
"""

from collections.abc import Callable
from typing import Final

from gpushare.core.interference import InterferenceModel
from gpushare.sim import job_policies as plain
from gpushare.sim import job_policies_learned as learned
from gpushare.sim.job_policy_gavel import GavelPairs
from gpushare.sim.job_policy_gpushare import GpuSharePolicy
from gpushare.sim.jobs import JobPolicy, SimulationError
from gpushare.sim.truth import DatasetTruth, Truth

Make = Callable[[Truth, InterferenceModel, int], JobPolicy]
"""(truth, the model that a release ships, seed) -> policy."""


def _mig(truth: Truth, _model: InterferenceModel, _seed: int) -> JobPolicy:
    if not isinstance(truth, DatasetTruth):
        raise SimulationError(
            "policy mig needs a colocation dataset with capped solo runs; a table of pairs has none"
        )
    return plain.Mig(truth)


def _mps_equal(truth: Truth, _model: InterferenceModel, _seed: int) -> JobPolicy:
    if not truth.has_caps:
        raise SimulationError("policy mps-equal needs a colocation dataset with caps; a table of pairs has none")
    return plain.MpsEqual()


def _ours(truth: Truth, model: InterferenceModel, _seed: int) -> JobPolicy:
    if not isinstance(truth, DatasetTruth):
        raise SimulationError(
            "policy gpushare decides by GPU counters and sets caps; a table of pairs has neither"
        )
    return GpuSharePolicy(model, truth.gpu_model, truth.profiles)


POLICIES: Final[dict[str, Make]] = {
    "fifo": lambda _t, _p, _s: plain.Fifo(),
    "time-slicing": lambda _t, _p, _s: plain.TimeSlicing(),
    "mps-uncapped": lambda _t, _p, _s: plain.MpsUncapped(),
    "mps-equal": _mps_equal,
    "mig": _mig,
    "salus": lambda _t, _p, _s: plain.Salus(),
    "gandiva": lambda _t, _p, _s: plain.Gandiva(),
    "gavel": lambda _t, _p, _s: GavelPairs(),
    "kace": lambda truth, _p, _s: learned.kace(truth),
    "oracle": lambda truth, _p, _s: learned.kace_oracle(truth),
    "random": lambda _t, _p, seed: learned.kace_random(seed),
    "by-memory": lambda truth, _p, _s: learned.kace_by_memory(truth),
    "by-sm": lambda truth, _p, _s: learned.kace_by_sm(truth),
    "best-rule": lambda truth, _p, _s: learned.kace_best_rule(truth),
    "xu": lambda truth, _p, seed: learned.xu_random_forest(truth, seed),
    "gpushare": _ours,
}
