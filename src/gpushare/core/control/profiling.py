"""Progress of profiling: which pods are on probation, and which cannot be measured where they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProfilingView:
    """The pods of a workload without a profile, by name.

    Attributes:
        on_probation: pods with a GPU to themselves, and when that ends at the latest, as text.
        unread: pods that share a GPU on which they cannot be measured, and why.
    """

    on_probation: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
