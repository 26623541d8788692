"""Which node a GPU belongs to if several list it and nothing tells which of them listed it first."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from gpushare.core.api import PodView, names


def nodes_by_decision(pods: Iterable[PodView]) -> dict[str, set[str]]:
    """Return, by GPU, the nodes with a pod whose decision names it.

    A decision for more GPUs than the pod's limit pays for is left out: the extender makes none, but a compromised
    agent can write one for a pod on its node.
    """
    found: dict[str, set[str]] = {}
    for pod in pods:
        if pod.node is None or pod.decision is None or pod.finished:
            continue
        uuids = pod.decision.gpu_uuids
        if len(uuids) == 1 or len(uuids) * names.SHARES_PER_GPU <= pod.limit_percent:
            for uuid in uuids:
                found.setdefault(uuid, set()).add(pod.node)
    return found


def in_order_of_claim(
    nodes: Iterable[str], with_pods: AbstractSet[str], created_at: Mapping[str, str]
) -> list[str]:
    """Return the nodes that claim a GPU, the owner first: who has pods on it, then the oldest GpuNode.

    Args:
        with_pods: nodes with a pod whose decision names the GPU.
        created_at: by node, when its GpuNode was created, RFC 3339.
    """
    return sorted(nodes, key=lambda node: (node not in with_pods, created_at[node], node))
