"""Parts of a pod's JSON that several readers ask for, beside `PodView`; each is read here and nowhere else."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpushare.core.api import names

TERMINAL_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""Phases in which a pod's containers have ended for good, so that it holds nothing any more."""
UNSCHEDULABLE: Final = "Unschedulable"
_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")
_DEFAULT_PROBE_SECONDS: Final = 1.0  # Kubernetes' own


def has_ended(obj: Mapping[str, Any]) -> bool:
    """Return whether a pod's containers have ended for good."""
    return (obj.get("status") or {}).get("phase") in TERMINAL_PHASES


def is_managed(obj: Mapping[str, Any]) -> bool:
    """Return whether a pod carries the label by which gpushare's parts watch its pods."""
    return (obj["metadata"].get("labels") or {}).get(names.MANAGED_LABEL) == "true"


def not_scheduled(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the condition by which kube-scheduler left a pod waiting; None where it has not, or not yet."""
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return one  # type: ignore[no-any-return]
    return None


def gates_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the scheduling gates that hold a pod back."""
    return tuple(str(gate.get("name")) for gate in spec.get("schedulingGates") or ())


def waiting_reason(status: Mapping[str, Any]) -> str:
    """Return why the first container that waits does, in kubelet's word; empty where none waits."""
    reasons = (
        ((one.get("state") or {}).get("waiting") or {}).get("reason")
        for one in status.get("containerStatuses") or ()
    )
    return next((str(reason) for reason in reasons if reason), "")


def shortest_probe_seconds(spec: Mapping[str, Any]) -> float | None:
    """Return the shortest time-out of the containers' probes, of any kind; None where they have none."""
    probes = [
        container[kind]
        for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
        for kind in _PROBES
        if container.get(kind)
    ]
    return min((float(probe.get("timeoutSeconds") or _DEFAULT_PROBE_SECONDS) for probe in probes), default=None)


def values_of_variable(spec: Mapping[str, Any], name: str) -> Iterator[object]:
    """Return what each container that sets an environment variable in the pod's object sets it to."""
    for container in spec.get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == name:
                yield variable.get("value")


def deletion_of(metadata: Mapping[str, Any]) -> tuple[str, float]:
    """Return when kubelet kills a deleted pod, RFC 3339, and its grace period in seconds; "" while it is not."""
    return str(metadata.get("deletionTimestamp") or ""), float(metadata.get("deletionGracePeriodSeconds") or 0)
