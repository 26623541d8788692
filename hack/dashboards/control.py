"""Dashboard of the control plane: whether annotated pods are admitted, placed and started, and how fast."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import PanelColumn, answer, board, graph, query, rows, stacked

BUCKETS = "sum by (le, verb) (rate(gpushare_extender_request_duration_seconds_bucket[5m]))"
FENCE = "sum by (le) (rate(gpushare_extender_bind_fence_wait_seconds_bucket[5m]))"
REVIEWS = "sum by (le) (rate(gpushare_admission_review_duration_seconds_bucket[5m]))"
LAG = "sum by (le, part) (rate(gpushare_event_loop_lag_seconds_bucket[5m]))"
WORK = "sum by (le, kind) (rate(gpushare_operator_reconciliation_duration_seconds_bucket[5m]))"


def build() -> dashboard.Dashboard:
    return board(
        "gpushare-control",
        "Whether annotated pods are admitted, placed and started, how fast, and what stands in their way.",
        [],
        [
            ("In short", in_short()),
            ("Scheduling", scheduling()),
            ("Admission and operator", operator()),
            ("Nodes' agents", agents()),
        ],
    )


def in_short() -> list[Any]:
    return [
        answer(
            "Are annotated pods scheduled?",
            "Extenders that are ready. kube-scheduler's leader asks its own one.",
            "none",
            "sum(gpushare_extender_ready)",
            words={"0": ("No: no extender is ready", "red"), "1..1000": ("Yes", "green")},
        ),
        answer(
            "How many pods wait?",
            "Annotated pods without a decision.",
            "suffix: pods wait",
            'sum(gpushare_workload_pods{state="Waiting"}) or 0 * sum(gpushare_operator_pods)',
            words={"0": ("None", "green"), "1": ("1 pod waits", "text")},
        ),
        answer(
            "Can new pods start on every node?",
            "Agents that are not registered with kubelet.",
            "suffix: nodes cannot",
            "count(gpushare_agent_registered == 0) or 0 * count(gpushare_agent_registered)",
            words={"0": ("Yes", "green"), "1": ("1 node cannot", "red")},
            bad_from=1,
        ),
        answer(
            "Does every driver answer?",
            "Nodes whose GPU driver does not.",
            "suffix: drivers do not",
            "count(gpushare_agent_driver_ready == 0) or 0 * count(gpushare_agent_driver_ready)",
            words={"0": ("Yes", "green"), "1": ("1 driver does not", "red")},
            bad_from=1,
        ),
        answer(
            "Is anything broken seen?",
            "Objects that the operator or an extender cannot understand now; of each kind, the most that one of "
            "them finds.",
            "suffix: broken objects",
            "sum(max by (kind) (gpushare_operator_bad_objects or gpushare_extender_present_bad_objects))",
            words={"0": ("No", "green"), "1": ("1 broken object", "red")},
            bad_from=1,
        ),
        answer(
            "Does the operator keep up?",
            "Keys that wait for work or are in work.",
            "suffix: keys wait",
            "sum(gpushare_operator_queue_length)",
            words={"0..999": ("Yes", "green")},
            bad_from=1000,
        ),
        answer(
            "How many pods does it know?",
            "Managed pods.",
            "suffix: pods",
            "sum(gpushare_operator_pods)",
            words={"0": ("None", "text"), "1": ("1 pod", "text")},
        ),
        answer(
            "How many hold room on a GPU?",
            "Reservations of the extender that is live.",
            "suffix: pods",
            "max(gpushare_extender_reservations)",
            words={"0": ("None", "text"), "1": ("1 pod", "text")},
        ),
    ]


def scheduling() -> list[Any]:
    return [
        graph(
            "The extender's answers",
            "Time to answer kube-scheduler, by verb.",
            "s",
            query(f"histogram_quantile(0.5, {BUCKETS})", "{{verb}} p50"),
            query(f"histogram_quantile(0.99, {BUCKETS})", "{{verb}} p99"),
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
            "Wait for an earlier allocation",
            "Time that bindings wait, p99.",
            "s",
            query(f"histogram_quantile(0.99, {FENCE})", "p99"),
        ),
        graph(
            "Bindings that failed, pods woken",
            "A second. A woken pod is tried again because room appeared.",
            "ops",
            query("sum by (reason) (rate(gpushare_extender_bind_failures_total[5m]))", "failed: {{reason}}"),
            query("sum(rate(gpushare_extender_pods_woken_total[5m]))", "woken"),
            query("sum by (resource) (rate(gpushare_extender_watch_restarts_total[5m]))", "watch: {{resource}}"),
        ),
    ]


def operator() -> list[Any]:
    return [
        graph(
            "Admission",
            "Time to answer the API server.",
            "s",
            query(f"histogram_quantile(0.5, {REVIEWS})", "p50"),
            query(f"histogram_quantile(0.99, {REVIEWS})", "p99"),
        ),
        stacked(
            graph(
                "Refusals",
                "Reviews refused a second, by reason.",
                "ops",
                query("sum by (reason) (rate(gpushare_admission_rejections_total[5m])) > 0", "{{reason}}"),
                query("sum by (result) (rate(gpushare_admission_reviews_total[5m]))", "all reviews: {{result}}"),
            )
        ),
        graph(
            "Reconciliations",
            "Time of one, p99, by kind.",
            "s",
            query(f"histogram_quantile(0.99, {WORK})", "{{kind}}"),
        ),
        graph(
            "Work of the operator",
            "A second: reconciliations by result, and statuses written.",
            "ops",
            query("sum by (result) (rate(gpushare_operator_reconciliations_total[5m]))", "{{result}}"),
            query("sum(rate(gpushare_operator_status_writes_total[5m]))", "statuses written"),
        ),
        stacked(
            graph(
                "GpuShares",
                "By phase.",
                "none",
                query("sum by (phase) (gpushare_operator_gpushares)", "{{phase}}"),
            )
        ),
        graph(
            "Retractions",
            "Pods that an agent wants moved away and that are still there; evictions that the API server refused.",
            "none",
            query("sum(gpushare_retractions_waiting)", "waiting"),
            query("sum(increase(gpushare_retractions_total[1h]))", "moved away in the last hour"),
            query(
                "sum by (reason) (increase(gpushare_retractions_refused_total[1h])) > 0",
                "refused in the last hour: {{reason}}",
            ),
        ),
        graph(
            "Learning",
            "Windows of shared GPUs that taught something about their workloads, a second.",
            "ops",
            query("sum(rate(gpushare_operator_windows_learnt_total[5m]))", "windows"),
        ),
        graph(
            "Longest stalls",
            "For how long, at most, one step of a part's work or a lack of CPU kept all else in it waiting. The "
            "operator's should be 0.5 s at most.",
            "s",
            query(f"histogram_quantile(1, {LAG})", "{{part}}"),
        ),
        graph(
            "Deletions that no watch brought",
            "Found when Kopf listed anew, by kind.",
            "none",
            query("sum by (kind) (gpushare_operator_missed_deletions)", "{{kind}}"),
        ),
    ]


def agents() -> list[Any]:
    return [
        rows(
            "Agents",
            "One row a node.",
            [
                PanelColumn("Registered", "bool_yes_no", "max by (node) (gpushare_agent_registered)"),
                PanelColumn("Driver answers", "bool_yes_no", "max by (node) (gpushare_agent_driver_ready)"),
                PanelColumn("Wrong GPUs", "none", "sum by (node) (gpushare_agent_allocation_mismatches_total)"),
                PanelColumn("Refused", "none", "sum by (node) (gpushare_agent_refused_allocations_total)"),
                PanelColumn("Starts refused", "none", "sum by (node) (gpushare_agent_refused_starts_total)"),
                PanelColumn("Broken decisions", "none", "sum by (node) (gpushare_agent_bad_pods_total)"),
            ],
            links={"node": ("gpushare-node", "This node", "&var-node=${__value.raw}")},
            span=12,
            height=8,
        ),
        graph(
            "Trouble of the agents",
            "Errors a second, by what they hit; the agent goes on after each.",
            "ops",
            query("sum by (part) (rate(gpushare_agent_errors_total[5m]))", "{{part}}"),
        ),
    ]
