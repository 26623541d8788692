"""The unbound pods that are nominated to nodes, as the watch shows them, and what is kept for them there."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from gpushare.core.api import PodView, Rejection
from gpushare.core.placement import (
    ClusterState,
    DecisionContext,
    KeptGpus,
    NominatedPod,
    PlacementRequest,
    WaitingPod,
    in_order_of_end,
    places_on,
)
from gpushare.runtime.moments import unix_seconds

_log = logging.getLogger(__name__)
MOST_LOOKED_AT: Final = 8
"""Most nodes on which places are computed anew each second though nothing has changed there; takes about 10 ms."""


@dataclass(slots=True)
class NominatedPods:
    """Nominated pods by node; a node's places are computed again only once its pods or GPUs have changed.

    What is kept follows from the pods and nodes alone, so it is the same after a restart and in another replica.
    """

    _pods: dict[str, dict[str, PodView]] = field(default_factory=dict)
    _node_of: dict[str, str] = field(default_factory=dict)
    _leaving: dict[str, dict[str, PodView]] = field(default_factory=dict)
    """By node, the bound pods that are being deleted."""
    _places: dict[str, tuple[KeptGpus, ...]] = field(default_factory=dict)
    _found: tuple[KeptGpus, ...] = ()
    _changed: set[str] = field(default_factory=set)
    _seen: tuple[int, int] = (-1, -1)
    """Versions of the state's nodes and rows by which the places are computed."""

    def put(self, pod: PodView) -> None:
        """Record a pod that was created or changed."""
        self.drop(pod.uid)
        node = pod.node or pod.nominated_node
        if pod.is_nominated:
            self._pods.setdefault(node, {})[pod.uid] = pod
        elif pod.node is not None and pod.leaving:
            self._leaving.setdefault(node, {})[pod.uid] = pod
        else:
            return
        self._node_of[pod.uid] = node
        self._changed.add(node)

    def drop(self, pod_uid: str) -> None:
        """Forget a pod that is gone."""
        node = self._node_of.pop(pod_uid, None)
        if node is None:
            return
        for by_node in (self._pods, self._leaving):
            if by_node.get(node, {}).pop(pod_uid, None) is not None and not by_node[node]:
                del by_node[node]
        self._changed.add(node)

    def look_again(self) -> None:
        """Compute the places of some nodes anew, in turn, as time and knowledge of workloads count too."""
        for node in list(self._places)[:MOST_LOOKED_AT]:
            self._places[node] = self._places.pop(node)
            self._changed.add(node)

    def keeping(
        self, context: DecisionContext, request_of: Callable[[PodView], PlacementRequest | Rejection]
    ) -> DecisionContext:
        """Return the context with the GPUs that are kept for the nominated pods now."""
        if self._pods or self._places:
            changed = self._to_look_at(context.state)
            for node in sorted(changed):
                places = self._on(node, context, request_of)
                _log_new(self._places.pop(node, ()), places)
                if node in self._pods:
                    self._places[node] = places
            if changed:
                self._found = tuple(kept for places in self._places.values() for kept in places)
            self._seen = context.state.nodes_version, context.state.change_count
        self._changed.clear()
        return context if context.nominated is self._found else replace(context, nominated=self._found)

    def _to_look_at(self, state: ClusterState) -> set[str]:
        """Return the nodes with nominated pods, now or before, on which something has changed."""
        nodes_version, change_count = self._seen
        nodes, rows = self._pods.keys() | self._places.keys(), state.changed_since(change_count)
        if rows is None:
            return nodes
        changed = self._changed.union(state.node_names_of(rows))
        if nodes_version != state.nodes_version:
            changed.update(node for node in nodes if state.row(node) is None)  # perhaps gone just now
        return nodes & changed

    def _on(
        self,
        node: str,
        context: DecisionContext,
        request_of: Callable[[PodView], PlacementRequest | Rejection],
    ) -> tuple[KeptGpus, ...]:
        nominated = []
        for pod in self._pods.get(node, {}).values():
            request = request_of(pod)
            if isinstance(request, PlacementRequest):
                since = unix_seconds(pod.nominated_at) if pod.nominated_at else math.inf
                nominated.append(NominatedPod(WaitingPod(request, pod.key), node, since))
        leaving = in_order_of_end(self._leaving.get(node, {}).values(), context.now, unix_seconds)
        return places_on(node, nominated, [pod.uid for pod in leaving], context)


def _log_new(before: tuple[KeptGpus, ...], after: tuple[KeptGpus, ...]) -> None:
    known = {each.pod.name for each in before}
    for each in after:
        if each.pod.name not in known:
            _log.info(
                "%s on %s is kept for %s, which is nominated to it; %d tenants have to leave",
                ",".join(each.gpu_uuids),
                each.node,
                each.pod.name,
                len(each.leaving),
            )
