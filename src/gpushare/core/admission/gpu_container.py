"""Which container of a pod gets the GPU (docs/adr/0216), and the share that it names."""

from collections.abc import Mapping
from typing import Any, Final

from gpushare.core.api import Reason, Rejection, names, shown

Json = dict[str, Any]
Object = Mapping[str, Any]

_DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
RULE: Final = f"the container that annotation {names.CONTAINER} or {_DEFAULT_CONTAINER} names, else on the first"


def annotations_of(obj: Object) -> Mapping[str, str]:
    """Return an object's annotations."""
    return (obj.get("metadata") or {}).get("annotations") or {}


def containers_of(pod: Object) -> list[Object]:
    """Return the containers of a pod or template, without init containers."""
    return list((pod.get("spec") or {}).get("containers") or ())


def container_index(pod: Object) -> int:
    """Return the index of the container that gets the GPU.

    It is the one that `gpushare.io/container` names, else the only one with a share, which an earlier call chose,
    else the pod's default container for kubectl, else the first. A service mesh puts its proxy first, after our
    first call or before it; its proxy has no share and is no default container.
    """
    containers, annotations = containers_of(pod), annotations_of(pod)
    positions = {str(container.get("name")): at for at, container in reversed(list(enumerate(containers)))}
    chosen = positions.get(annotations.get(names.CONTAINER, ""))
    if chosen is not None:
        return chosen
    with_share = [at for at, container in enumerate(containers) if _has_share(container)]
    if len(with_share) == 1:
        return with_share[0]
    return positions.get(annotations.get(_DEFAULT_CONTAINER, ""), 0)


def refuse_container(pod: Object) -> Rejection | None:
    """Return the refusal of a pod or template that lacks the container to get the GPU; None if it has it."""
    present = [str(container.get("name")) for container in containers_of(pod)]
    if not present:
        return Rejection(
            Reason.CONFLICT,
            f"spec.containers: there is none, so nothing could get the GPU of {names.FRACTION}",
        )
    asked = annotations_of(pod).get(names.CONTAINER)
    if asked is None or asked in present:
        return None
    return Rejection(
        Reason.INVALID_ANNOTATION,
        f"annotation {names.CONTAINER}: {shown(asked)} is not a container of this pod; allowed "
        f"{'is' if len(present) == 1 else 'are'} {', '.join(shown(name) for name in present[:16])}",
    )


def names_its_share(pod: Object) -> bool:
    """Return whether the container that gets the GPU names its share already, if only as 0."""
    containers, index = containers_of(pod), container_index(pod)
    return index < len(containers) and any(
        names.SHARE_RESOURCE in amounts_of(containers[index], kind) for kind in ("limits", "requests")
    )


def amounts_of(container: Object, kind: str) -> Object:
    """Return a container's "limits" or "requests"."""
    amounts: Object = (container.get("resources") or {}).get(kind) or {}
    return amounts


def is_none(amount: object) -> bool:
    """Return whether an amount requests nothing, as a LimitRange's default of 0 does."""
    return str(amount) == "0"


def _has_share(container: Object) -> bool:
    return not all(
        is_none(amounts_of(container, kind).get(names.SHARE_RESOURCE, "0")) for kind in ("limits", "requests")
    )


def all_containers(spec: Object) -> list[Object]:
    """Return the containers in their order, then the init containers."""
    return [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]


def named(container: Object) -> str:
    """Return how sentences name a container."""
    return f"container {shown(container.get('name'))}"
