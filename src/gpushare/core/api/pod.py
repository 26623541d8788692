"""A pod as gpushare sees it: the API's object reduced to the fields that gpushare uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, Final, Self

from gpushare.core.api import names
from gpushare.core.api.decision import Decision
from gpushare.core.api.node_rules import NodeRules
from gpushare.core.api.pod_parts import (
    NOMINATION_FIELDS,
    TERMINAL_PHASES,
    UNSCHEDULABLE,
    deletion_of,
    gates_of,
    nomination_of,
    not_scheduled,
)
from gpushare.core.api.pod_resources import as_allocated, requests_of, share_limit_of

_KEPT_ANNOTATIONS: Final = frozenset(names.USER_ANNOTATIONS)
_REJECTED: Final = "UnexpectedAdmissionError"
# Messages of kubelet's pkg/kubelet/cm/devicemanager: before a plugin registers, and after its connection is lost.
_NO_PLUGIN: Final = ("cannot allocate unregistered device", "no healthy devices present")
# How gpushare.front begins what it answers in an agent's place.
_NO_AGENT: Final = "the gpushare agent of this node"


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod.

    Attributes:
        annotations: the user's gpushare annotations only.
        owner_uids: the uids of its ownerReferences.
        controller: kind and name of the owner that manages it; None for a bare pod.
        created_at: the API server's time, RFC 3339; empty if missing.
        node: the node it is bound to; None while it is pending.
        phase: Pending, Running, Succeeded, Failed or Unknown; empty if missing.
        admitted: kubelet admitted it, so its devices are allocated (kubelet allocates before it sets startTime).
        limit_percent: its limit `gpushare.io/share`, 100 for each GPU; 0 if it has none.
        decision: its decision annotations; None if missing or malformed.
        decision_problem: a sentence on what is wrong with its decision annotations; empty if nothing is.
        has_preferences: it prefers some nodes over others, by affinity or topology spreading.
        short_of_shares: it waits because kube-scheduler itself counted too few shares on some node.
        deletion_at: when kubelet kills it because it is being deleted, RFC 3339; empty if it is not.
        unserved: kubelet rejected it for good because no device plugin was serving when it arrived.
        accepted_at: when kubelet took it up, by kubelet's clock, RFC 3339; empty before.
        started_at: when the first of its running containers started, by the same clock; empty while none runs.
        gated: a scheduling gate holds it back.
        unschedulable: kube-scheduler found no node for it in its last attempt.
        nominated_node: the node that kube-scheduler has chosen for it, where its volumes have to be prepared, or
            victims to leave, first; empty if none is.
        nominated_at: when it was chosen, or kube-scheduler last changed the status that it then wrote, RFC 3339;
            empty if unknown.
        rules: its own rules on nodes; None once it is bound.
    """

    uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    owner_uids: tuple[str, ...]
    controller: tuple[str, str] | None
    created_at: str
    node: str | None
    phase: str
    admitted: bool
    limit_percent: int
    cpu_milli: int
    memory_mib: int
    priority: int
    decision: Decision | None
    decision_problem: str = ""
    has_preferences: bool = False
    short_of_shares: bool = False
    deletion_at: str = ""
    unserved: bool = False
    accepted_at: str = ""
    started_at: str = ""
    gated: bool = False
    unschedulable: bool = False
    nominated_node: str = ""
    nominated_at: str = ""
    rules: NodeRules | None = None

    @classmethod
    def from_object(cls, obj: Mapping[str, Any]) -> Self:
        """Return the view of a pod's JSON object, from a list, a watch or kube-scheduler.

        Raises:
            KeyError: the pod has no uid or name.
            ValueError: a request is not a quantity.
        """
        metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
        annotations: Mapping[str, str] = metadata.get("annotations") or {}
        decision, problem = None, ""
        try:
            decision = Decision.from_annotations(annotations)
        except ValueError as error:
            problem = str(error)
        owners = metadata.get("ownerReferences") or ()
        cpu_milli, memory_mib = requests_of(as_allocated(spec, status))
        unscheduled = not_scheduled(status) or {}
        nominated_node, nominated_at = nomination_of(obj)
        return cls(
            uid=metadata["uid"],
            namespace=intern(metadata.get("namespace") or "default"),
            name=metadata["name"],
            annotations={key: value for key, value in annotations.items() if key in _KEPT_ANNOTATIONS},
            labels=metadata.get("labels") or {},
            owner_uids=tuple(owner["uid"] for owner in owners),
            controller=next(
                (
                    (intern(owner.get("kind", "")), intern(owner.get("name", "")))
                    for owner in owners
                    if owner.get("controller")
                ),
                None,
            ),
            created_at=metadata.get("creationTimestamp") or "",
            node=intern(spec["nodeName"]) if spec.get("nodeName") else None,
            phase=intern(status.get("phase") or ""),
            admitted="startTime" in status,
            limit_percent=share_limit_of(spec),
            cpu_milli=cpu_milli,
            memory_mib=memory_mib,
            priority=spec.get("priority") or 0,
            decision=decision,
            decision_problem=problem,
            has_preferences=_has_preferences(spec),
            short_of_shares=names.SHARE_RESOURCE in (unscheduled.get("message") or ""),
            deletion_at=deletion_of(metadata)[0],
            unserved=status.get("reason") == _REJECTED and _names_no_plugin(status.get("message") or ""),
            accepted_at=status.get("startTime") or "",
            started_at=_started_at(status),
            gated=bool(gates_of(spec)),
            unschedulable=unscheduled.get("reason") == UNSCHEDULABLE,
            nominated_node=intern(nominated_node),
            nominated_at=nominated_at,
            rules=None if spec.get("nodeName") else NodeRules.from_spec(spec),
        )

    @property
    def key(self) -> str:
        """Return "namespace/name"."""
        return f"{self.namespace}/{self.name}"

    @property
    def leaving(self) -> bool:
        """Return whether it is being deleted."""
        return bool(self.deletion_at)

    @property
    def finished(self) -> bool:
        """Return whether its containers have ended for good, so that it no longer holds a share."""
        return self.phase in TERMINAL_PHASES

    @property
    def waits_for_room(self) -> bool:
        """Return whether the pod could run but kube-scheduler found no node for it."""
        return (
            self.node is None and self.unschedulable and not self.gated and not self.leaving and not self.finished
        )

    @property
    def is_nominated(self) -> bool:
        """Return whether the pod is not bound but may be to the node that was chosen for it."""
        is_held_back = self.gated or self.leaving or self.finished
        return self.node is None and bool(self.nominated_node) and not is_held_back

    @property
    def fraction(self) -> str | None:
        """Return the annotation that marks a pod of gpushare; None on a pod that has only the label."""
        return self.annotations.get(names.FRACTION)


_METADATA: Final = (
    "name",
    "namespace",
    "uid",
    "labels",
    "ownerReferences",
    "creationTimestamp",
    "deletionTimestamp",
)
_SPEC: Final = (
    "nodeName",
    "overhead",
    "resources",
    "priority",
    "schedulingGates",
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
)
_STATUS: Final = ("phase", "reason", "message", "startTime", "nominatedNodeName")


def reduced_object(obj: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod's object with only what `PodView.from_object` reads, to store it: no environment variables."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    annotations = metadata.get("annotations") or {}
    unscheduled, allocated = not_scheduled(status), as_allocated(spec, status)
    nominated_at = nomination_of(obj)[1]
    return {
        "metadata": {
            **_only(metadata, _METADATA),
            **({"managedFields": [{"time": nominated_at, "fieldsV1": NOMINATION_FIELDS}]} if nominated_at else {}),
            "annotations": {key: value for key, value in annotations.items() if key.startswith(f"{names.GROUP}/")},
        },
        "spec": {
            **_only(allocated, _SPEC),
            **{
                kind: [_only(each, ("resources", "restartPolicy")) for each in allocated.get(kind) or ()]
                for kind in ("containers", "initContainers")
            },
        },
        "status": {
            **_only(status, _STATUS),
            "containerStatuses": [_only(each, ("state",)) for each in status.get("containerStatuses") or ()],
            "conditions": [_only(unscheduled, ("type", "status", "reason", "message"))] if unscheduled else [],
        },
    }


def _only(obj: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: obj[key] for key in keys if key in obj}


def _has_preferences(spec: Mapping[str, Any]) -> bool:
    return any(
        kind.get("preferredDuringSchedulingIgnoredDuringExecution")
        for kind in (spec.get("affinity") or {}).values()
        if kind
    ) or any(
        one.get("whenUnsatisfiable") == "ScheduleAnyway" for one in spec.get("topologySpreadConstraints") or ()
    )


def _started_at(status: Mapping[str, Any]) -> str:
    running = [(one.get("state") or {}).get("running") or {} for one in status.get("containerStatuses") or ()]
    return min((at for one in running if (at := one.get("startedAt"))), default="")


def _names_no_plugin(message: str) -> bool:
    is_kubelets = names.SHARE_RESOURCE in message and any(text in message for text in _NO_PLUGIN)
    return is_kubelets or _NO_AGENT in message
