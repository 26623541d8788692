"""Measure the interference model's error on sets with workloads that it was not fitted to.

It is measured under several assignments of workloads to folds, and with more and more of each profile missing.

`python -m gpushare.research.studies.interference_unseen DATASET [SEED ...]`

Without seeds the folds are every fifth workload by name; each seed shuffles the workloads first. Prints one row an
assignment and missing part: mean absolute error and share inside the 90% interval by number of tenants.
"""

import sys
from pathlib import Path

import numpy as np

from gpushare.core.interference.profile import LACKINGS, Lacking
from gpushare.research.dataset import parse
from gpushare.research.interference.fit import (
    FOLDS,
    MEMBERS,
    fitted,
    predicted,
    predicted_poorer,
    sets_of,
    split_workloads,
    unfitted,
    with_errors,
)


def main(path: str, seeds: list[str]) -> None:
    """Fit on four folds, judge on the fifth, five times for each assignment."""
    data = parse(Path(path).read_bytes().splitlines())
    sets = sets_of(data)
    for seed in ["by name", *seeds]:
        names = list(sets.workloads)
        if seed != "by name":
            names = [names[at] for at in np.random.default_rng(int(seed)).permutation(len(names))]
        folds = []
        for fold in range(FOLDS):
            training, unseen = split_workloads(sets, fold, names)
            model = fitted(unfitted(data, sets, 1), sets, training, seed=1, members=MEMBERS, done=lambda _: None)
            folds.append((model, unseen, predicted(model, sets, unseen), predicted_poorer(model, sets, unseen)))
        rows: dict[Lacking, list[tuple[int, float, bool]]] = {what: [] for what in LACKINGS}
        for fold, (model, unseen, _, _) in enumerate(folds):
            others = [each for other, each in enumerate(folds) if other != fold]
            known = [pair for _, positions, each, _ in others for pair in zip(positions, each, strict=True)]
            poorer = {what: [pair for *_, less in others for pair in less[what]] for what in LACKINGS if what}
            calibrated = with_errors(model, sets, known, poorer)
            whole = zip(unseen, predicted(calibrated, sets, unseen), strict=True)
            for what, pairs in [(Lacking.NOTHING, whole), *predicted_poorer(calibrated, sets, unseen).items()]:
                rows[what] += [
                    (len(each), abs(true - p), low <= true <= high)
                    for at, each in pairs
                    for true, (p, low, high) in zip(sets.progress[at], each, strict=True)
                ]
        for what, judged in rows.items():
            table = np.array(judged)
            cells = [
                f"{size}: {table[own, 1].mean():.3f} {100 * table[own, 2].mean():.0f}%"
                for size in (2, 3, 4)
                if (own := table[:, 0] == size).any()
            ]
            print(seed, str(what.name).lower(), *cells, sep="  ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
