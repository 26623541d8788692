"""Dashboard of a node and its GPUs: health, tenants, use of the hardware, MPS and the gate."""

from typing import Any

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import (
    GPU_NAME,
    POD_NAME,
    PanelColumn,
    answer,
    board,
    graph,
    known_progress,
    query,
    rows,
    stacked,
    variable,
)

GPUS = '{node=~"$node", gpu_uuid=~"$gpu"}'
# The gate's own families have no node: their GPUs are those that the chosen nodes' agents report, or did in the
# last hour, as the gate goes on while its agent is away.
CHOSEN = f"and on (gpu_uuid) last_over_time(gpushare_gpu_healthy{GPUS}[1h])"
NONE_YET = f"0 * count(gpushare_gpu_healthy{GPUS})"


def build() -> dashboard.Dashboard:
    return board(
        "gpushare-node",
        "What the GPUs of a node do, who shares them, and how MPS and its gate fare.",
        [
            variable("node", "Node", "label_values(gpushare_gpu_healthy, node)"),
            variable("gpu", "GPU", 'label_values(gpushare_gpu_healthy{node=~"$node"}, gpu_uuid)'),
        ],
        [
            ("In short", in_short()),
            ("Who shares what", [tenants()]),
            ("The GPUs", gpus()),
            ("MPS and the gate", mps()),
        ],
    )


def in_short() -> list[Any]:
    return [
        answer(
            "Do the GPUs take tenants?",
            "GPUs that are unhealthy.",
            "suffix: do not",
            f"count(gpushare_gpu_healthy{GPUS} == 0) or {NONE_YET}",
            words={"0": ("Yes, all", "green"), "1": ("1 does not", "red")},
            bad_from=1,
        ),
        answer(
            "Does MPS run?",
            "GPUs whose MPS is in another state than Active.",
            "suffix: GPUs without MPS",
            'count(gpushare_mps_state{node=~"$node", gpu_uuid=~"$gpu", state="Active"} == 0) or ' + NONE_YET,
            words={"0": ("Yes, on all", "green"), "1": ("1 GPU without MPS", "red")},
            bad_from=1,
        ),
        answer(
            "Do limits bind?",
            "GPUs on which the gate's self-test failed: this driver does not keep tenants to their share.",
            "suffix: GPUs without limits",
            f"count(gpushare_mps_ceilings_enforced{GPUS} == 0) or {NONE_YET}",
            words={"0": ("Yes", "green"), "1": ("1 GPU without limits", "red")},
            bad_from=1,
        ),
        answer(
            "Does anyone run outside MPS?",
            "Processes that no limit binds.",
            "suffix: processes do",
            f"sum(gpushare_mps_outside_processes{GPUS})",
            words={"0": ("No", "green"), "1": ("1 process does", "red")},
            bad_from=1,
        ),
        answer(
            "How much is given away?",
            "Mean share that pods are guaranteed.",
            "suffix: % of the GPUs",
            f"100 * avg(gpushare_gpu_share_used_ratio{GPUS})",
            words={"0": ("Nothing", "text")},
        ),
        answer(
            "How busy are the SMs?",
            "Time that an SM had work, mean over the GPUs.",
            "suffix: % of the time",
            f"100 * avg(gpushare_gpu_sm_activity_ratio{GPUS})",
            words={"0": ("Idle", "text")},
        ),
        answer(
            "How many pods share them?",
            "Pods on the chosen GPUs.",
            "suffix: pods",
            f"count(count by (pod_uid) (gpushare_pod_share_ratio{GPUS})) or {NONE_YET}",
            words={"0": ("None", "text"), "1": ("1 pod", "text")},
        ),
        answer(
            "Does anyone wait at the gate?",
            "Processes held, for whatever reason.",
            "suffix: processes wait",
            f"sum(gpushare_mps_held_connections{GPUS}) or {NONE_YET}",
            words={"0": ("No", "green"), "1": ("1 process waits", "text")},
        ),
    ]


def tenants() -> Any:
    columns = (
        ("gpushare_pod_share_ratio", "Share", "percentunit"),
        ("gpushare_pod_thread_percentage_ratio", "Cap", "percentunit"),
        ("gpushare_pod_memory_limit_bytes", "Memory limit", "bytes"),
        ("gpushare_pod_memory_used_bytes", "Memory used", "bytes"),
        ("gpushare_pod_promise_ratio", "Promise", "percentunit"),
        ("gpushare_pod_progress_ratio", "Progress", "percentunit"),
        ("gpushare_pod_slowdown_ratio", "Slowdown", "none"),
        ("gpushare_pod_throttle_ratio", "Stopped", "percentunit"),
    )
    by = "max by (node, gpu_uuid, namespace, pod)"
    return rows(
        "Who shares what",
        "Each pod on each of its GPUs; progress is relative to running alone.",
        [PanelColumn(title, unit, f"{by} ({metric}{GPUS})") for metric, title, unit in columns],
        links={"pod": ("gpushare-workload", "This pod", "&var-pod=${__value.raw}")},
        sort="Share",
    )


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
        graph(
            "Summed progress",
            "Work that the pods of each GPU do together, where every pod's progress is known; 1 is what one pod "
            "alone would do.",
            "none",
            query(f"sum by (node, gpu_uuid) ({known_progress(GPUS)})", "{{node}} {{gpu_uuid}}"),
        ),
        graph(
            "Progress by pod",
            "Relative to running alone.",
            "percentunit",
            query(f"gpushare_pod_progress_ratio{GPUS}", POD_NAME),
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
                "Processes that wait, by reason. Empty while none does.",
                "none",
                query(f"sum by (reason) (gpushare_mps_held_connections{GPUS})", "{{reason}}"),
            )
        ),
        graph(
            "A start at the gate",
            "Mean time of a turn, while processes start.",
            "s",
            query(
                f"rate(gpushare_mps_turn_seconds_total{GPUS}[5m])"
                f" / (rate(gpushare_mps_turns_total{GPUS}[5m]) > 0)",
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
            query(
                f"sum by (reason) (increase(gpushare_mps_refused_connections_total{GPUS}[5m])) > 0",
                "refused: {{reason}}",
            ),
        ),
        graph(
            "Throttling by the host",
            "Pods held to a share of time, and how often a second a pod is stopped.",
            "none",
            query(f"sum(gpushare_gate_throttled_pods {CHOSEN})", "pods"),
            query(f"sum(rate(gpushare_gate_throttle_freezes_total[5m]) {CHOSEN})", "stops a second"),
            query(
                f"sum by (reason) (increase(gpushare_gate_throttle_refused_total[5m]) {CHOSEN}) > 0",
                "refused: {{reason}}",
            ),
        ),
        graph(
            "Sockets at the gate",
            "Open ones, and those that are left unread because their pod connects too fast.",
            "none",
            query(f"sum(gpushare_gate_connections {CHOSEN})", "open"),
            query(f"sum(gpushare_gate_unread_connections {CHOSEN})", "unread"),
        ),
    ]
