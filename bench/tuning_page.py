"""Tables and plot of docs/guide/tuning.md and docs/measurements/tuning.md, from what `bench tuning` wrote:
`python -m bench.tuning_page tests/data/tuning/h200-table.jsonl docs`.

A table of a page stands between two comments, `tuning: NAME` and `tuning: end`, and is replaced whole.
"""

import hashlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tuning import DEFAULT, LOADS, SETTINGS

TuningRun = Mapping[str, Any]
PAGES = ("guide/tuning.md", "measurements/tuning.md")
PLOT = "guide/tuning.svg"
SLOWDOWN = "policy.maxSlowdown"
DEFAULTS = {SLOWDOWN: "1.5"}
ALONE = "no sharing"
LUCK = "other luck"


def read(path: Path) -> list[TuningRun]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(runs: Sequence[TuningRun], setting: str, value: str, load: float) -> list[TuningRun]:
    """Return the runs of one value, by seed; a setting's default is the run with no setting changed."""
    if DEFAULTS.get(setting) == value:
        setting, value = DEFAULT, ""
    found = [run for run in runs if (run["setting"], run["value"], run["load"]) == (setting, value, load)]
    return sorted(found, key=lambda run: run["seed"])


def slowdowns() -> list[str]:
    """Return the values of maxSlowdown that were tried, with the default."""
    return sorted([*SETTINGS[SLOWDOWN], DEFAULTS[SLOWDOWN]], key=float)


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f}%"


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f}"


FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "throughput": ("throughput", lambda value: f"{value:.2f}"),
    "submission to end, min": ("completion_seconds", minutes),
    "waits, min": ("wait_seconds", minutes),
    "slowdown: median": ("slowdown_median", lambda value: f"{value:.2f}"),
    "95th": ("slowdown_p95", lambda value: f"{value:.2f}"),
    "latency, p99": ("latency_p99", lambda value: f"{value:.2f}"),
    "below promise": ("below_promise", lambda value: percent(value, 1)),
    "stopped": ("stopped", lambda value: percent(value, 1)),
    "throttled": ("throttled", lambda value: f"{value:g}"),
    "retracted": ("retracted", lambda value: f"{value:g}"),
}
"""Column -> figure of a run, and how it is written."""
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "throughput": ("throughput",),
    "to the end, waits (min)": ("submission to end, min", "waits, min"),
    "slowdown: median, 95th": ("slowdown: median", "95th"),
    "latency, p99": ("latency, p99",),
    "below promise, stopped": ("below promise", "stopped"),
    "throttled, retracted": ("throttled", "retracted"),
}
"""Column of the guide, which has to fit on a screen -> columns."""


def cells(runs: Sequence[TuningRun], write: Callable[[Sequence[float], Callable[[float], str]], str]) -> list[str]:
    """Return a row's figures; a dash for a run without one."""
    return [
        "-" if any(run[key] is None for run in runs) else write([run[key] for run in runs], how)
        for key, how in FIGURES.values()
    ]


def means_by_column(runs: Sequence[TuningRun]) -> list[str]:
    """Return a row of the guide: means of the seeds."""
    by_column = dict(zip(FIGURES, cells(runs, mean), strict=True))
    return [", ".join(by_column[name] for name in names) for names in TOGETHER.values()]


def mean(values: Sequence[float], how: Callable[[float], str]) -> str:
    return how(statistics.fmean(values))


def each(values: Sequence[float], how: Callable[[float], str]) -> str:
    return " / ".join(how(value) for value in values)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def by_slowdown(runs: Sequence[TuningRun]) -> str:
    """Return the rows from cautious to aggressive: means of the seeds at both loads."""
    rows = [
        [f"{load:.1f}", shown, *means_by_column(of(runs, setting, value, load))]
        for load in LOADS
        for setting, value, shown in (
            (ALONE, "", "a GPU each"),
            *(
                (SLOWDOWN, value, f"**{value}**" if value == DEFAULTS[SLOWDOWN] else value)
                for value in slowdowns()
            ),
        )
    ]
    return table(["load", "`maxSlowdown`", *TOGETHER], rows)


def others(runs: Sequence[TuningRun], load: float) -> str:
    """Return the rows of every other setting at one load, as means of the seeds."""
    rows = [
        ["", "**all as the chart sets it**", *means_by_column(of(runs, DEFAULT, "", load))],
        ["", "the same, with other luck", *means_by_column(of(runs, LUCK, "", load))],
    ]
    rows += [
        [named(setting), value, *means_by_column(found)]
        for setting, values in SETTINGS.items()
        if setting not in (DEFAULT, ALONE, SLOWDOWN, LUCK)
        for value in values
        if (found := of(runs, setting, value, load))
    ]
    return table(["setting", "is", *TOGETHER], rows)


def every(runs: Sequence[TuningRun], load: float) -> str:
    """Return the rows of every setting at one load, seed by seed."""
    rows = [
        [named(setting), value, *cells(found, each)]
        for setting, values in SETTINGS.items()
        for value in values
        if (found := of(runs, setting, value, load))
    ]
    return table(["setting", "is", *FIGURES], rows)


def named(setting: str) -> str:
    return f"`{setting}`" if "." in setting else setting


TABLES: Mapping[str, Callable[[Sequence[TuningRun]], str]] = {
    "maxSlowdown": by_slowdown,
    "others at 2.0": lambda runs: others(runs, 2.0),
    "every run at 1.2": lambda runs: every(runs, 1.2),
    "every run at 2.0": lambda runs: every(runs, 2.0),
}


def filled(page: str, runs: Sequence[TuningRun]) -> str:
    """Return a page with its tables filled from the runs."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- tuning: {match[1]} -->\n\n{TABLES[match[1]](runs)}\n\n<!-- tuning: end -->"

    return re.sub(r"<!-- tuning: (?!end)(.+?) -->\n.*?<!-- tuning: end -->", replaced, page, flags=re.DOTALL)


def digest(data: Path) -> str:
    """Return the hash of the runs, by which a plot names its data."""
    return hashlib.sha256(data.read_bytes()).hexdigest()


def draw(runs: Sequence[TuningRun], output: Path, source: str) -> None:
    """Draw four plots over maxSlowdown: a line for each load is the mean of its seeds, the dots are the seeds."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - only drawing needs it

    plt.rcParams.update({"svg.hashsalt": "tuning", "svg.fonttype": "none", "font.size": 10})
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), sharex=True)
    places = [float(value) for value in slowdowns()]

    def plot(axis, key, scale, load, colour, style, label):
        found = [[scale(run[key]) for run in of(runs, SLOWDOWN, value, load)] for value in slowdowns()]
        axis.plot(places, [statistics.fmean(values) for values in found], style, color=colour, label=label)
        for place, values in zip(places, found, strict=True):
            axis.plot([place] * len(values), values, ".", color=colour, markersize=5, alpha=0.6)

    for load, colour in zip(LOADS, ("tab:blue", "tab:orange"), strict=True):
        name = f"load {load:.1f}"
        plot(axes[0][0], "throughput", lambda value: 100 * (value - 1), load, colour, "-", name)
        plot(axes[0][1], "completion_seconds", lambda value: value / 60, load, colour, "-", name)
        plot(axes[1][0], "slowdown_median", float, load, colour, "-", f"{name}, median")
        plot(axes[1][0], "slowdown_p95", float, load, colour, "--", f"{name}, 95th percentile")
        plot(
            axes[1][1], "below_promise", lambda value: 100 * value, load, colour, "-", f"{name}, below the promise"
        )
        plot(axes[1][1], "stopped", lambda value: 100 * value, load, colour, ":", f"{name}, stopped")
    titles = (
        ("throughput gained over a GPU each, %", "minutes from submission to end, mean"),
        ("slowdown on the GPU, against alone on a whole one", "part of the jobs' time on GPUs, %"),
    )
    for row, names in zip(axes, titles, strict=True):
        for axis, title in zip(row, names, strict=True):
            axis.set_title(title, fontsize=10)
            axis.axvline(float(DEFAULTS[SLOWDOWN]), color="grey", linewidth=0.8, linestyle="--")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("maxSlowdown (dashed: the default)")
    axes[0][1].set_ylim(bottom=0)
    axes[1][0].set_ylim(bottom=1)
    axes[1][1].set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(output, facecolor="white", metadata={"Date": None, "Description": source})


def main(data: Path, docs: Path) -> None:
    runs = read(data)
    for name in PAGES:
        page = docs / name
        page.write_text(filled(page.read_text(), runs))
    draw(runs, docs / PLOT, f"drawn by bench.tuning_page from runs with sha256 {digest(data)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
