"""The auditor's input: the cluster at one moment, as the API server, the gates, kubelet and /proc show it.

`bench.chaos.look` reads it without gpushare's own code, so that a mistake there cannot hide itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod that shares.

    Attributes:
        gpus: those of its decision annotation; empty before it is decided.
        share: percent of one GPU, the limit `gpushare.io/share`.
        most_threads: the largest cap of its decisions so far: a process keeps the one under which it connected.
        memory_mib: the decision's memory limit; 0 before.
        why: the reason why it waits or ended.
        admitted_at: when kubelet took it, Unix time in whole seconds; None before.
        bound_at: when it was bound, likewise.
    """

    uid: str
    name: str
    phase: str
    share: int
    gpus: tuple[str, ...] = ()
    thread_percentage: int = 0
    most_threads: int = 0
    memory_mib: int = 0
    is_bound: bool = False
    is_deleting: bool = False
    restarts: int = 0
    why: str = ""
    admitted_at: float | None = None
    bound_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Return whether its containers have ended for good, so that it holds nothing."""
        return self.phase in {"Succeeded", "Failed"}


@dataclass(frozen=True, slots=True)
class ClientSeen:
    """An MPS client by the twin or by the gate; `is_alive` by /proc, the twin's `pod_uid` by cgroup."""

    pid: int
    pod_uid: str | None
    thread_percentage: int | None = None
    memory_used_mib: int | None = None
    is_alive: bool = True


@dataclass(frozen=True, slots=True)
class GpuSeen:
    """A GPU by its GpuNode, its twin and its gate's status file.

    Attributes:
        tenants: pod uid -> share, by the agent.
        clients: by the twin's daemon, which is what runs.
        told: the clients by the gate's status file, which is part of what is tested.
        twin_age_seconds: since the twin wrote.
        gate_state: of the status file; gate_age_seconds: since it was written.
    """

    uuid: str
    memory_mib: int
    health: str = "Healthy"
    mps_state: str = "Active"
    tenants: Mapping[str, int] = field(default_factory=dict)
    gate_state: str = "Active"
    gate_age_seconds: float = 0.0
    clients: tuple[ClientSeen, ...] = ()
    told: tuple[ClientSeen, ...] = ()
    twin_age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Picture:
    """The cluster at one moment.

    Attributes:
        pods: None when the API server did not answer; by uid.
        devices: device ids that kubelet gave each pod, by uid.
        processes: live processes of each pod on the node, by uid.
        outside: pods of which a process uses a GPU outside MPS.
        unready: our parts, nodes and components that are not ready, each with a reason.
        taken_at: Unix time.
        kubelet_has: uids of the pods that kubelet knows, asked only where a pod was bound long ago; None: unknown.
        mps_hosts: uids of gpushare's MPS pods, each of which tests MPS on every GPU of its node.
    """

    pods: Mapping[str, PodSeen] | None
    gpus: tuple[GpuSeen, ...] = ()
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    processes: Mapping[str, int] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()
    unready: tuple[str, ...] = ()
    taken_at: float = 0.0
    kubelet_has: frozenset[str] | None = None
    mps_hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ExpectedPods:
    """A pod that the load generator created and has not deleted.

    Attributes:
        memory_mib: what it asks for.
    """

    uid: str
    name: str
    share: int
    memory_mib: int = 0
