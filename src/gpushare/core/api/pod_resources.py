"""Resources that a pod's spec requests: CPU, memory and GPU shares."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from gpushare.core.api import names
from gpushare.core.api.quantity import (
    MOST_BYTES,
    MOST_COUNT,
    MOST_MILLI,
    parse_bytes,
    parse_count,
    parse_cpu_milli,
)

_BYTES_PER_MIB: Final = 2**20
_DISTINCT_QUANTITIES: Final = 4096  # a cluster uses the same few hundred over and over


def requests_of(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Return a pod's CPU (thousandths) and memory (MiB) requests, as kube-scheduler counts them.

    What the pod requests as a whole (`spec.resources`, KEP-2837); where that does not name CPU or memory, the sum
    over containers and sidecars, or more if an init container needs more. Plus the pod's overhead. No pod counts
    for more than `MOST_MILLI` and `MOST_BYTES`: whoever may create a pod chooses its requests freely.

    Raises:
        ValueError: a request is not a quantity.
    """
    whole, overhead = _asked(spec, "requests"), spec.get("overhead") or {}
    if "cpu" in whole:
        cpu_milli = _milli(whole["cpu"])
    else:
        cpu_milli = _effective(spec, lambda one: _milli(_asked(one, "requests").get("cpu", "0")))
    if "memory" in whole:
        memory_bytes = _bytes(whole["memory"])
    else:
        memory_bytes = _effective(spec, lambda one: _bytes(_asked(one, "requests").get("memory", "0")))
    return (
        min(cpu_milli + _milli(overhead.get("cpu", "0")), MOST_MILLI),
        min(memory_bytes + _bytes(overhead.get("memory", "0")), MOST_BYTES) // _BYTES_PER_MIB,
    )


def as_allocated(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a pod's spec with the requests that its node holds for it, if it cannot have those of a resize.

    Requests that were changed in place stay in the spec even where kubelet finds that they exceed the node; they
    count as what is allocated, as kube-scheduler does (KEP-1287; of the pod as a whole, KEP-5419).
    """
    conditions = status.get("conditions") or ()
    if not any((one.get("type"), one.get("reason")) == ("PodResizePending", "Infeasible") for one in conditions):
        return spec
    kinds = {"containers": "containerStatuses", "initContainers": "initContainerStatuses"}
    whole = _asked(spec, "requests")
    of_whole = {name: amount for name, amount in (status.get("allocatedResources") or {}).items() if name in whole}
    found = dict(spec)
    if of_whole:
        found["resources"] = {**(spec.get("resources") or {}), "requests": {**whole, **of_whole}}
    for kind, statuses in kinds.items():
        allocated = {one.get("name"): one.get("allocatedResources") or {} for one in status.get(statuses) or ()}
        found[kind] = [
            {
                **one,
                "resources": {
                    **(one.get("resources") or {}),
                    "requests": {**_asked(one, "requests"), **allocated.get(one.get("name"), {})},
                },
            }
            for one in spec.get(kind) or ()
        ]
    return found


def share_limit_of(spec: Mapping[str, Any]) -> int:
    """Return a pod's limit `gpushare.io/share`, 100 for each GPU; 0 if missing or not a whole number.

    It is `MOST_COUNT` at most.
    """
    limit = _effective(spec, lambda one: _count(_asked(one, "limits").get(names.SHARE_RESOURCE, 0)))
    return min(limit, MOST_COUNT)


def _effective(spec: Mapping[str, Any], amount: Callable[[Mapping[str, Any]], int]) -> int:
    """Return the pod's amount from its containers' amounts, by the rule of KEP-753 (sidecars)."""
    containers = sum(map(amount, spec.get("containers") or ()))
    init: Iterable[Mapping[str, Any]] = spec.get("initContainers") or ()
    if not init:
        return containers
    sidecars = most_at_start = 0
    for one in init:
        asked = amount(one)
        if one.get("restartPolicy") == "Always":
            sidecars += asked
            most_at_start = max(most_at_start, sidecars)
        else:
            most_at_start = max(most_at_start, sidecars + asked)
    return max(containers + sidecars, most_at_start)


def _asked(one: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the "limits" or "requests" of a container, or of a pod's spec."""
    return (one.get("resources") or {}).get(kind) or {}


@lru_cache(_DISTINCT_QUANTITIES)
def _milli(text: str | int) -> int:
    return parse_cpu_milli(text)


@lru_cache(_DISTINCT_QUANTITIES)
def _bytes(text: str | int) -> int:
    return parse_bytes(text)


@lru_cache(_DISTINCT_QUANTITIES)
def _count(text: str | int) -> int:
    try:
        return parse_count(text)
    except ValueError:
        return 0
