"""Dashboard of a workload: its promise, progress, profile, neighbours, and suitable fraction."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import POD_NAME, PanelColumn, answer, board, graph, query, rows, variable

OF = '{namespace=~"$namespace", gpushare=~"$workload"}'
PODS = '{namespace=~"$namespace", pod=~"$pod"}'
SHARED_WITH = f"and on (gpu_uuid) gpushare_pod_share_ratio{PODS}"


def build() -> dashboard.Dashboard:
    return board(
        "gpushare-workload",
        "Whether a workload gets what it was promised, what it draws from its GPU, and who runs beside it.",
        [
            variable("namespace", "Namespace", "label_values(gpushare_workload_pod_info, namespace)"),
            variable(
                "workload",
                "Workload (its GpuShare)",
                'label_values(gpushare_workload_pod_info{namespace=~"$namespace"}, gpushare)',
            ),
            variable("pod", "Pod", f"label_values(gpushare_workload_pod_info{OF}, pod)", all_value=None),
        ],
        [
            ("In short", in_short()),
            ("Promise and progress", progress()),
            ("Neighbours", [neighbours()]),
            ("Profile: what it draws from its GPU", profile()),
            ("Its size", size()),
        ],
    )


def in_short() -> list[Any]:
    promised = f"min((gpushare_pod_progress_ratio{PODS} > 0) / gpushare_pod_promise_ratio{PODS})"  # 0: it sleeps
    return [
        answer(
            "Do my pods run?",
            "Pods that wait for a place.",
            "suffix: pods wait",
            f'sum(gpushare_workload_pods{{namespace=~"$namespace", gpushare=~"$workload", state="Waiting"}})'
            f" or 0 * sum(gpushare_workload_pods{OF})",
            words={"0": ("Yes, all", "green"), "1": ("1 pod waits", "text")},
            link=("gpushare-control", ""),
        ),
        answer(
            "Do they get what was promised?",
            "The worst pod's progress, of its promise. Below it the node throttles a neighbour, then moves one.",
            "suffix: % of it, the worst pod",
            f"100 * {promised}",
            words={"100..100000": ("Yes", "green")},
            bad_below=100,
        ),
        answer(
            "How much slower than alone?",
            "The worst pod's slowdown; it includes what its own cap costs.",
            "suffix: × as long as alone",
            f"max(gpushare_pod_slowdown_ratio{PODS})",
        ),
        answer(
            "Are they held back?",
            "Pods that are stopped part of the time for a neighbour's promise.",
            "suffix: pods throttled",
            f"count(gpushare_pod_throttle_ratio{PODS} > 0) or 0 * count(gpushare_pod_share_ratio{PODS})",
            words={"0": ("No", "green"), "1": ("1 pod throttled", "text")},
        ),
        answer(
            "What do they ask for?",
            "GPUs over all pods, waiting ones included.",
            "suffix: GPUs",
            f"sum(gpushare_workload_requested_gpus{OF})",
            words={"1": ("1 GPU", "text")},
        ),
        answer(
            "What would suit one pod?",
            "Share that the workload's profile recommends (`gpushare.io/fraction`); known once it is profiled.",
            "suffix: % of a GPU",
            f"100 * max(gpushare_workload_recommended_share_ratio{OF})",
        ),
        answer(
            "Is their memory enough?",
            "Memory in use of the limit, the fullest pod; said in figures from 80% on.",
            "suffix: % of the limit is used",
            f"100 * max(gpushare_pod_memory_used_bytes{PODS} / gpushare_pod_memory_limit_bytes{PODS})",
            words={"0..79.999": ("Yes", "green")},
            bad_from=95,
        ),
        answer(
            "Who shares their GPUs?",
            "Other pods on the same GPUs.",
            "suffix: neighbours",
            f"count(count by (pod_uid) (gpushare_pod_share_ratio {SHARED_WITH})"
            f" unless count by (pod_uid) (gpushare_pod_share_ratio{PODS}))"
            f" or 0 * count(gpushare_pod_share_ratio{PODS})",
            words={"0": ("Nobody", "green"), "1": ("1 neighbour", "text")},
        ),
    ]


def progress() -> list[Any]:
    return [
        graph(
            "Progress and promise",
            "Inferred progress relative to running alone, and what the pod may count on.",
            "percentunit",
            query(f"gpushare_pod_progress_ratio{PODS}", POD_NAME),
            query(f"gpushare_pod_promise_ratio{PODS}", f"{POD_NAME} promise"),
        ),
        graph(
            "Predicted against observed",
            "Observed over what the interference model predicts beside these neighbours; 1 is as predicted.",
            "none",
            query(f"gpushare_pod_progress_ratio{PODS} / gpushare_pod_predicted_progress_ratio{PODS}", POD_NAME),
        ),
        graph(
            "Slowdown",
            "How much longer each pod takes than alone.",
            "none",
            query(f"gpushare_pod_slowdown_ratio{PODS}", POD_NAME),
        ),
        graph(
            "Throttled",
            "Part of the time that a pod is stopped. Empty while none is.",
            "percentunit",
            query(f"gpushare_pod_throttle_ratio{PODS}", POD_NAME),
        ),
    ]


def neighbours() -> Any:
    columns = (
        ("gpushare_pod_share_ratio", "Share", "percentunit"),
        ("gpushare_pod_progress_ratio", "Progress", "percentunit"),
        ("gpushare_pod_slowdown_ratio", "Slowdown", "none"),
        ("gpushare_pod_throttle_ratio", "Stopped", "percentunit"),
    )
    by = "max by (node, gpu_uuid, namespace, pod)"
    busiest = f"{by} (gpushare_pod_pipe_utilization_ratio {SHARED_WITH})"
    return rows(
        "Who runs on the same GPUs",
        "The chosen pods and all others on their GPUs.",
        [
            *(PanelColumn(title, unit, f"{by} ({metric} {SHARED_WITH})") for metric, title, unit in columns),
            PanelColumn("Busiest pipe", "percentunit", busiest),
        ],
        links={
            "gpu_uuid": ("gpushare-node", "This GPU", "&var-gpu=${__value.raw}"),
            "pod": ("gpushare-workload", "This pod", "&var-pod=${__value.raw}"),
        },
        sort="gpu_uuid",
    )


def profile() -> list[Any]:
    return [
        graph(
            "Pipes",
            "The pods' own inferred use of each pipe, mean over the pods.",
            "percentunit",
            query(f"avg by (pipe) (gpushare_pod_pipe_utilization_ratio{PODS})", "{{pipe}}"),
        ),
        graph(
            "Busiest pipe",
            "The pipe that each pod uses most.",
            "percentunit",
            query(f"max by (namespace, pod) (gpushare_pod_pipe_utilization_ratio{PODS})", POD_NAME),
        ),
    ]


def size() -> list[Any]:
    return [
        graph(
            "Share, cap and what would suit",
            "Share: guaranteed. Cap: of the SMs, may be above the share. Recommended: by the profile.",
            "percentunit",
            query(f"gpushare_pod_share_ratio{PODS}", f"{POD_NAME} share"),
            query(f"gpushare_pod_thread_percentage_ratio{PODS}", f"{POD_NAME} cap"),
            query(f"gpushare_workload_recommended_share_ratio{OF}", "{{namespace}}/{{gpushare}} recommended"),
        ),
        graph(
            "Memory used of its limit",
            "1 is the limit of all the pod's processes together.",
            "percentunit",
            query(f"gpushare_pod_memory_used_bytes{PODS} / gpushare_pod_memory_limit_bytes{PODS}", POD_NAME),
        ),
    ]
