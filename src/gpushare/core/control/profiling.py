"""How it stands with a workload that has no profile yet: who is on probation, who cannot be read where it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProfilingView:
    """The pods of a workload without a profile, by name.

    Attributes:
        on_probation: those with a GPU to themselves, with when that ends at the latest, in words.
        unread: those that share a GPU on which they cannot be read, with why.
    """

    on_probation: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
