"""Parts of a pod's JSON that several modules need besides `PodView`; each is read only here."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpushare.core.api import names

TERMINAL_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""Phases in which a pod's containers have ended for good, so that it holds no resources."""
UNSCHEDULABLE: Final = "Unschedulable"
NOMINATION_FIELDS: Final[Mapping[str, Any]] = {"f:status": {"f:nominatedNodeName": {}}}
"""An entry of `managedFields` whose manager nominated the pod."""
_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")
_DEFAULT_PROBE_SECONDS: Final = 1.0  # Kubernetes' default


def has_ended(obj: Mapping[str, Any]) -> bool:
    """Return whether a pod's containers have ended for good."""
    return (obj.get("status") or {}).get("phase") in TERMINAL_PHASES


def is_managed(obj: Mapping[str, Any]) -> bool:
    """Return whether a pod carries the label by which gpushare's components watch pods."""
    return (obj["metadata"].get("labels") or {}).get(names.MANAGED_LABEL) == "true"


def not_scheduled(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the condition that says kube-scheduler found no node; None if it has not tried or found one."""
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return one  # type: ignore[no-any-return]
    return None


def nomination_of(obj: Mapping[str, Any]) -> tuple[str, str]:
    """Return the node that a pod is nominated to, and when it was (RFC 3339); both "" if it is not.

    The time is the API server's, of the last change of what the nominating client owns of the pod's status; "" if
    the object lacks its `managedFields`.
    """
    node = str((obj.get("status") or {}).get("nominatedNodeName") or "")
    if not node:
        return "", ""
    times = (
        str(entry.get("time") or "")
        for entry in obj["metadata"].get("managedFields") or ()
        if "f:nominatedNodeName" in ((entry.get("fieldsV1") or {}).get("f:status") or {})
    )
    return node, max(times, default="")


def gates_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the scheduling gates that hold a pod back."""
    return tuple(str(gate.get("name")) for gate in spec.get("schedulingGates") or ())


def may_wait_untried(spec: Mapping[str, Any]) -> bool:
    """Return whether kube-scheduler may hold a pod back before its first attempt, without a word in its status.

    Its plugins do so for a scheduling gate, a resource claim that does not exist or a group of pods that is not
    complete (PreEnqueue of SchedulingGates, DynamicResources and GangScheduling, Kubernetes 1.35).
    """
    return any(spec.get(field) for field in ("schedulingGates", "resourceClaims", "workloadRef"))


def claims_volumes(spec: Mapping[str, Any]) -> bool:
    """Return whether a pod has volumes that kube-scheduler may have to wait for, once it has chosen a node."""
    return any(each.get("persistentVolumeClaim") or each.get("ephemeral") for each in spec.get("volumes") or ())


def waiting_reason(status: Mapping[str, Any]) -> str:
    """Return kubelet's reason for the first waiting container; empty if none waits."""
    reasons = (
        ((one.get("state") or {}).get("waiting") or {}).get("reason")
        for one in status.get("containerStatuses") or ()
    )
    return next((str(reason) for reason in reasons if reason), "")


def shortest_probe_seconds(spec: Mapping[str, Any]) -> float | None:
    """Return the shortest timeout of the containers' probes of any kind; None without probes."""
    probes = [
        container[kind]
        for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
        for kind in _PROBES
        if container.get(kind)
    ]
    return min((float(probe.get("timeoutSeconds") or _DEFAULT_PROBE_SECONDS) for probe in probes), default=None)


def values_of_variable(spec: Mapping[str, Any], name: str) -> Iterator[object]:
    """Yield the value that each container gives an environment variable, for those that set it."""
    for container in spec.get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == name:
                yield variable.get("value")


def deletion_of(metadata: Mapping[str, Any]) -> tuple[str, float]:
    """Return when kubelet kills a pod under deletion (RFC 3339, else "") and its grace period in seconds."""
    return str(metadata.get("deletionTimestamp") or ""), float(metadata.get("deletionGracePeriodSeconds") or 0)
