"""Attribution on programs that the interference model never saw.

`python -m gpushare.research.studies.attribution_unseen DATASET FOLD...`

For each fold, every fifth program is left out of the fit (a minute), and the sets with one of them are scored;
then all folds together. With --as-live, profiles have no more than a node agent sees: counters at 100%, no caps,
no rates.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gpushare.core.interference.prior import expectation
from gpushare.core.progress.attribution import Predict, Prior, TenantLoad
from gpushare.research.attribution_score import AttributionScore, score
from gpushare.research.dataset import Dataset, parse
from gpushare.research.interference.fit import FOLDS, fit_model


def without_caps(data: Dataset) -> Dataset:
    """Drop the solo runs under a cap."""
    runs = tuple(run for run in data.runs if not run.is_solo or run.tenants[0].thread_percentage == 100)
    return dataclasses.replace(data, runs=runs)


def without_rates(predict: Predict) -> Predict:
    """Hide the rates from the model."""

    def told(loads: Sequence[TenantLoad]) -> Sequence[Prior | None]:
        return predict([dataclasses.replace(load, iterations_per_s=None) for load in loads])

    return told


def show(scores: dict[int, AttributionScore]) -> None:
    for size, each in scores.items():
        print(f"  {size} tenants: mae {each.mae:.3f} median {each.median:.3f} p90 {each.p90:.3f} n {each.n}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("folds", type=int, nargs="+", choices=range(FOLDS))
    parser.add_argument("--as-live", action="store_true")
    read = parser.parse_args()
    source = read.dataset.read_bytes()
    data = parse(source.splitlines())
    names = sorted(data.solo)
    by_size: dict[int, list[AttributionScore]] = {}
    for fold in read.folds:
        left_out = set(names[fold::FOLDS])
        seen = tuple(run for run in data.runs if not any(t.workload in left_out for t in run.tenants))
        rest = tuple(run for run in data.runs if run.is_solo or any(t.workload in left_out for t in run.tenants))
        train, test = dataclasses.replace(data, runs=seen), dataclasses.replace(data, runs=rest)
        predict = expectation(fit_model(train, seed=1, source=source, progress=lambda *_: None, members=1))
        if read.as_live:
            test, predict = without_caps(test), without_rates(predict)
        print(f"fold {fold}, left out: {', '.join(sorted(left_out))}")
        scores = score(test, predict)
        show(scores)
        for size, each in scores.items():
            by_size.setdefault(size, []).append(each)
    print("all of these folds")
    for size, parts in sorted(by_size.items()):
        n = sum(each.n for each in parts)
        mae = sum(each.mae * each.n for each in parts if each.n) / n
        print(f"  {size} tenants: mae {mae:.3f} n {n} unknown {sum(each.unknown for each in parts)}")


if __name__ == "__main__":
    main()
