"""What each process may have: the agent's decisions for this GPU, and the self-test's own ceilings."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpushare.core.api import MAX_CLIENTS_PER_GPU, MAX_CLIENTS_PER_POD
from gpushare.mps.layout import Decisions, GpuDirectory, LastGood, PodDecision, decisions_reader, gpu_directories
from gpushare.mps.status import HoldReason


@dataclass(slots=True)
class CeilingPolicy:
    """Decisions by pod uid, read anew whenever the agent replaced its file.

    Attributes:
        probes: ceilings of processes of our own, by pid (the self-test).
        max_clients_per_pod: clients that one pod may have, however many are free.
        wall: Unix time, which the agent's decisions speak of.
    """

    gpu: GpuDirectory
    max_clients_per_pod: int = MAX_CLIENTS_PER_POD
    wall: Callable[[], float] = time.time
    probes: dict[int, PodDecision] = field(default_factory=dict)
    _reader: LastGood[Decisions] | None = None
    _others: dict[str, LastGood[Decisions]] = field(default_factory=dict)

    def decisions(self) -> Decisions:
        """The decisions now."""
        if self._reader is None:
            self._reader = decisions_reader(self.gpu)
        return self._reader.read()

    def decide(self, pod_uid: str) -> tuple[PodDecision | None, HoldReason | None]:
        """A pod's ceilings here, or why it has to wait."""
        if decision := self.decisions().pods.get(pod_uid):
            return (None, HoldReason.POD_ENDS) if self._ends(decision) else (decision, None)
        if self._is_decided_elsewhere(pod_uid):
            return None, HoldReason.WRONG_GPU
        return None, HoldReason.NO_DECISION

    def ending(self) -> frozenset[str]:
        """Uids of the pods whose clients are to be ended now: kubelet is about to kill their processes."""
        return frozenset(uid for uid, decision in self.decisions().pods.items() if self._ends(decision))

    def _ends(self, decision: PodDecision) -> bool:
        return decision.ends_at is not None and self.wall() >= decision.ends_at

    def why_no_client(self, pod_uid: str, clients: Counter[str | None]) -> HoldReason | None:
        """Why a pod cannot have one more client; None when it can.

        A pod has those that belong to its share, so that the parts of all pods that fit on the GPU are there when
        they come (ADR 0184). Where parts are not known, every decided pod has one reserved.

        Args:
            clients: how many each pod has, `None` for those of no pod.
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
        """Whether it is a process of our own."""
        return pid in self.probes

    def ceiling(self, pid: int, pod_uid: str | None) -> PodDecision | None:
        """What binds this process; None when nothing was decided."""
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
