"""Find which figures of a profile predict which of two uncapped programs runs faster.

    python -m gpushare.research.studies.interference_strengths DATASET

Fits one strength to each program from the pairs that contend (caps above 100 in sum, progress below 1.35 in sum):
the logarithm of the two progresses' ratio is the difference of strengths, half of it credited to unequal caps.
Prints the correlation of strengths with figures of the solo profile, and the highest DRAM bandwidth used.
"""

import sys
from pathlib import Path

import numpy as np

from gpushare.research.dataset import parse
from gpushare.research.interference.fit import sets_of

RIDGE = 0.3
FEWEST = 3  # pairs of a program for its strength to count


def main(path: str) -> None:
    """Print the correlations, largest first."""
    data = parse(Path(path).read_bytes().splitlines())
    sets = sets_of(data)
    rows, ratios = [], []
    for at, progress in enumerate(sets.progress):
        caps = sets.caps(at)
        if len(progress) != 2 or sum(caps) <= 100 or sum(progress) >= 1.35:
            continue
        one, other = (sets.cells[cell][0] for cell in sets.index[at])
        row = np.zeros(len(sets.workloads))
        row[one] += 1
        row[other] -= 1
        rows.append(row)
        ratios.append(np.log(max(progress[0], 0.02) / max(progress[1], 0.02)) - 0.5 * np.log(caps[0] / caps[1]))
    design = np.array(rows)
    strength = np.linalg.solve(design.T @ design + RIDGE * np.eye(design.shape[1]), design.T @ np.array(ratios))
    counted = np.abs(design).sum(axis=0) >= FEWEST
    print(f"{len(rows)} pairs, {counted.sum()} programs")
    numbers = {
        name: np.array([getattr(profile.counters, name) or 0.0 for profile in sets.profiles])
        for name in ("sm_util", "sm_occupancy", "graphics_util", "dram_bw_util", "any_tensor_util", "integer_util")
    }
    numbers["log(1.02 - sm_util)"] = np.log(1.02 - numbers["sm_util"])
    numbers["log of the iteration's time"] = -np.log([p.iterations_per_s or 1.0 for p in sets.profiles])
    related = {name: np.corrcoef(each[counted], strength[counted])[0, 1] for name, each in numbers.items()}
    for name, value in sorted(related.items(), key=lambda item: -abs(item[1])):
        print(f"{name:30s} {value:+.2f}")
    drawn = [
        sum(
            p * (sets.profiles[sets.cells[cell][0]].counters.dram_bw_util or 0.0)
            for p, cell in zip(progress, sets.index[at], strict=True)
        )
        for at, progress in enumerate(sets.progress)
    ]
    shown = [run.counters.dram_bw_util or 0.0 for run in data.runs]
    print(f"DRAM: sets' progress by solo counters at most {max(drawn):.3f}, the device's at most {max(shown):.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
