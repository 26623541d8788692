"""Attribution on programs that the interference model never saw: python hack/attribution_unseen.py DATASET FOLD...

For each fold, every fifth program is left out of the fit (two minutes), and the sets with one of them are scored.
"""

import dataclasses
import sys
from pathlib import Path

from gpushare.core.attribution_score import score
from gpushare.core.dataset import parse
from gpushare.core.expectation import expectation
from gpushare.core.interference.fit import FOLDS, fit_model


def main() -> None:
    source = Path(sys.argv[1]).read_bytes()
    data = parse(source.splitlines())
    names = sorted({tenant.workload for run in data.runs for tenant in run.tenants})
    for fold in map(int, sys.argv[2:]):
        held = set(names[fold::FOLDS])
        seen = tuple(run for run in data.runs if not any(t.workload in held for t in run.tenants))
        rest = tuple(run for run in data.runs if run.is_solo or any(t.workload in held for t in run.tenants))
        train, test = dataclasses.replace(data, runs=seen), dataclasses.replace(data, runs=rest)
        model = fit_model(train, seed=1, source=source, progress=lambda *_: None, members=1)
        print(f"fold {fold}, left out: {', '.join(sorted(held))}")
        for size, each in score(test, expectation(model)).items():
            print(f"  {size} tenants: mae {each.mae:.3f} median {each.median:.3f} p90 {each.p90:.3f} n {each.n}")


if __name__ == "__main__":
    main()
