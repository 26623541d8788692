"""The page about a span of time on a cluster's GPUs (docs/guide/monitoring.md explains how to read it)."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import numpy as np

from gpushare.cli.report.page import Answer, TableCell, answers, number, page, paragraph, section, table, text
from gpushare.cli.report.plots import Ink, PlotAxis, PlotLine, line_plot, linear
from gpushare.cli.report.usage import (
    Figures,
    ShowbackRow,
    UsageCourse,
    UsageHistory,
    WorkloadName,
    course,
    kept_ratio,
    neighbours,
    other_fractions,
    showback,
)

_MOST_ROWS: Final = 25  # of a table; the rest is summed up in one line, and --json has all
_MOST_GAINING: Final = 10  # workloads to begin with
_HEADROOM: Final = 1.05  # so that the highest line does not touch the frame
_DAY_SECONDS: Final = 86400.0


def render_usage(history: UsageHistory, title: str = "GPUs shared, and what it gained") -> str:
    """Render the page of one history."""
    run = course(history)
    parts = [
        answers(_answers(history, run)),
        *(paragraph(note) for note in history.notes),
        _over_time(history, run),
        _showback(history),
        _promises(history, run),
        _neighbours(history),
        _fractions(history),
    ]
    footer = (
        "Progress is relative to running alone on a whole GPU: 1 is undisturbed. A GPU's worth of progress is "
        "what one pod alone on it would do. Spared GPUs: progress above the GPUs that made it, of those on "
        "which every pod's progress is known. "
        "Made by gpushare report."
    )
    return page(title, _subtitle(history), [part for part in parts if part], footer)


def _subtitle(history: UsageHistory) -> str:
    if history.is_simulated:
        length = history.step_seconds * len(history.times) / 3600
        return f"{length:.1f} simulated hours; from {history.source}."
    begin, end = _moment(history.begin), _moment(history.times[-1])
    if not history.step_seconds:
        return f"At {begin} UTC; from {history.source}."
    step = history.step_seconds
    every = f"{step / 60:g} min" if step >= 60 else f"{step:g} s"
    return f"{begin} to {end} UTC, sampled every {every}; from {history.source}."


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(float(seconds), UTC).strftime("%Y-%m-%d %H:%M")


def _answers(history: UsageHistory, run: UsageCourse) -> list[Answer]:
    has_figures = ~np.isnan(run.gpus)
    gpus, in_use = float(np.mean(run.gpus[has_figures])), float(np.mean(run.in_use[has_figures]))
    used, idle, known = (float(np.sum(each)) for each in (run.in_use, run.idle, run.known))
    done = float(np.sum(run.known_progress))
    without = f", {idle * history.hours:.1f} without a process" if idle else ""
    unknown = "not known" if used > idle else "nothing ran"
    spared = float(np.sum(run.spared)) * history.hours
    kept, throttled = kept_ratio(history), float(np.sum(run.throttled))
    over = "on average" if history.step_seconds else "now"
    found = [
        Answer("How many GPUs were in use?", f"{in_use:.1f} of {gpus:.1f}", f"GPUs with at least one pod, {over}"),
        Answer(
            "What did a used GPU do?",
            f"{done / known:.2f} × one pod alone" if known else unknown,
            f"{done * history.hours:.1f} {history.unit} of progress on {known * history.hours:.1f} on which every "
            f"pod's progress is known, of {used * history.hours:.1f} in use{without}",
        ),
        Answer(
            "What did sharing spare?",
            f"{spared:.1f} {history.unit}" if known else unknown,
            "that the same progress would have needed more, at one pod for each GPU",
        ),
        Answer(
            "Were promises kept?",
            "no promise is known" if kept is None else f"{kept:.1%} of the time",
            "over all pods whose progress is known",
        ),
        Answer(
            "Was anyone held back?",
            f"{throttled * history.hours:.1f} pod-hours" if history.step_seconds else f"{throttled:.0f} pods",
            "stopped part of the time for a neighbour's promise",
        ),
    ]
    if history.retractions is not None:
        found.append(
            Answer(
                "Was anyone moved away?", f"{history.retractions:.0f} times", "retracted for a neighbour's promise"
            )
        )
    return found


def _axes(history: UsageHistory, figures: Sequence[Figures]) -> tuple[PlotAxis, PlotAxis]:
    begin, end = float(history.times[0]), float(history.times[-1])
    form = "%H:%M" if end - begin <= 2 * _DAY_SECONDS else "%m-%d"
    marks = [float(at) for at in np.linspace(begin, end, 5)]
    ticks = tuple(
        (at, f"{at / 3600:.1f} h" if history.is_simulated else datetime.fromtimestamp(at, UTC).strftime(form))
        for at in marks
    )
    top = max((float(np.nanmax(one)) for one in figures if not np.isnan(one).all()), default=1.0)
    return PlotAxis(begin, end, ticks), linear(0, max(top, 1.0) * _HEADROOM)


def _plot(history: UsageHistory, title: str, y_label: str, *lines: tuple[str, Figures, Ink]) -> str:
    has_figures = ~np.isnan(history.gpus)
    shown = [(name, np.where(has_figures, figures, np.nan), ink) for name, figures, ink in lines]
    x, y = _axes(history, [figures for _, figures, _ in shown])
    drawn = [PlotLine(name, history.times, figures, ink, is_step=True) for name, figures, ink in shown]
    return line_plot(title, drawn, x, y, x_label="time" if history.is_simulated else "time, UTC", y_label=y_label)


def _over_time(history: UsageHistory, run: UsageCourse) -> str:
    if not history.step_seconds:
        return ""
    asked = [] if run.requested is None else [("asked for", run.requested, Ink.FOUR)]
    return section(
        "Over time",
        "Progress above the GPUs that made it is what sharing gained. The first plot counts the progress on GPUs "
        "on which every pod's progress is known, the second all that is known.",
        _plot(
            history,
            "GPUs and the work that they did",
            "GPUs",
            ("GPUs there are", run.gpus, Ink.FOUR),
            ("GPUs in use", run.in_use, Ink.ONE),
            ("of these, with known progress", run.known, Ink.THREE),
            ("their summed progress", run.known_progress, Ink.TWO),
        ),
        _plot(
            history,
            "Shares asked for, given, and progress made" if asked else "Shares given, and progress made",
            "GPUs",
            *asked,
            ("given", run.given, Ink.ONE),
            ("progress", run.progress, Ink.TWO),
        ),
    )


def _showback(history: UsageHistory) -> str:
    unit = history.unit
    spaces, workloads = showback(history), showback(history, by_workload=True)
    heads = [
        "pods",
        f"asked, {unit}",
        f"given, {unit}",
        f"progressed, {unit}",
        "progressed ÷ given",
        "promise kept",
    ]

    def cells(row: ShowbackRow) -> list[TableCell]:
        return [
            number(row.pods, "{:.0f}"),
            number(row.asked),
            number(row.given),
            number(row.progressed),
            number(row.progress_per_share),
            number(row.kept_ratio, "{:.1%}"),
        ]

    return section(
        "Who used what",
        "Asked: what pods requested, waiting ones included. Given: the share that they held. "
        "Progressed: the work that they did, in GPUs' worth, as far as it is known; against what was given in "
        "that time. A pod without a process does none.",
        ""
        if history.is_simulated
        else table(
            "Showback by namespace",
            ["namespace", *heads],
            [[text(row.namespace), *cells(row)] for row in spaces[:_MOST_ROWS]],
        ),
        _more(len(spaces)),
        table(
            "Showback by workload",
            ["workload", *heads],
            [[text(_name((row.namespace, row.workload))), *cells(row)] for row in workloads[:_MOST_ROWS]],
        ),
        _more(len(workloads)),
    )


def _promises(history: UsageHistory, run: UsageCourse) -> str:
    if kept_ratio(history) is None:
        return section("Promises", "No promise is known in this time, so nothing can be said of keeping them.")
    plot = ""
    if history.step_seconds:
        plot = _plot(
            history,
            "Pods below their promise, and pods throttled",
            "pods",
            ("below their promise", run.broken, Ink.THREE),
            ("throttled", run.throttled, Ink.ONE),
        )
    worst = sorted(
        (row for row in showback(history, by_workload=True) if row.kept_ratio is not None),
        key=lambda row: row.kept_ratio or 0.0,
    )
    return section(
        "Promises",
        "A pod is below its promise where its node finds its progress lower by more than the figure's error.",
        plot,
        table(
            "Workloads, the least kept first",
            ["workload", "promise kept", f"given, {history.unit}"],
            [
                [text(_name((r.namespace, r.workload))), number(r.kept_ratio, "{:.1%}"), number(r.given)]
                for r in worst[:_MOST_ROWS]
            ],
        ),
        _more(len(worst)),
    )


def _neighbours(history: UsageHistory) -> str:
    found = [row for row in neighbours(history) if row.lost > 0]
    heading = "Who slowed whom"
    if not found:
        return section(heading, "No pod lost progress beside another, or nobody could tell.")
    time = "hours together" if history.step_seconds else "pairs of pods"
    return section(
        heading,
        "What a workload makes less than alone is put to its neighbours of that moment, in proportion to how busy "
        "each one's busiest pipe was.",
        table(
            "Progress lost to neighbours, the most first",
            ["slowed", "by", time, "progress alone", "progress beside", f"lost, {history.unit}"],
            [
                [
                    text(_name(row.slowed)),
                    text(_name(row.by)),
                    number(row.shared_gpu_hours, "{:.1f}"),
                    number(row.alone_ratio),
                    number(row.beside_ratio),
                    number(row.lost),
                ]
                for row in found[:_MOST_ROWS]
            ],
        ),
        _more(len(found)),
    )


def _fractions(history: UsageHistory) -> str:
    found, heading = other_fractions(history), "Who would gain most from another fraction"
    if not found:
        return section(heading, "No profiled workload is known to gain by the share that its profile recommends.")
    return section(
        heading,
        "The share that a workload's profile recommends (its GpuShare's status), against what its pods held. "
        "Freed: shares for others; faster: progress that it would make more, as its profile expects it alone.",
        table(
            "The workloads that would gain most",
            [
                "workload",
                "held for each pod",
                "recommended",
                f"freed, {history.unit}",
                f"faster, {history.unit}",
                f"gained in all, {history.unit}",
            ],
            [
                [
                    text(_name(row.workload)),
                    number(row.share_ratio),
                    number(row.recommended_ratio),
                    number(row.freed),
                    number(row.faster),
                    number(row.gain),
                ]
                for row in found[:_MOST_GAINING]
            ],
        ),
        _more(len(found), _MOST_GAINING),
    )


def _name(workload: WorkloadName) -> str:
    return "/".join(part for part in workload if part)


def _more(count: int, shown: int = _MOST_ROWS) -> str:
    return paragraph(f"{count - shown} more are in the output of --json.") if count > shown else ""
