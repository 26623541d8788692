"""Policies compared on one trace of jobs, in the form of every report; the main ones are highlighted."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from gpushare.cli.report.page import Answer, TableCell, answers, number, page, section, table, text
from gpushare.cli.report.plots import Ink, PlotAxis, PlotLine, Spread, line_plot, linear, logarithmic, spread_plot
from gpushare.sim.job_report import Report
from gpushare.sim.jobs import JobResult, Outcome

_OURS: Final = "gpushare"
_USUAL: Final[Mapping[str, Ink]] = {"fifo": Ink.THREE, "time-slicing": Ink.FOUR}  # usual without gpushare
_BOUND: Final = "oracle"  # it knows the future, so it is never shown as the best
_TIME_PARTS: Final = 400
_HEADROOM: Final = 1.05
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
_COLUMNS: Final[tuple[tuple[str, Callable[[Report], float | None], str], ...]] = (
    ("makespan, h", lambda r: r.makespan_seconds / 3600, "{:.2f}"),
    ("mean completion, h", lambda r: r.mean_completion_seconds / 3600, "{:.2f}"),
    ("p95 completion, h", lambda r: r.p95_completion_seconds / 3600, "{:.2f}"),
    ("throughput, exclusive = 1", lambda r: r.throughput_ratio, "{:.2f}"),
    ("mean slowdown", lambda r: r.mean_slowdown, "{:.2f}"),
    ("worst slowdown", lambda r: r.worst_slowdown, "{:.2f}"),
    ("beyond tolerance", lambda r: r.late_share, "{:.1%}"),
    ("GPUs in use", lambda r: r.utilization_ratio, "{:.0%}"),
    ("Jain's index", lambda r: r.jain_index, "{:.3f}"),
    ("retracted", lambda r: float(r.retractions), "{:.0f}"),
    ("modelled", lambda r: r.modelled_ratio, "{:.0%}"),
)


def render_jobs(
    outcomes: Sequence[Outcome], reports: Sequence[Report], *, trace: str, colocation: str, gpus: int, seed: int
) -> str:
    """Render the page; `outcomes` and `reports` belong to the same policies, in the same order, at least one."""
    best = _best(reports)
    inks = {each.policy: _ink(each.policy, best) for each in reports}
    shown = _OURS if any(each.policy == _OURS for each in reports) else best
    parts = [
        answers(_answers(reports, shown, best)),
        section(
            "Completion",
            "How soon jobs are done: the further to the left, the better. "
            f"{best} has the shortest mean completion of all others that could be installed.",
            _completion(outcomes, inks),
        ),
        section(
            "The GPUs",
            "Summed progress for each GPU; 1 is what exclusive GPUs would do when all are busy.",
            _utilization(outcomes, inks),
        ),
        section(
            "Slowdown",
            "How much longer jobs were on a GPU than they would have been alone.",
            _slowdown(outcomes, inks),
        ),
        section("All policies", "Press a head to sort.", _policies(reports)),
        _workloads(next(each for each in outcomes if each.policy == shown)),
    ]
    jobs = reports[0].jobs
    subtitle = f"{jobs} jobs of {trace} on {gpus} GPUs; rates from {colocation}; seed {seed}."
    footer = (
        "Throughput: work done for each GPU-second in use. Modelled: part of the time of shared GPUs whose rates "
        "come from the model, not from a measurement. Made by gpushare sim compare."
    )
    return page("Policies compared", subtitle, parts, footer)


def _best(reports: Sequence[Report]) -> str:
    """Return the policy with the shortest mean completion, other than ours and the oracle."""
    others = [each for each in reports if each.policy not in (_OURS, _BOUND)] or list(reports)
    return min(others, key=lambda each: (each.mean_completion_seconds, each.policy)).policy


def _ink(policy: str, best: str) -> Ink:
    if policy == _OURS:
        return Ink.TWO
    return Ink.ONE if policy == best else _USUAL.get(policy, Ink.OTHER)


def _answers(reports: Sequence[Report], shown: str, best: str) -> list[Answer]:
    by_name = {each.policy: each for each in reports}
    chosen = by_name[shown]
    rivals = [by_name[name] for name in dict.fromkeys((best, *_USUAL)) if name in by_name and name != shown]

    def beside(say: Callable[[Report], str]) -> str:
        return "; ".join(f"{each.policy} {say(each)}" for each in rivals) or "no other policy ran"

    def hours(each: Report) -> str:
        return f"{each.mean_completion_seconds / 3600:.2f} h"

    return [
        Answer(f"How long until a job is done under {shown}?", hours(chosen), beside(hours)),
        Answer(
            "How much does a used GPU get done?",
            f"{chosen.throughput_ratio:.2f} × exclusive",
            beside(lambda each: f"{each.throughput_ratio:.2f}"),
        ),
        Answer(
            "How often are jobs slower than they tolerate?",
            f"{chosen.late_share:.1%} of the time",
            beside(lambda each: f"{each.late_share:.1%}"),
        ),
        Answer(
            "How bad does it get?",
            f"{chosen.worst_slowdown:.2f} × as long",
            "the worst job; " + beside(lambda each: f"{each.worst_slowdown:.2f}"),
        ),
    ]


def _completion(outcomes: Sequence[Outcome], inks: Mapping[str, Ink]) -> str:
    lines = []
    for outcome in outcomes:
        hours = np.sort([job.completion_seconds for job in outcome.jobs]) / 3600
        part = np.arange(1, len(hours) + 1) / len(hours)
        lines.append(PlotLine(outcome.policy, hours, part, inks[outcome.policy], is_step=True))
    x = logarithmic(min(line.x[0] for line in lines), max(line.x[-1] for line in lines))
    return line_plot(
        "Share of jobs done within a time", lines, x, linear(0, 1), x_label="hours, log", y_label="share"
    )


def _utilization(outcomes: Sequence[Outcome], inks: Mapping[str, Ink]) -> str:
    lines = []
    for outcome in outcomes:
        begins = np.array([span.begin_seconds for span in outcome.spans])
        ends = np.array([span.end_seconds for span in outcome.spans])
        work = np.array([span.summed_progress for span in outcome.spans]) * (ends - begins) / outcome.gpus
        edges = np.linspace(begins[0], ends[-1], min(_TIME_PARTS, len(begins)) + 1)
        done = np.interp(edges, np.concatenate((begins[:1], ends)), np.concatenate(([0.0], np.cumsum(work))))
        rates = np.diff(done) / np.diff(edges)
        x = (edges - begins[0]) / 3600
        lines.append(PlotLine(outcome.policy, x, np.append(rates, rates[-1]), inks[outcome.policy], is_step=True))
    across = linear(0, max(line.x[-1] for line in lines))
    up = linear(0, max(1.0, *(float(line.y.max()) for line in lines)) * _HEADROOM)
    return line_plot("Work done over time", lines, across, up, x_label="hours", y_label="progress for each GPU")


def _slowdown(outcomes: Sequence[Outcome], inks: Mapping[str, Ink]) -> str:
    spreads = []
    for outcome in outcomes:
        p5, p25, p50, p75, p95 = np.quantile([job.slowdown for job in outcome.jobs], _QUANTILES)
        spreads.append(Spread(outcome.policy, (p5, p25, p50, p75, p95), inks[outcome.policy]))
    spreads.sort(key=lambda spread: spread.quantiles[2])
    x: PlotAxis = logarithmic(1.0, max(2.0, *(spread.quantiles[4] for spread in spreads)))
    return spread_plot("Slowdown of jobs by policy", spreads, x, x_label="slowdown, log")


def _policies(reports: Sequence[Report]) -> str:
    rows = [[text(each.policy), *(number(value(each), form) for _, value, form in _COLUMNS)] for each in reports]
    marked = frozenset(index for index, each in enumerate(reports) if each.policy == _OURS)
    return table("Figures of every policy", ["policy", *(name for name, _, _ in _COLUMNS)], rows, marked=marked)


def _workloads(outcome: Outcome) -> str:
    groups: dict[str, list[JobResult]] = defaultdict(list)
    for job in outcome.jobs:
        groups[job.workload].append(job)
    rows: list[list[TableCell]] = []
    for workload, jobs in groups.items():
        run, late = sum(job.run_seconds for job in jobs), sum(job.late_seconds for job in jobs)
        rows.append(
            [
                text(workload),
                number(len(jobs), "{:.0f}"),
                number(sum(job.completion_seconds for job in jobs) / 3600, "{:.1f}"),
                number(run / 3600, "{:.1f}"),
                number(sum(job.solo_seconds for job in jobs) / 3600, "{:.1f}"),
                number(1 - late / run if run else None, "{:.1%}"),
                number(sum(job.retractions for job in jobs), "{:.0f}"),
            ]
        )
    rows.sort(key=lambda row: -float(row[3].value or 0.0))
    return section(
        f"Who used what, under {outcome.policy}",
        "Hours from submission to end, hours on a GPU, and hours of work done (as it would take alone).",
        table(
            "Workloads",
            [
                "workload",
                "jobs",
                "submitted to done, h",
                "on a GPU, h",
                "progressed, h",
                "in tolerance",
                "retracted",
            ],
            rows,
        ),
    )
