"""The nodes that a pod allows itself: its node selector, required node affinity and tolerations.

kube-scheduler evaluates these rules before it asks the extender. They are repeated here where nobody has asked it:
to keep a GPU for a waiting pod although by kube-scheduler's own count every node has too few shares, and in
`gpushare plan` and `explain`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from gpushare.core.api.rejection import Reason, Rejection

_KEEPS_PODS_OUT: Final = frozenset({"NoSchedule", "NoExecute"})
_INTEGER: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)
_MOST: Final = 2**63
"""kube-scheduler compares only numbers that match `_INTEGER` and fit 64 bits; Python's int takes more."""
_NAME_FIELD: Final = "metadata.name"
MOST_PARTS: Final = 512
"""Most parts of one pod's rules (see `NodeRules.parts`) that are matched with nodes. A pod object has room for
some 20,000, and each takes 0.85 µs per node."""


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint that keeps pods out."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        """Return it as kubectl writes it."""
        return f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"


CORDONED: Final = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
"""The taint of a cordoned node; kube-scheduler asks whether a pod tolerates it even before the node has it."""


@dataclass(frozen=True, slots=True)
class NodeRules:
    """One pod's rules; equal rules allow the same nodes.

    Attributes:
        selector: labels that a node must have.
        terms: of the required node affinity; one term must hold. A term holds if each of its
            (key, operator, values, is a field) does. None without required affinity.
        tolerations: (key, operator, value, effect).
        parts: number of labels, terms, expressions, values and tolerations.
        is_too_large: there are more than `MOST_PARTS`. They are not kept: such rules refuse no node here, and
            kube-scheduler alone knows which nodes the pod allows.
    """

    selector: tuple[tuple[str, str], ...]
    terms: tuple[tuple[tuple[str, str, tuple[str, ...], bool], ...], ...] | None
    tolerations: tuple[tuple[str, str, str, str], ...]
    parts: int = 0
    is_too_large: bool = False

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Read the rules from a pod's spec."""
        affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        parts = _count_parts(spec, (required or {}).get("nodeSelectorTerms") or ())
        if parts > MOST_PARTS:
            return cls((), None, (), parts, is_too_large=True)
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
            parts,
        )

    def allow(self, name: str, labels: Mapping[str, str], taints: Sequence[Taint]) -> bool:
        """Return whether the pod may run on a node; True if its rules are too large."""
        return self.is_too_large or (
            all(labels.get(key) == value for key, value in self.selector)
            and self._fits_affinity(name, labels)
            and self._untolerated(taints) is None
        )

    def refusal(self, name: str, labels: Mapping[str, str], taints: Sequence[Taint]) -> Rejection | None:
        """Return why the pod may not run on a node, the reason that kube-scheduler finds first; None if it may.

        None, too, if its rules are too large.
        """
        if self.is_too_large:
            return None
        if (taint := self._untolerated(taints)) is not None:
            return taint_refusal(taint)
        missed = [f"{key}={value}" for key, value in self.selector if labels.get(key) != value]
        if missed:
            return Rejection(
                Reason.NODE_LABELS,
                f"its labels do not match the pod's nodeSelector, which wants {', '.join(missed)}",
            )
        if not self._fits_affinity(name, labels):
            return Rejection(Reason.NODE_LABELS, "it does not match the pod's required node affinity")
        return None

    def _fits_affinity(self, name: str, labels: Mapping[str, str]) -> bool:
        return self.terms is None or any(
            term and all(_holds(each, name, labels) for each in term) for term in self.terms
        )

    def _untolerated(self, taints: Sequence[Taint]) -> Taint | None:
        """Return the first taint that the pod does not tolerate."""
        return next(
            (taint for taint in taints if not any(_tolerates(each, taint) for each in self.tolerations)), None
        )


def taint_refusal(taint: Taint) -> Rejection:
    """Return the refusal of a node for a taint that the pod does not tolerate."""
    if taint == CORDONED:
        return Rejection(Reason.NODE_CORDONED, "it is cordoned")
    return Rejection(Reason.NODE_TAINT, f"it has the taint {taint}, which the pod does not tolerate")


def taints_of(spec: Mapping[str, Any]) -> tuple[Taint, ...]:
    """Return a node's taints that keep pods out, from its spec; that of a cordoned node first."""
    taints = (
        Taint(each.get("key") or "", each.get("value") or "", each["effect"])
        for each in spec.get("taints") or ()
        if each.get("effect") in _KEEPS_PODS_OUT
    )
    if not spec.get("unschedulable"):
        return tuple(taints)
    return CORDONED, *(taint for taint in taints if taint != CORDONED)


def _count_parts(spec: Mapping[str, Any], terms: Sequence[Mapping[str, Any]]) -> int:
    expressions = [
        each for term in terms for kind in ("matchExpressions", "matchFields") for each in term.get(kind) or ()
    ]
    values = sum(len(each.get("values") or ()) for each in expressions)
    others = len(spec.get("nodeSelector") or ()) + len(spec.get("tolerations") or ())
    return len(terms) + len(expressions) + values + others


def _term(term: Mapping[str, Any]) -> tuple[tuple[str, str, tuple[str, ...], bool], ...]:
    return tuple(
        (each["key"], each["operator"], tuple(each.get("values") or ()), is_field)
        for kind, is_field in (("matchExpressions", False), ("matchFields", True))
        for each in term.get(kind) or ()
    )


def _holds(rule: tuple[str, str, tuple[str, ...], bool], name: str, labels: Mapping[str, str]) -> bool:
    key, operator, values, is_field = rule
    value = labels.get(key)
    if is_field:
        value = name if key == _NAME_FIELD else None
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
            number, bound = _integer(value), _integer(values[0] if len(values) == 1 else None)
            if number is None or bound is None:
                return False
            return number > bound if operator == "Gt" else number < bound
        case _:
            return False


def _integer(text: str | None) -> int | None:
    """Return the whole number that a label or a bound is; None if kube-scheduler takes it for none."""
    if text is None or not _INTEGER.fullmatch(text):
        return None
    return number if -_MOST <= (number := int(text)) < _MOST else None


def _tolerates(toleration: tuple[str, str, str, str], taint: Taint) -> bool:
    """Return whether a toleration matches a taint; the operators Gt and Lt, an alpha feature, match none."""
    key, operator, value, effect = toleration
    if effect and effect != taint.effect:
        return False
    if operator == "Exists":
        return not key or key == taint.key
    return operator == "Equal" and bool(key) and key == taint.key and value == taint.value
