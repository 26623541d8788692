"""Events on pods that kube-scheduler refused by its own count, without asking us: how much is free on which node.

kube-scheduler counts a node's shares itself, because it would find no victims for preemption otherwise
(docs/adr/0062-kube-scheduler-counts-shares-too.md), and then reports only "Insufficient gpushare.io/share".

The same loop writes events on nodes whose GpuNode lists the GPU of another node.
"""

from collections import Counter
from collections.abc import Callable
from heapq import nsmallest
from typing import Final

from gpushare.core.api import PodView, Rejection
from gpushare.extender.claims import ContestedGpu
from gpushare.extender.ledger import ShareLedger
from gpushare.extender.wire import plain
from gpushare.kube import Api, EventType, record_event

AGAIN_SECONDS: Final = 60.0  # between two events for one pod that keeps waiting
CONTESTED_SECONDS: Final = 3600.0  # events are kept for an hour by default
MAX_EXPLAINED: Final = 2  # per round of a second; each checks every node, 20 to 30 ms at 5,000 nodes
MAX_KINDS: Final = 3  # most kinds of reason in one sentence
CONTROLLER: Final = "gpushare.io/extender"


def explanation(ledger: ShareLedger, pod: PodView) -> str | None:
    """Return a sentence with figures on why the pod fits nowhere that it may run; None if it fits by now."""
    nodes, closed_to = ledger.state.node_names, ledger.closed_to(pod)
    closed = [closed_to[name] for name in nodes if name in closed_to]
    found = ledger.candidates(pod, [name for name in nodes if name not in closed_to])
    if isinstance(found, Rejection):
        return found.detail
    if found.nodes:
        return None
    details = Counter(rejection.detail for rejection in [*found.rejections().values(), *closed])
    commonest = "; ".join(f"{count} {detail}" for detail, count in details.most_common(MAX_KINDS))
    return plain(f"0/{details.total()} GPU nodes fit: {commonest}" if details else "there are no GPU nodes")


class Explainer:
    """Writes the events; both replicas may do so, because equal events about one pod are one object."""

    def __init__(self, api: Api, ledger: ShareLedger, clock: Callable[[], float]) -> None:
        self._api = api
        self._ledger = ledger
        self._clock = clock
        self._explained_at: dict[str, float] = {}
        self._told_of: dict[ContestedGpu, float] = {}

    async def round(self) -> None:
        """Write events for waiting pods, and for contested GPUs that had no event lately."""
        await self._tell_of_contested()
        now = self._clock()
        waiting = [pod for pod in self._ledger.pods.values() if pod.short_of_shares and pod.node is None]
        uids = {pod.uid for pod in waiting}
        self._explained_at = {uid: at for uid, at in self._explained_at.items() if uid in uids}

        def explained_at(pod: PodView) -> float:
            return self._explained_at.get(pod.uid, float("-inf"))

        due = [pod for pod in waiting if now - explained_at(pod) >= AGAIN_SECONDS]
        for pod in nsmallest(MAX_EXPLAINED, due, key=explained_at):
            self._explained_at[pod.uid] = now
            note = explanation(self._ledger, pod)
            if note is None:
                continue
            regarding = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.name,
                "namespace": pod.namespace,
                "uid": pod.uid,
            }
            await record_event(
                self._api,
                regarding,
                reason="NoRoom",
                note=note,
                action="Scheduling",
                event_type=EventType.WARNING,
                controller=CONTROLLER,
                once=True,
            )

    async def _tell_of_contested(self) -> None:
        """Write an event for a node that lists another's GPU; at most one a round, as an agent may list many."""
        now = self._clock()
        contested = dict.fromkeys(self._ledger.claims.contested())
        self._told_of = {each: at for each, at in self._told_of.items() if each in contested}
        due = [each for each in contested if now - self._told_of.get(each, float("-inf")) >= CONTESTED_SECONDS]
        for each in due[:1]:
            self._told_of[each] = now
            await record_event(
                self._api,
                {"apiVersion": "v1", "kind": "Node", "name": each.node, "uid": each.node},
                reason="GpuOfAnotherNode",
                note=plain(str(each)),
                action="Counting",
                event_type=EventType.WARNING,
                controller=CONTROLLER,
                once=True,
            )
