"""A pod's owners, and the GpuShare that is made for them (docs/design.md 1: one per owner).

A GpuShare that gpushare makes carries every owner of its pods that is known, from the pod's controller up to the
object that a user made. So any process finds it by the pod's own ownerReferences alone (`ShareIndex.of`), and
Kubernetes deletes it when the last of them is gone.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gpushare.core.api import GpuShare, OwnerReference, Rejection, names, parse_fraction

Json = dict[str, Any]
Object = Mapping[str, Any]

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MADE_BY_US: Final = "gpushare-operator"
# Controllers that another object usually makes; the user knows that object instead.
_INTERMEDIATE: Final = {("apps", "ReplicaSet"), ("batch", "Job")}
_USUAL_GROUPS: Final = ("", "apps", "batch")
_TEMPLATE_HASH: Final = "pod-template-hash"
_LONGEST_NAME: Final = 253
_HASH_LENGTH: Final = 8


def owners_of(obj: Object) -> tuple[OwnerReference, ...]:
    """Return an object's owner references."""
    return GpuShare.from_object(
        {"metadata": {"ownerReferences": _metadata(obj).get("ownerReferences") or ()}}
    ).owners


def controller_of(obj: Object) -> OwnerReference | None:
    """Return the owner that manages an object; None when there is none."""
    return next((owner for owner in owners_of(obj) if owner.controller), None)


def may_have_owner(owner: OwnerReference) -> bool:
    """Return whether to ask the API for the owner's own controller: for ReplicaSets and Jobs."""
    return (_group(owner), owner.kind) in _INTERMEDIATE


def pod_as_owner(pod: Object) -> OwnerReference:
    """Return the pod itself as owner, for one without a controller."""
    metadata = _metadata(pod)
    return OwnerReference("v1", "Pod", str(metadata.get("name", "")), str(metadata.get("uid", "")))


def guess_top_owner(pod: Object) -> OwnerReference | None:
    """Guess the top owner from the pod alone (a Deployment's uid stays unknown); None when it has no controller.

    A Deployment names its ReplicaSets after itself and the pod-template-hash, which is a label of the pod.
    """
    owner = controller_of(pod)
    if owner is None or owner.kind != "ReplicaSet":
        return owner
    template_hash = (_metadata(pod).get("labels") or {}).get(_TEMPLATE_HASH)
    if template_hash and owner.name.endswith(f"-{template_hash}"):
        return OwnerReference(owner.api_version, "Deployment", owner.name.removesuffix(f"-{template_hash}"), "")
    return owner


def share_name(owner: OwnerReference, *, distinct: bool = False) -> str:
    """Return the deterministic name of the GpuShare made for an owner, such as "deployment-web".

    A kind from outside Kubernetes' own groups, and a name too long, carry a hash so that no two owners share one.

    Args:
        distinct: add a hash of the owner's uid, for when a user's own GpuShare has the plain name.
    """
    name = f"{owner.kind.lower()}-{owner.name}"
    if not distinct and _group(owner) in _USUAL_GROUPS and len(name) <= _LONGEST_NAME:
        return name
    text = f"{_group(owner)}/{owner.kind}/{owner.name}" + (f"/{owner.uid}" if distinct else "")
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{name[: _LONGEST_NAME - _HASH_LENGTH - 1].rstrip('-.')}-{digest}"


def new_share(namespace: str, name: str, chain: Sequence[OwnerReference], fraction: str) -> Json:
    """Return the GpuShare for an owner, as JSON to create.

    Args:
        name: by `share_name`.
        chain: the pod's owners, its controller first, the one that a user made last.
        fraction: the first pod's annotation, for `kubectl get gpushares`; each pod's own still decides.
    """
    return {
        "apiVersion": names.API_VERSION,
        "kind": "GpuShare",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {MANAGED_BY: MADE_BY_US},
            "ownerReferences": references(chain),
        },
        "spec": {} if isinstance(parse_fraction(fraction), Rejection) else {"fraction": fraction},
    }


def missing_owners(share: GpuShare, chain: Iterable[OwnerReference]) -> tuple[OwnerReference, ...]:
    """Return the owners of a pod that its GpuShare does not carry yet, such as a Deployment's new ReplicaSet."""
    known = {owner.uid for owner in share.owners}
    return tuple(owner for owner in chain if owner.uid not in known)


def references(owners: Iterable[OwnerReference]) -> list[Json]:
    """Return owner references as JSON, the top owner first; none is a controller, none blocks a deletion."""
    return [
        {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}
        for owner in reversed(list(owners))
    ]


def _group(owner: OwnerReference) -> str:
    group, slash, _ = owner.api_version.partition("/")
    return group if slash else ""


def _metadata(obj: Object) -> Object:
    metadata: Object = obj.get("metadata") or {}
    return metadata
