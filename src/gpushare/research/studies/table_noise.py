"""Measure how much of a table's errors is scatter of its windows, as repeated solo windows show it.

`python -m gpushare.research.studies.table_noise TABLE [--seed N]`

Prints, by number of tenants: how far a measured progress lies from its own mean, which nothing can predict; and
the error of attribution, with the shipped model as its expectation, on three kinds of counters: as measured, as
the law of attribution says plus the scatter of solo windows, and exactly as the law says. Then the same by program
in pairs.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpushare.core.gpu import Counters
from gpushare.core.interference import expectation
from gpushare.core.progress import Attribution, attribute
from gpushare.core.progress.counter_errors import CounterRow, counters_of
from gpushare.data import default_model
from gpushare.research.attribution_score import evidence_of
from gpushare.research.dataset import Dataset, RunTenant, parse

SIZES = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Noise:
    """One tenant of a set: the part of its error that scatter explains, in progress.

    Attributes:
        truth: expected distance of the measured progress from its mean.
        inferred, scattered, exact: error of attribution on the counters as measured, as the law says plus the
            scatter of solo windows, and as the law says; NaN where it calls the tenant unknown.
    """

    program: str
    tenants: int
    truth: float
    inferred: float
    scattered: float
    exact: float


def scatter(rates: Sequence[float]) -> float:
    """Return how far a window lies from the mean of many, relative to it, by the differences of these windows."""
    mean = sum(rates) / len(rates)
    differences = [abs(a - b) for a, b in itertools.combinations(rates, 2)]
    return float(np.mean(differences)) / 2**0.5 / mean if differences else 0.0


def noises(data: Dataset, seed: int) -> list[Noise]:
    """Return the noise of every tenant of every set; the seed draws windows."""
    chance = np.random.default_rng(seed)
    predict = expectation(default_model())
    found = []
    usual = {
        program: float(np.mean([scatter([run.iterations_per_s[0] for run in runs]) for runs in caps.values()]))
        for program, caps in data.solo.items()
    }
    for run, progress in data.shared_runs():
        known = evidence_of(data, run, predict)
        works = [each.capped_work or each.signature for each in known]
        assert all(work is not None for work in works)
        exact = [work for work in works if work is not None]
        moved = [_moved(data, tenant, work, chance) for tenant, work in zip(run.tenants, exact, strict=True)]
        answers = [
            attribute(run.counters, known),
            *(attribute(_device(rows, progress), known) for rows in (moved, exact)),
        ]
        for at, (tenant, truth) in enumerate(zip(run.tenants, progress, strict=True)):
            missed = [_missed(answer[at], truth) for answer in answers]
            found.append(Noise(tenant.workload, len(run.tenants), truth * usual[tenant.workload], *missed))
    return found


def _moved(data: Dataset, tenant: RunTenant, work: Counters, chance: np.random.Generator) -> Counters:
    """Return a tenant's work as a further window alone may have shown it.

    A window's distance from the mean of n, itself among them, is scaled to that of a window that is not.
    """
    runs = data.solo.get(tenant.workload, {}).get(tenant.thread_percentage, ())
    if len(runs) < 2:
        return work
    each = [
        {name: value / run.iterations_per_s[0] for name, value in run.counters.as_dict().items()} for run in runs
    ]
    drawn, scale = each[int(chance.integers(len(runs)))], ((len(runs) + 1) / (len(runs) - 1)) ** 0.5
    moved = {}
    for name, value in work.as_dict().items():
        mean = sum(one.get(name, 0.0) for one in each) / len(each)
        moved[name] = (
            max(0.0, value * (1.0 + scale * (drawn.get(name, mean) / mean - 1.0))) if mean > 0.0 else value
        )
    return Counters(**moved)


def _device(works: Sequence[Counters], progress: Sequence[float]) -> Counters:
    """Return what a GPU reads of these works at this progress, by the law of attribution."""
    measured = [True] * len(works)
    read = {}
    for name in counters_of(works[0], works):
        law = CounterRow.of(name, works[0], works, measured)
        read[name] = sum(drawn * each for drawn, each in zip(law.design, progress, strict=True))
    return Counters(**read)


def _missed(answer: Attribution, truth: float) -> float:
    return float("nan") if answer.progress_ratio is None else abs(answer.progress_ratio - truth)


def main() -> None:
    """Print the noise by number of tenants, and by program in pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    read = parser.parse_args()
    every = noises(parse(read.table.read_bytes().splitlines()), read.seed)
    print("tenants  truth  inferred  scattered  exact")
    for size in SIZES:
        _show(str(size), [each for each in every if each.tenants == size])
    for program in sorted({each.program for each in every}):
        _show(f"2 {program}", [each for each in every if each.tenants == 2 and each.program == program])


def _show(name: str, some: Sequence[Noise]) -> None:
    rows = np.array([(each.truth, each.inferred, each.scattered, each.exact) for each in some])
    print(name, *(f"{value:.3f}" for value in np.nanmean(rows, axis=0)))


if __name__ == "__main__":
    main()
