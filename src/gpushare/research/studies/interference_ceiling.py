"""Estimate the best possible score of a choice of caps: that of a second measurement.

    python -m gpushare.research.studies.interference_ceiling DATASET [--probed]

Chooses among the measured caps of each set by its measured progress with new errors of 0.012 each (a standard
deviation: pairs measured twice differ by 0.017) and prints the mean score over 50 draws: summed progress of what
is chosen over that of the best as it was measured, which is partly the luckiest.
"""

import sys
from pathlib import Path

import numpy as np

from gpushare.research.dataset import parse
from gpushare.research.interference.evaluate import chosen_caps
from gpushare.research.interference.fit import sets_of

ERROR = 0.012  # progress; docs/measurements/interference.md
DRAWS = 50


def main(path: str, *, probed: bool) -> None:
    """Print the mean score, and its range."""
    sets = sets_of(parse(Path(path).read_bytes().splitlines()))
    chance = np.random.default_rng(1)
    scores = []
    for _ in range(DRAWS):
        again = {}
        for at in sets.probed() if probed else range(len(sets.index)):
            seen = np.array(sets.progress[at]) + chance.normal(0.0, ERROR, len(sets.progress[at]))
            again[at] = np.stack([seen] * 4, axis=1)
        scores.append(chosen_caps(sets, again)[0])
    print(f"{np.mean(scores):.3f} ({min(scores):.3f} to {max(scores):.3f})")


if __name__ == "__main__":
    main(sys.argv[1], probed="--probed" in sys.argv[2:])
