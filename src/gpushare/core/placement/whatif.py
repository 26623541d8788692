"""Whether a waiting pod would fit a GPU after some of its tenants have left, without changing the state."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from gpushare.core.api import FaultDomain, names
from gpushare.core.placement.judge import Judge
from gpushare.core.placement.shapes import GPU_MILLI, PlacementRequest, Tenant
from gpushare.core.placement.state import ClusterState

NO_CAPS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pod that fitted nowhere in the last attempt.

    Attributes:
        request: its request, with priority and start of waiting.
        name: for messages.
        nodes: the nodes that its selector, affinity and tolerations allow; None for all.
        joins: returns whether it may run beside these pods (uids) by rules that the state does not know.
    """

    request: PlacementRequest
    name: str
    nodes: Collection[str] | None = None
    joins: Callable[[Collection[str]], bool] = lambda _uids: True


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Inputs of a decision, for questions about what would fit after tenants leave."""

    state: ClusterState
    judge: Judge
    now: float

    def fits(
        self,
        pod: WaitingPod,
        at: tuple[int, int],
        tenants: Sequence[Tenant],
        gone: Collection[str],
        plus: Sequence[PlacementRequest] = (),
        *,
        caps: Mapping[str, int] = NO_CAPS,
        counts_node: bool = True,
    ) -> bool:
        """Return whether a pod fits one GPU after some of its tenants have left and others have arrived.

        Args:
            at: slot and row of the GPU.
            tenants: its present tenants.
            gone: uids of tenants that leave.
            plus: requests of tenants that arrive.
            caps: by pod uid, the thread percentage of tenants that arrive; by default the smallest that each may
                have.
            counts_node: whether the node's CPU and memory must suffice too.
        """
        (_, row), shape, state = at, pod.request.shape, self.state
        staying = [each for each in tenants if each.pod_uid not in gone]
        clients = sum(map(self._clients, staying)) + sum(each.clients for each in plus)
        staying += [each.as_tenant(self._memory_mib(each, at), caps.get(each.pod_uid)) for each in plus]
        if sum(each.share_milli for each in staying) + shape.share_milli > GPU_MILLI:
            return False
        usable = int(state.memory_usable_mib[at])
        if usable and sum(each.memory_mib for each in staying) + self._memory_mib(pod.request, at) > usable:
            return False
        if staying and FaultDomain.ISOLATED in {shape.fault_domain, *(each.fault_domain for each in staying)}:
            return False
        if clients + shape.clients > names.MAX_CLIENTS_PER_GPU:
            return False
        if counts_node:
            leaving = [each.pod_uid for each in tenants if each.pod_uid in gone]
            if not self.node_fits(pod, row, leaving, plus):
                return False
        gpu_model = state.model_names[int(state.model_ids[at])]
        if not pod.joins([each.pod_uid for each in staying]):
            return False
        return self.judge.takes(pod.request, gpu_model, staying, self.now)

    def node_fits(
        self, pod: WaitingPod, row: int, leaving: Iterable[str], plus: Iterable[PlacementRequest] = ()
    ) -> bool:
        """Return whether a node's CPU and memory suffice after tenants (uids) leave and others arrive."""
        cpu_milli, memory_mib = int(self.state.cpu_free_milli[row]), int(self.state.node_memory_free_mib[row])
        for uid in leaving:
            reservation = self.state.reservation(uid)
            if reservation is not None and reservation.row == row:
                cpu_milli += reservation.request.cpu_milli
                memory_mib += reservation.request.node_memory_mib
        for each in plus:
            cpu_milli -= each.cpu_milli
            memory_mib -= each.node_memory_mib
        return cpu_milli >= pod.request.cpu_milli and memory_mib >= pod.request.node_memory_mib

    def _memory_mib(self, request: PlacementRequest, at: tuple[int, int]) -> int:
        """Return the memory that a pod takes on a GPU: what it requests, else its share."""
        if request.memory_mib is not None:
            return request.memory_mib
        return int(self.state.memory_usable_mib[at]) * request.share_milli // GPU_MILLI

    def _clients(self, tenant: Tenant) -> int:
        reservation = self.state.reservation(tenant.pod_uid)
        return reservation.request.clients if reservation is not None else 1
