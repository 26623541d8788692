"""Open connections of one GPU's gate by pod and process, and which one is lost when there are too many.

A pod pays for its own connections, down to the last one that is not in its turn. Every choice takes the same short
time however many connections and processes there are, as a flood asks for one with each connection.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from gpushare.mps.packets import Channel

# A process with at most this many loses one only if none of its pod has more; a CUDA process has one at a time.
SPARED: Final = 4


class ConnectionPhase(enum.Enum):
    """Stage of a connection."""

    UNREAD = enum.auto()  # exceeds its pod's rate, so it was not greeted
    GREETED = enum.auto()
    INTRODUCED = enum.auto()  # its process sent its credentials
    RESUMED = enum.auto()  # greeted by the previous gate, which may have read its credentials
    READY = enum.auto()  # asked to become a compute client
    ODD = enum.auto()  # its process sent something unknown; held until it leaves
    PASSING = enum.auto()  # it is its turn
    SERVED = enum.auto()  # has its answer; any further data ends it
    GONE = enum.auto()


class _Activity(enum.Enum):
    """Kinds of phases; a pod that has too many connections loses those of one kind before the next."""

    SILENT = enum.auto()
    WAITING = enum.auto()
    ANSWERED = enum.auto()
    IN_TURN = enum.auto()


_ACTIVITY: Final = {
    ConnectionPhase.UNREAD: _Activity.SILENT,
    ConnectionPhase.GREETED: _Activity.SILENT,
    ConnectionPhase.INTRODUCED: _Activity.SILENT,
    ConnectionPhase.RESUMED: _Activity.SILENT,
    ConnectionPhase.READY: _Activity.WAITING,
    ConnectionPhase.ODD: _Activity.WAITING,
    ConnectionPhase.SERVED: _Activity.ANSWERED,
    ConnectionPhase.PASSING: _Activity.IN_TURN,
}


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted socket; `start_ticks` and `pod_uid` are those of its process when it was greeted."""

    channel: Channel
    pid: int
    pod_uid: str | None
    opened_at: float
    phase: ConnectionPhase = ConnectionPhase.UNREAD
    start_ticks: int | None = None
    number: int = 0

    @property
    def process(self) -> tuple[int, int | None]:
        """Return (pid, start time), which distinguishes its process from a later one with the same pid."""
        return self.pid, self.start_ticks


@dataclass(slots=True)
class _Group:
    """Open connections of a pod or a process, by activity, oldest first."""

    count: int = 0
    by_activity: dict[_Activity, dict[Connection, None]] = field(
        default_factory=lambda: {activity: {} for activity in _Activity}
    )

    def add(self, connection: Connection) -> None:
        self.count += 1
        self.by_activity[_ACTIVITY[connection.phase]][connection] = None

    def remove(self, connection: Connection) -> None:
        self.count -= 1
        del self.by_activity[_ACTIVITY[connection.phase]][connection]

    def least_needed(self) -> Connection | None:
        """Return the oldest silent connection, else the newest that waits for a turn."""
        if silent := self.by_activity[_Activity.SILENT]:
            return next(iter(silent))
        return next(reversed(self.by_activity[_Activity.WAITING]), None)


@dataclass(slots=True)
class _PodConnections:
    """Open connections of one pod; `by_count` has its pids by their numbers of connections, `most` the largest."""

    all: _Group = field(default_factory=_Group)
    processes: dict[int, _Group] = field(default_factory=dict)
    by_count: dict[int, dict[int, None]] = field(default_factory=dict)
    most: int = 0

    def add(self, connection: Connection) -> None:
        process = self.processes.setdefault(connection.pid, _Group())
        before = process.count
        for group in (self.all, process):
            group.add(connection)
        self._note_count(connection.pid, before, process.count)

    def remove(self, connection: Connection) -> None:
        process = self.processes[connection.pid]
        before = process.count
        for group in (self.all, process):
            group.remove(connection)
        self._note_count(connection.pid, before, process.count)
        if not process.count:
            del self.processes[connection.pid]

    def _note_count(self, pid: int, before: int, now: int) -> None:
        if before:
            del self.by_count[before][pid]
            if not self.by_count[before]:
                del self.by_count[before]
        if now:
            self.by_count.setdefault(now, {})[pid] = None
        self.most = max(self.most, now)
        while self.most and self.most not in self.by_count:
            self.most -= 1

    def connection_to_close(self) -> Connection | None:
        """Return the least needed connection of the process with the most, of any if all have few.

        None if all are in a turn.
        """
        if self.most > SPARED:
            greediest = self.processes[next(iter(self.by_count[self.most]))]
            if (found := greediest.least_needed()) is not None:
                return found
        if (found := self.all.least_needed()) is not None:
            return found
        # Their processes have what they came for, and CUDA closes such a connection itself.
        return next(iter(self.all.by_activity[_Activity.ANSWERED]), None)


class OpenConnections:
    """All open connections of one GPU's gate."""

    def __init__(self) -> None:
        self._pods: dict[str | None, _PodConnections] = {}

    def pods(self) -> frozenset[str | None]:
        """Return the pods with an open connection."""
        return frozenset(self._pods)

    def pod_count(self) -> int:
        """Return the number of pods with an open connection."""
        return len(self._pods)

    def of_pod(self, pod_uid: str | None) -> int:
        """Return the number of open connections of a pod."""
        return pod.all.count if (pod := self._pods.get(pod_uid)) is not None else 0

    def add(self, connection: Connection) -> None:
        """Count a connection."""
        self._pods.setdefault(connection.pod_uid, _PodConnections()).add(connection)

    def remove(self, connection: Connection) -> None:
        """Count a connection no longer; it still has the pod and phase with which it was counted."""
        pod = self._pods[connection.pod_uid]
        pod.remove(connection)
        if not pod.all.count:
            del self._pods[connection.pod_uid]

    def set_phase(self, connection: Connection, phase: ConnectionPhase) -> None:
        """Change a counted connection's phase."""
        if _ACTIVITY[phase] is _ACTIVITY[connection.phase]:
            connection.phase = phase
            return
        pod = self._pods[connection.pod_uid]
        groups = (pod.all, pod.processes[connection.pid])
        for group in groups:
            group.remove(connection)
        connection.phase = phase
        for group in groups:
            group.add(connection)

    def connection_to_close(self, pod_uid: str | None) -> Connection | None:
        """Return the connection that a pod with too many loses first; None if all of them are in their turn."""
        return pod.connection_to_close() if (pod := self._pods.get(pod_uid)) is not None else None

    def busiest(self) -> Iterator[str | None]:
        """Yield the pods, that with the most connections first."""
        yield from sorted(self._pods, key=lambda pod_uid: self._pods[pod_uid].all.count, reverse=True)
