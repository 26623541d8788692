"""What pods hold of a cluster's state, and what is undone of it when a hypothesis ends."""

from dataclasses import dataclass, field

from gpushare.core.placement.shapes import Placement, PlacementRequest


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one pod holds; `slots` is None while its node or one of its GPUs is unknown (counted on arrival)."""

    placement: Placement
    request: PlacementRequest
    order: int
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
