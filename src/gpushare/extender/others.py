"""Pods that gpushare did not place: the CPU and memory that they use on a node."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from sys import intern
from typing import Any, Final

from gpushare.core.api import as_allocated, has_ended, is_managed, requests_of, share_limit_of
from gpushare.core.placement import ClusterState
from gpushare.extender.presence import serves

ON_A_NODE: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Field selector for pods that use resources of a node, so that the API server sends no others."""


@dataclass(frozen=True, slots=True)
class OtherPod:
    """Another system's pod on a node.

    Attributes:
        limit_percent: its limit `gpushare.io/share`, nearly always 0.
        serves: for a pod of gpushare's agent, whether it is running; None for any other pod.
    """

    uid: str
    node: str
    cpu_milli: int
    memory_mib: int
    limit_percent: int = 0
    serves: bool | None = None


def reduce_other_pod(obj: Mapping[str, Any], namespace: str = "") -> OtherPod | None:
    """Return the needed fields of a pod; None for our pods, unbound pods and pods that have ended.

    Args:
        namespace: gpushare's own namespace.

    Raises:
        KeyError: the pod has no uid.
        ValueError: a request is not a quantity.
    """
    spec = obj.get("spec") or {}
    node = spec.get("nodeName")
    if not node or has_ended(obj) or is_managed(obj):
        return None
    cpu_milli, memory_mib = requests_of(as_allocated(spec, obj.get("status") or {}))
    return OtherPod(
        obj["metadata"]["uid"], intern(node), cpu_milli, memory_mib, share_limit_of(spec), serves(obj, namespace)
    )


class OtherPods:
    """The pods of other systems, by node; reports their total requests to `state`."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._by_node: dict[str, dict[str, OtherPod]] = {}

    def put(self, pod: OtherPod) -> bool:
        """Count a pod that appeared or changed; return whether it gives something back.

        It stays on its node until it ends.
        """
        on_node = self._by_node.setdefault(pod.node, {})
        before, on_node[pod.uid] = on_node.get(pod.uid), pod
        self._tell(pod.node)
        return before is not None and (pod.cpu_milli < before.cpu_milli or pod.memory_mib < before.memory_mib)

    def drop(self, pod: OtherPod) -> None:
        """Stop counting a pod."""
        on_node = self._by_node.get(pod.node, {})
        on_node.pop(pod.uid, None)
        if not on_node:
            self._by_node.pop(pod.node, None)
        self._tell(pod.node)

    def get(self, node: str | None, uid: str) -> OtherPod | None:
        """Return one pod of a node, or None."""
        return self._by_node.get(node or "", {}).get(uid)

    @contextmanager
    def leaving(self, node: str, uids: Sequence[str]) -> Iterator[None]:
        """Count these pods' requests as free within this context."""
        self._tell(node, frozenset(uids))
        try:
            yield
        finally:
            self._tell(node)

    def _tell(self, node: str, without: frozenset[str] = frozenset()) -> None:
        counted = [pod for pod in self._by_node.get(node, {}).values() if pod.uid not in without]
        self._state.set_other_use(
            node, sum(pod.cpu_milli for pod in counted), sum(pod.memory_mib for pod in counted)
        )
