"""Plot the interference model on workloads it has not seen: predicted against measured, coverage, caps.

python -m gpushare.research.studies.plot_interference \
    src/gpushare/data/h200-colocation.jsonl docs/measurements/interference.png
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from gpushare.research.dataset import parse
from gpushare.research.interference.evaluate import EvaluationProtocol, judged_tenants
from gpushare.research.interference.fit import MEMBERS, Sets, sets_of, unfitted


def plot(sets: Sets, rows: np.ndarray, output: Path) -> None:
    """Draw the plots; rows: tenants of unseen workloads; columns: size, measured, predicted, lower, upper."""
    size, true, predicted, lower, upper = rows.T
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6))
    for count, colour in ((2, "tab:blue"), (3, "tab:orange"), (4, "tab:green")):
        of = size == count
        left.plot(true[of], predicted[of], ".", color=colour, alpha=0.4, markersize=4, label=f"{count} tenants")
    left.plot([0, 1.1], [0, 1.1], color="grey", linewidth=0.8)
    left.set(xlabel="measured progress", ylabel="predicted progress", title="unseen workloads")
    left.legend()
    edges = np.linspace(0, 1, 9)
    inside = (true >= lower) & (true <= upper)
    where = np.digitize(predicted, edges)
    shares = [inside[where == bin_].mean() if (where == bin_).any() else np.nan for bin_ in range(1, 9)]
    middle.bar((edges[1:] + edges[:-1]) / 2, shares, width=0.11)
    middle.axhline(0.9, color="grey", linewidth=0.8)
    middle.set(xlabel="predicted progress", ylabel="share inside the 90% interval", ylim=(0, 1), title="coverage")
    for name, profile in zip(sets.workloads, sets.profiles, strict=True):
        caps = sorted(profile.cap_curve)
        right.plot(caps, [profile.cap_curve[cap] for cap in caps], color="tab:blue", alpha=0.35, label=name)
    right.set(
        xlabel="thread percentage", ylabel="progress alone", title=f"cap curves of {len(sets.workloads)} programs"
    )
    figure.tight_layout()
    figure.savefig(output, dpi=70)


if __name__ == "__main__":
    data = parse(Path(sys.argv[1]).read_bytes().splitlines())
    all_sets = sets_of(data)
    unseen = judged_tenants(
        all_sets,
        unfitted(data, all_sets, 1),
        EvaluationProtocol.UNSEEN_WORKLOAD,
        seed=1,
        members=MEMBERS,
        done=lambda *_: None,
    )
    plot(all_sets, unseen, Path(sys.argv[2]))
