"""A comparison as one self-contained HTML file: the policies' table and plots."""

import base64
import html
import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from gpushare.cli.errors import UsageError
from gpushare.sim.job_report import Report
from gpushare.sim.jobs import Outcome

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #dde3ea}
th:first-child,td:first-child{text-align:left}
tr.ours{background:#eaf5ee;font-weight:600}figure{margin:2rem 0}img{max-width:100%}figcaption{color:#56606e}
"""
_COLUMNS: Final[tuple[tuple[str, Callable[[Report], str]], ...]] = (
    ("makespan, h", lambda r: f"{r.makespan_seconds / 3600:.2f}"),
    ("mean completion, h", lambda r: f"{r.mean_completion_seconds / 3600:.2f}"),
    ("p95 completion, h", lambda r: f"{r.p95_completion_seconds / 3600:.2f}"),
    ("throughput, exclusive = 1", lambda r: f"{r.throughput_ratio:.2f}"),
    ("worst slowdown", lambda r: f"{r.worst_slowdown:.2f}"),
    ("beyond tolerance", lambda r: f"{r.late_share:.1%}"),
    ("GPUs in use", lambda r: f"{r.utilization_ratio:.0%}"),
    ("Jain's index", lambda r: f"{r.jain_index:.3f}"),
    ("retracted", lambda r: str(r.retractions)),
)


def render(
    outcomes: Sequence[Outcome], reports: Sequence[Report], *, trace: str, colocation: str, gpus: int, seed: int
) -> str:
    """Render the page.

    Raises:
        UsageError: matplotlib, of the extra `fit`, is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, needed by this report alone
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise UsageError('the HTML report needs matplotlib: install "gpushare[fit]"') from None
    mpl.rc("svg", hashsalt="gpushare")  # the same input gives the same file
    plots = [
        ("Completion time: share of jobs that ended within", _completion(Figure, outcomes)),
        ("GPUs in use over time", _utilization(Figure, outcomes)),
        ("Slowdown of jobs while on a GPU", _slowdown(Figure, outcomes)),
    ]
    jobs = reports[0].jobs if reports else 0
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in _COLUMNS)
    rows = "".join(
        f'<tr class="{"ours" if r.policy == "gpushare" else ""}"><td>{html.escape(r.policy)}</td>'
        + "".join(f"<td>{cell(r)}</td>" for _, cell in _COLUMNS)
        + "</tr>"
        for r in reports
    )
    figures = "".join(
        f'<figure><img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{html.escape(title)}</figcaption></figure>"
        for title, data in plots
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>gpushare: policies compared</title>'
        f"<style>{_STYLE}</style><h1>Policies compared</h1>"
        f"<p>{jobs} jobs of {html.escape(trace)} on {gpus} GPUs; rates from {html.escape(colocation)}; "
        f"seed {seed}.</p>"
        f"<table><thead><tr><th>policy</th>{head}</tr></thead><tbody>{rows}</tbody></table>{figures}</html>\n"
    )


def _completion(figure: Any, outcomes: Sequence[Outcome]) -> str:
    fig, axes = _axes(figure, "hours", "share of jobs")
    for index, outcome in enumerate(outcomes):
        hours = np.sort([job.completion_seconds for job in outcome.jobs]) / 3600
        axes.step(hours, np.arange(1, len(hours) + 1) / len(hours), where="post", **_line(index, outcome.policy))
    axes.set_xscale("log")
    return _encode(fig, axes)


def _utilization(figure: Any, outcomes: Sequence[Outcome]) -> str:
    fig, axes = _axes(figure, "hours", "summed progress / GPUs")
    for index, outcome in enumerate(outcomes):
        begins = [span.begin_seconds / 3600 for span in outcome.spans]
        rates = [span.summed_progress / outcome.gpus for span in outcome.spans]
        axes.step(begins, rates, where="post", **_line(index, outcome.policy))
    return _encode(fig, axes)


def _slowdown(figure: Any, outcomes: Sequence[Outcome]) -> str:
    fig, axes = _axes(figure, "", "slowdown, alone = 1")
    axes.boxplot([[job.slowdown for job in outcome.jobs] for outcome in outcomes], whis=(5, 95), showfliers=True)
    axes.set_xticks(range(1, len(outcomes) + 1), [o.policy for o in outcomes], rotation=45, ha="right")
    axes.set_yscale("log")
    return _encode(fig, None)


def _axes(figure: Any, x: str, y: str) -> tuple[Any, Any]:
    make: Any = figure
    fig = make(figsize=(10, 4.5), layout="constrained")
    axes = fig.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return fig, axes


def _line(index: int, policy: str) -> dict[str, Any]:
    ours = policy == "gpushare"
    return {
        "label": policy,
        "color": "#0a7d36" if ours else f"C{index % 10}",
        "linewidth": 2.4 if ours else 1.1,
        "linestyle": "-" if index < 10 or ours else "--",
    }


def _encode(fig: Any, legend_axes: Any) -> str:
    if legend_axes is not None:
        fig.legend(loc="outside right upper", fontsize=8)
    buffer = io.BytesIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode()
