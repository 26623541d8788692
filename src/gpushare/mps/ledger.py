"""Who was let in under which ceilings, and who is there: the gate's record of one GPU's clients."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gpushare.mps.grants import ProcessMemory
from gpushare.mps.identity import is_alive, pod_uid_of, start_ticks_of
from gpushare.mps.memory import MemoryReader
from gpushare.mps.patience import HangingError, PatientCaller
from gpushare.mps.status import ClientStatus, GateStatus, Mismatch, MismatchKind

logger = logging.getLogger(__name__)

KEPT_MISMATCHES: Final = 50  # the latest; the agent turns each into an event once
KEPT_DEPARTED: Final = 1024  # a bound only: the keeper forgets them by time


@dataclass(frozen=True, slots=True)
class Admission:
    """A process that had its turn.

    Attributes:
        pod_limit_mib: the pod's limit at that time; granted_mib: what of it was this process's ceiling.
        admitted_at: seconds of the gate's clock.
    """

    pid: int
    start_ticks: int | None
    pod_uid: str | None
    thread_percentage: int | None
    granted_mib: int | None
    pod_limit_mib: int | None
    admitted_at: float
    used_mib: int | None = None
    changed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Presence:
    """One process's time as a client, from its turn until it was missed in the server's list; None while there."""

    pid: int
    pod_uid: str | None
    since: float
    until: float | None = None


class ClientLedger:
    """Admissions by pid and the server's client list."""

    def __init__(
        self,
        memory: MemoryReader,
        *,
        identify: Callable[[int], str | None] = pod_uid_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory, self._identify, self._clock = memory, identify, clock
        self._caller = PatientCaller()
        self._admissions: dict[int, Admission] = {}
        self._clients: tuple[int, ...] = ()
        self._is_first_list = True
        self._strangers: dict[int, Mismatch] = {}
        self._late: Admission | None = None
        self._present: dict[int, Presence] = {}
        self._departed: deque[Presence] = deque(maxlen=KEPT_DEPARTED)
        self.mismatches: tuple[Mismatch, ...] = ()

    @property
    def client_count(self) -> int:
        """Clients at the last look."""
        return len(self._clients)

    def is_client(self, pid: int) -> bool:
        """Whether the server listed it at the last look."""
        return pid in self._clients

    def has_admission(self, pid: int) -> bool:
        """Whether it had a turn, or has it now."""
        return pid in self._admissions

    def connected(self, earliest: float, latest: float) -> tuple[Presence, ...]:
        """Return who was a client at any time between the two, whether or not it has left since."""
        return tuple(
            each
            for each in (*self._departed, *self._present.values())
            if each.since <= latest and (each.until is None or each.until >= earliest)
        )

    def forget_departed(self, before: float) -> None:
        """Forget who left before this time."""
        while self._departed and (self._departed[0].until or 0.0) < before:
            self._departed.popleft()

    def _depart(self, pid: int) -> None:
        if presence := self._present.pop(pid, None):
            self._departed.append(replace(presence, until=self._clock()))

    def restore(self, status: GateStatus | None) -> None:
        """Take over what a gate before this one wrote, for processes that still run."""
        now, unix = self._clock(), time.time()
        for client in status.clients if status else ():
            if client.start_ticks is not None and is_alive(client.pid, client.start_ticks):
                age = max(0.0, unix - client.connected_at) if client.connected_at else 0.0
                limit = client.memory_limit_mib
                self._admissions[client.pid] = Admission(
                    client.pid,
                    client.start_ticks,
                    client.pod_uid,
                    client.thread_percentage,
                    limit,
                    limit,
                    now - age,
                    client.memory_used_mib,
                    now,
                )

    def admit(self, admission: Admission) -> None:
        """A process gets its turn."""
        self._late = None
        self._present.setdefault(admission.pid, Presence(admission.pid, admission.pod_uid, admission.admitted_at))
        self._admissions[admission.pid] = replace(admission, changed_at=admission.admitted_at)

    def end_turn(self, pid: int, *, is_client: bool) -> None:
        """Its turn is over. Who did not become a client may still, while the ceilings in force are its own."""
        if not is_client:
            self._late = self._admissions.pop(pid, None)
            if pid not in self._clients:
                self._depart(pid)

    def note_clients(self, pids: tuple[int, ...], turn_pid: int | None = None) -> tuple[int, ...]:
        """The server's client list now; whoever is in it without a turn of its own is a stranger."""
        self._clients = pids
        for pid, admission in list(self._admissions.items()):
            gone = pid not in self._clients and pid != turn_pid
            if gone and not is_alive(pid, admission.start_ticks):
                del self._admissions[pid]
        for pid in [pid for pid in self._present if pid not in pids and pid != turn_pid]:
            self._depart(pid)
        for pid in self._clients:
            if pid in self._admissions:
                continue
            if self._late is not None and self._late.pid == pid:
                self._admissions[pid] = self._late
                self._late = None
                continue
            pod_uid = self._identify(pid)
            if self._is_first_list:
                # Connected through a gate before this one that left no word of it.
                self._admissions[pid] = Admission(
                    pid, start_ticks_of(pid), pod_uid, None, None, None, self._clock(), None, self._clock()
                )
            elif pid not in self._strangers:
                kind = MismatchKind.UNKNOWN_CLIENT if pod_uid is None else MismatchKind.STALE_CEILING
                detail = (
                    f"process {pid} of no pod connected to the MPS daemon past the gate"
                    if pod_uid is None
                    else f"process {pid} connected outside its turn, under ceilings that are not its own"
                )
                self._strangers[pid] = self.note(Mismatch(kind, pod_uid, pid, detail))
        self._strangers = {pid: m for pid, m in self._strangers.items() if pid in self._clients}
        for pid in self._clients:
            if pid not in self._present:
                known = self._admissions.get(pid) or self._strangers.get(pid)
                self._present[pid] = Presence(pid, known.pod_uid if known else None, self._clock())
        self._is_first_list = False
        return self._clients

    def strangers(self) -> tuple[Mismatch, ...]:
        """Clients that are connected without a turn of their own."""
        return tuple(self._strangers.values())

    def note(self, mismatch: Mismatch) -> Mismatch:
        """Keep a mismatch for the agent."""
        self.mismatches = (*self.mismatches, mismatch)[-KEPT_MISMATCHES:]
        return mismatch

    def note_overrun(self, pod_uid: str | None, pid: int, used_mib: int, limit_mib: int) -> None:
        """A pod passed its limit and its newest process is ended for it."""
        detail = f"the pod's processes held {used_mib} MiB of its {limit_mib} MiB; ended the newest, process {pid}"
        self.note(Mismatch(MismatchKind.MEMORY_OVERRUN, pod_uid, pid, detail))

    async def watch_memory(self) -> None:
        """Read what each process holds, in a thread; while the driver hangs nobody can tell, and grants count."""
        was_hanging = self._caller.hangs_seconds > 0
        used: Mapping[int, int | None] | None = None
        try:
            used = await self._caller.call(self._memory.used_mib)
        except HangingError as error:
            if not was_hanging:
                logger.error("the driver does not say what processes hold, grants count in full: %s", error)
        self.note_memory(used, self._clock())

    @property
    def memory_hangs_seconds(self) -> float:
        """How long the driver has not answered; 0 when it does."""
        return self._caller.hangs_seconds

    def observe_memory(self, now: float) -> None:
        """Read what each process holds, here and now."""
        self.note_memory(self._memory.used_mib(), now)

    def note_memory(self, used: Mapping[int, int | None] | None, now: float) -> None:
        """What each process holds, MiB; None when nobody can tell."""
        for pid, admission in self._admissions.items():
            value = None if used is None else used.get(pid, 0)
            if value != admission.used_mib:
                self._admissions[pid] = replace(admission, used_mib=value, changed_at=now)

    def clients_by_pod(self) -> Counter[str | None]:
        """How many clients each pod has."""
        return Counter(a.pod_uid if (a := self._admissions.get(pid)) else None for pid in self._clients)

    def siblings(self, pod_uid: str | None, pid: int) -> tuple[ProcessMemory, ...]:
        """The pod's other live processes."""
        return tuple(_memory_of(a) for a in self._admissions.values() if a.pod_uid == pod_uid and a.pid != pid)

    def pods(self) -> tuple[tuple[str, int, tuple[ProcessMemory, ...]], ...]:
        """Pod uid, limit and processes of every pod; the limit is the highest of their admissions."""
        grouped: dict[str, list[Admission]] = {}
        for admission in self._admissions.values():
            if admission.pod_uid is not None and self.is_client(admission.pid):
                grouped.setdefault(admission.pod_uid, []).append(admission)
        return tuple(
            (
                uid,
                max(a.pod_limit_mib for a in group if a.pod_limit_mib is not None),
                tuple(map(_memory_of, group)),
            )
            for uid, group in grouped.items()
            if any(a.pod_limit_mib is not None for a in group)
        )

    def forget_clients(self) -> None:
        """The server is gone and with it every client."""
        self._clients = ()
        for pid in list(self._present):
            self._depart(pid)
        self._admissions.clear()
        self._late = None
        self._strangers.clear()
        self._is_first_list = False

    def clients(self) -> tuple[ClientStatus, ...]:
        """The clients at the last look, for the status file."""
        now, unix = self._clock(), time.time()
        result = []
        for pid in self._clients:
            a = self._admissions.get(pid)
            if a is None:
                result.append(ClientStatus(pid, self._identify(pid)))
            else:
                result.append(
                    ClientStatus(
                        pid,
                        a.pod_uid,
                        a.thread_percentage,
                        a.granted_mib,
                        a.used_mib,
                        unix - (now - a.admitted_at),
                        a.start_ticks,
                    )
                )
        return tuple(result)


def _memory_of(admission: Admission) -> ProcessMemory:
    return ProcessMemory(
        admission.pid, admission.granted_mib, admission.used_mib, admission.admitted_at, admission.changed_at
    )
