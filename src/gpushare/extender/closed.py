"""Which nodes are closed to waiting pods by the pods' own rules, within a bound on the work of a round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cachetools import LRUCache

from gpushare.core.api import NodeRules, Rejection
from gpushare.extender.reduce import NodeView

MOST_RULES: Final = 64
"""Rules of waiting pods for which the nodes they allow are remembered; matching 5,000 nodes takes some 7 ms."""
MOST_MATCHED: Final = 20_000
"""Most nodes that are matched in one round with rules of up to `PARTS_AT_ONCE` parts, about 30 ms."""
PARTS_AT_ONCE: Final = 8


def matching_cost(rules: NodeRules, nodes: int) -> int:
    """Return what matching nodes with rules costs, as a number of nodes matched with small rules."""
    return nodes * (1 + rules.parts // PARTS_AT_ONCE)


@dataclass(slots=True)
class ClosedNodes:
    """The nodes that kube-scheduler does not ask about for a pod, by rules.

    Rules that are too large, or cost more than `MOST_MATCHED` on this cluster, close no node. kube-scheduler
    itself applies them before it asks, so a pod is at most tried in vain.
    """

    _of: LRUCache[NodeRules, Mapping[str, Rejection]] = field(default_factory=lambda: LRUCache(MOST_RULES))
    _left: int = MOST_MATCHED

    def clear(self) -> None:
        """Forget everything, after a change of nodes."""
        self._of.clear()

    def begin_round(self) -> None:
        """Allow as much work as a round may do."""
        self._left = MOST_MATCHED

    def of(self, rules: NodeRules | None, nodes: Mapping[str, NodeView]) -> Mapping[str, Rejection]:
        """Return the nodes closed by these rules, and why; none if this round's work is done."""
        if rules is None or rules.is_too_large:
            return {}
        found = self._of.get(rules)
        if found is None:
            cost = matching_cost(rules, len(nodes))
            if cost > self._left:
                return {}
            self._left -= cost
            refused = ((name, rules.refusal(name, node.labels, node.taints)) for name, node in nodes.items())
            found = self._of[rules] = {name: why for name, why in refused if why is not None}
        return found
