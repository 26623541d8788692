"""Names that users, Kubernetes objects and every part of gpushare share (docs/design.md 1)."""

from typing import Final

GROUP: Final = "gpushare.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# What the user writes on a pod.
FRACTION: Final = f"{GROUP}/fraction"
"""Share of one GPU, or a number of whole GPUs. A pod with it shares GPUs; every other pod is left alone."""
MEMORY: Final = f"{GROUP}/memory"
"""GPU memory of the pod on each GPU; without it, what its GpuShare says, or the fraction's part of the memory."""
CLASS: Final = f"{GROUP}/class"
"""What the pod cares about: throughput is capped and may be throttled, latency runs uncapped and is protected."""
WORKLOAD: Final = f"{GROUP}/workload"
"""Key of the workload, so that pods of one kind share what was learnt about them; without it, the pod's owner."""
CONTAINER: Final = f"{GROUP}/container"
"""Which container gets the GPU; without it, the pod's default container for kubectl, else the first."""
PROCESSES: Final = f"{GROUP}/processes"
"""Number of CUDA processes (contexts, if a process has several) that share the pod's cap evenly; default 1."""
SLO: Final = f"{GROUP}/slo"
"""The pod's own target: a latency, or a rate for class throughput, read as `slo-from` or `slo-query` says."""
SLO_FROM: Final = f"{GROUP}/slo-from"
"""The histogram or summary of request times that the pod serves or, for a rate, its counter."""
SLO_QUERY: Final = f"{GROUP}/slo-query"
"""A query for Prometheus, for the quantile in seconds or the rate; $namespace and $pod stand for the pod's."""
USER_ANNOTATIONS: Final = (FRACTION, MEMORY, CLASS, WORKLOAD, CONTAINER, PROCESSES, SLO, SLO_FROM, SLO_QUERY)

# The decision; only gpushare's own service accounts may write these.
GPU: Final = f"{GROUP}/gpu"
"""UUIDs of the GPUs that the pod was placed on."""
THREAD_PERCENTAGE: Final = f"{GROUP}/thread-percentage"
"""The pod's cap: the percentage of the GPU's threads that its processes may use."""
MEMORY_LIMIT: Final = f"{GROUP}/memory-limit"
"""Device memory that the pod may allocate on each of its GPUs, such as "0=8192M"."""
DECIDED_AT: Final = f"{GROUP}/decided-at"
"""When the pod was placed."""
PROBATION_SECONDS: Final = f"{GROUP}/probation-seconds"
"""How many seconds the pod has its GPU to itself while its workload is profiled; only set on such pods."""
DECISION_ANNOTATIONS: Final = (GPU, THREAD_PERCENTAGE, MEMORY_LIMIT, DECIDED_AT, PROBATION_SECONDS)

ROOM_SINCE: Final = f"{GROUP}/room-since"
"""Written by the extender on a waiting pod to make kube-scheduler try it again; its value has no other meaning."""

DEVICES_READY: Final = "DevicesReady"
"""Condition of a GpuNode: whether the driver answers and can read every GPU that it counts."""
THROTTLE_READY: Final = "ThrottleReady"
"""Condition of a GpuNode: whether its tenants can be stopped for a moment (throttled)."""
READINGS_READY: Final = "ReadingsReady"
"""Condition of a GpuNode, only present while False: counters' windows are longer than tenants may be stopped."""
READING_CONDITIONS: Final = (THROTTLE_READY, READINGS_READY)
"""Conditions of a GpuNode of which none may be False for workloads to be profiled in place, beside others."""

MANAGED_LABEL: Final = f"{GROUP}/managed"
"""Label "true" on each pod that shares GPUs, set by admission, so that watches can select these pods."""
MANAGED_SELECTOR: Final = f"{MANAGED_LABEL}=true"
UNMANAGED_SELECTOR: Final = f"{MANAGED_LABEL}!=true"
SHARE_RESOURCE: Final = f"{GROUP}/share"
"""Percent of a GPU, a limit that admission sets on the container; quota, extender and kubelet count it."""
SCHEDULER_NAME: Final = "gpushare-scheduler"
"""The scheduler of pods that share GPUs; set by admission."""

# In a tenant's container: the read-only mount of its GPU's tenant directory.
TENANT_MPS_DIRECTORY: Final = "/run/gpushare/mps"
# On the node, private to gpushare: one directory per GPU; see `gpushare.mps.layout`.
HOST_DIRECTORY: Final = "/run/gpushare"

SHARES_PER_GPU: Final = 100
MAX_CLIENTS_PER_GPU: Final = 48  # docs/facts.md 9: the 49th client of one MPS server is refused by CUDA
MAX_CLIENTS_PER_POD: Final = 16  # default: a third of the server's 48; pods with more workers are rare
LEAST_PROCESS_PERCENT: Final = 6  # MPS gives a process no less than 8 of an H200's 132 SMs (docs/gate.md)
