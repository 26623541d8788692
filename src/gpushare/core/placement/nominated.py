"""Room on a node that is kept for pods which kube-scheduler has nominated to it (docs/adr/0244).

kube-scheduler nominates a pod to a node when it evicts others for it there, and tries it again once they have
left. Meanwhile it counts the pod's requests on that node against other pods of no higher priority, but only in
sum: neither for each GPU nor for GPU memory. So here each nominated pod gets a place among the node's GPUs; the
node's CPU and memory are kube-scheduler's.

Nothing is stored between calls: a place follows from which pods are nominated, which run and which are being
deleted, so every replica and `plan` have the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import numpy as np

from gpushare.core.api import PodView, Rejection
from gpushare.core.placement.decide import DecisionContext, decide
from gpushare.core.placement.keeping import KeptGpus
from gpushare.core.placement.search import fit
from gpushare.core.placement.shapes import Placement, PlacementRequest, Shape
from gpushare.core.placement.whatif import WaitingPod

LONGEST_SECONDS: Final = 3600.0
"""How long a nomination counts. kube-scheduler tries a pod again within 300 s, and prepares its volumes for 600 s
at most before it binds it, so an older nomination was left behind.

A victim that is still present so long after kubelet should have killed it does not count as leaving either. It may
never end, and meanwhile every status that kube-scheduler writes on the nominated pod renews the nomination."""


@dataclass(frozen=True, slots=True)
class NominatedPod:
    """A pod that is not bound but nominated to a node.

    Attributes:
        since: when it was nominated, Unix time; inf if that is not known: then since it was queued.
    """

    pod: WaitingPod
    node: str
    since: float


def in_order_of_end(pods: Iterable[PodView], now: float, unix_seconds: Callable[[str], float]) -> list[PodView]:
    """Return the pods that are being deleted, in the order in which kubelet kills them, without those that stay.

    Args:
        now: Unix time.
        unix_seconds: reads a time of the API.
    """
    ending = [pod for pod in pods if now - unix_seconds(pod.deletion_at) <= LONGEST_SECONDS]
    return sorted(ending, key=lambda pod: (pod.deletion_at, pod.uid))


def nominating(
    context: DecisionContext, pods: Iterable[NominatedPod], leaving: Mapping[str, Sequence[str]]
) -> DecisionContext:
    """Return the context with room kept for these pods.

    Args:
        leaving: by node, see `places_on`.
    """
    by_node = groupby(sorted(pods, key=lambda each: each.node), key=lambda each: each.node)
    found = [kept for node, each in by_node for kept in places_on(node, each, leaving.get(node, ()), context)]
    return replace(context, nominated=tuple(found))


def places_on(
    node: str, pods: Iterable[NominatedPod], leaving: Sequence[str], context: DecisionContext
) -> tuple[KeptGpus, ...]:
    """Return the GPUs of a node that are kept for the pods nominated to it, highest priority first.

    A pod's place is the one that the decision gives it as soon as it fits: now, or once some of the pods that are
    being deleted have left. Nominated pods before it count as tenants; of equal priorities the largest request
    comes first. A pod that fits nowhere even after all have left has no place.

    Args:
        leaving: uids of the node's pods that are being deleted, in the order in which they will be gone.
    """
    state, context = context.state, replace(context, nominated=())
    row = state.row(node)
    if row is None:
        return ()
    found: list[KeptGpus] = []
    tried: dict[Shape, int] = {}
    snapshot = state.snapshot()
    try:
        for each in sorted(pods, key=_order):
            request = each.pod.request
            if _is_too_old(each, context.now) or state.reservation(request.pod_uid) is not None:
                continue
            of_gpus = replace(request, cpu_milli=0, node_memory_mib=0)
            placement, count = _first_place(of_gpus, row, leaving, context, tried.get(of_gpus.shape, 0))
            tried[of_gpus.shape] = count
            if placement is None or not placement.gpu_uuids:
                continue
            tenants = {tenant.pod_uid for uuid in placement.gpu_uuids for tenant in state.tenants(uuid)}
            gone = tenants.intersection(leaving[:count])
            waited_seconds = context.now - request.queued_at
            found.append(
                KeptGpus(each.pod, node, placement.gpu_uuids, frozenset(gone), waited_seconds, is_nominated=True)
            )
            state.reserve(request.pod_uid, placement, of_gpus)
    finally:
        state.undo(snapshot)
    return tuple(found)


def _is_too_old(nominated: NominatedPod, now: float) -> bool:
    """Return whether a nomination is too old to count; if its time cannot be right, by when the pod was queued.

    The time comes from the pod's `managedFields`. Whoever may patch a pod may remove them, or write a time in the
    future.
    """
    since = nominated.since if nominated.since <= now + LONGEST_SECONDS else nominated.pod.request.queued_at
    return now - since > LONGEST_SECONDS


def _order(nominated: NominatedPod) -> tuple[int, int, float, str]:
    request = nominated.pod.request
    return -request.priority, -request.gpu_count * request.share_milli, request.queued_at, nominated.pod.name


def _first_place(
    request: PlacementRequest, row: int, leaving: Sequence[str], context: DecisionContext, first: int
) -> tuple[Placement | None, int]:
    """Return a pod's place on a node once it fits, and how many of the leaving pods are gone by then.

    Args:
        first: the number of leaving pods before which it does not fit.
    """
    state = context.state
    snapshot = state.snapshot()
    try:
        for uid in leaving[:first]:
            state.release(uid)
        for count in range(first, len(leaving) + 1):
            if fit(state, request.shape, np.array([row]))[0][0]:  # first, as a whole decision takes far longer
                found = decide(request, context, node=state.node_name(row))
                if not isinstance(found, Rejection):
                    return found, count
            if count < len(leaving):
                state.release(leaving[count])
        return None, len(leaving)
    finally:
        state.undo(snapshot)
