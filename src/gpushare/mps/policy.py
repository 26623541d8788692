"""What each process may have: the agent's decisions for this GPU, and the self-test's own ceilings."""

from dataclasses import dataclass, field

from gpushare.mps.layout import Decisions, GpuDirectory, LastGood, PodDecision, decisions_reader, gpu_directories
from gpushare.mps.status import HoldReason


@dataclass(slots=True)
class Policy:
    """Decisions by pod uid, read anew whenever the agent replaced its file.

    Attributes:
        probes: ceilings of processes of our own, by pid (the self-test).
    """

    gpu: GpuDirectory
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
            return decision, None
        if self._is_decided_elsewhere(pod_uid):
            return None, HoldReason.WRONG_GPU
        return None, HoldReason.NO_DECISION

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
