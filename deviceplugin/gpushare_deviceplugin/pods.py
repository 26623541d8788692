"""The node's managed pods, reduced from the API's JSON to what the agent needs."""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpushare.core.api import (
    AUTO,
    TERMINAL_PHASES,
    Decision,
    JobClass,
    PodView,
    RateSlo,
    Rejection,
    Slo,
    deletion_of,
    names,
    parse_class,
    parse_processes,
    parse_slo,
    shortest_probe_seconds,
    values_of_variable,
)
from gpushare.runtime.moments import unix_seconds

# kubelet kills processes that still run after the grace period. By then the gate, which checks once a second, has
# ended the pod's clients; a program has the rest of the period to save its state on SIGTERM.
END_BEFORE_KILL_SECONDS: Final = 3.0
THREAD_VARIABLE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
JAX_VARIABLES: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""JAX's names for the part of a GPU's memory that a process may take: the present one and the older one."""


@dataclass(frozen=True, slots=True)
class ManagedPod:
    """Pod of this node with our label.

    Attributes:
        share_units: requested `gpushare.io/share`, 100 a GPU.
        decision: its placement; None before the decision, or if it was never seen with valid annotations.
        problem: what is wrong with its annotations now, a sentence; empty if nothing is.
        workload: key that links pods of one kind.
        own_percentage: lowest thread percentage that its containers set themselves; None if none does.
        sets_jax_memory: whether one of its containers sets one of JAX_VARIABLES, as far as the pod object shows.
        processes: CUDA processes that share its cap.
        has_class: whether its own annotation names its class. is_auto: whether its fraction is `auto`.
        probe_seconds: shortest time-out of its containers' probes; None without probes.
        slo: its own target; admission refuses invalid ones.
        labels, owner_uids: what its GpuShare depends on.
        ip: its address; empty while it has none. is_host_network: that is the node's.
        ends_at: Unix time at which its MPS clients are to be ended, as it is being deleted; None while it is not.
        grace_seconds: grace period of its deletion; 0 while it is not being deleted.
    """

    uid: str
    namespace: str
    name: str
    phase: str
    share_units: int
    decision: Decision | None
    problem: str
    job_class: JobClass
    workload: str
    ends_at: float | None = None
    grace_seconds: float = 0.0
    own_percentage: int | None = None
    sets_jax_memory: bool = False
    processes: int = 1
    has_class: bool = False
    is_auto: bool = False
    probe_seconds: float | None = None
    slo: Slo | RateSlo | None = None
    ip: str = ""
    is_host_network: bool = False
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    owner_uids: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return namespace/name, as PodResources names pods."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_over(self) -> bool:
        """Return whether its containers have ended for good, so that it holds no share any more."""
        return self.phase in TERMINAL_PHASES

    def as_annotated_before(self, former: "ManagedPod") -> "ManagedPod":
        """Return the pod as it is now, with what its annotations were while they could be read (ADR 0230)."""
        return replace(
            self,
            decision=self.decision or former.decision,
            job_class=former.job_class,
            has_class=former.has_class,
            is_auto=former.is_auto,
            processes=former.processes,
            workload=former.workload,
            slo=former.slo,
        )


def reduce_pod(obj: Mapping[str, Any]) -> ManagedPod:
    """Reduce the API's JSON object; broken annotations become its `problem`."""
    pod = PodView.from_object(obj)
    problem = pod.decision_problem
    job_class = parse_class(pod.annotations.get(names.CLASS, JobClass.THROUGHPUT.value))
    if isinstance(job_class, Rejection):
        problem = problem or str(job_class)
        job_class = JobClass.THROUGHPUT
    processes = parse_processes(pod.annotations.get(names.PROCESSES, "1"))
    if isinstance(processes, Rejection):
        problem = problem or str(processes)
        processes = 1
    slo = parse_slo(pod.annotations)
    spec = obj.get("spec") or {}
    deleted_at, grace_seconds = deletion_of(obj["metadata"])
    kill_at = unix_seconds(deleted_at)
    return ManagedPod(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        phase=pod.phase,
        share_units=pod.limit_percent,
        decision=pod.decision,
        problem=problem,
        job_class=job_class,
        workload=_workload(pod),
        ends_at=None if math.isinf(kill_at) else end_of_clients(kill_at, grace_seconds),
        grace_seconds=grace_seconds,
        own_percentage=_own_percentage(spec),
        sets_jax_memory=any(True for name in JAX_VARIABLES for _ in values_of_variable(spec, name)),
        processes=processes,
        has_class=names.CLASS in pod.annotations,
        is_auto=pod.annotations.get(names.FRACTION) == AUTO,
        probe_seconds=shortest_probe_seconds(spec),
        slo=None if isinstance(slo, Rejection) else slo,
        ip=str((obj.get("status") or {}).get("podIP") or ""),
        is_host_network=bool(spec.get("hostNetwork")),
        labels=pod.labels,
        owner_uids=pod.owner_uids,
    )


def _own_percentage(spec: Mapping[str, Any]) -> int | None:
    """Return the lowest thread percentage in its containers' environment, as given in the pod object.

    A value set by an image, a ConfigMap or the program itself is not visible: MPS does not report a client's own
    percentage, and the MPS host may not read the environment of a process.
    """
    found = []
    for value in values_of_variable(spec, THREAD_VARIABLE):
        with contextlib.suppress(TypeError, ValueError):
            found.append(float(value))  # type: ignore[arg-type]
    return min((max(1, int(value)) for value in found if 0 < value <= 100), default=None)


def end_of_clients(kill_at: float, grace_seconds: float) -> float:
    """Return when to end a deleted pod's clients: shortly before its grace period ends."""
    return kill_at - min(END_BEFORE_KILL_SECONDS, grace_seconds)


def _workload(pod: PodView) -> str:
    """Return the key that links pods of one kind, within a namespace so that tenants cannot affect others."""
    if (named := pod.annotations.get(names.WORKLOAD)) is not None:
        return f"{pod.namespace}/{named}"  # a name has no slash, so no owner's key looks the same
    kind, owner = pod.controller or ("", "")
    return f"{pod.namespace}/{kind}/{owner}" if owner else f"pod/{pod.uid}"
