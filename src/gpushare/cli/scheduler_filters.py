"""Nodes that kube-scheduler refuses before it asks the extender, as far as a cluster's objects tell.

It refuses a node that is cordoned, has a taint that the pod does not tolerate or does not match the pod's node
selector and required node affinity (its plugins NodeUnschedulable, TaintToleration and NodeAffinity), and one of
which kubelet has too few shares by its own count (NodeResourcesFit, docs/adr/0062), less those of pods of at least
its priority that are nominated to the node.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpushare.core.api import (
    CORDONED,
    NodeRules,
    Reason,
    Rejection,
    Taint,
    names,
    taint_refusal,
)
from gpushare.core.placement import (
    GPU_MILLI,
    MILLI_PER_PERCENT,
    DecisionContext,
    IntArray,
    PlacementRequest,
    survey,
)

NEVER_OFFERED: Final = Rejection(
    Reason.SHARES_NOT_OFFERED,
    f"kubelet offers no {names.SHARE_RESOURCE} there: the node's agent has not registered with it",
)


@dataclass(frozen=True, slots=True)
class SchedulerNode:
    """One GPU node as kube-scheduler sees it.

    Attributes:
        taints: those that keep pods out; `CORDONED` for a cordoned node.
        offered_percent: the shares that kubelet offers there; None if it has never been told of any.
        uncounted_percent: the limits of pods on GPUs that the node has lost; kube-scheduler counts them.
    """

    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    offered_percent: int | None
    uncounted_percent: int = 0

    def refusal(self, name: str, rules: NodeRules | None) -> Rejection | None:
        """Return why the node takes no pod with these rules, whatever runs there; None if it may take one.

        Args:
            rules: None if the pod's rules are not known; then a cordon counts, but not taints and labels. So it is
                if they are too large.
        """
        if rules is not None and (found := rules.refusal(name, self.labels, self.taints)) is not None:
            return found
        if (rules is None or rules.is_too_large) and CORDONED in self.taints:
            return taint_refusal(CORDONED)
        return NEVER_OFFERED if self.offered_percent is None else None


class SchedulerFilters:
    """kube-scheduler's filters on the nodes of one cluster, for one request after another.

    Args:
        nodes: the cluster's GPU nodes by name.
    """

    def __init__(self, nodes: Mapping[str, SchedulerNode]) -> None:
        self._nodes = nodes
        self._refused: dict[NodeRules | None, dict[str, Rejection]] = {}

    def excluded(self, request: PlacementRequest, context: DecisionContext) -> Mapping[str, Rejection]:
        """Return by node why kube-scheduler would not ask about it.

        Too few shares are the reason only where the decision itself would take the node: its own reason says more.
        """
        if request.rules not in self._refused:
            self._refused[request.rules] = {
                name: found
                for name, node in self._nodes.items()
                if (found := node.refusal(name, request.rules)) is not None
            }
        refused = self._refused[request.rules]
        if not request.gpu_count or not self._nodes:
            return refused
        needed = request.gpu_count * request.share_milli // MILLI_PER_PERCENT
        fitting, free = survey(request, context, excluded=refused).rows, self._free_percent(request, context)
        lacking = fitting[free[fitting] < needed]
        names_of = zip(context.state.node_names_of(lacking), free[lacking].tolist(), strict=True)
        return refused | {name: self._shares_refusal(name, needed, left) for name, left in names_of}

    def _free_percent(self, request: PlacementRequest, context: DecisionContext) -> IntArray:
        """Return for each row the shares that are free for a request by kube-scheduler's count.

        They are fewer than the healthy GPUs have where a GPU has failed under its pods: kubelet no longer offers
        its shares, but its pods still count.
        """
        state = context.state
        offered = np.zeros(len(state.alive), np.int64)
        for name, node in self._nodes.items():
            if (row := state.row(name)) is not None:
                offered[row] = (node.offered_percent or 0) - node.uncounted_percent
        taken_milli = np.where(state.present, GPU_MILLI - state.share_free_milli, 0).sum(axis=0)
        for each in context.nominated:
            if each.before(request) and (row := state.row(each.node)) is not None:
                taken_milli[row] += each.pod.request.gpu_count * each.pod.request.share_milli
        free: IntArray = offered - taken_milli // MILLI_PER_PERCENT
        return free

    def _shares_refusal(self, name: str, needed: int, free: int) -> Rejection:
        offered, free = self._nodes[name].offered_percent, max(free, 0)
        return Rejection(
            Reason.SHARES_NOT_OFFERED,
            f"needs {needed} of {names.SHARE_RESOURCE}, kubelet offers {offered} there and {free} are free",
        )
