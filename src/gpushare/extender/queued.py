"""Pods that wait for room: since when, on which nodes they may run, and for which of them a GPU is kept."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from gpushare.core.api import NodeRules, PodView, Rejection
from gpushare.core.placement import (
    MOST_EXAMINED,
    DecisionContext,
    KeptGpus,
    PlacementRequest,
    WaitingPod,
    is_due,
)
from gpushare.extender.closed import MOST_MATCHED, matching_cost
from gpushare.extender.due import DuePods, Waiter
from gpushare.extender.nominated import NominatedPods
from gpushare.extender.reduce import NodeView
from gpushare.runtime.moments import unix_seconds

_log = logging.getLogger(__name__)
BINDING_SECONDS: Final = 660.0
"""How long an answer may take effect: kube-scheduler prepares a pod's volumes for 600 s at most before it binds it
(bindTimeoutSeconds of VolumeBinding), and the fence takes 10 s."""
MOST_AGAIN: Final = 1
"""Most pods without success that are examined again in one second, so that the others get most searches."""


@dataclass(slots=True)
class QueuedPods:
    """The pods that are not bound, as the watch shows them.

    The kept GPUs follow from the pods themselves, so another replica continues with the same. Only two things are
    remembered here and lost in a restart: when a pod's scheduling gates were removed (then the pod counts as
    waiting since its creation), and for which pods no GPU was found (then they are examined like the others).

    Attributes:
        clock: returns monotonic seconds, by which an answer to kube-scheduler is old.
    """

    after_seconds: float
    clock: Callable[[], float] = time.monotonic
    nominated: NominatedPods = field(default_factory=NominatedPods)
    _unbound: dict[str, PodView] = field(default_factory=dict)
    _gated: set[str] = field(default_factory=set)
    _opened_at: dict[str, float] = field(default_factory=dict)
    _asked_at: dict[str, float] = field(default_factory=dict)
    _in_vain: dict[str, None] = field(default_factory=dict)  # first who was examined longest ago
    _allowed: dict[NodeRules, set[str]] = field(default_factory=dict)
    _due: DuePods = field(init=False)

    def __post_init__(self) -> None:
        self._due = DuePods(self.after_seconds)

    def put(self, pod: PodView, now: float) -> None:
        """Record a pod that was created or changed."""
        if pod.node is not None:
            self.drop(pod.uid)
        self.nominated.put(pod)
        if pod.node is not None:
            return
        self._unbound[pod.uid] = pod
        if pod.gated:
            self._gated.add(pod.uid)
        elif pod.uid in self._gated:
            self._gated.discard(pod.uid)
            self._opened_at[pod.uid] = now
        since = self.since(pod)
        if pod.waits_for_room and math.isfinite(since):
            self._due.put(Waiter(-pod.priority, since, pod.uid))
        else:
            self._in_vain.pop(pod.uid, None)
            self._due.drop(pod.uid)

    def drop(self, pod_uid: str) -> None:
        """Forget a pod that is bound or gone."""
        self.nominated.drop(pod_uid)
        self._unbound.pop(pod_uid, None)
        self._gated.discard(pod_uid)
        self._opened_at.pop(pod_uid, None)
        self._asked_at.pop(pod_uid, None)
        self._in_vain.pop(pod_uid, None)
        self._due.drop(pod_uid)

    def asked(self, pod_uid: str) -> None:
        """Record that kube-scheduler asks about a pod; the watch may show that pod later."""
        now = self.clock()
        self._asked_at.pop(pod_uid, None)
        self._asked_at[pod_uid] = now
        while now - self._asked_at[first := next(iter(self._asked_at))] > BINDING_SECONDS:  # in this order
            del self._asked_at[first]

    def untried(self) -> Iterator[PodView]:
        """Yield the pods that nothing holds back and that kube-scheduler has not tried."""
        now = self.clock()
        for pod in self._unbound.values():
            is_held_back = pod.gated or pod.leaving or pod.finished
            is_asked = now - self._asked_at.get(pod.uid, -math.inf) <= BINDING_SECONDS
            if not (pod.unschedulable or pod.nominated_node or is_held_back or is_asked):
                yield pod

    def node_changed(self, name: str, node: NodeView | None) -> None:
        """Record that a node's labels or taints have changed, or that it is gone (None)."""
        for rules, allowed in self._allowed.items():
            if node is not None and rules.allow(name, node.labels, node.taints):
                allowed.add(name)
            else:
                allowed.discard(name)

    def since(self, pod: PodView) -> float:
        """Return since when a pod could be placed, Unix time; inf if its creation time is missing."""
        opened_at = self._opened_at.get(pod.uid)
        if opened_at is not None:
            return opened_at
        return unix_seconds(pod.created_at) if pod.created_at else math.inf

    def keeping(
        self,
        context: DecisionContext,
        request_of: Callable[[PodView], PlacementRequest | Rejection],
        nodes: Mapping[str, NodeView],
    ) -> DecisionContext:
        """Return the context with GPUs kept for the pods that have waited long."""
        pods = [self._unbound[uid] for uid in (*self._first(context), *self._again(context))]
        self._match({pod.rules: None for pod in pods if pod.rules is not None}, nodes)
        waiting = []
        for pod in pods:
            request = request_of(pod)
            if isinstance(request, Rejection) or (pod.rules is not None and _never_match(pod.rules, nodes)):
                self._in_vain[pod.uid] = None
            elif pod.rules is None or pod.rules in self._allowed:
                waiting.append(WaitingPod(request, pod.key, self._nodes_of(pod, nodes)))
        found = context.keeping(waiting, goes_on=True)
        self.nominated.look_again()
        self._in_vain.update(
            (each.request.pod_uid, None) for each in waiting if each.request.pod_uid in found.in_vain
        )
        for kept in found.kept:
            self._in_vain.pop(kept.pod.request.pod_uid, None)
        _log_new(context.kept, found.kept)
        return found

    def _first(self, context: DecisionContext) -> Iterator[str]:
        """Yield the first pods that are due, without those for which no GPU was found."""
        waits = (
            uid
            for uid in self._due.at(context.now)
            if uid not in self._in_vain and context.state.reservation(uid) is None
        )
        return islice(waits, MOST_EXAMINED)

    def _again(self, context: DecisionContext) -> list[str]:
        """Return the next pods for which no GPU was found; each has its next turn after all the others."""
        turns: list[str] = []
        for uid in tuple(self._in_vain):
            if len(turns) == MOST_AGAIN:
                break
            del self._in_vain[uid]
            waited = context.now - self.since(self._unbound[uid])
            if context.state.reservation(uid) is None and is_due(waited, self.after_seconds):
                turns.append(uid)
        self._in_vain.update(dict.fromkeys(turns))
        return turns

    def _match(self, asked: Iterable[NodeRules], nodes: Mapping[str, NodeView]) -> None:
        """Compute which nodes these rules allow, as many as one call may, and forget all other rules.

        Rules that are too large, or cost more than a call may, stay out: their pods get no kept GPU.
        """
        found: dict[NodeRules, set[str]] = {}
        left = MOST_MATCHED
        for rules in asked:
            if rules in self._allowed:
                found[rules] = self._allowed[rules]
            elif not _never_match(rules, nodes) and (cost := matching_cost(rules, len(nodes))) <= left:
                left -= cost
                found[rules] = {
                    name for name, node in nodes.items() if rules.allow(name, node.labels, node.taints)
                }
        self._allowed = found

    def _nodes_of(self, pod: PodView, nodes: Mapping[str, NodeView]) -> Collection[str] | None:
        """Return the nodes that a pod's rules allow; None for all."""
        allowed = self._allowed[pod.rules] if pod.rules is not None else nodes
        return None if len(allowed) == len(nodes) else allowed


def _never_match(rules: NodeRules, nodes: Collection[str]) -> bool:
    """Return whether these rules are too large for this cluster."""
    return rules.is_too_large or matching_cost(rules, len(nodes)) > MOST_MATCHED


def _log_new(before: Collection[KeptGpus], after: Collection[KeptGpus]) -> None:
    known = {(each.pod.name, each.gpu_uuids) for each in before}
    for each in after:
        if (each.pod.name, each.gpu_uuids) not in known:
            _log.info(
                "%s on %s is kept for %s, which has waited %.0f s; %d tenants have to leave",
                ",".join(each.gpu_uuids),
                each.node,
                each.pod.name,
                each.waited_seconds,
                len(each.leaving),
            )
