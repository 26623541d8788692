"""The nodes that a pod allows itself: its node selector, required node affinity and tolerations.

kube-scheduler evaluates these rules. They are repeated here only to keep a GPU for a waiting pod that
kube-scheduler does not ask us about, because by its own count every node has too few shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

_KEEPS_PODS_OUT: Final = frozenset({"NoSchedule", "NoExecute"})


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint that keeps pods out."""

    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class NodeRules:
    """One pod's rules; equal rules allow the same nodes.

    Attributes:
        selector: labels that a node must have.
        terms: of the required node affinity; one term must hold. A term holds if each of its
            (key, operator, values, is a field) does. None without required affinity.
        tolerations: (key, operator, value, effect).
    """

    selector: tuple[tuple[str, str], ...]
    terms: tuple[tuple[tuple[str, str, tuple[str, ...], bool], ...], ...] | None
    tolerations: tuple[tuple[str, str, str, str], ...]

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Read the rules from a pod's spec."""
        affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        return cls(
            tuple(sorted((spec.get("nodeSelector") or {}).items())),
            None if not required else tuple(map(_term, required.get("nodeSelectorTerms") or ())),
            tuple(
                (
                    each.get("key") or "",
                    each.get("operator") or "Equal",
                    each.get("value") or "",
                    each.get("effect") or "",
                )
                for each in spec.get("tolerations") or ()
            ),
        )

    def allow(self, name: str, labels: Mapping[str, str], taints: tuple[Taint, ...]) -> bool:
        """Return whether the pod may run on a node."""
        if any(labels.get(key) != value for key, value in self.selector):
            return False
        if self.terms is not None and not any(
            term and all(_holds(each, name, labels) for each in term) for term in self.terms
        ):
            return False
        return all(any(_tolerates(each, taint) for each in self.tolerations) for taint in taints)


def taints_of(spec: Mapping[str, Any]) -> tuple[Taint, ...]:
    """Return a node's taints that keep pods out, from its spec."""
    return tuple(
        Taint(each.get("key") or "", each.get("value") or "", each["effect"])
        for each in spec.get("taints") or ()
        if each.get("effect") in _KEEPS_PODS_OUT
    )


def _term(term: Mapping[str, Any]) -> tuple[tuple[str, str, tuple[str, ...], bool], ...]:
    return tuple(
        (each["key"], each["operator"], tuple(each.get("values") or ()), is_field)
        for kind, is_field in (("matchExpressions", False), ("matchFields", True))
        for each in term.get(kind) or ()
    )


def _holds(rule: tuple[str, str, tuple[str, ...], bool], name: str, labels: Mapping[str, str]) -> bool:
    key, operator, values, is_field = rule
    value = name if is_field else labels.get(key)
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            try:
                difference = int(value or "") - int(values[0])
            except (ValueError, IndexError):
                return False
            return difference > 0 if operator == "Gt" else difference < 0
        case _:
            return False


def _tolerates(toleration: tuple[str, str, str, str], taint: Taint) -> bool:
    key, operator, value, effect = toleration
    if effect and effect != taint.effect:
        return False
    if not key:
        return operator == "Exists"
    return key == taint.key and (operator == "Exists" or value == taint.value)
