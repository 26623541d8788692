"""The gate's record of one GPU's clients: admitted processes, their ceilings, and which are connected."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gpushare.mps.contexts import ContextLog
from gpushare.mps.grants import ProcessMemory
from gpushare.mps.identity import is_alive, pod_uid_of, seconds_alive, start_ticks_of
from gpushare.mps.memory import MemoryReader
from gpushare.mps.patience import HangingError, PatientCaller
from gpushare.mps.status import ClientStatus, GateStatus, Mismatch, MismatchKind, highest_grants

logger = logging.getLogger(__name__)

KEPT_MISMATCHES: Final = 50  # only the latest; the agent turns each into an event once
KEPT_GRANTS: Final = 64
KEPT_DEPARTED: Final = 1024  # only a bound; the keeper forgets departed clients by time


@dataclass(frozen=True, slots=True)
class Admission:
    """A process that had its turn.

    Attributes:
        granted_mib: the process's memory ceiling, its part of the pod's limit.
        pod_limit_mib: the pod's limit at that time.
        admitted_at: in seconds of the gate's clock.
        grants: the thread percentages of all its turns; a process with several contexts has had several turns.
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
    grants: tuple[int | None, ...] = ()

    def percentages(self, contexts: int) -> tuple[int | None, ...]:
        """Return the highest thread percentages of this many contexts; which contexts are gone is not known."""
        return highest_grants(self.grants or (self.thread_percentage,), contexts)


@dataclass(frozen=True, slots=True)
class Presence:
    """A process's time as a client, from its turn until the server stopped listing it (`until` is None before).

    Attributes:
        listed: whether the server has listed it.
        is_handed: whether it was given the server's socket in its turn.
        turned_away_at: when it said in its turn that the server did not take it; None if it did not.
        cuda_error: what it got from the server then.
    """

    pid: int
    pod_uid: str | None
    since: float
    until: float | None = None
    start_ticks: int | None = None
    listed: bool = False
    is_handed: bool = False
    turned_away_at: float | None = None
    cuda_error: int = 0


class ClientLedger:
    """Admissions by pid and the server's client list."""

    def __init__(
        self,
        memory: MemoryReader,
        *,
        identify: Callable[[int], str | None] = pod_uid_of,
        clock: Callable[[], float] = time.monotonic,
        ends_strangers: bool = False,
        contexts: ContextLog | None = None,
        own_pid: int = 0,
    ) -> None:
        self._contexts, self._own_pid = contexts, own_pid
        self._memory, self._identify, self._clock = memory, identify, clock
        self._follows = "; it is ended" if ends_strangers else ""
        self._caller = PatientCaller()
        self._admissions: dict[int, Admission] = {}
        self._clients: tuple[int, ...] = ()
        self._noted_at = -math.inf
        self._seen_at: dict[int, float] = {}  # when each client was in a list last
        self._is_first_list = True
        self._strangers: dict[int, Mismatch] = {}
        self._stranger_ticks: dict[int, int | None] = {}
        self._late: Admission | None = None
        self._present: dict[int, Presence] = {}
        self._departed: deque[Presence] = deque(maxlen=KEPT_DEPARTED)
        self._terminated: deque[tuple[int, float]] = deque(maxlen=KEPT_DEPARTED)  # pid, when the server ended it
        self._lost: dict[str, None] = {}
        self.mismatches: tuple[Mismatch, ...] = ()

    @property
    def client_count(self) -> int:
        """Return the number of clients at the last look."""
        return len(self._clients)

    def is_client(self, pid: int) -> bool:
        """Return whether the server listed the process at the last look."""
        return pid in self._clients

    def has_admission(self, pid: int) -> bool:
        """Return whether the process had a turn, or has it now."""
        return pid in self._admissions

    def has_live(self) -> bool:
        """Return whether any process still runs that was a client at the last look or had its turn."""
        known = dict.fromkeys(self._clients) | {pid: a.start_ticks for pid, a in self._admissions.items()}
        return any(is_alive(pid, ticks) for pid, ticks in known.items())

    def connected(self, earliest: float, latest: float) -> tuple[Presence, ...]:
        """Return the processes that the server had at any time between the two, whether or not they have left.

        A process in its turn counts once it is given the server's socket, as it may become a client, and leave,
        between two lists. One whose turn broke off before goes on when its next turn comes. One that the server
        has ended at our request was there until then, whenever a list shows that.
        """
        return tuple(
            each
            for each in self._presences()
            if (each.listed or each.is_handed)
            and each.since <= latest
            and (each.until is None or each.until >= earliest)
            and not any(each.pid == pid and each.since <= at < earliest for pid, at in tuple(self._terminated))
        )

    def note_terminated(self, pid: int) -> None:
        """Record that the server has ended this client, whose threads were held; called from another thread.

        Without that, the end of a client may itself begin a fault, a moment later (gpushare.mps.ending).
        """
        self._terminated.append((pid, self._clock()))

    def lost_in_their_turn(self, earliest: float) -> tuple[Presence, ...]:
        """Return the processes that the server was given and did not take, but those of turns before this time.

        They said so, or have ended without having been listed. A process that came again and is listed is none.
        """
        return tuple(
            each
            for each in self._never_served()
            if each.is_handed
            and (each.until is None or each.until >= earliest)
            and (each.turned_away_at is not None or not is_alive(each.pid, each.start_ticks))
        )

    def turned_away(self, after: float, until: float) -> tuple[Presence, ...]:
        """Return the processes that said in this time that the server did not take them.

        A process that came again and is listed is none.
        """
        return tuple(
            each
            for each in self._never_served()
            if each.turned_away_at is not None and after < each.turned_away_at <= until
        )

    def _never_served(self) -> list[Presence]:
        served = {(each.pid, each.start_ticks) for each in self._presences() if each.listed}
        return [each for each in self._presences() if (each.pid, each.start_ticks) not in served]

    def note_handed(self, pid: int) -> None:
        """Record that a process is given the server's socket in its turn."""
        if presence := self._present.get(pid):
            self._present[pid] = replace(presence, is_handed=True)

    def note_turned_away(self, pid: int, cuda_error: int) -> None:
        """Record that a process said in its turn that the server did not take it."""
        if presence := self._present.get(pid):
            self._present[pid] = replace(
                presence, is_handed=True, turned_away_at=self._clock(), cuda_error=cuda_error
            )

    def _presences(self) -> tuple[Presence, ...]:
        return (*self._departed, *self._present.values())

    def forget_departed(self, before: float) -> None:
        """Forget clients that left before this time."""
        while self._departed and (self._departed[0].until or 0.0) < before:
            self._departed.popleft()

    def _depart(self, pid: int) -> None:
        if presence := self._present.pop(pid, None):
            self._departed.append(replace(presence, until=self._clock()))

    def restore(self, status: GateStatus | None) -> None:
        """Adopt the admissions that the previous gate recorded, for processes that still run.

        All its clients count as connected until the first list, so that a fault that came meanwhile names them.
        """
        now = self._clock()
        if self._contexts is not None:
            self._contexts.read()
        ages = _ages_now(status) if status is not None else {}
        self.note_lost(status.lost_pods if status is not None else ())
        for client in status.clients if status is not None else ():
            self._present[client.pid] = Presence(
                client.pid, client.pod_uid, -math.inf, None, client.start_ticks, listed=True
            )
            if client.pid in ages:
                self._admissions[client.pid] = Admission(
                    client.pid,
                    client.start_ticks,
                    client.pod_uid,
                    client.thread_percentage,
                    client.memory_limit_mib,
                    client.pod_limit_mib,
                    now - ages[client.pid],
                    client.memory_used_mib,
                    now,
                    client.grants,
                )
                if self._contexts is not None:  # the log may have been trimmed since it told of them
                    self._contexts.at_least(client.pid, client.contexts)

    def admit(self, admission: Admission) -> None:
        """Record that a process gets its turn."""
        self._late = None
        former = self._present.get(admission.pid)
        if former is not None and former.start_ticks not in {None, admission.start_ticks}:
            self._depart(admission.pid)  # another process with its pid
        self._present.setdefault(
            admission.pid,
            Presence(admission.pid, admission.pod_uid, admission.admitted_at, None, admission.start_ticks),
        )
        before = self._admissions.get(admission.pid)
        earlier: tuple[int | None, ...] = ()
        if before is not None and before.start_ticks == admission.start_ticks and self.is_client(before.pid):
            earlier = before.grants or (before.thread_percentage,)
        grants = (*earlier, admission.thread_percentage)[-KEPT_GRANTS:]
        self._admissions[admission.pid] = replace(admission, changed_at=admission.admitted_at, grants=grants)

    def end_turn(self, pid: int, *, is_client: bool) -> None:
        """Record that a process's turn is over. It may still become a client while the ceilings are its own."""
        if not is_client and pid not in self._clients:  # a client that asked for another context stays a client
            self._late = self._admissions.pop(pid, None)
            self._depart(pid)

    def note_clients(
        self, pids: tuple[int, ...], turn_pid: int | None = None, asked_at: float | None = None
    ) -> tuple[int, ...]:
        """Record the server's client list; a listed process without a turn of its own is a stranger.

        Args:
            turn_pid: the process that has its turn now.
            asked_at: when the list was asked for, by the ledger's clock; None: nobody asked for another meanwhile.
        """
        pids = tuple(pid for pid in pids if pid != self._own_pid)  # listed while we send a client's message
        if asked_at is not None:
            pids = self._without_older_news(pids, asked_at)
        self._noted_at = now = self._clock()
        self._seen_at = dict.fromkeys(pids, now)
        if self._contexts is not None:
            self._contexts.read()  # before the log is trimmed, whether or not a process waits
        self._clients = pids
        for pid, admission in list(self._admissions.items()):
            gone = pid not in self._clients and pid != turn_pid
            if gone and not is_alive(pid, admission.start_ticks):
                del self._admissions[pid]
        for pid in [pid for pid in self._present if pid not in pids and pid != turn_pid]:
            self._depart(pid)
        for pid in self._clients:
            if (known := self._admissions.get(pid)) and (same := _if_the_same(known)):
                self._admissions[pid] = same
                continue
            if self._late is not None and self._late.pid == pid and (same := _if_the_same(self._late)):
                self._admissions[pid] = same
                self._late = None
                continue
            # Another process has the pid of one that had its turn; a tenant can cause that by forking.
            self._admissions.pop(pid, None)
            pod_uid = self._identify(pid)
            if self._is_first_list:
                # Connected through a previous gate that left no record of it.
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
                self._strangers[pid] = self.note(Mismatch(kind, pod_uid, pid, detail + self._follows))
                self._stranger_ticks[pid] = start_ticks_of(pid)
        self._strangers = {pid: m for pid, m in self._strangers.items() if pid in self._clients}
        self._stranger_ticks = {pid: self._stranger_ticks[pid] for pid in self._strangers}
        for pid in self._clients:
            if pid not in self._present:
                listed = self._admissions.get(pid) or self._strangers.get(pid)
                ticks = self._stranger_ticks.get(pid) or start_ticks_of(pid)
                self._present[pid] = Presence(
                    pid, listed.pod_uid if listed else None, self._clock(), None, ticks, listed=True
                )
            elif not self._present[pid].listed:
                self._present[pid] = replace(self._present[pid], listed=True)
        self._is_first_list = False
        for pod_uid in self.clients_by_pod() if self._lost else ():
            self._lost.pop(pod_uid or "", None)
        return self._clients

    def note_lost(self, pods: Iterable[str]) -> None:
        """Record the pods whose clients a fault ended."""
        self._lost |= dict.fromkeys(pods)

    def lost_pods(self, decided: Collection[str]) -> tuple[str, ...]:
        """Return the pods that have had no client since a fault ended theirs; only decided ones are kept."""
        self._lost = {pod_uid: None for pod_uid in self._lost if pod_uid in decided}
        return tuple(self._lost)

    def _without_older_news(self, pids: tuple[int, ...], asked_at: float) -> tuple[int, ...]:
        """Return a list's clients, corrected by what was noted since it was asked for.

        Gate and keeper ask at the same time, and the older answer may be read last. A client that was seen since
        stays, else its pod's next process would get its part of the cap; one that has left since does not come
        back, as a stranger.
        """
        if self._noted_at <= asked_at:
            return pids
        stay = tuple(
            pid
            for pid in self._clients
            if pid not in pids and self._seen_at.get(pid, asked_at) > asked_at and is_alive(pid)
        )
        return (*(pid for pid in pids if pid in self._clients or is_alive(pid)), *stay)

    def strangers(self) -> tuple[Mismatch, ...]:
        """Return clients that connected without a turn of their own."""
        return tuple(self._strangers.values())

    def note(self, mismatch: Mismatch) -> Mismatch:
        """Record a mismatch for the agent."""
        self.mismatches = (*self.mismatches, mismatch)[-KEPT_MISMATCHES:]
        return mismatch

    def note_overrun(self, pod_uid: str | None, pid: int, used_mib: int, limit_mib: int) -> None:
        """Record that a pod exceeded its limit and that its newest process is ended for it."""
        detail = f"the pod's processes held {used_mib} MiB of its {limit_mib} MiB; ended process {pid}"
        self.note(Mismatch(MismatchKind.MEMORY_OVERRUN, pod_uid, pid, detail))

    async def watch_memory(self) -> None:
        """Read each process's memory in a thread; while the driver hangs, memory is unknown and grants count."""
        was_hanging = self._caller.hangs_seconds > 0
        used: Mapping[int, int | None] | None = None
        try:
            used = await self._caller.call(self._memory.used_mib)
        except HangingError as error:
            if not was_hanging:
                logger.error("the driver does not report the memory of processes, grants count in full: %s", error)
        self.note_memory(used, self._clock())

    @property
    def memory_hangs_seconds(self) -> float:
        """Return how long the driver has not answered; 0 if it does."""
        return self._caller.hangs_seconds

    def observe_memory(self, now: float) -> None:
        """Read each process's memory, in the calling thread."""
        self.note_memory(self._memory.used_mib(), now)

    def note_memory(self, used: Mapping[int, int | None] | None, now: float) -> None:
        """Record each process's memory, MiB; None when it is unknown."""
        for pid, admission in self._admissions.items():
            value = None if used is None else used.get(pid, 0)
            if value != admission.used_mib:
                self._admissions[pid] = replace(admission, used_mib=value, changed_at=now)

    def clients_by_pod(self) -> Counter[str | None]:
        """Return how many clients each pod has."""
        return Counter(a.pod_uid if (a := self._admissions.get(pid)) else None for pid in self._clients)

    def siblings(self, pod_uid: str | None, pid: int) -> tuple[ProcessMemory, ...]:
        """Return the pod's other live processes."""
        return tuple(_memory_of(a) for a in self._admissions.values() if a.pod_uid == pod_uid and a.pid != pid)

    def read_contexts(self) -> None:
        """Read what the server's log has told of contexts since the last look."""
        if self._contexts is not None:
            self._contexts.read()

    def heard(self, pid: int) -> int | None:
        """Return how many connections of a process the server's log shows; None if it shows none at all."""
        if self._contexts is None:
            return None
        self._contexts.read()
        return self._contexts.heard(pid)

    @property
    def log_bytes(self) -> int:
        """Return how far the server's log has been written by now; 0 if it is not read."""
        return self._contexts.read_bytes if self._contexts is not None else 0

    def has_heard(self, pid: int, since_bytes: int) -> bool | None:
        """Return whether the server's log shows a connection of a process after this position; None if unknown."""
        return self._contexts.has_heard(pid, since_bytes) if self._contexts is not None else None

    def contexts_of(self, pid: int) -> int:
        """Return how many contexts a process has now, by the server's log."""
        if self._contexts is None:
            return 0
        self._contexts.read()
        return self._contexts.count(pid)

    def percentages(self, pod_uid: str | None, pid: int) -> tuple[int | None, ...]:
        """Return the thread percentages of a pod's contexts, except the one that `pid` is about to make.

        There is one for each other client that still runs, more for a client with several contexts, and one for
        each context that `pid` has already; None for an unknown percentage.
        """
        if self._contexts is not None:
            self._contexts.read()
        found: list[int | None] = []
        for a in self._admissions.values():
            if a.pod_uid == pod_uid and self.is_client(a.pid) and is_alive(a.pid, a.start_ticks):
                known = self._contexts.count(a.pid) if self._contexts is not None else 0
                found += a.percentages(known if a.pid == pid else max(1, known))
        return tuple(found)

    def pods(self) -> tuple[tuple[str, int, tuple[ProcessMemory, ...]], ...]:
        """Return uid, limit and processes of every pod; the limit is the highest of their admissions."""
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
        """Forget every client, because the server is gone."""
        self._clients = ()
        for pid in list(self._present):
            self._depart(pid)
        self._admissions.clear()
        self._late = None
        self._strangers.clear()
        self._stranger_ticks.clear()
        self._is_first_list = False

    def clients(self) -> tuple[ClientStatus, ...]:
        """Return the clients at the last look, for the status file."""
        now, unix = self._clock(), time.time()
        result = []
        for pid in self._clients:
            a = self._admissions.get(pid)
            if a is None:
                ticks = self._stranger_ticks.get(pid)
                result.append(ClientStatus(pid, self._identify(pid), start_ticks=ticks))
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
                        self._contexts.count(pid) if self._contexts is not None else 0,
                        a.grants,
                        a.pod_limit_mib,
                    )
                )
        return tuple(result)


def _ages_now(status: GateStatus) -> dict[int, float]:
    """Return how many seconds ago each client that a former gate recorded and that still runs had its turn.

    Within one status all times are as far apart as they were by that gate's own clock. How long ago it was written
    is known by the wall clock alone, which may have been set since, so it is as long ago as that says, but not
    longer than the youngest of these processes allows. So their order stays, whatever the clock did.
    """
    written_ages: dict[int, float] = {}
    spare_seconds = [time.time() - status.written_at]
    for client in status.clients:
        if client.start_ticks is not None and is_alive(client.pid, client.start_ticks):
            connected_at = client.connected_at or status.written_at
            written_ages[client.pid] = max(0.0, status.written_at - connected_at)
            spare_seconds.append(seconds_alive(client.start_ticks) - written_ages[client.pid])
    since_seconds = max(0.0, min(spare_seconds))
    return {pid: age + since_seconds for pid, age in written_ages.items()}


def _if_the_same(admission: Admission) -> Admission | None:
    """Return the admission with its start time; None if another process has its pid now."""
    ticks = start_ticks_of(admission.pid)
    if admission.start_ticks is None:
        return replace(admission, start_ticks=ticks)
    return admission if ticks in {None, admission.start_ticks} else None


def _memory_of(admission: Admission) -> ProcessMemory:
    return ProcessMemory(
        admission.pid, admission.granted_mib, admission.used_mib, admission.admitted_at, admission.changed_at
    )
