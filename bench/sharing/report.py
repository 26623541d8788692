"""The table and the figure of one benchmark."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.figures import Interval, interval, percentile
from bench.sharing import accuracy, faults
from bench.sharing.analysis import Bounded, Outcomes, RunFigures, makespans, mean_of, outcomes, ratio_of, runs
from bench.sharing.machine import why_not_the_tables
from bench.sharing.policies import OURS, POLICIES
from bench.sharing.records import Records

TABLE: Final = "sharing.md"
FIGURE: Final = "sharing.png"

Figure = Callable[[RunFigures], float | None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _spells(run: RunFigures) -> list[float]:
    return [spell for job in run.jobs for spell in job.below_spells]


def _worst(run: RunFigures) -> float | None:
    return max(run.p99.values(), default=None)


COLUMNS: Final[Sequence[tuple[str, str, Figure]]] = (
    ("summed progress", "{:.2f}", lambda run: run.summed_progress),
    ("completion, mean s", "{:.1f}", lambda run: _mean(run.completions)),
    ("p90 s", "{:.1f}", lambda run: percentile(run.completions, 0.9)),
    ("slowdown, mean", "{:.2f}", lambda run: _mean([job.slowdown for job in run.jobs])),
    ("largest", "{:.2f}", lambda run: max(job.slowdown for job in run.jobs)),
    ("below promise, % of job-seconds", "{:.1f}", lambda run: 100 * run.below_ratio),
    ("longest time below it, s", "{:.1f}", lambda run: max(_spells(run), default=0.0)),
    ("latency p50 / alone", "{:.2f}", lambda run: _mean(list(run.p50.values()))),
    ("latency p99 / alone", "{:.2f}", lambda run: _mean(list(run.p99.values()))),
    ("worst program's", "{:.2f}", _worst),
    ("all serving p99 / alone", "{:.2f}", lambda run: _mean(list(run.all_p99.values()))),
    ("best effort beside latency", "{:.2f}", lambda run: run.beside_latency),
    ("energy, kJ", "{:.1f}", lambda run: None if run.joules is None else run.joules / 1000),
    ("restarts", "{:.1f}", lambda run: float(run.restarts)),
)


def write_report(directory: Path) -> str:
    """Write table and figure beside the records; return the table."""
    records = Records.open(directory)
    text = table(records)
    (directory / TABLE).write_text(text)
    found = runs(records)
    if found:
        draw(found, directory / FIGURE)
    return text


def table(records: Records) -> str:
    """Return what a person reads first, as Markdown."""
    found, ends = runs(records), outcomes(records)
    lines = [_where(records), ""]
    if not ends:
        return "\n".join([*lines, "No run is complete.", ""])
    heads = [
        "policy",
        "runs",
        "failed runs",
        "failed jobs",
        "cut runs",
        "makespan of ours over its",
        "makespan, s",
    ]
    heads += [name for name, _, _ in COLUMNS]
    lines += [
        "Mean over repetitions ± its 95% interval (Student's t), of runs in which no job failed.",
        "≥, ≤: a run that was cut after 2.5 times what was expected counts with that time.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    ours = makespans(records, found, OURS.name)
    for name in POLICIES:
        if (end := ends.get(name)) is None:
            continue
        spans = makespans(records, found, name)
        ratio = Bounded(None) if name == OURS.name else ratio_of(ours, spans)
        of_policy = [run for run in found if run.policy == name]
        cells = [POLICIES[name].title, *map(str, (end.counted, end.failed, end.failed_jobs, end.cut))]
        cells += [_bounded_text(ratio, "{:.2f}"), _bounded_text(mean_of(spans), "{:.1f}")]
        cells += [
            _text(interval([value for run in of_policy if (value := figure(run)) is not None]), form)
            for _, form, figure in COLUMNS
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            *_made_again(ends),
            *_by_program(found),
            "",
            *accuracy.report(accuracy.accuracy(records)),
            "",
            *_faults(records),
        ]
    )


def _made_again(ends: Mapping[str, Outcomes]) -> list[str]:
    """Return which runs the end of their session cut and a later session made again; they are in no mean."""
    again = {name: ends[name].again for name in POLICIES if name in ends and ends[name].again}
    if not again:
        return []
    counts = ", ".join(f"{POLICIES[name].title} {number}" for name, number in again.items())
    return [f"Cut by the end of their session, made again and in no figure of this table: {counts}.", ""]


def _faults(records: Records) -> list[str]:
    ended = {
        (job["run"], f"job-{job['number']:03d}"): job["ended"]
        for job in records.of("job")
        if job["ended"] is not None
    }
    lines = faults.report(list(records.of("fault")), ended)
    return [*lines, ""] if lines else []


def draw(found: Sequence[RunFigures], path: Path) -> None:
    """Draw makespan, completion, slowdown and latency by policy, and who ran when in the first repetition."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in POLICIES if any(run.policy == name for run in found)]
    groups = [[run for run in found if run.policy == name] for name in names]
    figure, axes = plt.subplots(2, 3, figsize=(17, 9))
    for place, group in enumerate(groups):
        axes[0][0].bar(place, statistics.fmean(run.makespan for run in group), color=f"C{place}", alpha=0.6)
        axes[0][0].plot([place] * len(group), [run.makespan for run in group], "k.")
        times = sorted(time for run in group for time in run.completions)
        parts = [(index + 1) / len(times) for index in range(len(times))]
        axes[0][1].step(times, parts, where="post", label=names[place])
        for run in group:
            axes[1][0].plot([place] * len(run.p99), list(run.p99.values()), "o", color=f"C{place}", alpha=0.6)
    axes[0][0].set_title("makespan, s (dots: repetitions)")
    axes[0][1].set_title("part of the jobs done so long after they came, s")
    axes[0][1].legend(fontsize=8)
    axes[0][2].boxplot([[job.slowdown for run in group for job in run.jobs] for group in groups], whis=(5, 95))
    axes[0][2].set_title("slowdown of each job (whiskers 5 and 95%)")
    axes[1][0].axhline(1.1, color="grey", linewidth=0.8, linestyle=":")
    axes[1][0].set_title("p99 of requests over alone, class latency, by program")
    axes[1][0].set_yscale("log")
    below = [[100 * run.below_ratio for run in group] for group in groups]
    axes[1][1].bar(range(len(names)), [statistics.fmean(each) for each in below], color="C3", alpha=0.6)
    axes[1][1].set_title("job-seconds below the promise, %")
    for axis, first in ((axes[0][0], 0), (axes[0][2], 1), (axes[1][0], 0), (axes[1][1], 0)):
        axis.set_xticks([first + place for place in range(len(names))], names, rotation=25, fontsize=8)
    for place, group in enumerate(groups):
        for job in group[0].jobs:
            at = place + job.number / (1.2 * len(group[0].jobs))
            axes[1][2].plot([job.ready, job.ended], [at, at], color=f"C{place}", linewidth=1.0)
    axes[1][2].set_yticks([place + 0.4 for place in range(len(names))], names, fontsize=8)
    axes[1][2].set_title("who ran when, first repetition, s")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _where(records: Records) -> str:
    settings, sessions = records.first("settings"), list(records.of("session"))
    if settings is None or not sessions:
        return "Nothing was measured yet."
    places = sorted({f"{each['gpu']}{' (simulated)' if each['simulated'] else ''}" for each in sessions})
    launchers = {"processes": "processes, without Kubernetes", "pods": "pods of a Kubernetes cluster"}
    ways = sorted({launchers.get(each["launcher"], each["launcher"]) for each in sessions})
    work = sum(job["seconds"] for job in settings["list"])
    return (
        f"{settings['jobs']} jobs of {len({job['program'] for job in settings['list']})} programs on "
        f"{', '.join(places)}, seed {settings['seed']}: {work:.0f} s of work alone, arriving over "
        f"{settings['list'][-1]['arrives']:.0f} s. Jobs were {' and '.join(ways)}. {len(sessions)} sessions, "
        f"{sessions[0]['began']} to {sessions[-1]['began']}, driver {sessions[-1]['driver']}, commits "
        f"{', '.join(sorted({each['commit'] for each in sessions}))}.{_signatures(records)}"
        + "".join(
            f" {words}" for gpu in sorted({each["gpu"] for each in sessions}) if (words := why_not_the_tables(gpu))
        )
    )


def _signatures(records: Records) -> str:
    line = records.first("signatures")
    if line is None:
        return ""
    if line["source"] == "none":
        return " gpushare began without a signature, as on a new cluster."
    whose = {"agent": "the node agent's, taken of each program alone", "table": "the H200 table's, cap curves too"}
    return f" Signatures: {whose[line['source']]} ({len(line['known'])} programs)."


def _by_program(found: Sequence[RunFigures]) -> list[str]:
    """Return the mean slowdown of each program under each policy."""
    if not found:
        return []
    names = [name for name in POLICIES if any(run.policy == name for run in found)]
    programs = sorted({job.program for run in found for job in run.jobs})
    lines = ["| slowdown, mean | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for program in programs:
        cells = []
        for name in names:
            values = [j.slowdown for run in found if run.policy == name for j in run.jobs if j.program == program]
            cells.append(f"{statistics.fmean(values):.2f}" if values else "")
        lines.append(f"| {program} | " + " | ".join(cells) + " |")
    return lines


def _bounded_text(figure: Bounded, form: str) -> str:
    return f"{figure.sign}{_text(figure.interval, form)}"


def _text(figure: Interval | None, form: str) -> str:
    if figure is None:
        return ""
    mean = form.format(figure.mean)
    return mean if figure.half_width is None else f"{mean} ± {form.format(figure.half_width)}"
