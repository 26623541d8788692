"""Tolerations of the taints that keep other pods off GPU nodes (docs/adr/0214)."""

from collections.abc import Collection, Mapping
from typing import Any, Final

Json = dict[str, Any]
Object = Mapping[str, Any]

_OF_KUBERNETES: Final = "node.kubernetes.io/"


def tolerations_of(spec: Object, taints: Collection[str]) -> list[Object]:
    """Return what a pod with our annotation tolerates: what its spec says, else the taints of GPU nodes too.

    Tolerations of its own stay as they are: no update may remove one from a pod, so after an addition to them the
    next `kubectl apply` of the same file would fail. Those that Kubernetes itself adds do not count.

    Args:
        taints: keys of the taints.
    """
    given = list(spec.get("tolerations") or ())
    if any(not str(each.get("key") or "").startswith(_OF_KUBERNETES) for each in given):
        return given
    return [*given, *({"key": key, "operator": "Exists"} for key in taints)]


def set_tolerations(spec: Object, taints: Collection[str]) -> list[Json]:
    """Return the JSON patch that makes a pod or template tolerate the taints; empty if nothing changes."""
    tolerations = tolerations_of(spec, taints)
    if tolerations == list(spec.get("tolerations") or ()):
        return []
    return [{"op": "add", "path": "/spec/tolerations", "value": tolerations}]


def restored_tolerations(spec: Object | None, former: Object | None, taints: Collection[str]) -> list[Json]:
    """Return the JSON patch that restores what we had added to the former template, if this one leaves it out."""
    if not spec or not former or tolerations_of(spec, taints) != former.get("tolerations"):
        return []
    return set_tolerations(spec, taints)
