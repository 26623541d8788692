#!/usr/bin/env python3
"""Writes helm/gpushare/dashboards/gpushare.json: the Grafana dashboard as code. Run after a change here."""

import sys
from itertools import count
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "helm" / "gpushare" / "dashboards" / "gpushare.json"

SOURCE = DataSourceRef(type_val="prometheus", uid="$source")
GPUS = '{node=~"$node", gpu_uuid=~"$gpu"}'
PODS = '{node=~"$node", gpu_uuid=~"$gpu", namespace=~"$namespace"}'
GPU_NAME = "{{node}} GPU {{gpu_index}}"
POD_NAME = "{{namespace}}/{{pod}}"


def query(expression: str, legend: str = "__auto") -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).legend_format(legend).datasource(SOURCE)


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


def number(title: str, description: str, unit: str, expression: str) -> stat.Panel:
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .unit(unit)
        .datasource(SOURCE)
        .color_mode(BigValueColorMode.NONE)
        .with_target(query(expression).ref_id("A"))
        .span(4)
        .height(4)
    )


def tenants_table() -> table.Panel:
    """Who shares what: one row a pod, one column a figure."""
    columns = {
        "A": ("gpushare_pod_share_ratio", "Share", "percentunit"),
        "B": ("gpushare_pod_thread_percentage_ratio", "Cap", "percentunit"),
        "C": ("gpushare_pod_memory_limit_bytes", "Memory limit", "bytes"),
        "D": ("gpushare_pod_memory_used_bytes", "Memory used", "bytes"),
        "E": ("gpushare_pod_progress_ratio", "Progress", "percentunit"),
        "F": ("gpushare_pod_slowdown_ratio", "Slowdown", "none"),
    }
    panel = (
        table.Panel()
        .title("Who shares what")
        .description("Each pod on each of its GPUs; progress is relative to running alone.")
        .datasource(SOURCE)
        .span(24)
        .height(9)
    )
    renamed, hidden = {}, {"Time": True, "pod_uid": True}
    for reference, (metric, title, unit) in columns.items():
        expression = f"max by (node, gpu_uuid, namespace, pod) ({metric}{PODS})"
        target = query(expression).instant().format(PromQueryFormat.TABLE).ref_id(reference)
        renamed[f"Value #{reference}"] = title
        panel = panel.with_target(target).override_by_name(title, [DynamicConfigValue("unit", unit)])
    return panel.with_transformation(DataTransformerConfig("merge", {})).with_transformation(
        DataTransformerConfig("organize", {"excludeByName": hidden, "renameByName": renamed})
    )


def variable(name: str, label: str, expression: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(expression)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".+")  # not ".*", which also takes series that lack the label
        .current(VariableOption(True, "All", "$__all"))
    )


def build() -> dashboard.Dashboard:
    board = (
        dashboard.Dashboard("gpushare")
        .uid("gpushare")
        .title("gpushare")
        .description("Who shares which GPU, at what cap, and how much slower each one runs than alone.")
        .tags(["gpushare", "gpu"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("source").label("Data source").type("prometheus"))
        .with_variable(variable("node", "Node", "label_values(gpushare_gpu_healthy, node)"))
        .with_variable(variable("gpu", "GPU", 'label_values(gpushare_gpu_healthy{node=~"$node"}, gpu_uuid)'))
        .with_variable(variable("namespace", "Namespace", "label_values(gpushare_pod_share_ratio, namespace)"))
    )
    ids = count(1)
    for title, panels in rows():
        board = board.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            board = board.with_panel(panel.id(next(ids)))
    return board


def rows() -> list[tuple[str, list[Any]]]:
    return [
        ("At a glance", glance()),
        ("Pods", pods()),
        ("GPUs", gpus()),
        ("MPS and the gate", mps()),
        ("Scheduling and admission", scheduling()),
    ]


def glance() -> list[Any]:
    return [
        number("GPUs", "GPUs of the chosen nodes.", "none", f"count(gpushare_gpu_healthy{GPUS})"),
        number("Healthy", "Of them taking new tenants.", "none", f"sum(gpushare_gpu_healthy{GPUS})"),
        number(
            "Shares given",
            "Mean share of a GPU that is given away.",
            "percentunit",
            f"avg(gpushare_gpu_share_used_ratio{GPUS})",
        ),
        number(
            "Pods", "Pods that share GPUs.", "none", f"count(count by (pod_uid) (gpushare_pod_share_ratio{PODS}))"
        ),
        number(
            "Summed progress per GPU",
            "1 is what one pod alone on each GPU would do.",
            "none",
            f"sum(gpushare_pod_progress_ratio{PODS}) / count(gpushare_gpu_healthy{GPUS})",
        ),
        number(
            "Worst slowdown",
            "The pod that suffers most, relative to running alone.",
            "none",
            f"max(gpushare_pod_slowdown_ratio{PODS})",
        ),
    ]


def pods() -> list[Any]:
    return [
        tenants_table(),
        graph(
            "Progress",
            "Inferred progress relative to running alone.",
            "percentunit",
            query(f"gpushare_pod_progress_ratio{PODS}", POD_NAME),
        ),
        graph(
            "Slowdown",
            "How much longer each pod takes than alone.",
            "none",
            query(f"gpushare_pod_slowdown_ratio{PODS}", POD_NAME),
        ),
        graph(
            "Memory used of its limit",
            "1 is the limit of all the pod's processes together.",
            "percentunit",
            query(f"gpushare_pod_memory_used_bytes{PODS} / gpushare_pod_memory_limit_bytes{PODS}", POD_NAME),
        ),
        graph(
            "Busiest pipe",
            "The pod's own inferred use of the pipe that it uses most.",
            "percentunit",
            query(f"max by (namespace, pod) (gpushare_pod_pipe_utilization_ratio{PODS})", POD_NAME),
        ),
    ]


def gpus() -> list[Any]:
    return [
        graph(
            "Pipes",
            "Use by pipe, tensor pipes counted in, mean over the chosen GPUs.",
            "percentunit",
            query(f"avg by (pipe) (gpushare_gpu_pipe_utilization_ratio{GPUS})", "{{pipe}}"),
        ),
        graph(
            "What nvidia-smi says, and what is true",
            "NVML's figure beside the SMs' activity.",
            "percentunit",
            query(f"avg(gpushare_gpu_nvml_utilization_ratio{GPUS})", "NVML utilisation"),
            query(f"avg(gpushare_gpu_sm_activity_ratio{GPUS})", "SM activity"),
            query(f"avg(gpushare_gpu_sm_occupancy_ratio{GPUS})", "SM occupancy"),
        ),
        graph(
            "Shares given",
            "Sum of the shares of each GPU's pods; never above 1.",
            "percentunit",
            query(f"gpushare_gpu_share_used_ratio{GPUS}", GPU_NAME),
        ),
        graph(
            "Memory",
            "Device memory in use of all there is.",
            "percentunit",
            query(f"gpushare_gpu_memory_used_bytes{GPUS} / gpushare_gpu_memory_total_bytes{GPUS}", GPU_NAME),
        ),
    ]


def mps() -> list[Any]:
    return [
        graph(
            "Clients",
            "Processes connected to each GPU's MPS server; 48 at most.",
            "none",
            query(f"gpushare_mps_clients{GPUS}", "{{node}} {{gpu_uuid}}"),
        ),
        stacked(
            graph(
                "Held at the gate",
                "Processes that wait, by reason.",
                "none",
                query(f"sum by (reason) (gpushare_mps_held_connections{GPUS})", "{{reason}}"),
            )
        ),
        graph(
            "A start at the gate",
            "Mean time of a turn.",
            "s",
            query(
                f"rate(gpushare_mps_turn_seconds_total{GPUS}[5m]) / rate(gpushare_mps_turns_total{GPUS}[5m])",
                "{{node}} {{gpu_uuid}}",
            ),
        ),
        graph(
            "Trouble",
            "Faults, restarted daemons, and processes that run otherwise than decided.",
            "none",
            query(f"sum(increase(gpushare_mps_faults_total{GPUS}[5m]))", "faults"),
            query(f"sum(increase(gpushare_mps_daemon_restarts_total{GPUS}[5m]))", "restarted daemons"),
            query(f"sum by (kind) (gpushare_mps_mismatches{GPUS})", "mismatch: {{kind}}"),
            query("sum(increase(gpushare_agent_allocation_mismatches_total[5m]))", "kubelet chose another GPU"),
        ),
    ]


def scheduling() -> list[Any]:
    buckets = "sum by (le, verb) (rate(gpushare_extender_request_duration_seconds_bucket[5m]))"
    fence = "sum by (le) (rate(gpushare_extender_bind_fence_wait_seconds_bucket[5m]))"
    reviews = "sum by (le) (rate(gpushare_admission_review_duration_seconds_bucket[5m]))"
    return [
        graph(
            "The extender's answers",
            "Time to answer kube-scheduler, by verb.",
            "s",
            query(f"histogram_quantile(0.5, {buckets})", "{{verb}} p50"),
            query(f"histogram_quantile(0.99, {buckets})", "{{verb}} p99"),
        ),
        stacked(
            graph(
                "Pods that fitted nowhere",
                "Rejections a second, by reason.",
                "ops",
                query("sum by (reason) (rate(gpushare_extender_rejections_total[5m]))", "{{reason}}"),
            )
        ),
        graph(
            "Binding",
            "Wait for an earlier allocation (p99), and bindings that failed.",
            "s",
            query(f"histogram_quantile(0.99, {fence})", "fence p99"),
            query("sum by (reason) (rate(gpushare_extender_bind_failures_total[5m]))", "failed: {{reason}}"),
        ),
        graph(
            "Admission",
            "Time to answer the API server (p99), and refusals a second.",
            "s",
            query(f"histogram_quantile(0.99, {reviews})", "review p99"),
            query("sum by (reason) (rate(gpushare_admission_rejections_total[5m]))", "refused: {{reason}}"),
        ),
    ]


def render() -> str:
    return JSONEncoder(sort_keys=True, indent=2).encode(build().build()) + "\n"


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text)
    print(f"wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
