"""A generated fleet as the API server would show it: nodes, GpuNodes and running tenants, realistic in size."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

KINDS = 100  # of pods: the combination of team and app repeats after so many
GPU_MODEL = "NVIDIA H200"
GPU_MEMORY_MIB = 143771
WAITED = timedelta(hours=2)  # within the first window of policy.reserveAfterSeconds
FRACTIONS = (10, 20, 25, 30, 40, 50)
PREFERENCE = {
    "nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 1,
                "preference": {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]},
            }
        ]
    }
}
"""An affinity that leaves kube-scheduler a choice (ADR 0043)."""
KUBELET_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")


def node_name(index: int) -> str:
    return f"gpu-node-{index:05d}.eu-west-1.compute.internal"


def gpu_uuid(node: int, gpu: int) -> str:
    return f"GPU-{node:08x}-{gpu:04x}-4e11-9f00-c0ffee000000"


def pod_uid(index: int) -> str:
    return f"{index:08x}-5eed-4abc-8def-00000000feed"


def node(index: int, gpus: int) -> dict[str, Any]:
    """Return a Node with the conditions and labels of a real one."""
    name = node_name(index)
    capacity = {
        "cpu": "192",
        "memory": "2113411328Ki",
        "pods": "250",
        "ephemeral-storage": "1823Gi",
        "hugepages-1Gi": "0",
        "hugepages-2Mi": "0",
        "gpushare.io/share": str(100 * gpus),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"{index:08x}-0000-4abc-8def-00000000beef",
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
        },
        "spec": {},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [
                {"type": kind, "status": status, "reason": "KubeletSaysSo", "message": "kubelet says so"}
                for kind, status in (("Ready", "True"), ("MemoryPressure", "False"), ("DiskPressure", "False"))
            ],
            "images": [{"names": [f"registry.local/image@sha256:{i:064x}"], "sizeBytes": 10**9} for i in range(9)],
        },
    }


def gpunode(index: int, gpus: int, tenants: dict[int, list[tuple[str, int]]] | None = None) -> dict[str, Any]:
    """Return a GpuNode; `tenants`: (pod uid, share percent) by GPU index."""
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuNode",
        "metadata": {"name": node_name(index), "resourceVersion": "1"},
        "status": {
            "driverVersion": "580.159.04",
            "gpus": [
                {
                    "uuid": gpu_uuid(index, gpu),
                    "index": gpu,
                    "model": GPU_MODEL,
                    "memoryMiB": GPU_MEMORY_MIB,
                    "smCount": 132,
                    "health": "Healthy",
                    "mps": {"state": "Active", "clients": 2, "held": 0},
                    "utilization": {
                        "fp16": 0.31,
                        "fp32": 0.12,
                        "fp64": 0.0,
                        "integer": 0.08,
                        "dram": 0.4,
                        "sm": 0.7,
                        "nvml": 0.9,
                    },
                    "memoryUsedMiB": 40000,
                    "tenants": [
                        {
                            "podUid": uid,
                            "share": share,
                            "threadPercentage": share,
                            "memoryLimitMiB": 20000,
                            "memoryUsedMiB": 10000,
                            "clients": 1,
                            "progress": 0.9,
                            "slowdown": 1.1,
                        }
                        for uid, share in (tenants or {}).get(gpu, [])
                    ],
                }
                for gpu in range(gpus)
            ],
        },
    }


def waiting_pod(index: int) -> dict[str, Any]:
    """Return a pod that has waited long for nine tenths of a GPU, or for eight GPUs."""
    made = pod(index, 90)
    if index % 8 == 0:
        made["metadata"]["annotations"]["gpushare.io/fraction"] = "8"
        made["spec"]["containers"][0]["resources"]["limits"]["gpushare.io/share"] = "800"
    made["metadata"]["creationTimestamp"] = (datetime.now(UTC) - WAITED).strftime("%Y-%m-%dT%H:%M:%SZ")
    made["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    return made


def pod(index: int, percent: int, *, node_index: int | None = None, gpu: int = 0) -> dict[str, Any]:
    """Return a pod as large as the API shows one of a Deployment, about 4 kB; running if `node_index` is given."""
    annotations = {"gpushare.io/fraction": f"0.{percent:02d}", "prometheus.io/scrape": "true"}
    spec: dict[str, Any] = {
        "schedulerName": "gpushare-scheduler",
        "priority": 0,
        "serviceAccountName": "default",
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{key}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            }
            for key in ("not-ready", "unreachable")
        ],
        "volumes": [{"name": "kube-api-access", "projected": {"defaultMode": 420, "sources": [{"x": "y" * 200}]}}],
        "containers": [
            {
                "name": "main",
                "image": "registry.local/team/serving:2026.11.21",
                "env": [{"name": f"SETTING_{i}", "value": "v" * 20} for i in range(15)],
                "resources": {
                    "limits": {"gpushare.io/share": str(percent), "memory": "8Gi"},
                    "requests": {"gpushare.io/share": str(percent), "memory": "8Gi", "cpu": "1"},
                },
                "volumeMounts": [{"name": "kube-api-access", "mountPath": "/var/run/secrets", "readOnly": True}],
            }
        ],
    }
    status: dict[str, Any] = {"phase": "Pending"}
    if node_index is not None:
        spec["nodeName"] = node_name(node_index)
        annotations |= {
            "gpushare.io/gpu": gpu_uuid(node_index, gpu),
            "gpushare.io/thread-percentage": str(percent),
            "gpushare.io/memory-limit": f"0={GPU_MEMORY_MIB * percent // 100}M",
            "gpushare.io/decided-at": "2026-11-21T11:00:00.000Z",
        }
        status = {
            "phase": "Running",
            "startTime": "2026-11-21T11:00:00Z",
            "podIP": "10.0.0.1",
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": "2026-11-21T11:00:00Z"}
                for kind in KUBELET_CONDITIONS
            ],
            "containerStatuses": [
                {"name": "main", "ready": True, "imageID": "sha256:" + "0" * 64, "x": "z" * 300}
            ],
        }
    return {
        "metadata": {
            "name": f"tenant-{index:06d}-7c9f8b6d5-{index % 100000:05d}",
            "namespace": f"team-{index % 20}",
            "uid": pod_uid(index),
            "labels": {
                "app": f"serving-{index % 50}",
                "gpushare.io/managed": "true",
                "pod-template-hash": "7c9f8b6d5",
            },
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": "serving",
                    "uid": "o" * 36,
                    "controller": True,
                }
            ],
            "managedFields": [{"manager": "kube-controller-manager", "fieldsV1": {"f": "x" * 900}}],
        },
        "spec": spec,
        "status": status,
    }


def other_pod(index: int, nodes: int) -> dict[str, Any]:
    """Return a running pod of the same size that is not gpushare's: two containers, eight CPU and memory sizes."""
    made = pod(index, FRACTIONS[0])
    made["metadata"] |= {
        "name": f"other-{index:06d}-5d4f8c7b9-{index % 100000:05d}",
        "namespace": f"system-{index % 40}",
        "uid": f"{index:08x}-07e5-4abc-8def-00000000cafe",
        "labels": {"app": f"service-{index % 200}", "pod-template-hash": "5d4f8c7b9"},
        "annotations": {"prometheus.io/scrape": "true"},
    }
    requests = {"cpu": f"{100 * (1 + index % 8)}m", "memory": f"{128 * (1 + index % 8)}Mi"}
    main = made["spec"]["containers"][0] | {"resources": {"limits": {"memory": "8Gi"}, "requests": requests}}
    sidecar = {
        "name": "proxy",
        "image": "registry.local/mesh/proxy:1.27",
        "resources": {"requests": {"cpu": "10m"}},
    }
    made["spec"] |= {
        "schedulerName": "default-scheduler",
        "nodeName": node_name(index % nodes),
        "containers": [main, sidecar],
    }
    running = pod(index, FRACTIONS[0], node_index=0)["status"]
    return made | {"status": running}


def gpushare(team: int, app: int, counters: dict[str, float]) -> dict[str, Any]:
    """Return a GpuShare with a profile for one team's pods of one app, as `pod` makes them."""
    return {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {"name": f"serving-{app}", "namespace": f"team-{team}", "uid": f"share-{team}-{app}"},
        "spec": {"selector": {"matchLabels": {"app": f"serving-{app}"}}},
        "status": {"profile": {"gpuModel": GPU_MODEL, "counters": counters, "windowSeconds": 10.0}},
    }


def place(nodes: int, gpus: int, tenants: int, seed: int) -> list[tuple[int, int, int]]:
    """Return (node, gpu, percent) of each running tenant: at random, never above 100 on a GPU."""
    rng = random.Random(seed)
    free = [[100] * gpus for _ in range(nodes)]
    placed: list[tuple[int, int, int]] = []
    while len(placed) < tenants:
        at, gpu, percent = rng.randrange(nodes), rng.randrange(gpus), rng.choice(FRACTIONS)
        if free[at][gpu] >= percent:
            free[at][gpu] -= percent
            placed.append((at, gpu, percent))
    return placed
