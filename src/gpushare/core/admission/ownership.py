"""A pod's owners, and the GpuShare that is created for them (docs/design.md 1: one per owner).

A GpuShare created by gpushare lists every known owner of its pods, from the pod's controller up to the object that
the user created. Any process can therefore find it from the pod's own ownerReferences (`ShareIndex.of`), and
Kubernetes deletes it when the last owner is gone.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gpushare.core.api import GpuShare, OwnerReference, Rejection, names, parse_fraction

Json = dict[str, Any]
Object = Mapping[str, Any]

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MADE_BY_US: Final = "gpushare-operator"
DEPLOYMENT: Final = "Deployment"
# Controllers that another object usually creates (a Deployment, a CronJob); users know that object.
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
    """Return the owner that manages an object, or None."""
    return next((owner for owner in owners_of(obj) if owner.controller), None)


def may_have_owner(owner: OwnerReference) -> bool:
    """Return whether this owner may have a controller of its own: true for a ReplicaSet or a Job."""
    return (_group(owner), owner.kind) in _INTERMEDIATE


def pod_as_owner(pod: Object) -> OwnerReference:
    """Return the pod itself as an owner reference, for a pod without a controller."""
    metadata = _metadata(pod)
    return OwnerReference("v1", "Pod", str(metadata.get("name", "")), str(metadata.get("uid", "")))


def guess_top_owner(pod: Object) -> OwnerReference | None:
    """Guess the top owner from the pod alone; None without a controller, and a Deployment's uid stays empty.

    A Deployment names its ReplicaSets after itself plus the pod-template-hash, which is also a label of the pod.
    """
    owner = controller_of(pod)
    if owner is None or owner.kind != "ReplicaSet":
        return owner
    template_hash = (_metadata(pod).get("labels") or {}).get(_TEMPLATE_HASH)
    if template_hash and owner.name.endswith(f"-{template_hash}"):
        return OwnerReference(owner.api_version, DEPLOYMENT, owner.name.removesuffix(f"-{template_hash}"), "")
    return owner


def share_name(owner: OwnerReference, *, distinct: bool = False) -> str:
    """Return the deterministic name of the GpuShare made for an owner, such as "deployment-web".

    A kind outside the core, apps and batch groups, or a name that is too long, gets a hash to stay unique.

    Args:
        distinct: add a hash that includes the owner's uid, for when a user's GpuShare already has the plain name.
    """
    name = f"{owner.kind.lower()}-{owner.name}"
    if not distinct and _group(owner) in _USUAL_GROUPS and len(name) <= _LONGEST_NAME:
        return name
    text = f"{_group(owner)}/{owner.kind}/{owner.name}" + (f"/{owner.uid}" if distinct else "")
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{name[: _LONGEST_NAME - _HASH_LENGTH - 1].rstrip('-.')}-{digest}"


def new_share(namespace: str, name: str, chain: Sequence[OwnerReference], fraction: str) -> Json:
    """Return the GpuShare to create for an owner, as JSON.

    Args:
        name: as made by `share_name`.
        chain: the pod's owners, from its controller up to the object that the user created.
        fraction: the first pod's annotation, shown by `kubectl get gpushares`; each pod's own annotation decides.
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
    """Return the owners of a pod that its GpuShare does not list yet, such as a Deployment's new ReplicaSet."""
    known = {owner.uid for owner in share.owners}
    return tuple(owner for owner in chain if owner.uid not in known)


def references(owners: Iterable[OwnerReference]) -> list[Json]:
    """Return owner references as JSON, the top owner first, without `controller` or `blockOwnerDeletion`."""
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
