"""Kubernetes' own value types that our objects contain: conditions, label selectors, owner references."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from gpushare.core.api.schema import ATOMIC_LIST, CelRule, described


class ConditionStatus(StrEnum):
    """Status of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class SelectorOperator(StrEnum):
    """Operators of a label selector's expressions."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition in the form of metav1.Condition."""

    type: str = described("Kind of condition, such as Ready.", default="", required=True, maxLength=316)
    status: ConditionStatus = described("True, False or Unknown.", default=ConditionStatus.UNKNOWN, required=True)
    reason: str = described("One CamelCase word on why.", default="", required=True, maxLength=1024)
    message: str = described("A sentence for people.", default="", maxLength=32768)
    last_transition_time: str | None = described("When the status last changed.", default=None, format="date-time")
    observed_generation: int | None = described(
        "The metadata.generation that this was concluded from.", default=None, minimum=0
    )


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """One expression of a label selector."""

    key: str = described("Label that the expression is about.", default="", required=True, maxLength=317)
    operator: SelectorOperator = described(
        "How the label relates to the values.", default=SelectorOperator.IN, required=True
    )
    values: tuple[str, ...] = described(
        "Values for In and NotIn; none for Exists and DoesNotExist.",
        default=(),
        items={"maxLength": 63},
        maxItems=64,
        **ATOMIC_LIST,
    )
    CEL_RULES: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            "In and NotIn need values, Exists and DoesNotExist take none",
            ".values",
        ),
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether a pod's labels satisfy this expression."""
        match self.operator:
            case SelectorOperator.IN:
                return labels.get(self.key) in self.values
            case SelectorOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case SelectorOperator.EXISTS:
                return self.key in labels
            case SelectorOperator.DOES_NOT_EXIST:
                return self.key not in labels


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """A label selector as Kubernetes defines it; an empty one selects every pod."""

    match_labels: Mapping[str, str] = described(
        "Labels that a pod must have with these values.",
        default_factory=dict,
        items={"maxLength": 63},
        maxProperties=64,
    )
    match_expressions: tuple[LabelRequirement, ...] = described(
        "Expressions that must all hold.", default=(), maxItems=64, **ATOMIC_LIST
    )

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether this selector matches a pod with these labels."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


@dataclass(frozen=True, slots=True)
class OwnerReference:
    """An owner of an object; `controller` marks the owner that manages it."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
