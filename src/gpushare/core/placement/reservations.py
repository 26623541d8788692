"""Reservations of pods in a cluster's state, and the journal to undo them after a hypothesis."""

from dataclasses import dataclass, field

from gpushare.core.placement.shapes import Placement, PlacementRequest


@dataclass(frozen=True, slots=True)
class Reservation:
    """The resources that one pod holds.

    Attributes:
        order: rises with arrival; Unix time of the decision on a live cluster.
        slots: of those of its GPUs that its node has, in their order; None while the node is unknown.
    """

    placement: Placement
    request: PlacementRequest
    order: float
    row: int = -1
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A point that `undo` returns to."""

    position: int
    order: int


@dataclass(slots=True)
class Journal:
    """Reservations made and released since the oldest open snapshot, newest last."""

    entries: list[tuple[str, Reservation | None]] = field(default_factory=list)
    open_snapshots: int = 0
