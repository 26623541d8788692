"""Dashboard of the cluster: its GPUs, the gain of sharing, kept promises, waiting pods."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import PanelColumn, answer, board, graph, known_progress, query, rows, stacked, variable

PODS = '{namespace=~"$namespace"}'
IN_USE = "count(count by (gpu_uuid) (gpushare_pod_share_ratio))"
KNOWN = known_progress()
PROGRESS = f"sum({KNOWN})"
KNOWN_GPUS = f"count(count by (gpu_uuid) ({KNOWN}))"
NONE_YET = "0 * count(gpushare_gpu_healthy)"  # 0 where agents report, nothing where none does


def build() -> dashboard.Dashboard:
    return board(
        "gpushare",
        "What the cluster's GPUs do, what sharing them gains, and whether every promise is kept.",
        [variable("namespace", "Namespace", "label_values(gpushare_pod_share_ratio, namespace)")],
        [
            ("In short", in_short()),
            ("What sharing gains", gains()),
            ("Promises", promises()),
            ("Who has what", who()),
        ],
    )


def in_short() -> list[Any]:
    return [
        answer(
            "How many GPUs are there?",
            "All GPUs that an agent reports.",
            "suffix: GPUs",
            "count(gpushare_gpu_healthy)",
            words={"1": ("1 GPU", "text")},
        ),
        answer(
            "How many are in use?",
            "GPUs with at least one pod.",
            "suffix: in use",
            f"{IN_USE} or {NONE_YET}",
            words={"0": ("None", "text")},
        ),
        answer(
            "What does a used GPU do?",
            "Summed progress over the GPUs that made it: those in use on which every pod's progress is known. "
            "1 is what one pod alone on each GPU would do.",
            "suffix: × one pod alone",
            f"{PROGRESS} / {KNOWN_GPUS}",
        ),
        answer(
            "How many GPUs does sharing spare?",
            "GPUs that the same work would need at one pod for each GPU, less those that did it: "
            "the GPUs in use on which every pod's progress is known.",
            "suffix: GPUs spared",
            f"clamp_min({PROGRESS} - {KNOWN_GPUS}, 0)",
        ),
        answer(
            "Is every promise kept?",
            "Pods that make less progress than they were promised, as their nodes' loops see it.",
            "suffix: pods below their promise",
            f"sum(gpushare_pod_promise_broken) or {NONE_YET}",
            words={"0": ("Yes", "green"), "1": ("1 pod below its promise", "red")},
            bad_from=1,
            link=("gpushare-workload", ""),
        ),
        answer(
            "Is anyone held back?",
            "Pods that are stopped for part of the time, so that a neighbour's promise is kept.",
            "suffix: pods throttled",
            f"count(gpushare_pod_throttle_ratio > 0) or {NONE_YET}",
            words={"0": ("No", "green"), "1": ("1 pod throttled", "text")},
        ),
        answer(
            "Does anyone wait for a GPU?",
            "Annotated pods without a decision.",
            "suffix: pods wait",
            'sum(gpushare_workload_pods{state="Waiting"}) or 0 * count(gpushare_operator_pods)',
            words={"0": ("No", "green"), "1": ("1 pod waits", "text")},
            link=("gpushare-control", ""),
        ),
        answer(
            "Is every GPU healthy?",
            "GPUs that take no new tenants.",
            "suffix: GPUs unhealthy",
            f"count(gpushare_gpu_healthy == 0) or {NONE_YET}",
            words={"0": ("Yes", "green"), "1": ("1 GPU unhealthy", "red")},
            bad_from=1,
            link=("gpushare-node", ""),
        ),
    ]


def gains() -> list[Any]:
    return [
        graph(
            "Work done against GPUs in use",
            "Progress above the GPUs that made it is what sharing gained. It is summed over the GPUs in use on "
            "which every pod's progress is known.",
            "none",
            query(PROGRESS, "their summed progress"),
            query(KNOWN_GPUS, "GPUs with known progress"),
            query(f"{IN_USE} or {NONE_YET}", "GPUs in use"),
            query("count(gpushare_gpu_healthy)", "GPUs"),
        ),
        graph(
            "Shares given against used",
            "Given: what pods are guaranteed. Used: the time that the SMs of all GPUs had work.",
            "percentunit",
            query("avg(gpushare_gpu_share_used_ratio)", "given"),
            query("avg(gpushare_gpu_sm_activity_ratio)", "used: SM activity"),
            query("sum(gpushare_gpu_memory_used_bytes) / sum(gpushare_gpu_memory_total_bytes)", "used: memory"),
        ),
        stacked(
            graph(
                "Progress by namespace",
                "GPUs' worth of work that each namespace gets done.",
                "none",
                query(f"sum by (namespace) (gpushare_pod_progress_ratio{PODS})", "{{namespace}}"),
            )
        ),
        graph(
            "Asked, given, done",
            "GPUs that pods ask for, waiting ones included; that they hold; and the work that they do, where "
            "their progress is known.",
            "none",
            query(f"sum(gpushare_workload_requested_gpus{PODS})", "asked"),
            query(f"sum(gpushare_pod_share_ratio{PODS})", "given"),
            query(f"sum(gpushare_pod_progress_ratio{PODS})", "done"),
        ),
    ]


def promises() -> list[Any]:
    return [
        graph(
            "Promises broken, pods throttled",
            "What the nodes do about it: throttle first, then retract.",
            "none",
            query(f"sum(gpushare_pod_promise_broken) or {NONE_YET}", "below their promise"),
            query(f"count(gpushare_pod_throttle_ratio > 0) or {NONE_YET}", "throttled"),
        ),
        graph(
            "What was done in the last hour",
            "Promises found broken, pods throttled for them, and pods moved away.",
            "none",
            query("sum(increase(gpushare_promises_broken_total[1h]))", "promises found broken"),
            query("sum(increase(gpushare_throttles_total[1h]))", "throttled"),
            query("sum(increase(gpushare_retractions_asked_total[1h]))", "asked to leave"),
            query("sum(increase(gpushare_retractions_total[1h]))", "moved away"),
        ),
        graph(
            "Worst slowdown",
            "The pods that suffer most, relative to running alone.",
            "none",
            query(f"topk(5, gpushare_pod_slowdown_ratio{PODS})", "{{namespace}}/{{pod}}"),
        ),
        graph(
            "Progress of its promise",
            "1 is the promise; the five lowest of the pods that work.",
            "percentunit",
            query(
                f"bottomk(5, (gpushare_pod_progress_ratio{PODS} > 0) / gpushare_pod_promise_ratio{PODS})",
                "{{namespace}}/{{pod}}",
            ),
        ),
    ]


def who() -> list[Any]:
    by_space = "by (namespace)"
    by_gpu = "by (node, gpu_index, gpu_uuid)"
    return [
        rows(
            "Namespaces",
            "GPUs asked for, given, and really used; a showback for a span of time is `gpushare report`.",
            [
                PanelColumn("Asked, GPUs", "none", f"sum {by_space} (gpushare_workload_requested_gpus{PODS})"),
                PanelColumn("Given, GPUs", "none", f"sum {by_space} (gpushare_pod_share_ratio{PODS})"),
                PanelColumn("Done, GPUs' work", "none", f"sum {by_space} (gpushare_pod_progress_ratio{PODS})"),
                PanelColumn("Worst slowdown", "none", f"max {by_space} (gpushare_pod_slowdown_ratio{PODS})"),
            ],
            links={"namespace": ("gpushare-workload", "Its workloads", "&var-namespace=${__value.raw}")},
            sort="Given, GPUs",
            span=12,
        ),
        rows(
            "GPUs",
            "One row a GPU.",
            [
                PanelColumn("Healthy", "bool_yes_no", f"max {by_gpu} (gpushare_gpu_healthy)"),
                PanelColumn("Given", "percentunit", f"max {by_gpu} (gpushare_gpu_share_used_ratio)"),
                PanelColumn("SM activity", "percentunit", f"max {by_gpu} (gpushare_gpu_sm_activity_ratio)"),
                PanelColumn("Memory used", "bytes", f"max {by_gpu} (gpushare_gpu_memory_used_bytes)"),
            ],
            links={
                "gpu_uuid": ("gpushare-node", "This GPU", "&var-gpu=${__value.raw}"),
                "node": ("gpushare-node", "This node", "&var-node=${__value.raw}"),
            },
            sort="Given",
            span=12,
        ),
    ]
