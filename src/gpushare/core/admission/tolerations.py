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
    return given if _own_of(spec) else [*given, *_added_for(taints)]


def set_tolerations(spec: Object, taints: Collection[str]) -> list[Json]:
    """Return the JSON patch that makes a pod or template tolerate the taints; empty if nothing changes."""
    return _set(spec, tolerations_of(spec, taints))


def restored_tolerations(
    spec: Object | None, former: Object | None, taints: Collection[str], *, is_fixed: bool
) -> list[Json]:
    """Return the JSON patch that restores what we had added to the former template, if this one leaves it out.

    What a fixed template lacks makes the API server refuse it, so everything that looks like an addition of ours
    comes back, whatever the list of taints is by now. Of one that may still change only what we would add today:
    a queue takes back what it has added to a job.

    Args:
        is_fixed: whether the API server refuses other tolerations than the former ones.
    """
    if not spec or not former or _own_of(spec):
        return []
    own = _own_of(former)
    added = [{"key": each.get("key"), "operator": "Exists"} for each in own] if is_fixed else _added_for(taints)
    return _set(spec, [*(spec.get("tolerations") or ()), *own]) if own == added else []


def _own_of(spec: Object) -> list[Object]:
    """Return the tolerations that Kubernetes did not add."""
    given: Collection[Object] = spec.get("tolerations") or ()
    return [each for each in given if not str(each.get("key") or "").startswith(_OF_KUBERNETES)]


def _added_for(taints: Collection[str]) -> list[Object]:
    return [{"key": key, "operator": "Exists"} for key in taints]


def _set(spec: Object, tolerations: list[Object]) -> list[Json]:
    if tolerations == list(spec.get("tolerations") or ()):
        return []
    return [{"op": "add", "path": "/spec/tolerations", "value": tolerations}]
