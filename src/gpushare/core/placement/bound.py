"""Pods that are bound already: what they hold, by their decision or limit if their annotations do not say it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gpushare.core.api import MAX_GPUS_PER_POD, Decision, PodView, Rejection, names
from gpushare.core.placement.shapes import GPU_MILLI, MILLI_PER_PERCENT, Placement, PlacementRequest
from gpushare.core.placement.state import ClusterState


def bound_request(asked: PlacementRequest | Rejection, pod: PodView, decision: Decision) -> PlacementRequest:
    """Return the request of a pod that was placed: its GPUs and limit count, whatever its annotations say now.

    Args:
        asked: the request by its present annotations.
    """
    gpus = len(decision.gpu_uuids)
    if isinstance(asked, PlacementRequest) and asked.gpu_count == gpus:
        return asked
    percent = names.SHARES_PER_GPU
    if gpus == 1 and 0 < pod.limit_percent <= names.SHARES_PER_GPU:
        percent = pod.limit_percent
    uid = asked.pod_uid if isinstance(asked, PlacementRequest) else pod.uid
    return PlacementRequest(
        uid, percent * MILLI_PER_PERCENT, gpus, cpu_milli=pod.cpu_milli, node_memory_mib=pod.memory_mib
    )


def resize(state: ClusterState, pod: PodView) -> bool:
    """Count a reserved pod's present CPU and memory requests; return whether that frees CPU or memory of its node.

    A running pod's requests can be changed in place, by default since Kubernetes 1.33. Its GPUs, share and age
    stay.
    """
    reservation = state.reservation(pod.uid)
    if reservation is None:
        return False
    before = reservation.request
    if (before.cpu_milli, before.node_memory_mib) == (pod.cpu_milli, pod.memory_mib):
        return False
    request = replace(before, cpu_milli=pod.cpu_milli, node_memory_mib=pod.memory_mib)
    state.release(pod.uid)
    state.reserve(pod.uid, reservation.placement, request, reservation.order)
    return pod.cpu_milli < before.cpu_milli or pod.memory_mib < before.node_memory_mib


class Undecided:
    """Pods that run with a share but without our decision, each counted by its limit on its node.

    They occupy the GPUs on which the node's agent lists them; until it does, those with the most free share.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._pods: dict[str, tuple[str, PlacementRequest]] = {}

    def hold(self, uid: str, node: str, limit_percent: int, cpu_milli: int = 0, memory_mib: int = 0) -> None:
        """Record a pod; `place` counts it once its node's GPUs are known.

        Args:
            cpu_milli: CPU request, only if nothing else counts it.
            memory_mib: node memory request, only if nothing else counts it.
        """
        share_milli = min(limit_percent * MILLI_PER_PERCENT, GPU_MILLI)
        gpu_count = min(math.ceil(limit_percent / names.SHARES_PER_GPU), MAX_GPUS_PER_POD)
        request = PlacementRequest(uid, share_milli, gpu_count, cpu_milli=cpu_milli, node_memory_mib=memory_mib)
        self._pods[uid] = (node, request)

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    def forget(self, uid: str) -> None:
        """Forget a pod that is gone or has a decision now; the caller releases its reservation."""
        self._pods.pop(uid, None)

    def place(self, uid: str, allocated: Sequence[str] = ()) -> bool:
        """Reserve GPUs for a pod: those on which its node's agent lists it (`allocated`), else the freest.

        If the node has lost some of its GPUs, the pod gets fewer than it asked for.

        Returns:
            Whether others were reserved for it before, or more of them: those are free now.
        """
        node, request = self._pods[uid]
        row = self._state.row(node)
        if row is None:
            return False
        uuids = self._state.uuids(row)
        before = self._state.reservation(uid)
        known = [slot for slot, uuid in enumerate(uuids) if uuid in allocated]
        if before is not None:
            is_whole = before.slots is not None and len(before.slots) == len(before.placement.gpu_uuids)
            stays = tuple(known) == before.slots if known else is_whole
            if stays and before.request == request:
                return False
            self._state.release(uid)
        if 0 < len(known) <= request.gpu_count:
            slots = known
        else:
            room = self._state.share_free_milli[: len(uuids), row]
            slots = np.argsort(-room, kind="stable")[: request.gpu_count].tolist()
        usable = min((int(self._state.memory_usable_mib[slot, row]) for slot in slots), default=0)
        memory_mib = usable * request.share_milli // GPU_MILLI
        self._state.reserve(uid, Placement(node, tuple(uuids[slot] for slot in slots), memory_mib), request)
        return before is not None

    def place_all(self, node: str, allocated: Mapping[str, Sequence[str]]) -> bool:
        """Reserve GPUs for every such pod of a node whose GPUs or tenants changed.

        Returns:
            Whether GPUs were reserved for one of them before that are free now.
        """
        on_node = [uid for uid, (at, _) in self._pods.items() if at == node]
        moved = [self.place(uid, allocated.get(uid, ())) for uid in on_node]  # each of them, also after the first
        return any(moved)
