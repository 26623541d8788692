"""Which nodes' agents run: kubelet rejects a pod for good if no plugin serves when it arrives (ADR 0160)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

COMPONENT_LABEL: Final = "app.kubernetes.io/component"
AGENT: Final = "agent"
# Containers of its pod: one is at work, the other takes over at once (ADR 0198).
AGENT_CONTAINERS: Final = frozenset({"agent", "standby"})
HOLD_SECONDS: Final = 10.0  # after this time kubelet reports on its node that it has no shares


def serves(obj: Mapping[str, Any], namespace: str) -> bool | None:
    """Return whether an agent runs in a pod and has registered with kubelet; None for any other pod.

    Args:
        namespace: gpushare's own namespace; the agent's label on a pod elsewhere is ignored.
    """
    metadata = obj["metadata"]
    is_agent = (metadata.get("labels") or {}).get(COMPONENT_LABEL) == AGENT
    if not is_agent or metadata.get("namespace") != namespace:
        return None
    containers = (obj.get("status") or {}).get("containerStatuses") or ()
    return "deletionTimestamp" not in metadata and any(
        one.get("name") in AGENT_CONTAINERS and one.get("started") and "running" in (one.get("state") or {})
        for one in containers
    )


@dataclass(slots=True)
class AgentPresence:
    """The agents' pods of each node, and nodes where kubelet has just rejected a pod.

    A node on which no agent was ever seen is assumed to have one.
    """

    _agents: dict[str, dict[str, bool]] = field(default_factory=dict)
    _rejected: set[str] = field(default_factory=set)
    _rejected_at: dict[str, float] = field(default_factory=dict)

    def is_away(self, node: str) -> bool:
        """Return whether kubelet would probably reject a pod that is bound to the node now."""
        agents = self._agents.get(node)
        gone = agents is not None and not any(agents.values())
        return gone or node in self._rejected or node in self._rejected_at

    def put(self, node: str, uid: str, *, serving: bool) -> None:
        """Record an agent's pod."""
        self._agents.setdefault(node, {})[uid] = serving

    def drop(self, node: str, uid: str) -> None:
        """Record that an agent's pod is gone; the node has no agent until another one comes."""
        self._agents.get(node, {}).pop(uid, None)

    def forget(self, node: str) -> None:
        """Forget a node that is no longer ours, unless it has an agent's pod."""
        if not self._agents.get(node):
            self._agents.pop(node, None)

    def rejected(self, node: str) -> None:
        """Record that kubelet rejected a pod because no device plugin was serving."""
        self._rejected.add(node)

    def listen(self, now: float) -> frozenset[str]:
        """Return the nodes whose rejection has expired by now, and forget it."""
        self._rejected_at |= dict.fromkeys(self._rejected, now)
        self._rejected.clear()
        over = frozenset(node for node, at in self._rejected_at.items() if now - at > HOLD_SECONDS)
        for node in over:
            del self._rejected_at[node]
        return over
