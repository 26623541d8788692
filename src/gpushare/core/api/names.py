"""Names that users, Kubernetes objects and every part of gpushare share (docs/design.md 1)."""

from typing import Final

GROUP: Final = "gpushare.io"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# What the user writes on a pod.
FRACTION: Final = f"{GROUP}/fraction"
MEMORY: Final = f"{GROUP}/memory"
CLASS: Final = f"{GROUP}/class"
WORKLOAD: Final = f"{GROUP}/workload"
CONTAINER: Final = f"{GROUP}/container"
PROCESSES: Final = f"{GROUP}/processes"
SLO: Final = f"{GROUP}/slo"
SLO_FROM: Final = f"{GROUP}/slo-from"
SLO_QUERY: Final = f"{GROUP}/slo-query"
USER_ANNOTATIONS: Final = (FRACTION, MEMORY, CLASS, WORKLOAD, CONTAINER, PROCESSES, SLO, SLO_FROM, SLO_QUERY)

# The decision; only gpushare's own service accounts may write these.
GPU: Final = f"{GROUP}/gpu"
THREAD_PERCENTAGE: Final = f"{GROUP}/thread-percentage"
MEMORY_LIMIT: Final = f"{GROUP}/memory-limit"
DECIDED_AT: Final = f"{GROUP}/decided-at"
PROBATION_SECONDS: Final = f"{GROUP}/probation-seconds"
"""Only on a pod that has its GPU to itself for so long, while its workload's profile is taken."""
DECISION_ANNOTATIONS: Final = (GPU, THREAD_PERCENTAGE, MEMORY_LIMIT, DECIDED_AT, PROBATION_SECONDS)

ROOM_SINCE: Final = f"{GROUP}/room-since"
"""Touched by the extender on a waiting pod, to have kube-scheduler try it again; says nothing else."""

THROTTLE_READY: Final = "ThrottleReady"
"""Condition of a GpuNode: whether its tenants can be stopped for a moment."""

MANAGED_LABEL: Final = f"{GROUP}/managed"
MANAGED_SELECTOR: Final = f"{MANAGED_LABEL}=true"
UNMANAGED_SELECTOR: Final = f"{MANAGED_LABEL}!=true"
SHARE_RESOURCE: Final = f"{GROUP}/share"
SCHEDULER_NAME: Final = "gpushare-scheduler"

# Inside a tenant's container: the read-only mount of its GPU's tenant directory.
TENANT_MPS_DIRECTORY: Final = "/run/gpushare/mps"
# On the node, private to gpushare: one directory per GPU, see `gpushare.mps.layout`.
HOST_DIRECTORY: Final = "/run/gpushare"

SHARES_PER_GPU: Final = 100
MAX_CLIENTS_PER_GPU: Final = 48  # docs/facts.md 9: the 49th client of one MPS server is refused by CUDA
LEAST_PROCESS_PERCENT: Final = 6  # MPS gives a process no less than 8 of an H200's 132 SMs (docs/gate.md)
