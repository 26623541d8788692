"""The ceilings of each process: the agent's decisions for this GPU, and the self-test's own."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpushare.core.api import MAX_CLIENTS_PER_GPU, MAX_CLIENTS_PER_POD
from gpushare.mps.frozen import is_recorded
from gpushare.mps.layout import Decisions, GpuDirectory, LastGood, PodDecision, decisions_reader, gpu_directories
from gpushare.mps.status import HoldReason


@dataclass(slots=True)
class CeilingPolicy:
    """Decisions by pod uid, read again whenever the agent has replaced its file.

    Attributes:
        probes: ceilings of our own processes (the self-test), by pid.
        max_clients_per_pod: most clients of one pod, however many are free.
        wall: returns Unix time, which the agent's decisions refer to.
    """

    gpu: GpuDirectory
    max_clients_per_pod: int = MAX_CLIENTS_PER_POD
    wall: Callable[[], float] = time.time
    probes: dict[int, PodDecision] = field(default_factory=dict)
    _reader: LastGood[Decisions] | None = None
    _others: dict[str, LastGood[Decisions]] = field(default_factory=dict)

    def decisions(self) -> Decisions:
        """Return the present decisions."""
        if self._reader is None:
            self._reader = decisions_reader(self.gpu)
        return self._reader.read()

    def decide(self, pod_uid: str) -> tuple[PodDecision | None, HoldReason | None]:
        """Return a pod's ceilings on this GPU, or why it must wait."""
        if decision := self.decisions().pods.get(pod_uid):
            return (None, HoldReason.POD_ENDS) if self._ends(decision) else (decision, None)
        if self._is_decided_elsewhere(pod_uid):
            return None, HoldReason.WRONG_GPU
        return None, HoldReason.NO_DECISION

    def ending(self) -> frozenset[str]:
        """Return the uids of the pods whose clients must be ended now, because kubelet is about to kill them."""
        return frozenset(uid for uid, decision in self.decisions().pods.items() if self._ends(decision))

    def is_frozen(self, pod_uid: str) -> bool:
        """Return whether the node's throttle has frozen the pod."""
        return is_recorded(self.gpu.path.parent, pod_uid)

    def _ends(self, decision: PodDecision) -> bool:
        return decision.ends_at is not None and self.wall() >= decision.ends_at

    def why_no_client(self, pod_uid: str, clients: Counter[str | None]) -> HoldReason | None:
        """Return why a pod cannot have one more client; None if it can.

        A pod may have the clients that belong to its share, so that all pods that fit on the GPU get theirs (ADR
        0184). If a pod's number is not known, one client is reserved for every decided pod.

        Args:
            clients: number of clients by pod; `None` for processes in no pod.
        """
        free, own = MAX_CLIENTS_PER_GPU - clients.total(), clients[pod_uid]
        if free <= 0:
            return HoldReason.CLIENTS
        pods = self.decisions().pods
        decision = pods.get(pod_uid)
        part = decision.clients if decision is not None else None
        if own >= min(self.max_clients_per_pod, part or self.max_clients_per_pod):
            return HoldReason.POD_CLIENTS
        reserved = sum(clients[other] == 0 for other in pods if other != pod_uid)
        return HoldReason.CLIENTS_RESERVED if own and free <= reserved else None

    def is_probe(self, pid: int) -> bool:
        """Return whether it is one of our own processes."""
        return pid in self.probes

    def ceiling(self, pid: int, pod_uid: str | None) -> PodDecision | None:
        """Return the ceilings of a process; None if nothing was decided."""
        if probe := self.probes.get(pid):
            return probe
        return self.decisions().pods.get(pod_uid) if pod_uid is not None else None

    def _is_decided_elsewhere(self, pod_uid: str) -> bool:
        for other in gpu_directories(self.gpu.path.parent):
            if other.uuid == self.gpu.uuid:
                continue
            reader = self._others.setdefault(other.uuid, decisions_reader(other))
            if pod_uid in reader.read().pods:
                return True
        return False
