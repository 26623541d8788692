"""Our kinds of panels: an answer in words, a graph, a table; and the links between dashboards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DashboardRangeMapOptions,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    RangeMap,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="$source")
GPU_NAME = "{{node}} GPU {{gpu_index}}"
POD_NAME = "{{namespace}}/{{pod}}"
GOOD, BAD, NEITHER = "green", "red", "text"

# A pod of several whole GPUs has no progress (ADR 0030), nor has one without a profile beside others. One without
# a process has none either, but is known to do nothing.
_KNOWN = "(gpushare_pod_progress_ratio or gpushare_pod_clients == 0)"
_UNKNOWN = f"(gpushare_pod_share_ratio unless on (gpu_uuid, pod_uid) {_KNOWN})"

# uid -> title, in the order in which they link to each other
BOARDS = {
    "gpushare": "gpushare: cluster",
    "gpushare-node": "gpushare: node and GPU",
    "gpushare-workload": "gpushare: workload",
    "gpushare-control": "gpushare: control plane",
}


def query(expression: str, legend: str = "__auto") -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).legend_format(legend).datasource(SOURCE)


def known_progress(of: str = "") -> str:
    """Return the query for the pods' progress on the GPUs on which every pod's is known, as in `gpushare gain`.

    The work of the others is unknown: a sum over the rest of their pods would be too low.
    """
    return f"gpushare_pod_progress_ratio{of} unless on (gpu_uuid) {_UNKNOWN}"


def graph(title: str, description: str, unit: str, *queries: prometheus.Dataquery) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .min(0)
        .datasource(SOURCE)
        .draw_style(GraphDrawStyle.LINE)
        .fill_opacity(5)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .span(12)
        .height(8)
    )
    for letter, one in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(one.ref_id(letter))
    return panel


def stacked(panel: timeseries.Panel) -> timeseries.Panel:
    return panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)


def answer(
    question: str,
    description: str,
    unit: str,
    expression: str,
    *,
    words: Mapping[str, tuple[str, str]] | None = None,
    bad_from: float | None = None,
    bad_below: float | None = None,
    span: int = 6,
    link: tuple[str, str] | None = None,
) -> stat.Panel:
    """Return a panel whose title is a question and whose value is the answer.

    Args:
        unit: Grafana's, or "suffix: words" that follow the number.
        words: value -> what is said instead of it, and its colour; a key such as "0..1" is a range with both ends.
        bad_from, bad_below: values that are shown red.
        link: uid of a dashboard and more of its address, for whoever asks further.
    """
    base = BAD if bad_below is not None else GOOD if bad_from is not None else NEITHER
    steps = [Threshold(None, base)]
    if bad_from is not None:
        steps.append(Threshold(bad_from, BAD))
    if bad_below is not None:
        steps.append(Threshold(bad_below, GOOD))
    coloured = bad_from is not None or bad_below is not None or bool(words)
    panel = (
        stat.Panel()
        .title(question)
        .description(description)
        .unit(unit)
        .no_value("nothing is known: no data")
        .mappings(_mappings(words or {}))
        .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .datasource(SOURCE)
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE if coloured else BigValueColorMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(query(expression).instant().ref_id("A"))
        .span(span)
        .height(4)
    )
    return panel.links([_link(BOARDS[link[0]], link[0], link[1])]) if link else panel


def _mappings(words: Mapping[str, tuple[str, str]]) -> list[Any]:
    found: list[Any] = []
    for key, (text, colour) in words.items():
        result = ValueMappingResult(text=text, color=colour, index=len(found))
        begin, dots, end = key.partition("..")
        if dots:
            found.append(RangeMap(DashboardRangeMapOptions(float(begin), float(end), result)))
        else:
            found.append(ValueMap({key: result}))
    return found


@dataclass(frozen=True)
class PanelColumn:
    """One figure of a table: the instant query, its title and unit."""

    title: str
    unit: str
    expression: str


def rows(
    title: str,
    description: str,
    columns: Sequence[PanelColumn],
    *,
    hidden: Sequence[str] = (),
    links: Mapping[str, tuple[str, str, str]] | None = None,
    sort: str = "",
    height: int = 9,
    span: int = 24,
) -> table.Panel:
    """Return a table that joins instant queries by their labels.

    Args:
        links: column -> dashboard's uid, text, and the rest of its address.
    """
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .no_value("-")
        .span(span)
        .height(height)
    )
    renamed = {}
    for letter, column in zip("ABCDEFGHIJKL", columns, strict=False):
        target = query(column.expression).instant().format(PromQueryFormat.TABLE).ref_id(letter)
        renamed["Value" if len(columns) == 1 else f"Value #{letter}"] = column.title
        shown = [DynamicConfigValue("unit", column.unit)]
        panel = panel.with_target(target).override_by_name(column.title, shown)
    for name, (uid, text, more) in (links or {}).items():
        target_url = {"title": text, "url": _url(uid, more)}
        panel = panel.override_by_name(name, [DynamicConfigValue("links", [target_url])])
    excluded = dict.fromkeys(("Time", *hidden), True)
    panel = panel.with_transformation(DataTransformerConfig("merge", {})).with_transformation(
        DataTransformerConfig("organize", {"excludeByName": excluded, "renameByName": renamed})
    )
    if sort:
        panel = panel.with_transformation(
            DataTransformerConfig("sortBy", {"sort": [{"field": sort, "desc": True}]})
        )
    return panel


def variable(name: str, label: str, expression: str, *, all_value: str | None = ".+") -> dashboard.QueryVariable:
    """Return a drop-down list.

    Args:
        all_value: the value of "All": ".+" and not ".*", which also takes series that lack the label; None:
            every value of the list, for one that depends on another.
    """
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(expression)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .current(VariableOption(True, "All", "$__all"))
    )
    return made.all_value(all_value) if all_value is not None else made


def _url(uid: str, more: str = "") -> str:
    return f"/d/{uid}?var-source=${{source}}&${{__url_time_range}}{more}"


def _link(title: str, uid: str, more: str = "") -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(_url(uid, more))


def board(
    uid: str,
    description: str,
    variables: Sequence[dashboard.QueryVariable],
    content: Sequence[tuple[str, Sequence[Any]]],
) -> dashboard.Dashboard:
    """Return a dashboard: its rows of panels, and at its top the links to the next one and to the others."""
    made = (
        dashboard.Dashboard(BOARDS[uid])
        .uid(uid)
        .description(description)
        .tags(["gpushare", "gpu"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Data source").type("prometheus"))
    )
    for one in variables:
        made = made.with_variable(one)
    order = list(BOARDS)
    at = order.index(uid)
    for place, other in enumerate([*order[at + 1 :], *order[:at]]):
        title = f"Next: {BOARDS[other]}" if place == 0 else BOARDS[other]
        link = dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(f"/d/{other}")
        made = made.link(link.keep_time(True).include_vars(True))
    ids = count(1)
    for title, panels in content:
        made = made.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            made = made.with_panel(panel.id(next(ids)))
    return made
